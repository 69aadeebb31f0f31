// SPDX-License-Identifier: Apache-2.0
//! kvm for Rust: a KV-cache service for LLM inference that computes attention next to the data.
//!
//! An engine appends the keys and values of its tokens and sends queries; it gets back the
//! attention state of each row and head: `o`, the softmax-weighted mean of the values, and `lse`,
//! the logarithm of the sum of the exponentiated logits. Keys and values stay with the service: the
//! daemon kvmd ([`Client::connect`]), or an engine in this process ([`Client::open_embedded`], with
//! the feature `embedded`). What the numbers mean is said in `kvm.h`; this crate says it in Rust.
//!
//! ```
//! use kvm::{Client, EmbeddedParams, Item, QueueParams, SpaceParams, Step};
//!
//! # fn main() -> Result<(), kvm::Error> {
//! let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
//! let space = client.register_space(&SpaceParams::new("my-model", 2, 4, 16).kv_heads(2))?;
//! let mut queue = client.create_queue(&QueueParams::new())?;
//! let sequence = space.create_sequence()?;
//!
//! // For each token and layer: append one row of keys and values, and attend with one query.
//! let (k, v, q) = (vec![0.1f32; 2 * 16], vec![0.2f32; 2 * 16], vec![0.3f32; 4 * 16]);
//! let (mut o, mut lse) = (vec![0.0f32; 4 * 16], vec![0.0f32; 4]);
//! for layer in 0..2 {
//!     queue.step(
//!         Step::new(&space, layer)
//!             .item(Item::new(&sequence).append(1).query(1))
//!             .k(&k)
//!             .v(&v)
//!             .q(&q)
//!             .o(&mut o)
//!             .lse(&mut lse),
//!     )?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Who owns what
//!
//! - [`Client`], [`Space`] and [`Arena`] are handles that may be cloned; a client closes when the
//!   last thing that was made with it is dropped. [`Sequence`] frees its sequence when dropped.
//! - Requests borrow their tensors: slices, or [`ArenaBuffer`]s, which go without a copy. A call
//!   that waits borrows them until it returns; what a [`Scope`] starts borrows them until the scope
//!   has seen it complete. So nothing can be freed or changed while the service uses it.
//! - [`Client`], [`Space`], [`Sequence`], [`Arena`] and [`ArenaBuffer`] may be used from any
//!   thread; a [`Queue`] belongs to one thread at a time (`Send`, not `Sync`).
//!
//! # Errors
//!
//! Every call that can fail returns [`Result`]; an [`Error`] has the [`Status`] of `kvm.h` and a
//! sentence that names the value and what is allowed. A failed call has changed nothing unless it
//! says otherwise. After `fork()` a child can only forget what it inherited: calls give
//! [`Status::Forked`].

#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

mod arena;
mod client;
mod codec;
mod error;
mod log;
mod merge;
mod prefix;
mod preset;
mod probe;
mod queue;
mod scope;
mod sequence;
mod space;
mod step;
mod tensor;

pub use arena::{Arena, ArenaBuffer};
pub use client::{Client, ClientInfo, ConnectParams, EmbeddedParams, Stats};
pub use codec::CodecId;
pub use error::{Error, Result, Status};
pub use log::{set_log, LogLevel};
pub use merge::Merge;
pub use prefix::{FoundPrefix, PrefixHash, PrefixHashes, PREFIX_TOKENS};
pub use preset::Preset;
pub use probe::{HeadProbe, HeadScores};
pub use queue::{Queue, QueueParams};
pub use scope::{Completion, Refused, Request, Scope, Ticket};
pub use sequence::{Priority, Sequence, SequenceId, SequenceInfo, SequenceParams, SnapshotInfo};
pub use space::{
    Codec, Heads, Index, IndexKind, LayerKind, LayerParams, Policy, Rope, Space, SpaceId,
    SpaceInfo, SpaceParams,
};
pub use step::{Accuracy, Item, Mode, ModeUsed, Observe, Proposal, Read, Step, StepStats};
pub use tensor::{Bf16, Dtype, Element, Sink, Source, F16};

// Its code compiles: rustdoc tests it as that of a comment.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/rust.md")]
struct PageOnRust;

/// Version of the library that is linked: major * 1000000 + minor * 1000 + patch.
///
/// ```
/// assert_eq!(kvm::version() / 1_000_000, 0);
/// ```
#[must_use]
pub fn version() -> u32 {
    // SAFETY: may be called at any time.
    unsafe { kvm_sys::kvm_version() }
}

/// The same as text.
///
/// ```
/// assert!(kvm::version_string().starts_with("0."));
/// ```
#[must_use]
pub fn version_string() -> &'static str {
    // SAFETY: a static string.
    let text = unsafe { std::ffi::CStr::from_ptr(kvm_sys::kvm_version_string()) };
    text.to_str().unwrap_or("")
}
