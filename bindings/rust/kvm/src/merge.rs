// SPDX-License-Identifier: Apache-2.0
use kvm_sys as sys;

use crate::error::{check, Error, Result, Status};
use crate::tensor::{Sink, Source};

/// Merges attention states over disjoint key sets: pure computation, in memory of this process
/// (a buffer of an arena is passed as the slice that it is).
///
/// States are merged in the order given. An empty state (lse = -inf) changes nothing.
///
/// ```
/// use kvm::Merge;
/// let (o_a, lse_a) = ([1.0f32; 2], [0.0f32]);
/// let (o_b, lse_b) = ([3.0f32; 2], [0.0f32]);
/// let (mut o, mut lse) = ([0.0f32; 2], [0.0f32]);
/// Merge::new(1, 1, 2)
///     .state(&o_a, &lse_a)
///     .state(&o_b, &lse_b)
///     .write(&mut o, &mut lse)?;
/// assert_eq!(o, [2.0; 2]);
/// assert!((lse[0] - 2f32.ln()).abs() < 1e-6);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Merge<'b> {
    n_rows: u32,
    n_heads: u32,
    dim: u32,
    o: Vec<sys::kvm_tensor>,
    lse: Vec<sys::kvm_tensor>,
    _borrow: std::marker::PhantomData<Source<'b>>,
}

impl<'b> Merge<'b> {
    /// Makes a merge of states of this shape: o is `[n_rows][n_heads][dim]`, lse
    /// `[n_rows][n_heads]`.
    #[must_use]
    pub fn new(n_rows: u32, n_heads: u32, dim: u32) -> Self {
        Merge {
            n_rows,
            n_heads,
            dim,
            o: Vec::new(),
            lse: Vec::new(),
            _borrow: std::marker::PhantomData,
        }
    }

    /// Adds a state; 1 to 64 in all. o of any type, lse of f32.
    #[must_use]
    pub fn state(mut self, o: impl Into<Source<'b>>, lse: impl Into<Source<'b>>) -> Self {
        self.o.push(o.into().raw);
        self.lse.push(lse.into().raw);
        self
    }

    /// Merges them into `o` and `lse`. An empty `lse` is not wanted. Fails with `Invalid`.
    pub fn write<'o>(self, o: impl Into<Sink<'o>>, lse: impl Into<Sink<'o>>) -> Result<()> {
        let n_states = u32::try_from(self.o.len())
            .map_err(|_| Error::new(Status::Invalid, "more than 64 states"))?;
        let (o, lse) = (o.into(), lse.into());
        let params = sys::kvm_merge_params {
            n_states,
            n_rows: self.n_rows,
            n_heads: self.n_heads,
            dim: self.dim,
            o: self.o.as_ptr(),
            lse: self.lse.as_ptr(),
            out_o: o.raw,
            out_lse: lse.raw,
            ..Default::default()
        };
        // SAFETY: `n_states` tensors each, borrowed through the call with what they describe.
        check(unsafe { sys::kvm_merge(&params) })
    }
}
