// SPDX-License-Identifier: Apache-2.0
use std::ffi::CString;
use std::fmt;
use std::ops::{Range, RangeBounds};
use std::ptr;
use std::sync::Arc;

use kvm_sys as sys;

use crate::client::{c_string, Client, Connection};
use crate::codec::CodecId;
use crate::error::{check, text_of, Error, Result, Status};
use crate::prefix::{FoundPrefix, PrefixHash};
use crate::preset::Preset;
use crate::sequence::{Sequence, SequenceId, SequenceParams};
use crate::step::{Accuracy, Mode, Proposal};

/// The number of a space. Never used again.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
/// assert_eq!(client.find_space("my-model")?.id(), space.id());
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId(
    /// The number in `kvm.h`.
    pub u64,
);

/// How a model rotates its heads (RoPE). Keys are appended already rotated; the service uses this
/// to move queries.
///
/// ```
/// let frequencies: Vec<f32> = (0..64).map(|i| 10_000f32.powf(-i as f32 / 64.0)).collect();
/// let params = kvm::SpaceParams::new("my-model", 32, 32, 128)
///     .rope(kvm::Rope::Half, &frequencies);
/// # let _ = params;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rope {
    /// Pairs (i, i + n_pairs): Llama as published by most libraries.
    Half,
    /// Pairs (2i, 2i + 1): GPT-J.
    Interleaved,
}

/// A `LayerKind` says what a layer stores.
///
/// ```
/// use kvm::{LayerKind, LayerParams};
/// let shared = LayerParams::new(1..2).kind(LayerKind::Alias { target: 0 });
/// # let _ = shared;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Its own K and V.
    Own,
    /// Nothing: it reads the store of `target`; append to it is an error.
    Alias {
        /// A layer of kind `Own` with the same head counts and dims.
        target: u32,
    },
    /// Nothing, and cannot be attended.
    Absent,
    /// Its lengths, and directions that it shares with the layer below it, of kind `Own`
    /// (`MiniCache`). The entry is of this layer alone.
    Pair,
}

/// Overrides for a range of layers. Where several name a layer, the last wins.
///
/// ```
/// use kvm::{LayerParams, SpaceParams};
/// // Every layer but the last sees 1,024 tokens.
/// let params = SpaceParams::new("my-model", 8, 4, 64).layer(LayerParams::new(0..7).window(1024));
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # client.register_space(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerParams {
    raw: sys::kvm_layer_params,
}

impl LayerParams {
    /// As the space, for these layers.
    #[must_use]
    pub fn new(layers: Range<u32>) -> Self {
        LayerParams {
            raw: sys::kvm_layer_params {
                layer_begin: layers.start,
                n_layers: layers.end.saturating_sub(layers.start),
                ..Default::default()
            },
        }
    }

    /// Sets what they store.
    #[must_use]
    pub fn kind(mut self, kind: LayerKind) -> Self {
        let (kind, target) = match kind {
            LayerKind::Own => (sys::KVM_LAYER_OWN, 0),
            LayerKind::Alias { target } => (sys::KVM_LAYER_ALIAS, target),
            LayerKind::Absent => (sys::KVM_LAYER_ABSENT, 0),
            LayerKind::Pair => (sys::KVM_LAYER_PAIR, 0),
        };
        self.raw.kind = kind;
        self.raw.target = target;
        self
    }

    /// Of [`LayerKind::Pair`]: the weight of this layer's directions, and the share of tokens that
    /// keep their rows of both layers, both up to 1; 0: 0.6 and 0.05.
    #[must_use]
    pub fn pair(mut self, t: f32, gamma: f32) -> Self {
        self.raw.pair_t = t;
        self.raw.pair_gamma = gamma;
        self
    }

    /// Head counts; 0: as the space.
    #[must_use]
    pub fn heads(mut self, n_q_heads: u32, n_kv_heads: u32) -> Self {
        self.raw.n_q_heads = n_q_heads;
        self.raw.n_kv_heads = n_kv_heads;
        self
    }

    /// Widths of keys and values: multiples of 8 up to 576; 0: as the space, of an alias as its
    /// target. One request appends to layers of the same widths only.
    ///
    /// ```
    /// use kvm::{LayerParams, SpaceParams};
    /// // Gemma 4: every sixth layer sees all tokens, with heads twice as wide.
    /// let params = SpaceParams::new("my-model", 6, 16, 256)
    ///     .kv_heads(8)
    ///     .layer(LayerParams::new(0..5).window(1024))
    ///     .layer(LayerParams::new(5..6).heads(0, 2).head_dims(512, 512));
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # client.register_space(&params)?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn head_dims(mut self, keys: u32, values: u32) -> Self {
        self.raw.head_dim_k = keys;
        self.raw.head_dim_v = values;
        self
    }

    /// A query at p sees keys at positions > p - window; 0: all.
    #[must_use]
    pub fn window(mut self, n_tokens: u64) -> Self {
        self.raw.window = n_tokens;
        self
    }
}

/// The kv heads and layers that an entry of a space is about.
///
/// ```
/// use kvm::Heads;
/// let all = Heads::all();
/// let two_of_upper_half = Heads::all().layers(16..).kv_heads([0, 5]);
/// # let _ = (all, two_of_upper_half);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Heads {
    layer_begin: u32,
    n_layers: u32,
    kv_head_mask: [u64; 2],
    is_empty: bool,
}

impl Heads {
    /// All heads of all layers.
    #[must_use]
    pub fn all() -> Self {
        Heads::default()
    }

    /// Those of these layers.
    #[must_use]
    pub fn layers(mut self, layers: impl RangeBounds<u32>) -> Self {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        self.layer_begin = match layers.start_bound() {
            Included(first) => *first,
            Excluded(before) => before.saturating_add(1),
            Unbounded => 0,
        };
        let end = match layers.end_bound() {
            Included(last) => Some(last.saturating_add(1)),
            Excluded(end) => Some(*end),
            Unbounded => None,
        };
        // In kvm.h no layers means "to the last", so an empty range has to be refused here.
        self.n_layers = end.map_or(0, |end| end.saturating_sub(self.layer_begin));
        self.is_empty |= end.is_some() && self.n_layers == 0;
        self
    }

    /// Those with these numbers, below 128.
    #[must_use]
    pub fn kv_heads(mut self, heads: impl IntoIterator<Item = u32>) -> Self {
        self.kv_head_mask = [0; 2];
        for head in heads {
            match self.kv_head_mask.get_mut(head as usize / 64) {
                Some(word) => *word |= 1 << (head % 64),
                None => self.is_empty = true,
            }
        }
        self.is_empty |= self.kv_head_mask == [0; 2];
        self
    }

    fn check(&self, what: &str) -> Result<()> {
        if self.is_empty {
            return Err(Error::new(
                Status::Invalid,
                format!("{what} is for no layer, for no head, or for a head beyond 127"),
            ));
        }
        Ok(())
    }
}

/// How heads keep their tokens. A head that no entry names keeps everything.
///
/// ```
/// use kvm::{Heads, Policy, SpaceParams};
/// let params = SpaceParams::new("my-model", 32, 32, 128)
///     .policy(Policy::sinks_recent(Heads::all().layers(16..), 4, 1024).slack(64));
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # client.register_space(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Policy {
    heads: Heads,
    raw: sys::kvm_policy_params,
}

impl Policy {
    /// Every token stays.
    #[must_use]
    pub fn full(heads: Heads) -> Self {
        Policy {
            heads,
            raw: sys::kvm_policy_params {
                layer_begin: heads.layer_begin,
                n_layers: heads.n_layers,
                kv_head_mask: heads.kv_head_mask,
                retention: sys::KVM_RETAIN_FULL,
                ..Default::default()
            },
        }
    }

    /// A query at p sees positions < `n_sinks` and > p - `n_recent`; pages that no later query can
    /// see are freed once their tokens are committed.
    #[must_use]
    pub fn sinks_recent(heads: Heads, n_sinks: u64, n_recent: u64) -> Self {
        let mut policy = Policy::full(heads);
        policy.raw.retention = sys::KVM_RETAIN_SINKS_RECENT;
        policy.raw.n_sinks = n_sinks;
        policy.raw.n_recent = n_recent;
        policy
    }

    /// `RazorAttention`: as [`Policy::sinks_recent`], but what is freed stays as one entry of the
    /// head, its mean.
    #[must_use]
    pub fn sinks_recent_fold(heads: Heads, n_sinks: u64, n_recent: u64) -> Self {
        let mut policy = Policy::sinks_recent(heads, n_sinks, n_recent);
        policy.raw.retention = sys::KVM_RETAIN_SINKS_RECENT_FOLD;
        policy
    }

    /// H2O: as [`Policy::sinks_recent`], but of what would be freed the `n_heavy` tokens with the
    /// largest attention mass stay.
    #[must_use]
    pub fn heavy(heads: Heads, n_sinks: u64, n_recent: u64, n_heavy: u64) -> Self {
        let mut policy = Policy::sinks_recent(heads, n_sinks, n_recent);
        policy.raw.retention = sys::KVM_RETAIN_HEAVY;
        policy.raw.n_heavy = n_heavy;
        policy
    }

    /// Unified Layer Skipping: for all heads of layers that decoding skips. Every token stays until
    /// the prompt ends ([`Item::prompt_end`](crate::Item::prompt_end)); then their memory is freed,
    /// and attends of them answer `Partial`.
    ///
    /// ```
    /// use kvm::{Heads, Policy, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let policy = Policy::prompt(Heads::all().layers(1..3));
    /// client.register_space(&SpaceParams::new("my-model", 4, 4, 64).policy(policy))?;
    /// // Not for some heads of a layer.
    /// let policy = Policy::prompt(Heads::all().layers(1..3).kv_heads([0]));
    /// let wrong = SpaceParams::new("other-model", 4, 4, 64).policy(policy);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn prompt(heads: Heads) -> Self {
        let mut policy = Policy::full(heads);
        policy.raw.retention = sys::KVM_RETAIN_PROMPT;
        policy
    }

    /// D2O: the tokens that a [`Policy::heavy`] head gives up join the kept ones with the nearest
    /// keys, where these are near enough (kvm.h, `KVM_MERGE_WEIGHTED`). `is_counted`: a token then
    /// counts for as many as have become it.
    ///
    /// ```
    /// use kvm::{Heads, Policy, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let policy = Policy::heavy(Heads::all(), 4, 512, 512).merging(true);
    /// client.register_space(&SpaceParams::new("my-model", 2, 4, 64).policy(policy))?;
    /// // Of other heads nothing goes that could be merged so.
    /// let policy = Policy::sinks_recent(Heads::all(), 4, 512).merging(true);
    /// let wrong = SpaceParams::new("other-model", 2, 4, 64).policy(policy);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn merging(mut self, is_counted: bool) -> Self {
        self.raw.merge = if is_counted {
            sys::KVM_MERGE_COUNTED
        } else {
            sys::KVM_MERGE_WEIGHTED
        };
        self
    }

    /// `MiKV`: the tokens that a [`Policy::heavy`] head does not keep stay in fewer bits
    /// ([`Codec::demoted`]; kvm.h, `KVM_MERGE_DEMOTED`).
    ///
    /// ```
    /// use kvm::{Codec, CodecId, Heads, Policy, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let policy = Policy::heavy(Heads::all(), 0, 512, 512).demoting();
    /// let codec = Codec::new(Heads::all()).demoted(CodecId::I2_BALANCED, CodecId::I2);
    /// let params = SpaceParams::new("my-model", 2, 4, 64).policy(policy).codec(codec);
    /// client.register_space(&params)?;
    /// // It has to be said what to.
    /// let policy = Policy::heavy(Heads::all(), 0, 512, 512).demoting();
    /// let wrong = SpaceParams::new("other-model", 2, 4, 64).policy(policy);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn demoting(mut self) -> Self {
        self.raw.merge = sys::KVM_MERGE_DEMOTED;
        self
    }

    /// D2O: [`Policy::heavy`] heads keep every token until the prompt ends
    /// ([`Item::prompt_end`](crate::Item::prompt_end)); then layers whose attention is spread out
    /// keep more than others (kvm.h, `KVM_BUDGETS_BY_DENSITY`).
    ///
    /// ```
    /// use kvm::{Heads, Policy, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let policy = Policy::heavy(Heads::all(), 4, 512, 512).by_density();
    /// client.register_space(&SpaceParams::new("my-model", 2, 4, 64).policy(policy))?;
    /// // Of other heads nothing is chosen.
    /// let policy = Policy::sinks_recent(Heads::all(), 4, 512).by_density();
    /// let wrong = SpaceParams::new("other-model", 2, 4, 64).policy(policy);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn by_density(mut self) -> Self {
        self.raw.budgets = sys::KVM_BUDGETS_BY_DENSITY;
        self
    }

    /// `StreamingLLM`: sinks and recent tokens count as neighbours, whatever was between them. The
    /// space must have a rope layout, and the layers no window.
    #[must_use]
    pub fn in_cache_positions(mut self) -> Self {
        self.raw.positions = sys::KVM_POSITIONS_IN_CACHE;
        self
    }

    /// Tokens kept beyond `n_recent`, so that truncate has room.
    #[must_use]
    pub fn slack(mut self, n_tokens: u64) -> Self {
        self.raw.slack = n_tokens;
        self
    }
}

/// How heads are stored.
///
/// ```
/// use kvm::{Codec, CodecId, Heads, SpaceParams};
/// let params = SpaceParams::new("my-model", 32, 32, 128)
///     .codec(Codec::new(Heads::all()).values(CodecId::I8));
/// # let _ = params;
/// ```
#[derive(Clone, Debug)]
pub struct Codec {
    heads: Heads,
    raw: sys::kvm_codec_params,
}

impl Codec {
    /// As the space, for these heads.
    #[must_use]
    pub fn new(heads: Heads) -> Self {
        Codec {
            heads,
            raw: sys::kvm_codec_params {
                layer_begin: heads.layer_begin,
                n_layers: heads.n_layers,
                kv_head_mask: heads.kv_head_mask,
                ..Default::default()
            },
        }
    }

    /// How keys are stored.
    #[must_use]
    pub fn keys(mut self, codec: CodecId) -> Self {
        self.raw.codec_k = codec.code();
        self
    }

    /// How values are stored.
    #[must_use]
    pub fn values(mut self, codec: CodecId) -> Self {
        self.raw.codec_v = codec.code();
        self
    }

    /// How keys and values of tokens are stored that [`Policy::demoting`] heads demote.
    #[must_use]
    pub fn demoted(mut self, keys: CodecId, values: CodecId) -> Self {
        self.raw.demoted_k = keys.code();
        self.raw.demoted_v = values.code();
        self
    }
}

/// The kind of an index says what it keeps of each key.
///
/// ```
/// use kvm::{Heads, Index, IndexKind, SpaceParams};
/// let params = SpaceParams::new("my-model", 32, 32, 128)
///     .index(Index::new(Heads::all(), IndexKind::Lsh { bits: 10, tables: 150 }));
/// # let _ = params;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexKind {
    /// Nothing: no index.
    None,
    /// One of the next three, whichever suits the keys.
    Sketch,
    /// A bit of each coordinate: 20 bytes of a key of dim 128.
    Sketch1Bit,
    /// 8 leading coordinates in int8, a bit of the others: 28 bytes.
    Sketch8I8,
    /// Two bits of each coordinate: 36 bytes.
    Sketch2Bit,
    /// Hash tables as in MagicPIG: 2 bytes a table and more. Zeros: the defaults.
    Lsh {
        /// Hash bits of a table: 1 to 15; 0: 10.
        bits: u32,
        /// Tables: 2 to 512; 0: 150.
        tables: u32,
    },
}

/// The index of heads, by which the approximate modes choose keys. A head that no entry names has
/// none and is answered exactly.
///
/// ```
/// use kvm::{Heads, Index, IndexKind, SpaceParams};
/// let params = SpaceParams::new("my-model", 32, 32, 128)
///     .index(Index::new(Heads::all(), IndexKind::Sketch).recent(128).min_tokens(1024));
/// # let _ = params;
/// ```
#[derive(Clone, Debug)]
pub struct Index {
    heads: Heads,
    raw: sys::kvm_index_params,
}

impl Index {
    /// An index of this kind for these heads.
    #[must_use]
    pub fn new(heads: Heads, kind: IndexKind) -> Self {
        let (kind, lsh_bits, lsh_tables) = match kind {
            IndexKind::None => (sys::KVM_INDEX_NONE, 0, 0),
            IndexKind::Sketch => (sys::KVM_INDEX_SKETCH, 0, 0),
            IndexKind::Sketch1Bit => (sys::KVM_INDEX_SKETCH_1BIT, 0, 0),
            IndexKind::Sketch8I8 => (sys::KVM_INDEX_SKETCH_8I8, 0, 0),
            IndexKind::Sketch2Bit => (sys::KVM_INDEX_SKETCH_2BIT, 0, 0),
            IndexKind::Lsh { bits, tables } => (sys::KVM_INDEX_LSH, bits, tables),
        };
        Index {
            heads,
            raw: sys::kvm_index_params {
                layer_begin: heads.layer_begin,
                n_layers: heads.n_layers,
                kv_head_mask: heads.kv_head_mask,
                kind,
                lsh_bits,
                lsh_tables,
                ..Default::default()
            },
        }
    }

    /// First tokens that are always read; 0: 4.
    #[must_use]
    pub fn sinks(mut self, n_tokens: u32) -> Self {
        self.raw.n_sinks = n_tokens;
        self
    }

    /// Last tokens that are always read; 0: 64.
    #[must_use]
    pub fn recent(mut self, n_tokens: u32) -> Self {
        self.raw.n_recent = n_tokens;
        self
    }

    /// From this length on there is an index: 256 to 8192; 0: 4096.
    #[must_use]
    pub fn min_tokens(mut self, n_tokens: u32) -> Self {
        self.raw.min_tokens = n_tokens;
        self
    }

    /// Sets the seed of rotations and hash planes.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.raw.seed = seed;
        self
    }
}

/// The geometry and identity of one model's KV.
///
/// ```
/// use kvm::{CodecId, SpaceParams};
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// let params = SpaceParams::new("llama-8b", 32, 32, 128).kv_heads(8).stored_as(CodecId::BF16);
/// let space = client.register_space(&params)?;
/// assert_eq!(space.info()?.n_kv_heads, 8);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SpaceParams {
    name: String,
    raw: sys::kvm_space_params,
    rope_inv_freq: Vec<f32>,
    sink_logits: Option<Vec<f32>>,
    alibi_slopes: Option<Vec<f32>>,
    layers: Vec<sys::kvm_layer_params>,
    policies: Vec<Policy>,
    codecs: Vec<Codec>,
    indexes: Vec<Index>,
}

// SAFETY: the pointers in `raw` are null until a call fills a copy of it.
unsafe impl Send for SpaceParams {}
// SAFETY: as above.
unsafe impl Sync for SpaceParams {}

impl SpaceParams {
    /// A model with as many kv heads as q heads, values of the keys' width, and bf16 storage.
    /// `name`: 1 to 63 bytes of `[A-Za-z0-9._/-]`.
    #[must_use]
    pub fn new(name: impl Into<String>, n_layers: u32, n_q_heads: u32, head_dim: u32) -> Self {
        SpaceParams {
            name: name.into(),
            raw: sys::kvm_space_params {
                n_layers,
                n_q_heads,
                head_dim_k: head_dim,
                ..Default::default()
            },
            rope_inv_freq: Vec::new(),
            sink_logits: None,
            alibi_slopes: None,
            layers: Vec::new(),
            policies: Vec::new(),
            codecs: Vec::new(),
            indexes: Vec::new(),
        }
    }

    /// Divides the q heads into groups of 1 to 128.
    #[must_use]
    pub fn kv_heads(mut self, n_kv_heads: u32) -> Self {
        self.raw.n_kv_heads = n_kv_heads;
        self
    }

    /// Width of values, where it is not that of keys; a multiple of 8 up to 576, as that is.
    #[must_use]
    pub fn head_dim_v(mut self, dim: u32) -> Self {
        self.raw.head_dim_v = dim;
        self
    }

    /// Values are the first `dim` channels of keys, as in multi-head latent attention: stored and
    /// read once. Steps append `k` alone (`Invalid` with a `v`), and [`Read`](crate::Read) gives
    /// both. Heads have no index: registering one fails with `Unsupported`.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let latent = kvm::SpaceParams::new("deepseek-v2-lite", 27, 16, 576)
    ///     .kv_heads(1)
    ///     .values_in_keys(512);
    /// let info = client.register_space(&latent)?.info()?;
    /// assert!(info.has_values_in_keys);
    /// assert_eq!(info.bytes_per_token, 27 * 1152);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn values_in_keys(mut self, dim: u32) -> Self {
        self.raw.flags |= sys::KVM_SPACE_V_IN_K;
        self.raw.head_dim_v = dim;
        self
    }

    /// How K and V are stored, but for heads that [`codec`](Self::codec) names.
    #[must_use]
    pub fn stored_as(mut self, codec: CodecId) -> Self {
        self.raw.codec = codec.code();
        self
    }

    /// Multiplies q.k; the default is 1 / sqrt of the width of each layer's keys.
    #[must_use]
    pub fn softmax_scale(mut self, scale: f32) -> Self {
        self.raw.softmax_scale = scale;
        self
    }

    /// logit = cap * tanh(logit / cap).
    #[must_use]
    pub fn logit_softcap(mut self, cap: f32) -> Self {
        self.raw.logit_softcap = cap;
        self
    }

    /// Layout of rotations, and the angle per position of each pair in radians.
    #[must_use]
    pub fn rope(mut self, layout: Rope, inv_freq: &[f32]) -> Self {
        self.raw.rope_layout = match layout {
            Rope::Half => sys::KVM_ROPE_HALF,
            Rope::Interleaved => sys::KVM_ROPE_INTERLEAVED,
        };
        self.rope_inv_freq = inv_freq.to_vec();
        self
    }

    /// `[n_layers][n_q_heads]` an extra logit without a value in every softmax.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let params = kvm::SpaceParams::new("my-model", 2, 4, 64).sink_logits(&[0.0; 8]);
    /// client.register_space(&params)?;
    /// let wrong = kvm::SpaceParams::new("other-model", 2, 4, 64).sink_logits(&[0.0; 4]);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn sink_logits(mut self, logits: &[f32]) -> Self {
        self.sink_logits = Some(logits.to_vec());
        self
    }

    /// `[n_q_heads]` what logits grow by from position to position: ALiBi. A key at position x and
    /// a query at p get `slope * (x - p)`, behind the soft-cap, in all layers. Magnitudes up to
    /// 10,000. Heads have no index: registering one fails with `Unsupported`.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let slopes: Vec<f32> = (1..=8).map(|i| 0.5f32.powi(i)).collect(); // of 8 heads
    /// let params = kvm::SpaceParams::new("my-model", 2, 8, 64).alibi_slopes(&slopes);
    /// client.register_space(&params)?;
    /// let wrong = kvm::SpaceParams::new("other-model", 2, 8, 64).alibi_slopes(&slopes[..4]);
    /// assert!(client.register_space(&wrong).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: &[f32]) -> Self {
        self.alibi_slopes = Some(slopes.to_vec());
        self
    }

    /// Sets a hash of whatever must agree between users (weights, ...).
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: [u8; 32]) -> Self {
        self.raw.fingerprint = fingerprint;
        self
    }

    /// Tensor-parallel rank of this geometry's heads, for the identity.
    #[must_use]
    pub fn shard(mut self, index: u32, n_shards: u32) -> Self {
        self.raw.shard_index = index;
        self.raw.n_shards = n_shards;
        self
    }

    /// Adds an override for layers.
    #[must_use]
    pub fn layer(mut self, layer: LayerParams) -> Self {
        self.layers.push(layer.raw);
        self
    }

    /// Adds what a published system keeps and how it stores it: a [`Preset`], or its
    /// name. What is added later wins. Fails with the nearest name where there is none of that, and
    /// where the preset needs more of the model.
    ///
    /// ```
    /// use kvm::{Heads, Policy, Preset, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let params = SpaceParams::new("my-model", 32, 32, 128)
    ///     .preset(Preset::new("h2o").tokens(8192))?
    ///     .policy(Policy::full(Heads::all().layers(0..2)));
    /// client.register_space(&params)?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn preset(mut self, preset: impl Into<Preset>) -> Result<Self> {
        let entries = preset.into().resolve(self.raw.n_layers)?;
        self.layers.extend(entries.layers);
        let heads = |layer_begin, n_layers, kv_head_mask| Heads {
            layer_begin,
            n_layers,
            kv_head_mask,
            is_empty: false,
        };
        self.policies
            .extend(entries.policies.into_iter().map(|raw| Policy {
                heads: heads(raw.layer_begin, raw.n_layers, raw.kv_head_mask),
                raw,
            }));
        self.codecs
            .extend(entries.codecs.into_iter().map(|raw| Codec {
                heads: heads(raw.layer_begin, raw.n_layers, raw.kv_head_mask),
                raw,
            }));
        self.indexes
            .extend(entries.indexes.into_iter().map(|raw| Index {
                heads: heads(raw.layer_begin, raw.n_layers, raw.kv_head_mask),
                raw,
            }));
        if entries.default_mode != 0 {
            self.raw.default_mode = entries.default_mode;
            self.raw.default_budget = entries.default_budget;
        }
        Ok(self)
    }

    /// Adds a retention policy.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policies.push(policy);
        self
    }

    /// Adds a way of storing.
    #[must_use]
    pub fn codec(mut self, codec: Codec) -> Self {
        self.codecs.push(codec);
        self
    }

    /// Adds an index.
    #[must_use]
    pub fn index(mut self, index: Index) -> Self {
        self.indexes.push(index);
        self
    }

    /// How steps are answered that name no mode. A step that names one takes nothing from here.
    ///
    /// ```
    /// use kvm::{Accuracy, Heads, Index, IndexKind, Mode, SpaceParams};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let accuracy = Accuracy { eps: 0.05, delta: 0.1 };
    /// let mode = Mode::Verified { budget: 0, accuracy };
    /// let params = SpaceParams::new("my-model", 32, 32, 128)
    ///     .index(Index::new(Heads::all(), IndexKind::Sketch))
    ///     .default_mode(mode);
    /// let info = client.register_space(&params)?.info()?;
    /// assert_eq!(info.default_mode, Some(mode));
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn default_mode(mut self, mode: Mode) -> Self {
        let (mode, budget, accuracy) = mode.to_raw();
        self.raw.default_mode = mode;
        self.raw.default_budget = budget;
        self.raw.default_eps = accuracy.eps;
        self.raw.default_delta = accuracy.delta;
        self
    }

    /// Sets what an approximate default mode chooses keys by.
    #[must_use]
    pub fn default_proposal(mut self, proposal: Proposal) -> Self {
        self.raw.default_proposal = proposal.code();
        self
    }

    /// Checks what C cannot see: the lengths of arrays that it takes from other fields, and ranges
    /// that would mean "all" to it.
    fn check(&self) -> Result<()> {
        if let Some(logits) = &self.sink_logits {
            let needed = u64::from(self.raw.n_layers) * u64::from(self.raw.n_q_heads);
            if logits.len() as u64 != needed {
                let text = format!(
                    "sink_logits has {} numbers; n_layers * n_q_heads is {needed}",
                    logits.len()
                );
                return Err(Error::new(Status::Invalid, text));
            }
        }
        if let Some(slopes) = &self.alibi_slopes {
            let needed = self.raw.n_q_heads;
            if slopes.len() as u64 != u64::from(needed) {
                let text = format!(
                    "alibi_slopes has {} numbers; n_q_heads is {needed}",
                    slopes.len()
                );
                return Err(Error::new(Status::Invalid, text));
            }
        }
        if let Some(i) = self.layers.iter().position(|layer| layer.n_layers == 0) {
            let text = format!("layer entry {i} is for no layer");
            return Err(Error::new(Status::Invalid, text));
        }
        self.policies
            .iter()
            .try_for_each(|entry| entry.heads.check("a policy"))?;
        self.codecs
            .iter()
            .try_for_each(|entry| entry.heads.check("a codec"))?;
        self.indexes
            .iter()
            .try_for_each(|entry| entry.heads.check("an index"))
    }
}

fn count(len: usize) -> Result<u32> {
    u32::try_from(len).map_err(|_| Error::new(Status::Invalid, "an array has 2^32 entries"))
}

/// Null for an empty slice.
pub(crate) fn pointer<T>(slice: &[T]) -> *const T {
    if slice.is_empty() {
        ptr::null()
    } else {
        slice.as_ptr()
    }
}

/// A registered space. Stays registered when dropped; [`Space::remove`] removes it.
///
/// A clone is the same space. May be used from any thread.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// let space = client.register_space(&SpaceParams::new("my-model", 2, 4, 64))?;
/// let sequence = space.create_sequence()?;
/// assert_eq!(space.info()?.n_sequences, 1);
/// drop(sequence);
/// space.remove()?;
/// assert!(client.find_space("my-model").is_err());
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Space {
    connection: Arc<Connection>,
    id: SpaceId,
}

impl Space {
    pub(crate) fn register(client: &Client, params: &SpaceParams) -> Result<Self> {
        params.check()?;
        let name: CString = c_string(params.name.as_bytes(), "the name")?;
        let policies: Vec<_> = params.policies.iter().map(|entry| entry.raw).collect();
        let codecs: Vec<_> = params.codecs.iter().map(|entry| entry.raw).collect();
        let indexes: Vec<_> = params.indexes.iter().map(|entry| entry.raw).collect();
        let raw = sys::kvm_space_params {
            name: name.as_ptr(),
            n_rope_pairs: count(params.rope_inv_freq.len())?,
            rope_inv_freq: pointer(&params.rope_inv_freq),
            sink_logits: params
                .sink_logits
                .as_ref()
                .map_or(ptr::null(), |logits| pointer(logits)),
            alibi_slopes: params
                .alibi_slopes
                .as_ref()
                .map_or(ptr::null(), |slopes| pointer(slopes)),
            layers: pointer(&params.layers),
            n_layer_params: count(params.layers.len())?,
            policies: pointer(&policies),
            n_policies: count(policies.len())?,
            codecs: pointer(&codecs),
            n_codecs: count(codecs.len())?,
            indexes: pointer(&indexes),
            n_indexes: count(indexes.len())?,
            ..params.raw
        };
        let connection = Arc::clone(client.connection());
        let mut id = 0;
        // SAFETY: a live client; every array has the length that its count says (sink_logits and
        // alibi_slopes: checked above), and all live through the call.
        check(unsafe { sys::kvm_space_register(connection.raw(), &raw, &mut id) })?;
        let id = SpaceId(id);
        Ok(Space { connection, id })
    }

    pub(crate) fn find(client: &Client, name: &str) -> Result<Self> {
        let name = c_string(name.as_bytes(), "the name")?;
        let connection = Arc::clone(client.connection());
        let mut id = 0;
        // SAFETY: a live client, a string and an output that live through the call.
        check(unsafe { sys::kvm_space_find(connection.raw(), name.as_ptr(), &mut id) })?;
        let id = SpaceId(id);
        Ok(Space { connection, id })
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// Geometry, and what it costs. Fails with `Stale`, `Lost` or `Timeout`.
    pub fn info(&self) -> Result<SpaceInfo> {
        let mut raw = sys::kvm_space_info::default();
        // SAFETY: a live client and an output with its size.
        check(unsafe { sys::kvm_space_get_info(self.connection.raw(), self.id.0, &mut raw) })?;
        Ok(SpaceInfo::from_raw(&raw))
    }

    /// Makes an empty sequence. Fails with `Stale`, `Lost`, `Quota`, `Limit` or
    /// `Timeout`.
    pub fn create_sequence(&self) -> Result<Sequence> {
        self.create_sequence_with(&SequenceParams::new())
    }

    /// The same, with parameters.
    pub fn create_sequence_with(&self, params: &SequenceParams) -> Result<Sequence> {
        Sequence::create(&self.connection, self.id, params)
    }

    /// Forks a sequence that a client of the same user has published, as
    /// [`Sequence::fork`] does; `u64::MAX`: all of it. The fork pays for no page that it has from
    /// there. Fails likewise, and with `Permission` (a sequence of another client).
    pub fn fork_published(&self, parent: SequenceId, n_tokens: u64) -> Result<Sequence> {
        Sequence::fork_of(&self.connection, parent, n_tokens)
    }

    /// Takes a published sequence out of the library: it is this client's from now on, and counts
    /// for its limits. Fails with `Quota` (it does not fit), `Permission`, `Stale`, `Lost` or
    /// `Timeout`; it stays where it is then.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let published = space.create_sequence()?.publish()?;
    /// let sequence = space.take_sequence(published)?;
    /// assert!(!sequence.info()?.is_published);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn take_sequence(&self, published: SequenceId) -> Result<Sequence> {
        Sequence::take(&self.connection, published)
    }

    /// What the hashes of this space's prompts begin with ([`PrefixHashes`](crate::PrefixHashes)).
    /// Spaces of the same layout, policies and fingerprint have the same. salt: at most 64 bytes;
    /// who has another one finds nothing, and so does not learn what prompts there were. Fails with
    /// `Invalid` (salt), `Stale`, `Lost` or `Timeout`.
    pub fn prefix_seed(&self, salt: &[u8]) -> Result<PrefixHash> {
        PrefixHash::seed(&self.connection, self.id, salt)
    }

    /// The longest prefix that is there ([`Sequence::publish_prefix`]), for
    /// [`Space::fork_published`]. Asks nobody but the first time. What was found may be gone before
    /// it is forked: [`Space::fork_prefix`] looks after that. Fails with `Unsupported` (kvmd is
    /// older), `NoMemory`, `Limit` (of descriptors), `Disconnected` or `Timeout`.
    pub fn find_prefix(&self, hashes: &[PrefixHash]) -> Result<Option<FoundPrefix>> {
        FoundPrefix::find(&self.connection, self.id, hashes, 0.0)
    }

    /// The same, but `None` where what is there lies on disk and is sooner computed, at
    /// `prefill_rate` tokens a second, than read. Where something is found kvmd is asked. Fails
    /// also with `Invalid` (the rate is negative or not finite).
    pub fn find_prefix_faster_than(
        &self,
        prefill_rate: f64,
        hashes: &[PrefixHash],
    ) -> Result<Option<FoundPrefix>> {
        FoundPrefix::find(&self.connection, self.id, hashes, prefill_rate)
    }

    /// A fork of the longest prefix that is there, and its length: what follows is yet to be
    /// computed. Where there is none, a new sequence and 0. The fork pays for no page that it has
    /// from there. Fails as [`Space::find_prefix`], [`Space::fork_published`] and
    /// [`Space::create_sequence`].
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let tokens: Vec<u32> = (0..128).collect();
    /// let hashes = kvm::PrefixHashes::new(space.prefix_seed(b"")?, &tokens);
    /// // An engine needs what the last token says, so it computes that one in any case.
    /// let (chat, n_found) = space.fork_prefix(hashes.up_to(tokens.len() - 1))?;
    /// assert_eq!(chat.info()?.n_tokens_max, n_found);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn fork_prefix(&self, hashes: &[PrefixHash]) -> Result<(Sequence, u64)> {
        self.fork_prefix_faster_than(0.0, hashes)
    }

    /// The same of what [`Space::find_prefix_faster_than`] finds.
    pub fn fork_prefix_faster_than(
        &self,
        prefill_rate: f64,
        hashes: &[PrefixHash],
    ) -> Result<(Sequence, u64)> {
        if let Some(found) = self.find_prefix_faster_than(prefill_rate, hashes)? {
            if let Some(sequence) = self.fork_found(found)? {
                return Ok((sequence, found.n_tokens));
            }
        }
        Ok((self.create_sequence()?, 0))
    }

    /// `None`: it is not there any more.
    pub(crate) fn fork_found(&self, found: FoundPrefix) -> Result<Option<Sequence>> {
        match self.fork_published(found.sequence, found.n_tokens) {
            Ok(sequence) => Ok(Some(sequence)),
            Err(error) => match error.status() {
                Status::NotFound | Status::Stale | Status::Permission => Ok(None),
                _ => Err(error),
            },
        }
    }

    /// A sequence that holds what was saved under the name ([`Sequence::save`]) by any client of
    /// the user, in a space of the same layout, policies and fingerprint. It is there at once; its
    /// pages are read from disk as they are needed. Fails with `Unsupported`, `NotFound`, `Invalid`
    /// (the name; or the space is another one), `Lost` or `Corrupt` (parts of it are gone or
    /// damaged), `Io`, `Quota`, `Limit`, `NoSpace`, `Stale` or `Timeout`.
    pub fn load(&self, name: &str) -> Result<Sequence> {
        Sequence::load(&self.connection, self.id, name)
    }

    /// Removes the space from the service. Fails with `Busy` (it has sequences), `Stale`, `Lost` or
    /// `Timeout`.
    pub fn remove(self) -> Result<()> {
        // SAFETY: a live client.
        check(unsafe { sys::kvm_space_drop(self.connection.raw(), self.id.0) })
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Space").field(&self.id.0).finish()
    }
}

/// Facts that are known of a space. See [`Space::info`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SpaceInfo {
    /// The space itself.
    pub space: SpaceId,
    /// Its name.
    pub name: String,
    /// A hash of whatever must agree between users.
    pub fingerprint: [u8; 32],
    /// Layers.
    pub n_layers: u32,
    /// Query heads.
    pub n_q_heads: u32,
    /// Heads of K and V.
    pub n_kv_heads: u32,
    /// Width of keys.
    pub head_dim_k: u32,
    /// Width of values.
    pub head_dim_v: u32,
    /// Whether values are the first channels of keys.
    pub has_values_in_keys: bool,
    /// How K and V are stored.
    pub codec: CodecId,
    /// Over all layers.
    pub n_head_classes: u32,
    /// The user whose space it is.
    pub uid: u32,
    /// Agrees where layers, kv heads and dims are the same, whatever the codecs; zeros of a kvmd
    /// that has none.
    pub geometry_digest: [u8; 16],
    /// Agrees where the bytes of pages mean the same.
    pub layout_digest: [u8; 16],
    /// Agrees where heads keep the same tokens.
    pub policy_digest: [u8; 16],
    /// Agrees where the same is indexed in the same way.
    pub index_digest: [u8; 16],
    /// Sequences of all clients.
    pub n_sequences: u64,
    /// Over all layers, were every token kept.
    pub bytes_per_token: u64,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// How steps that name no mode are answered, with the service's own numbers where the space
    /// names none; `None`: in a mode that this crate does not know.
    pub default_mode: Option<Mode>,
    /// The proposal by which that mode chooses keys; `None`: something that this crate does not
    /// know.
    pub default_proposal: Option<Proposal>,
}

impl SpaceInfo {
    pub(crate) fn from_raw(raw: &sys::kvm_space_info) -> Self {
        SpaceInfo {
            space: SpaceId(raw.space),
            name: text_of(&raw.name),
            fingerprint: raw.fingerprint,
            n_layers: raw.n_layers,
            n_q_heads: raw.n_q_heads,
            n_kv_heads: raw.n_kv_heads,
            head_dim_k: raw.head_dim_k,
            head_dim_v: raw.head_dim_v,
            has_values_in_keys: raw.flags & sys::KVM_SPACE_V_IN_K != 0,
            codec: CodecId::from_code(raw.codec),
            n_head_classes: raw.n_head_classes,
            uid: raw.uid,
            geometry_digest: raw.geometry_digest,
            layout_digest: raw.layout_digest,
            policy_digest: raw.policy_digest,
            index_digest: raw.index_digest,
            n_sequences: raw.n_sequences,
            bytes_per_token: raw.bytes_per_token,
            page_tokens: raw.page_tokens,
            default_mode: Mode::from_raw(
                raw.default_mode,
                raw.default_budget,
                Accuracy {
                    eps: raw.default_eps,
                    delta: raw.default_delta,
                },
            ),
            default_proposal: Proposal::from_code(raw.default_proposal),
        }
    }
}
