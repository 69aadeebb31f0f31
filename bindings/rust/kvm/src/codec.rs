// SPDX-License-Identifier: Apache-2.0
use std::ffi::{CStr, CString};
use std::fmt;

use kvm_sys as sys;

/// An encoding of stored K and V.
///
/// ```
/// use kvm::{CodecId, SpaceParams};
/// let params = SpaceParams::new("my-model", 32, 32, 128).stored_as(CodecId::I8);
/// assert_eq!(CodecId::find("int8"), Some(CodecId::I8));
/// # let _ = params;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecId(u32);

impl CodecId {
    /// 32-bit floating point.
    pub const F32: CodecId = CodecId(sys::KVM_CODEC_F32);
    /// IEEE half precision.
    pub const F16: CodecId = CodecId(sys::KVM_CODEC_F16);
    /// The upper half of an F32.
    pub const BF16: CodecId = CodecId(sys::KVM_CODEC_BF16);
    /// 8 bits, with a scale for each row.
    pub const I8: CodecId = CodecId(sys::KVM_CODEC_I8);
    /// e4m3, 8 bits of floating point, with a scale for each row.
    pub const F8E4M3: CodecId = CodecId(sys::KVM_CODEC_F8E4M3);
    /// 8 bits, with a scale for each channel of a page: for keys.
    pub const I8_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_I8_CHANNEL);
    /// 4 bits, scales and zeros for 64 channels of a row: for values.
    pub const I4: CodecId = CodecId(sys::KVM_CODEC_I4);
    /// 4 bits, scales and zeros for each channel of a page: for keys.
    pub const I4_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_I4_CHANNEL);
    /// `I4` without the mean of each channel of a page: for keys, too.
    pub const I4_CENTRED: CodecId = CodecId(sys::KVM_CODEC_I4_CENTRED);
    /// 2 bits, otherwise as `I4`.
    pub const I2: CodecId = CodecId(sys::KVM_CODEC_I2);
    /// 2 bits, otherwise as `I4_CHANNEL`.
    pub const I2_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_I2_CHANNEL);
    /// 2 bits, otherwise as `I4_CENTRED`.
    pub const I2_CENTRED: CodecId = CodecId(sys::KVM_CODEC_I2_CENTRED);
    /// `I4_CHANNEL`, and what it loses in low rank and outliers.
    pub const GEAR4_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_GEAR4_CHANNEL);
    /// `I4` with the same.
    pub const GEAR4: CodecId = CodecId(sys::KVM_CODEC_GEAR4);
    /// `I2_CHANNEL` with the same.
    pub const GEAR2_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_GEAR2_CHANNEL);
    /// `I2` with the same.
    pub const GEAR2: CodecId = CodecId(sys::KVM_CODEC_GEAR2);
    /// `I4` of keys whose channels are divided by what they have of the scores.
    pub const I4_BALANCED: CodecId = CodecId(sys::KVM_CODEC_I4_BALANCED);
    /// 2 bits, otherwise as `I4_BALANCED`.
    pub const I2_BALANCED: CodecId = CodecId(sys::KVM_CODEC_I2_BALANCED);
    /// 3 bits, otherwise as `I4`.
    pub const I3: CodecId = CodecId(sys::KVM_CODEC_I3);
    /// 3 bits, otherwise as `I4_CHANNEL`.
    pub const I3_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_I3_CHANNEL);
    /// 3 bits, otherwise as `I4_CENTRED`.
    pub const I3_CENTRED: CodecId = CodecId(sys::KVM_CODEC_I3_CENTRED);
    /// 3 bits, otherwise as `I4_BALANCED`.
    pub const I3_BALANCED: CodecId = CodecId(sys::KVM_CODEC_I3_BALANCED);
    /// 3 bits, otherwise as `GEAR4_CHANNEL`.
    pub const GEAR3_CHANNEL: CodecId = CodecId(sys::KVM_CODEC_GEAR3_CHANNEL);
    /// 3 bits, otherwise as `GEAR4`.
    pub const GEAR3: CodecId = CodecId(sys::KVM_CODEC_GEAR3);

    /// The codec of a name, such as `int8`; `None` where libkvm has none.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let name = CString::new(name).ok()?;
        // SAFETY: a string that lives through the call.
        let code = unsafe { sys::kvm_codec_find(name.as_ptr()) };
        (code != 0).then_some(CodecId(code))
    }

    /// Its name; `None`: a codec of a newer kvmd, which this libkvm does not know.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        // SAFETY: takes any number.
        let name = unsafe { sys::kvm_codec_name(self.0) };
        // SAFETY: not null, a string that lives as long as the program.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?"))
    }

    pub(crate) fn from_code(code: u32) -> Self {
        CodecId(code)
    }

    pub(crate) fn code(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for CodecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "codec {}", self.0),
        }
    }
}
