// SPDX-License-Identifier: Apache-2.0
//! The C interface of kvm, declared for Rust: every type, constant and function of `kvm.h`, under
//! the names it has there. `kvm.h` is the reference; nothing here repeats it. The crate `kvm` is
//! what programs should use.
//!
//! A structure's `Default` is all zeros with `struct_size` set, which is how a caller of C begins:
//!
//! ```
//! let params = kvm_sys::kvm_seq_params { reserve: 1000, ..Default::default() };
//! assert_eq!(params.struct_size as usize, std::mem::size_of_val(&params));
//! ```
//!
//! Links `libkvm`; with the feature `embedded`, `libkvm_embedded`, which has the same functions and
//! the engine. See `build.rs` for where it is looked for.

#![allow(non_camel_case_types)]

mod bindings;

pub use bindings::*;

use std::marker::{PhantomData, PhantomPinned};

/// Makes the handles of `kvm.h` neither `Send`, `Sync` nor `Unpin`: they are seen by pointer only.
type NotOurs = PhantomData<(*mut u8, PhantomPinned)>;

/// A HOST buffer over `size` bytes at `data`.
#[must_use]
pub fn kvm_host_buffer(data: *const std::os::raw::c_void, size: u64) -> kvm_buffer {
    kvm_buffer {
        kind: KVM_BUFFER_HOST,
        region: 0,
        r#where: data as usize as u64,
        size,
    }
}

/// A packed tensor over a HOST buffer.
#[must_use]
pub fn kvm_host_tensor(data: *const std::os::raw::c_void, size: u64, dtype: u32) -> kvm_tensor {
    kvm_tensor {
        buffer: kvm_host_buffer(data, size),
        dtype,
        ..Default::default()
    }
}
