// SPDX-License-Identifier: Apache-2.0
use std::marker::PhantomData;
use std::ptr;

use kvm_sys as sys;

use crate::error::{Error, Result, Status};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floating point.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an F32.
    Bf16,
}

impl Dtype {
    pub(crate) fn code(self) -> u32 {
        match self {
            Dtype::F32 => sys::KVM_DTYPE_F32,
            Dtype::F16 => sys::KVM_DTYPE_F16,
            Dtype::Bf16 => sys::KVM_DTYPE_BF16,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        match code {
            sys::KVM_DTYPE_F32 => Some(Dtype::F32),
            sys::KVM_DTYPE_F16 => Some(Dtype::F16),
            sys::KVM_DTYPE_BF16 => Some(Dtype::Bf16),
            _ => None,
        }
    }
}

/// A bf16 number: the upper half of an f32.
///
/// ```
/// use kvm::Bf16;
/// assert_eq!(Bf16::from_f32(1.0).to_f32(), 1.0);
/// assert_eq!(Bf16::from_f32(1.0 / 3.0).to_f32(), 0.33398438);
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bf16(
    /// The bits.
    pub u16,
);

impl Bf16 {
    /// The nearest bf16; ties to the even one. NaN stays NaN.
    #[must_use]
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }

    /// The same number.
    #[must_use]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// An IEEE half-precision number, by its bits. Conversions are left to whoever has them in
/// hardware.
///
/// ```
/// let one = kvm::F16(0x3c00);
/// # let _ = one;
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct F16(
    /// The bits.
    pub u16,
);

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::F16 {}
    impl Sealed for super::Bf16 {}
}

/// Tensors of requests are made of these: `f32`, [`F16`] and [`Bf16`].
///
/// ```
/// fn bytes_of<T: kvm::Element>(tensor: &[T]) -> usize {
///     std::mem::size_of_val(tensor)
/// }
/// assert_eq!(bytes_of(&[kvm::Bf16(0); 3]), 6);
/// ```
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The code of the type.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

/// Identifies the connection whose arena a tensor lies in; null for memory of this process.
/// Compared only: arenas of different connections may have the same number.
pub(crate) type Owner = *const sys::kvm_client;

fn host_tensor<T: Element>(data: *const T, len: usize) -> sys::kvm_tensor {
    let size = len * std::mem::size_of::<T>();
    if size == 0 {
        return sys::kvm_tensor::default(); // No address belongs to it: as if it were not given.
    }
    sys::kvm_host_tensor(data.cast(), size as u64, T::DTYPE.code())
}

/// A tensor that a request reads: borrowed from a slice, a `Vec`, an array or an
/// [`ArenaBuffer`](crate::ArenaBuffer). Made by `From`, so functions take the slice itself.
///
/// Its bytes are all of the slice, so pass the part that holds the tensor. Shapes are those of
/// [`Step`](crate::Step); an empty slice counts as not given.
///
/// ```
/// use kvm::Source;
/// let keys = vec![0.0f32; 3 * 256];
/// let every_second = Source::from(&keys[..]).strides(0, 256, 32);
/// # let _ = every_second;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Source<'b> {
    pub(crate) raw: sys::kvm_tensor,
    pub(crate) owner: Owner,
    _borrow: PhantomData<&'b [u8]>,
}

// SAFETY: a shared borrow of plain numbers, which any thread may read.
unsafe impl Send for Source<'_> {}
// SAFETY: as above.
unsafe impl Sync for Source<'_> {}

impl<'b> Source<'b> {
    /// No tensor.
    pub(crate) fn none() -> Self {
        Source {
            raw: sys::kvm_tensor::default(),
            owner: ptr::null(),
            _borrow: PhantomData,
        }
    }

    /// REQUIRES: `raw` describes memory of `owner` that nobody writes during `'b`.
    pub(crate) fn in_arena(raw: sys::kvm_buffer, dtype: Dtype, owner: Owner) -> Self {
        let raw = sys::kvm_tensor {
            buffer: raw,
            dtype: dtype.code(),
            ..Default::default()
        };
        Source {
            raw,
            owner,
            _borrow: PhantomData,
        }
    }

    /// Distances in elements between layers, rows and heads; 0: packed.
    #[must_use]
    pub fn strides(mut self, layer: u64, row: u64, head: u64) -> Self {
        self.raw.stride_layer = layer;
        self.raw.stride_row = row;
        self.raw.stride_head = head;
        self
    }
}

impl<'b, T: Element> From<&'b [T]> for Source<'b> {
    fn from(slice: &'b [T]) -> Self {
        Source {
            raw: host_tensor(slice.as_ptr(), slice.len()),
            owner: ptr::null(),
            _borrow: PhantomData,
        }
    }
}

impl<'b, T: Element> From<&'b Vec<T>> for Source<'b> {
    fn from(vec: &'b Vec<T>) -> Self {
        vec.as_slice().into()
    }
}

impl<'b, T: Element, const N: usize> From<&'b [T; N]> for Source<'b> {
    fn from(array: &'b [T; N]) -> Self {
        array.as_slice().into()
    }
}

/// A tensor that a request writes: borrowed for itself alone until the request is done. Made by
/// `From`, as [`Source`] is.
///
/// ```
/// use kvm::Sink;
/// let mut o = [0.0f32; 64];
/// let sink = Sink::from(&mut o);
/// // A request that has completed gives its sinks back, and they the memory.
/// let again: &mut [f32] = sink.into_slice().unwrap();
/// assert_eq!(again.len(), 64);
/// ```
#[derive(Debug)]
pub struct Sink<'b> {
    pub(crate) raw: sys::kvm_tensor,
    pub(crate) owner: Owner,
    data: *mut u8,
    len: usize,
    _borrow: PhantomData<&'b mut [u8]>,
}

// SAFETY: an exclusive borrow of plain numbers, which may move to another thread.
unsafe impl Send for Sink<'_> {}
// SAFETY: a shared reference to it gives no access to the memory.
unsafe impl Sync for Sink<'_> {}

impl<'b> Sink<'b> {
    pub(crate) fn none() -> Self {
        Sink {
            raw: sys::kvm_tensor::default(),
            owner: ptr::null(),
            data: ptr::null_mut(),
            len: 0,
            _borrow: PhantomData,
        }
    }

    /// REQUIRES: `raw` describes the memory of `slice`, which lies in an arena of `owner`.
    pub(crate) fn in_arena<T: Element>(
        raw: sys::kvm_buffer,
        slice: &'b mut [T],
        owner: Owner,
    ) -> Self {
        let mut sink = Sink::from(slice);
        sink.raw.buffer = raw;
        sink.raw.dtype = T::DTYPE.code();
        sink.owner = owner;
        sink
    }

    /// Distances in elements between layers, rows and heads; 0: packed.
    #[must_use]
    pub fn strides(mut self, layer: u64, row: u64, head: u64) -> Self {
        self.raw.stride_layer = layer;
        self.raw.stride_row = row;
        self.raw.stride_head = head;
        self
    }

    /// The memory, for the rest of the borrow. Fails with `Invalid` when it holds another type.
    pub fn into_slice<T: Element>(self) -> Result<&'b mut [T]> {
        if self.len == 0 {
            return Ok(&mut []);
        }
        if self.raw.dtype != T::DTYPE.code() {
            return Err(Error::new(
                Status::Invalid,
                format!(
                    "the tensor holds {:?}, not {:?}",
                    Dtype::from_code(self.raw.dtype),
                    T::DTYPE
                ),
            ));
        }
        // SAFETY: made from a `&'b mut [T]` of this length and type, which this value stands for.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.len) })
    }
}

impl<'b, T: Element> From<&'b mut [T]> for Sink<'b> {
    fn from(slice: &'b mut [T]) -> Self {
        let data = slice.as_mut_ptr();
        Sink {
            raw: host_tensor(data, slice.len()),
            owner: ptr::null(),
            data: data.cast(),
            len: slice.len(),
            _borrow: PhantomData,
        }
    }
}

impl<'b, T: Element> From<&'b mut Vec<T>> for Sink<'b> {
    fn from(vec: &'b mut Vec<T>) -> Self {
        vec.as_mut_slice().into()
    }
}

impl<'b, T: Element, const N: usize> From<&'b mut [T; N]> for Sink<'b> {
    fn from(array: &'b mut [T; N]) -> Self {
        array.as_mut_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even() {
        // Finds the nearest of two bf16 around an f32, by search among the neighbours in f64.
        let mut state = 1u32;
        for _ in 0..10_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state & 0xbfff_ffff | 0x2000_0000);
            let got = Bf16::from_f32(value);
            let error = (f64::from(got.to_f32()) - f64::from(value)).abs();
            for other in [Bf16(got.0.wrapping_sub(1)), Bf16(got.0.wrapping_add(1))] {
                let rival = (f64::from(other.to_f32()) - f64::from(value)).abs();
                assert!(
                    error < rival || (error == rival && got.0 % 2 == 0),
                    "{value}"
                );
            }
        }
        assert!(Bf16::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(
            Bf16::from_f32(f32::NEG_INFINITY).to_f32(),
            f32::NEG_INFINITY
        );
    }

    #[test]
    fn a_sink_gives_back_its_own_type_only() {
        let mut memory = [Bf16(7); 4];
        assert!(Sink::from(&mut memory).into_slice::<f32>().is_err());
        let back: &mut [Bf16] = Sink::from(&mut memory).into_slice().unwrap();
        assert_eq!(back, [Bf16(7); 4]);
        let mut empty: [f32; 0] = [];
        assert!(Sink::from(&mut empty)
            .into_slice::<f32>()
            .unwrap()
            .is_empty());
    }
}
