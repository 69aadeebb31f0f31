// SPDX-License-Identifier: Apache-2.0
use std::ffi::CStr;
use std::os::raw::{c_char, c_int, c_void};
use std::panic::catch_unwind;

use kvm_sys as sys;

/// How much a message of the library matters. See [`set_log`].
///
/// ```
/// assert!(kvm::LogLevel::Error < kvm::LogLevel::Debug);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Something failed.
    Error,
    /// Something is worse than it could be.
    Warning,
    /// Something happened.
    Info,
    /// For whoever looks for a fault.
    Debug,
}

unsafe extern "C" fn forward(level: c_int, message: *const c_char, user: *mut c_void) {
    let level = match level {
        sys::KVM_LOG_ERROR => LogLevel::Error,
        sys::KVM_LOG_WARNING => LogLevel::Warning,
        sys::KVM_LOG_INFO => LogLevel::Info,
        _ => LogLevel::Debug,
    };
    // SAFETY: `user` is the function pointer that set_log passed.
    let receive = unsafe { std::mem::transmute::<*mut c_void, fn(LogLevel, &str)>(user) };
    // SAFETY: a string that is valid during this call.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    // A panic must not cross C; the message is lost then.
    let _ = catch_unwind(|| receive(level, &message));
}

/// Receives the library's own messages (connection lost, fallback taken); `None` switches them off,
/// which is the default. For the whole process.
///
/// `receive` runs on the thread whose call logs, and must not call kvm: set no errors and take no
/// locks that a caller of kvm holds.
///
/// ```
/// fn print(level: kvm::LogLevel, message: &str) {
///     eprintln!("kvm: {level:?}: {message}");
/// }
/// kvm::set_log(Some(print));
/// ```
pub fn set_log(receive: Option<fn(LogLevel, &str)>) {
    match receive {
        // SAFETY: the function and what it is given stay valid for ever.
        Some(receive) => unsafe {
            sys::kvm_set_log_callback(Some(forward), receive as *mut c_void)
        },
        // SAFETY: allowed at any time.
        None => unsafe { sys::kvm_set_log_callback(None, std::ptr::null_mut()) },
    }
}
