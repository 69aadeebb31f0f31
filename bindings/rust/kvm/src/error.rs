// SPDX-License-Identifier: Apache-2.0
use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;

use kvm_sys as sys;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $constant:ident,)*) => {
        /// Why a call failed: the `KVM_ERR_*` codes of `kvm.h`.
        ///
        /// ```
        /// use kvm::Status;
        /// assert_eq!(Status::NoSpace.name(), "KVM_ERR_NO_SPACE");
        /// assert_eq!(Status::from_code(-11), Status::NoSpace);
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Status {
            $($(#[$doc])* $name,)*
            /// A code that this crate does not know.
            Unknown(i32),
        }

        impl Status {
            /// The status of a code of `kvm.h`. `KVM_OK` is no failure: it gives `Unknown(0)`.
            #[must_use]
            pub fn from_code(code: i32) -> Self {
                match code {
                    $(sys::$constant => Status::$name,)*
                    other => Status::Unknown(other),
                }
            }

            /// The code in `kvm.h`.
            #[must_use]
            pub fn code(self) -> i32 {
                match self {
                    $(Status::$name => sys::$constant,)*
                    Status::Unknown(code) => code,
                }
            }

            #[cfg(test)]
            const ALL: &'static [(Status, &'static str)] =
                &[$((Status::$name, stringify!($constant)),)*];
        }
    };
}

statuses! {
    /// A parameter is out of its range, or two contradict each other.
    Invalid = KVM_ERR_INVALID,
    /// No object has this id or name.
    NotFound = KVM_ERR_NOT_FOUND,
    /// The name is taken by an object with other parameters.
    Exists = KVM_ERR_EXISTS,
    /// The queue is full: take completions first.
    Again = KVM_ERR_AGAIN,
    /// The time given has passed; the request goes on.
    Timeout = KVM_ERR_TIMEOUT,
    /// The object has users (a space with sequences, say).
    Busy = KVM_ERR_BUSY,
    /// An append would leave a hole or overwrite: its position is not the length.
    Hole = KVM_ERR_HOLE,
    /// A policy has dropped tokens that this needs.
    Partial = KVM_ERR_PARTIAL,
    /// The id was valid once; its object is gone.
    Stale = KVM_ERR_STALE,
    /// The machine refused memory.
    NoMemory = KVM_ERR_NO_MEMORY,
    /// The service's capacity is used up.
    NoSpace = KVM_ERR_NO_SPACE,
    /// This client's share is used up.
    Quota = KVM_ERR_QUOTA,
    /// A fixed limit ([`ClientInfo`](crate::ClientInfo)) is reached.
    Limit = KVM_ERR_LIMIT,
    /// Input or output failed.
    Io = KVM_ERR_IO,
    /// A checksum did not match.
    Corrupt = KVM_ERR_CORRUPT,
    /// The service restarted and no longer has this object.
    Lost = KVM_ERR_LOST,
    /// The daemon is gone; see [`Client::reconnect`](crate::Client::reconnect).
    Disconnected = KVM_ERR_DISCONNECTED,
    /// The other side broke the protocol; the connection is closed.
    Protocol = KVM_ERR_PROTOCOL,
    /// No protocol version in common.
    Version = KVM_ERR_VERSION,
    /// Not allowed to this user or client.
    Permission = KVM_ERR_PERMISSION,
    /// A handle was used in a child of the process that made it.
    Forked = KVM_ERR_FORKED,
    /// Known to this crate, not offered by this service.
    Unsupported = KVM_ERR_UNSUPPORTED,
    /// A device failed.
    Device = KVM_ERR_DEVICE,
    /// The request was cancelled before it started.
    Cancelled = KVM_ERR_CANCELLED,
    /// The deadline passed before the request started.
    Deadline = KVM_ERR_DEADLINE,
    /// The error asked for needs more than the budget; the best estimate is in place.
    Accuracy = KVM_ERR_ACCURACY,
    /// The flag of [`QueueParams::interrupted_by`](crate::QueueParams::interrupted_by) ended the
    /// wait; requests go on.
    Interrupted = KVM_ERR_INTERRUPTED,
    /// A defect in kvm; please report the sentence.
    Internal = KVM_ERR_INTERNAL,
}

impl Status {
    /// The name in `kvm.h`; `KVM_ERR_UNKNOWN` for a code that the library does not know.
    #[must_use]
    pub fn name(self) -> &'static str {
        // SAFETY: a static string for every code.
        let name = unsafe { CStr::from_ptr(sys::kvm_status_name(self.code())) };
        name.to_str().unwrap_or("KVM_ERR_UNKNOWN")
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failed call: the status, and a sentence that names the value and what is allowed.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// let error = client.find_space("no-such-model").unwrap_err();
/// assert_eq!(error.status(), kvm::Status::NotFound);
/// assert!(error.message().contains("no-such-model"));
/// eprintln!("{error}"); // the sentence, then (KVM_ERR_NOT_FOUND)
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    status: Status,
    message: String,
}

/// The result that fallible functions of this crate return.
///
/// ```
/// fn ask() -> kvm::Result<String> {
///     Ok(kvm::version_string().to_string())
/// }
/// # ask().unwrap();
/// ```
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Error {
            status,
            message: message.into(),
        }
    }

    /// The failure that the last call of this thread reported with `code`.
    pub(crate) fn last(code: i32) -> Self {
        // SAFETY: never null, and valid until this thread's next call.
        let message = unsafe { CStr::from_ptr(sys::kvm_last_error()) };
        Error::new(Status::from_code(code), message.to_string_lossy())
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status
    }

    /// The sentence, without the status.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.status.name())
    }
}

/// As `Display`: it is what a `main` that returns a [`Result`] and `unwrap` print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// `Ok` for `KVM_OK`, else what the thread's last call left.
pub(crate) fn check(code: sys::kvm_status) -> Result<()> {
    if code == sys::KVM_OK {
        Ok(())
    } else {
        Err(Error::last(code))
    }
}

/// The text of a NUL-terminated array of a structure.
pub(crate) fn text_of(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| *c as u8)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_name_and_code() {
        for (status, name) in Status::ALL {
            assert_eq!(status.name(), *name);
            assert_eq!(Status::from_code(status.code()), *status);
        }
        assert_eq!(Status::from_code(-77), Status::Unknown(-77));
        assert_eq!(Status::Unknown(-77).name(), "KVM_ERR_UNKNOWN");
    }

    #[test]
    fn it_prints_its_sentence_and_code() {
        let error = Error::new(Status::NotFound, "no space has this name");
        let expected = "no space has this name (KVM_ERR_NOT_FOUND)";
        assert_eq!(format!("{error}"), expected);
        assert_eq!(format!("{error:?}"), expected);
    }

    /// No code of the header is missing above: all that the library can name are known here.
    #[test]
    fn no_code_is_missing() {
        for code in -200..0 {
            let status = Status::from_code(code);
            let known = !matches!(status, Status::Unknown(_));
            assert_eq!(known, status.name() != "KVM_ERR_UNKNOWN", "{code}");
        }
    }
}
