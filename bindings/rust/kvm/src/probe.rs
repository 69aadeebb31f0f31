// SPDX-License-Identifier: Apache-2.0
use kvm_sys as sys;

use crate::error::{check, Error, Result, Status};
use crate::tensor::Source;

/// A probe finds the heads of a layer that look back, by a prompt that repeats itself.
///
/// The prompt is a prefix (the token that begins every prompt, say), and then the same `period`
/// random tokens several times. [`HeadProbe::scores`] says, for each kv head, how much attention it
/// gives to earlier copies of a token, and to the tokens behind those. RazorAttention keeps the
/// heads of all layers with the top 14 % of induction scores and the top 1 % of echo scores, and
/// gives the others [`Policy::sinks_recent_fold`](crate::Policy::sinks_recent_fold). Pure
/// computation, on this thread.
///
/// ```
/// use kvm::HeadProbe;
/// // Two copies of 8 tokens, and a head whose rows look at the copy before.
/// let row = |token: usize, i: usize| if i == token % 8 { 6.0f32 } else { 0.0 };
/// let q: Vec<f32> = (0..16 * 8).map(|at| row(at / 8, at % 8)).collect();
/// let k = q.clone();
/// let scores = HeadProbe::new(8, 2, 1, 8).scores(&q, &k)?;
/// assert!(scores[0].echo > 0.4 && scores[0].induction < 0.1);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadProbe {
    n_prefix: u32,
    period: u32,
    n_copies: u32,
    n_rows: u32,
    n_q_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    scale: f32,
}

/// How much a kv head looks back: from 0, nothing, to 1, all of its attention.
///
/// ```
/// # fn choose(scores: &[kvm::HeadScores]) {
/// let looks_back = scores.iter().map(|s| s.induction).fold(0.0, f32::max);
/// # let _ = looks_back;
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeadScores {
    /// Attention to earlier copies of a row's own token.
    pub echo: f32,
    /// Attention to the tokens behind those.
    pub induction: f32,
}

impl HeadProbe {
    /// Makes a probe for a prompt of `n_copies` times the same `period` tokens, both at least 2,
    /// and a layer of `n_heads` query and kv heads of `head_dim` channels, at most 576.
    #[must_use]
    pub fn new(period: u32, n_copies: u32, n_heads: u32, head_dim: u32) -> Self {
        HeadProbe {
            n_prefix: 0,
            period,
            n_copies,
            n_rows: 0,
            n_q_heads: n_heads,
            n_kv_heads: n_heads,
            head_dim,
            scale: 0.0,
        }
    }

    /// Tokens before the first copy. Default: none.
    #[must_use]
    pub fn prefix(mut self, n_tokens: u32) -> Self {
        self.n_prefix = n_tokens;
        self
    }

    /// KV heads, in groups of 1 to 128 query heads. Default: as many as query heads.
    #[must_use]
    pub fn kv_heads(mut self, n_kv_heads: u32) -> Self {
        self.n_kv_heads = n_kv_heads;
        self
    }

    /// Rows that are looked at, evenly from the second copy on. Default: 256.
    #[must_use]
    pub fn rows(mut self, n_rows: u32) -> Self {
        self.n_rows = n_rows;
        self
    }

    /// Sets the scale of logits. Default: 1 / sqrt(head_dim).
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// One for each kv head. q: `[token][n_q_heads][head_dim]`, k: `[token][n_kv_heads][head_dim]`,
    /// both as the layer has them after rotation. Fails with `Invalid`.
    pub fn scores<'b>(
        &self,
        q: impl Into<Source<'b>>,
        k: impl Into<Source<'b>>,
    ) -> Result<Vec<HeadScores>> {
        let n_tokens = u64::from(self.period) * u64::from(self.n_copies) + u64::from(self.n_prefix);
        let n_tokens = u32::try_from(n_tokens)
            .map_err(|_| Error::new(Status::Invalid, "a prompt of 2^32 tokens or more"))?;
        let n_heads = self.n_kv_heads as usize;
        if self.n_kv_heads == 0 || self.n_kv_heads > self.n_q_heads {
            return Err(Error::new(
                Status::Invalid,
                format!(
                    "n_kv_heads is {}; it must be 1 to n_q_heads, {}",
                    self.n_kv_heads, self.n_q_heads
                ),
            ));
        }
        let (mut echo, mut induction) = (vec![0.0f32; n_heads], vec![0.0f32; n_heads]);
        let (q, k) = (q.into(), k.into());
        let params = sys::kvm_probe_params {
            n_tokens,
            n_prefix: self.n_prefix,
            period: self.period,
            n_rows: self.n_rows,
            n_q_heads: self.n_q_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            q: q.raw,
            k: k.raw,
            ..Default::default()
        };
        // SAFETY: tensors that are borrowed through the call, and outputs of n_kv_heads numbers.
        check(unsafe { sys::kvm_probe_heads(&params, echo.as_mut_ptr(), induction.as_mut_ptr()) })?;
        let pairs = echo.into_iter().zip(induction);
        Ok(pairs
            .map(|(echo, induction)| HeadScores { echo, induction })
            .collect())
    }
}
