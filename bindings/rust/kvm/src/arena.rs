// SPDX-License-Identifier: Apache-2.0
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvm_sys as sys;

use crate::client::{Client, Connection};
use crate::error::{check, Result};
use crate::tensor::{Element, Sink, Source};

struct RawArena {
    raw: NonNull<sys::kvm_arena>,
    connection: Arc<Connection>,
}

// SAFETY: kvm.h allows the calls on an arena from any thread; it is destroyed by its last owner.
unsafe impl Send for RawArena {}
// SAFETY: as above.
unsafe impl Sync for RawArena {}

impl Drop for RawArena {
    fn drop(&mut self) {
        // SAFETY: the last owner; buffers, which requests borrow, own the arena as well, so no
        // request is outstanding.
        unsafe { sys::kvm_arena_destroy(self.raw.as_ptr()) }
    }
}

/// Memory shared with the service: tensors in it go without a copy.
///
/// Buffers keep their arena alive, and the arena its client. Its memory is taken at once, so make
/// it early. A clone is the same arena.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// let arena = client.create_arena(1 << 20)?;
/// let mut q = arena.alloc::<f32>(4 * 64)?;
/// q.fill(0.5);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone)]
pub struct Arena {
    inner: Arc<RawArena>,
}

impl Arena {
    pub(crate) fn create(client: &Client, size_bytes: u64) -> Result<Self> {
        let params = sys::kvm_arena_params {
            size: size_bytes,
            ..Default::default()
        };
        let connection = Arc::clone(client.connection());
        let mut out = ptr::null_mut();
        // SAFETY: a live client, and parameters and an output that live through the call.
        check(unsafe { sys::kvm_arena_create(connection.raw(), &params, &mut out) })?;
        let raw = NonNull::new(out).expect("kvm_arena_create gave no arena");
        let inner = Arc::new(RawArena { raw, connection });
        Ok(Arena { inner })
    }

    /// Takes room for `len` elements, all zero, aligned to 64 bytes. Fails with `NoSpace` when
    /// there is too little in one piece, with `Invalid` when `len` is 0.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let arena = client.create_arena(0)?; // of 16 MiB
    /// let keys = arena.alloc::<kvm::Bf16>(8 * 128)?;
    /// assert!(keys.iter().all(|k| *k == kvm::Bf16(0)));
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn alloc<T: Element>(&self, len: usize) -> Result<ArenaBuffer<T>> {
        let size = (len as u64).saturating_mul(std::mem::size_of::<T>() as u64);
        let mut buffer = sys::kvm_buffer::default();
        let arena = self.inner.raw.as_ptr();
        // SAFETY: a live arena, and an output that lives through the call.
        check(unsafe { sys::kvm_arena_alloc(arena, size, 0, &mut buffer) })?;
        // SAFETY: a buffer of this arena.
        let data = unsafe { sys::kvm_arena_data(arena, buffer) };
        let data = NonNull::new(data.cast::<T>()).expect("a buffer of the arena has an address");
        // SAFETY: `len` elements from `data` on are this buffer's alone, aligned to 64 bytes. Zero
        // bytes are a value of every Element.
        unsafe { ptr::write_bytes(data.as_ptr(), 0, len) };
        Ok(ArenaBuffer {
            arena: Arc::clone(&self.inner),
            raw: buffer,
            data,
            len,
            _elements: PhantomData,
        })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").finish_non_exhaustive()
    }
}

/// A slice that lies in an [`Arena`] and goes back to it when dropped.
///
/// A request borrows it as it borrows a slice: `&buffer` is read, `&mut buffer` written.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let arena = client.create_arena(1 << 20)?;
/// let mut o = arena.alloc::<f32>(128)?;
/// let first_half = o.sink(..64); // to be handed to a request
/// # drop(first_half);
/// assert_eq!(o.len(), 128);
/// # Ok::<(), kvm::Error>(())
/// ```
pub struct ArenaBuffer<T: Element> {
    arena: Arc<RawArena>,
    raw: sys::kvm_buffer,
    data: NonNull<T>,
    len: usize,
    _elements: PhantomData<T>,
}

// SAFETY: owns its elements, as a boxed slice does; the arena may be used from any thread.
unsafe impl<T: Element> Send for ArenaBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for ArenaBuffer<T> {}

impl<T: Element> ArenaBuffer<T> {
    /// The elements of a range as a tensor to be read. Panics when the range is out of bounds.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let arena = client.create_arena(1 << 20)?;
    /// let both = arena.alloc::<f32>(256)?;
    /// let (k, v) = (both.source(..128), both.source(128..));
    /// # let _ = (k, v);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn source(&self, range: impl RangeBounds<usize>) -> Source<'_> {
        let (begin, end) = self.bounds(&range);
        if begin == end {
            return Source::none();
        }
        Source::in_arena(self.part(begin, end), T::DTYPE, self.arena.connection.raw())
    }

    /// The elements of a range as a tensor to be written. Panics when the range is out of bounds.
    pub fn sink(&mut self, range: impl RangeBounds<usize>) -> Sink<'_> {
        let (begin, end) = self.bounds(&range);
        if begin == end {
            return Sink::none();
        }
        let (raw, owner) = (self.part(begin, end), self.arena.connection.raw());
        Sink::in_arena(raw, &mut self[begin..end], owner)
    }

    fn bounds(&self, range: &impl RangeBounds<usize>) -> (usize, usize) {
        let begin = match range.start_bound() {
            Bound::Included(at) => *at,
            Bound::Excluded(at) => at.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(at) => at.saturating_add(1),
            Bound::Excluded(at) => *at,
            Bound::Unbounded => self.len,
        };
        assert!(
            begin <= end && end <= self.len,
            "{begin}..{end} is not inside a buffer of {} elements",
            self.len
        );
        (begin, end)
    }

    /// REQUIRES: begin < end <= len.
    fn part(&self, begin: usize, end: usize) -> sys::kvm_buffer {
        let size = std::mem::size_of::<T>() as u64;
        sys::kvm_buffer {
            r#where: self.raw.r#where + begin as u64 * size,
            size: (end - begin) as u64 * size,
            ..self.raw
        }
    }
}

impl<T: Element> Deref for ArenaBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements that were written when allocated and belong to this buffer. The
        // service writes them only for requests that hold a Sink, and with it a `&mut` of this.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for ArenaBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; a request that reads them holds a `&` of this.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for ArenaBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: a live arena and a buffer of it, which nobody uses any more.
        unsafe { sys::kvm_arena_free(self.arena.raw.as_ptr(), self.raw) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for ArenaBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'b, T: Element> From<&'b ArenaBuffer<T>> for Source<'b> {
    fn from(buffer: &'b ArenaBuffer<T>) -> Self {
        buffer.source(..)
    }
}

impl<'b, T: Element> From<&'b mut ArenaBuffer<T>> for Sink<'b> {
    fn from(buffer: &'b mut ArenaBuffer<T>) -> Self {
        buffer.sink(..)
    }
}
