// SPDX-License-Identifier: Apache-2.0
use std::ops::Range;
use std::time::Duration;

use kvm_sys as sys;

use crate::client::nanoseconds;
use crate::error::{Error, Result, Status};
use crate::sequence::SequenceId;
use crate::space::{pointer, Space, SpaceId};
use crate::tensor::{Owner, Sink, Source};

/// `CLOCK_MONOTONIC`, which deadlines count in. `Instant` is that clock, but keeps its number.
fn monotonic_ns() -> u64 {
    #[repr(C)]
    struct Timespec {
        seconds: std::os::raw::c_long,
        nanoseconds: std::os::raw::c_long,
    }
    extern "C" {
        fn clock_gettime(clock: std::os::raw::c_int, out: *mut Timespec) -> std::os::raw::c_int;
    }
    const CLOCK_MONOTONIC: std::os::raw::c_int = 1;
    let mut now = Timespec {
        seconds: 0,
        nanoseconds: 0,
    };
    // SAFETY: the C library's function and structure; never fails for this clock.
    unsafe { clock_gettime(CLOCK_MONOTONIC, &mut now) };
    now.seconds as u64 * 1_000_000_000 + now.nanoseconds as u64
}

/// Converts a budget, where 0 says that there is none.
fn time_budget(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| nanoseconds(time).max(1))
}

/// How good an approximation should be. Zeros: the defaults of the service.
///
/// ```
/// use kvm::{Accuracy, Mode};
/// let accuracy = Accuracy { eps: 0.01, ..Accuracy::default() };
/// let mode = Mode::Verified { budget: 0, accuracy };
/// # let _ = mode;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Accuracy {
    /// Relative error of o aimed at, below 1; 0: 0.03.
    pub eps: f32,
    /// Probability that the error exceeds its bar; 0: 0.01.
    pub delta: f32,
}

/// A mode says which keys are read.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8)
/// #     .index(Index::new(Heads::all(), IndexKind::Sketch).min_tokens(256)))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// # let sequence = space.create_sequence()?;
/// # let kv: Vec<f32> = (0..1024 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
/// # queue.append(Step::new(&space, 0).item(Item::new(&sequence).append(1024)).k(&kv).v(&kv))?;
/// let (q, mut o, mut err) = ([0.1f32; 8], [0.0f32; 8], [0.0f32; 2]);
/// let stats = queue.attend(
///     Step::new(&space, 0)
///         .item(Item::new(&sequence).query(1))
///         .mode(Mode::Sampled { budget: 64, accuracy: Accuracy::default() })
///         .seed(7)
///         .q(&q)
///         .o(&mut o)
///         .err(&mut err),
/// )?;
/// assert!(stats.keys_read < stats.keys_present);
/// println!("o is off by {:.1} % at most, probably", 100.0 * err[0]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Mode {
    /// Every visible key.
    #[default]
    Exact,
    /// Those with the largest estimated logits. Biased, without an error bar.
    TopK {
        /// Keys of which the answer is made, per row and kv head beside those always read; not
        /// 0. To rank them more are read: four times as many with sketches.
        budget: u64,
    },
    /// A random sample, weighted so that nothing is missing on average.
    Sampled {
        /// Keys per row and kv head; 0: as many as should give `accuracy`.
        budget: u64,
        /// `delta` of the bar; with a budget of 0 also what is aimed at. With a budget and an
        /// `eps`, rows whose bar is beyond it take bar / eps times the budget, up to 16 times.
        accuracy: Accuracy,
    },
    /// A sample that grows until its error bar is small enough, else all.
    Verified {
        /// Keys per row and kv head beyond which a head is answered exactly, whatever that takes;
        /// 0: those that take longer than an exact answer.
        budget: u64,
        /// What the bar is held against.
        accuracy: Accuracy,
    },
    /// For each kv head whichever of the above the service expects to be best on this machine.
    Auto {
        /// How long the request may compute, all threads at work: aimed at, not kept, and
        /// `accuracy` has no meaning then. `None`: the fastest of `Exact` and `Verified` that keeps
        /// `accuracy`. A time of 0 counts as a nanosecond.
        time: Option<Duration>,
        /// Without a time: as for `Verified`.
        accuracy: Accuracy,
    },
    /// What the space was registered with ([`SpaceParams::default_mode`](crate::SpaceParams)),
    /// `Exact` where it names nothing. Numbers that are not 0 go before the space's. This, with
    /// zeros, is what a [`Step`] begins with.
    OfSpace {
        /// As the space's mode has it: keys, or of `Auto` nanoseconds. 0: the space's, but none
        /// beside an `eps` that it would take the place of, or whose meaning it would change.
        budget: u64,
        /// Zeros: the space's, but no `eps` beside a budget whose meaning it would change.
        accuracy: Accuracy,
    },
}

impl Mode {
    /// Mode, budget and accuracy as `kvm.h` has them.
    pub(crate) fn to_raw(self) -> (u32, u64, Accuracy) {
        let exact = Accuracy::default();
        match self {
            Mode::Exact => (sys::KVM_MODE_EXACT, 0, exact),
            Mode::TopK { budget } => (sys::KVM_MODE_TOPK, budget, exact),
            Mode::Sampled { budget, accuracy } => (sys::KVM_MODE_SAMPLED, budget, accuracy),
            Mode::Verified { budget, accuracy } => (sys::KVM_MODE_VERIFIED, budget, accuracy),
            Mode::Auto { time, accuracy } => (sys::KVM_MODE_AUTO, time_budget(time), accuracy),
            Mode::OfSpace { budget, accuracy } => (sys::KVM_MODE_DEFAULT, budget, accuracy),
        }
    }

    /// Converts the mode of a space. A service that does not know defaults of spaces says 0: there
    /// all are exact.
    pub(crate) fn from_raw(mode: u32, budget: u64, accuracy: Accuracy) -> Option<Self> {
        match mode {
            sys::KVM_MODE_DEFAULT | sys::KVM_MODE_EXACT => Some(Mode::Exact),
            sys::KVM_MODE_TOPK => Some(Mode::TopK { budget }),
            sys::KVM_MODE_SAMPLED => Some(Mode::Sampled { budget, accuracy }),
            sys::KVM_MODE_VERIFIED => Some(Mode::Verified { budget, accuracy }),
            sys::KVM_MODE_AUTO => Some(Mode::Auto {
                time: (budget != 0).then(|| Duration::from_nanos(budget)),
                accuracy,
            }),
            _ => None,
        }
    }
}

/// A proposal is what an approximate mode chooses keys by.
///
/// ```
/// # use kvm::*;
/// # fn step<'a>(space: &Space) -> Step<'a> {
/// Step::new(space, 0).mode(Mode::TopK { budget: 256 }).proposal(Proposal::Sketch)
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Proposal {
    /// The kind of the head's index decides.
    #[default]
    Default,
    /// Sketches.
    Sketch,
    /// Hash tables.
    Lsh,
}

impl Proposal {
    pub(crate) fn code(self) -> u32 {
        match self {
            Proposal::Default => sys::KVM_PROPOSAL_DEFAULT,
            Proposal::Sketch => sys::KVM_PROPOSAL_SKETCH,
            Proposal::Lsh => sys::KVM_PROPOSAL_LSH,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        match code {
            sys::KVM_PROPOSAL_DEFAULT => Some(Proposal::Default),
            sys::KVM_PROPOSAL_SKETCH => Some(Proposal::Sketch),
            sys::KVM_PROPOSAL_LSH => Some(Proposal::Lsh),
            _ => None,
        }
    }
}

/// One sequence's share of a request: how many tokens it gets, and how many query rows it has.
///
/// Rows of the tensors are counted over all items of a request: give [`Item::append_row`] and
/// [`Item::query_row`] where there are several.
///
/// ```
/// # use kvm::*;
/// # fn items(first: &Sequence, second: &Sequence) {
/// let decode = Item::new(first).append(1).query(1);
/// let next = Item::new(second).append(1).append_row(1).query(1).query_row(1);
/// let prefill_chunk = Item::new(first).append(512).query(512);
/// let without_a_part = Item::new(first).query(1).exclude(100..200).exclude(300..400);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Item {
    raw: sys::kvm_item,
    ranges: Vec<sys::kvm_range>,
    tree: Vec<u64>,
}

impl Item {
    /// Appends nothing and asks nothing yet. Positions are at the end.
    #[must_use]
    pub fn new(sequence: impl Into<SequenceId>) -> Self {
        Item {
            raw: sys::kvm_item {
                seq: sequence.into().0,
                append_position: sys::KVM_POSITION_END,
                query_position: sys::KVM_POSITION_END,
                ..Default::default()
            },
            ranges: Vec::new(),
            tree: Vec::new(),
        }
    }

    /// Tokens appended.
    #[must_use]
    pub fn append(mut self, n_tokens: u32) -> Self {
        self.raw.n_append = n_tokens;
        self
    }

    /// The length that the layer must have; the request fails with `Hole` otherwise. Default:
    /// whatever it is.
    #[must_use]
    pub fn append_position(mut self, position: u64) -> Self {
        self.raw.append_position = position;
        self
    }

    /// First row in k and v.
    #[must_use]
    pub fn append_row(mut self, row: u32) -> Self {
        self.raw.append_row = row;
        self
    }

    /// Query rows.
    #[must_use]
    pub fn query(mut self, n_rows: u32) -> Self {
        self.raw.n_query = n_rows;
        self
    }

    /// Position of the first query row; the others follow. Default: the rows are the layer's last
    /// tokens after the append.
    #[must_use]
    pub fn query_position(mut self, position: u64) -> Self {
        self.raw.query_position = position;
        self
    }

    /// First row in q, o, lse and err.
    #[must_use]
    pub fn query_row(mut self, row: u32) -> Self {
        self.raw.query_row = row;
        self
    }

    /// The tokens reach no layer beyond the request's last, and are final: for models that skip
    /// layers.
    #[must_use]
    pub fn last_layer(mut self) -> Self {
        self.raw.flags |= sys::KVM_ITEM_LAST_LAYER;
        self
    }

    /// The prompt ends with these tokens: policies that wait for it act
    /// ([`Policy::by_density`](crate::Policy::by_density)).
    #[must_use]
    pub fn prompt_end(mut self) -> Self {
        self.raw.flags |= sys::KVM_ITEM_PROMPT_END;
        self
    }

    /// The tokens are those at [`Item::append_position`] that
    /// [`Sequence::drop_tokens`](crate::Sequence::drop_tokens) has dropped: whole pages of 64.
    #[must_use]
    pub fn restore(mut self) -> Self {
        self.raw.flags |= sys::KVM_ITEM_RESTORE;
        self
    }

    /// Rows see every position, not only those up to their own.
    #[must_use]
    pub fn not_causal(mut self) -> Self {
        self.raw.flags |= sys::KVM_ITEM_NOT_CAUSAL;
        self
    }

    /// Rows see these positions only, and those of further calls. Ranges are given in order and
    /// disjoint. Takes back what [`Item::exclude`] said.
    #[must_use]
    pub fn only(self, positions: Range<u64>) -> Self {
        self.range(positions, 0)
    }

    /// Rows do not see these positions, nor those of further calls. Ranges are given in order and
    /// disjoint. Takes back what [`Item::only`] said.
    #[must_use]
    pub fn exclude(self, positions: Range<u64>) -> Self {
        self.range(positions, sys::KVM_ITEM_EXCLUDE_RANGES)
    }

    fn range(mut self, positions: Range<u64>, kind: u32) -> Self {
        if self.raw.flags & sys::KVM_ITEM_EXCLUDE_RANGES != kind {
            self.raw.flags ^= sys::KVM_ITEM_EXCLUDE_RANGES;
            self.ranges.clear();
        }
        self.ranges.push(sys::kvm_range {
            begin: positions.start,
            end: positions.end,
        });
        self
    }

    /// A tree of drafts: bit i of word j says that query row j sees the token of row i. One word
    /// for each query row, at most 64.
    ///
    /// ```
    /// # use kvm::*;
    /// # fn item(sequence: &Sequence) {
    /// // Two continuations of one token: rows 1 and 2 both see row 0, not each other.
    /// let drafts = Item::new(sequence).append(3).query(3).tree([0b001, 0b011, 0b101]);
    /// # }
    /// ```
    #[must_use]
    pub fn tree(mut self, words: impl IntoIterator<Item = u64>) -> Self {
        self.raw.flags |= sys::KVM_ITEM_TREE;
        self.tree = words.into_iter().collect();
        self
    }
}

/// One request: append, attend, or both, for many sequences of a space. What
/// [`Queue::append`](crate::Queue::append), [`attend`](crate::Queue::attend) and
/// [`step`](crate::Queue::step) take.
///
/// Shapes, a row being a token of an item, heads and dims being those of the layer:
///
/// | tensor | shape | type |
/// |---|---|---|
/// | k | `[n_layers][row][n_kv_heads][head_dim_k]` | any |
/// | v | `[n_layers][row][n_kv_heads][head_dim_v]`; none where values are in keys | any |
/// | q | `[row][n_q_heads][head_dim_k]` | any |
/// | o | `[row][n_q_heads][head_dim_v]` | any |
/// | lse | `[row][n_q_heads]`, natural logarithm | f32 |
/// | err | `[row][n_q_heads][2]`: relative L2 error of o, absolute error of lse | f32 |
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 2, 4, 16).kv_heads(2))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// # let sequence = space.create_sequence()?;
/// let (k, v, q) = ([0.1f32; 2 * 16], [0.2f32; 2 * 16], [0.3f32; 4 * 16]);
/// let (mut o, mut lse) = ([0.0f32; 4 * 16], [0.0f32; 4]);
/// for layer in 0..2 {
///     queue.step(
///         Step::new(&space, layer)
///             .item(Item::new(&sequence).append(1).query(1))
///             .k(&k).v(&v).q(&q).o(&mut o).lse(&mut lse),
///     )?;
/// }
/// assert!((o[0] - 0.2).abs() < 1e-3); // of a single token: its value
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Step<'b> {
    space: SpaceId,
    layer_begin: u32,
    n_layers: u32,
    flags: u32,
    items: Vec<sys::kvm_item>,
    ranges: Vec<sys::kvm_range>,
    tree: Vec<u64>,
    is_broken: Option<&'static str>,
    mode: Mode,
    proposal: Proposal,
    scale: f32,
    seed: u64,
    deadline_ns: u64,
    k: Source<'b>,
    v: Source<'b>,
    q: Source<'b>,
    o: Sink<'b>,
    lse: Sink<'b>,
    err: Sink<'b>,
}

impl<'b> Step<'b> {
    /// A request for one layer, without items and tensors.
    #[must_use]
    pub fn new(space: &Space, layer: u32) -> Self {
        Step {
            space: space.id(),
            layer_begin: layer,
            n_layers: 1,
            flags: 0,
            items: Vec::new(),
            ranges: Vec::new(),
            tree: Vec::new(),
            is_broken: None,
            mode: Mode::OfSpace {
                budget: 0,
                accuracy: Accuracy::default(),
            },
            proposal: Proposal::Default,
            scale: 0.0,
            seed: 0,
            deadline_ns: 0,
            k: Source::none(),
            v: Source::none(),
            q: Source::none(),
            o: Sink::none(),
            lse: Sink::none(),
            err: Sink::none(),
        }
    }

    /// Layers from the first one on; more than one with append only.
    #[must_use]
    pub fn layers(mut self, n_layers: u32) -> Self {
        self.n_layers = n_layers;
        self
    }

    /// Adds an item. A sequence may occur once with tokens to append.
    #[must_use]
    pub fn item(mut self, item: Item) -> Self {
        let mut raw = item.raw;
        let begins = (
            u32::try_from(self.ranges.len()),
            u32::try_from(item.ranges.len()),
            u32::try_from(self.tree.len()),
        );
        if let (Ok(range_begin), Ok(n_ranges), Ok(tree_begin)) = begins {
            raw.range_begin = if n_ranges == 0 { 0 } else { range_begin };
            raw.n_ranges = n_ranges;
            raw.tree_begin = if item.tree.is_empty() { 0 } else { tree_begin };
        } else {
            self.is_broken = Some("the items have too many ranges or tree words");
        }
        if raw.flags & sys::KVM_ITEM_TREE != 0 && item.tree.len() != raw.n_query as usize {
            self.is_broken = Some("an item's tree does not have a word for each query row");
        }
        self.items.push(raw);
        self.ranges.extend(item.ranges);
        self.tree.extend(item.tree);
        self
    }

    /// Adds many.
    #[must_use]
    pub fn items(self, items: impl IntoIterator<Item = Item>) -> Self {
        items.into_iter().fold(self, Step::item)
    }

    /// Keys to append.
    #[must_use]
    pub fn k(mut self, k: impl Into<Source<'b>>) -> Self {
        self.k = k.into();
        self
    }

    /// Values to append. None where they are in keys
    /// ([`SpaceParams::values_in_keys`](crate::SpaceParams::values_in_keys)).
    #[must_use]
    pub fn v(mut self, v: impl Into<Source<'b>>) -> Self {
        self.v = v.into();
        self
    }

    /// Queries.
    #[must_use]
    pub fn q(mut self, q: impl Into<Source<'b>>) -> Self {
        self.q = q.into();
        self
    }

    /// Receives the weighted means of the values.
    #[must_use]
    pub fn o(mut self, o: impl Into<Sink<'b>>) -> Self {
        self.o = o.into();
        self
    }

    /// Receives the logarithms of the sums of the exponentiated logits.
    #[must_use]
    pub fn lse(mut self, lse: impl Into<Sink<'b>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Receives error bars, `f32`: `[row][q head][2]`, the estimated relative error of o and the
    /// absolute one of lse. NaN: there is no estimate; 0 for exact answers.
    #[must_use]
    pub fn err(mut self, err: impl Into<Sink<'b>>) -> Self {
        self.err = err.into();
        self
    }

    /// Sets which keys are read. Without this: as the space says.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets what an approximate mode chooses them by.
    #[must_use]
    pub fn proposal(mut self, proposal: Proposal) -> Self {
        self.proposal = proposal;
        self
    }

    /// Sets the seed of sampling: the same seed draws the same numbers for the same positions at
    /// every step.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Instead of the space's softmax scale.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Weights times values in fp32 instead of bf16 products: slower, and more exact.
    #[must_use]
    pub fn f32_values(mut self) -> Self {
        self.flags |= sys::KVM_STEP_F32_VALUES;
        self
    }

    /// The attend adds nothing to the attention mass by which heads choose what to keep: it leaves
    /// its sequences as they were.
    #[must_use]
    pub fn no_statistics(mut self) -> Self {
        self.flags |= sys::KVM_STEP_NO_STATISTICS;
        self
    }

    /// A request that has not begun this long from now fails with `Deadline`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use kvm::*;
    /// # fn step<'a>(space: &Space) -> Step<'a> {
    /// Step::new(space, 0).deadline_in(Duration::from_millis(20))
    /// # }
    /// ```
    #[must_use]
    pub fn deadline_in(mut self, time: Duration) -> Self {
        self.deadline_ns = monotonic_ns().saturating_add(nanoseconds(time)).max(1);
        self
    }

    /// The output tensors o, lse and err, to have their memory back from a completed request.
    ///
    /// ```
    /// # use kvm::*;
    /// # fn example<'b>(step: Step<'b>) -> Result<&'b mut [f32]> {
    /// let (o, _lse, _err) = step.into_outputs();
    /// o.into_slice::<f32>()
    /// # }
    /// ```
    #[must_use]
    pub fn into_outputs(self) -> (Sink<'b>, Sink<'b>, Sink<'b>) {
        (self.o, self.lse, self.err)
    }

    pub(crate) fn owners(&self) -> [Owner; 6] {
        let sources = (self.k.owner, self.v.owner, self.q.owner);
        let sinks = (self.o.owner, self.lse.owner, self.err.owner);
        [sources.0, sources.1, sources.2, sinks.0, sinks.1, sinks.2]
    }

    /// For kvm.h. Points into `self`: valid while that lives and stays where it is.
    pub(crate) fn to_raw(&self) -> Result<sys::kvm_step_params> {
        if let Some(reason) = self.is_broken {
            return Err(Error::new(Status::Invalid, reason));
        }
        let (mode, budget, accuracy) = self.mode.to_raw();
        let count = |len: usize| {
            u32::try_from(len).map_err(|_| Error::new(Status::Invalid, "2^32 items or more"))
        };
        Ok(sys::kvm_step_params {
            flags: self.flags,
            space: self.space.0,
            layer_begin: self.layer_begin,
            n_layers: self.n_layers,
            n_items: count(self.items.len())?,
            n_ranges: count(self.ranges.len())?,
            items: pointer(&self.items),
            ranges: pointer(&self.ranges),
            tree_mask: pointer(&self.tree),
            n_tree_words: count(self.tree.len())?,
            mode,
            k: self.k.raw,
            v: self.v.raw,
            q: self.q.raw,
            o: self.o.raw,
            lse: self.lse.raw,
            err: self.err.raw,
            scale: self.scale,
            proposal: self.proposal.code(),
            eps: accuracy.eps,
            delta: accuracy.delta,
            budget,
            seed: self.seed,
            deadline_ns: self.deadline_ns,
            ..Default::default()
        })
    }
}

/// Counts of what a request did.
///
/// ```
/// # use kvm::*;
/// # fn print(stats: &StepStats) {
/// if stats.mode != ModeUsed::Exact {
///     println!("{} of {} keys read", stats.keys_read, stats.keys_present);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepStats {
    /// That was used.
    pub mode: ModeUsed,
    /// (item, kv head, key) visible to some row of the item.
    pub keys_present: u64,
    /// The part of them whose K or V was read; unique over the heads of a group.
    pub keys_read: u64,
    /// Bytes of K and V, index included.
    pub bytes_read: u64,
    /// From acceptance to completion, in the service.
    pub service_time: Duration,
    /// From the start of the first task to the end of the last merge.
    pub compute_time: Duration,
    /// The largest error bar over rows and heads; NaN: one of them has none.
    pub err_max: f32,
    /// With an approximate mode: (row, q head) that were answered exactly.
    pub n_exact: u32,
    /// (row, q head) that were answered NaN: their query, or a key or a value that they see, is not
    /// finite.
    pub n_not_finite: u64,
}

/// The mode in which a request was answered; of [`Mode::Auto`] what most approximated rows got.
/// `Exact` also for an approximate request of which no head was approximated.
///
/// ```
/// # use kvm::*;
/// # fn is_exact(stats: &StepStats) -> bool {
/// stats.mode == ModeUsed::Exact
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModeUsed {
    /// Every visible key was read.
    Exact,
    /// [`Mode::TopK`].
    TopK,
    /// [`Mode::Sampled`].
    Sampled,
    /// [`Mode::Verified`].
    Verified,
    /// One that this crate does not know, by its code.
    Other(u32),
}

impl ModeUsed {
    fn from_code(code: u32) -> Self {
        match code {
            sys::KVM_MODE_DEFAULT | sys::KVM_MODE_EXACT => ModeUsed::Exact,
            sys::KVM_MODE_TOPK => ModeUsed::TopK,
            sys::KVM_MODE_SAMPLED => ModeUsed::Sampled,
            sys::KVM_MODE_VERIFIED => ModeUsed::Verified,
            other => ModeUsed::Other(other),
        }
    }
}

impl StepStats {
    pub(crate) fn from_stats(raw: &sys::kvm_step_stats) -> Self {
        StepStats {
            mode: ModeUsed::from_code(raw.mode),
            keys_present: raw.keys_present,
            keys_read: raw.keys_read,
            bytes_read: raw.bytes_read,
            service_time: Duration::from_nanos(raw.service_ns),
            compute_time: Duration::from_nanos(raw.compute_ns),
            err_max: raw.err_max,
            n_exact: raw.n_exact,
            n_not_finite: raw.n_not_finite,
        }
    }

    pub(crate) fn from_completion(raw: &sys::kvm_completion) -> Self {
        StepStats {
            mode: ModeUsed::from_code(raw.mode),
            keys_present: raw.keys_present,
            keys_read: raw.keys_read,
            bytes_read: raw.bytes_read,
            service_time: Duration::from_nanos(raw.service_ns),
            compute_time: Duration::from_nanos(raw.compute_ns),
            err_max: raw.err_max,
            n_exact: raw.n_exact,
            n_not_finite: raw.n_not_finite,
        }
    }
}

/// An observation is what an engine saw in a prefill that it computed itself, so that indexes and
/// policies know what later queries will look like: queries, column sums of the attention mass, or
/// both.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 1, 2, 8))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// # let sequence = space.create_sequence()?;
/// # let kv = [0.0f32; 3 * 2 * 8];
/// # queue.append(Step::new(&space, 0).item(Item::new(&sequence).append(3)).k(&kv).v(&kv))?;
/// let q = [0.5f32; 2 * 8]; // one row: [n_q_heads][head_dim_k]
/// let mass = [0.5f32; 3 * 2]; // [column][n_kv_heads]
/// queue.observe(Observe::new(&sequence, 0).queries(2, 1, &q).column_sums(0, 3, &mass))?;
/// assert_eq!(sequence.info()?.n_rows_observed, 1);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Observe<'b> {
    pub(crate) raw: sys::kvm_observe_params,
    pub(crate) q: Source<'b>,
    pub(crate) column_sums: Source<'b>,
}

impl<'b> Observe<'b> {
    /// Nothing yet, of one layer of a sequence.
    #[must_use]
    pub fn new(sequence: impl Into<SequenceId>, layer: u32) -> Self {
        Observe {
            raw: sys::kvm_observe_params {
                seq: sequence.into().0,
                layer,
                ..Default::default()
            },
            q: Source::none(),
            column_sums: Source::none(),
        }
    }

    /// `[n_rows][n_q_heads][head_dim_k]` queries, the first of them at `position`.
    #[must_use]
    pub fn queries(mut self, position: u64, n_rows: u32, q: impl Into<Source<'b>>) -> Self {
        self.raw.query_position = position;
        self.raw.n_rows = n_rows;
        self.q = q.into();
        self
    }

    /// `[n_columns][n_kv_heads]` softmax mass of the tokens from `position` on, summed over rows
    /// and the heads of a group; f32.
    #[must_use]
    pub fn column_sums(
        mut self,
        position: u64,
        n_columns: u64,
        sums: impl Into<Source<'b>>,
    ) -> Self {
        self.raw.column_begin = position;
        self.raw.n_columns = n_columns;
        self.column_sums = sums.into();
        self
    }

    pub(crate) fn owners(&self) -> [Owner; 2] {
        [self.q.owner, self.column_sums.owner]
    }

    pub(crate) fn to_raw(&self) -> sys::kvm_observe_params {
        sys::kvm_observe_params {
            q: self.q.raw,
            column_sums: self.column_sums.raw,
            ..self.raw
        }
    }
}

/// K and V back out, converted to the tensors' types.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// # let sequence = space.create_sequence()?;
/// # let kv = [0.5f32; 3 * 8];
/// # queue.append(Step::new(&space, 0).item(Item::new(&sequence).append(3)).k(&kv).v(&kv))?;
/// let mut k = [0.0f32; 2 * 8];
/// queue.read(Read::new(&sequence, 0, 1..3).k(&mut k))?;
/// assert_eq!(k, [0.5; 2 * 8]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Read<'b> {
    pub(crate) raw: sys::kvm_read_params,
    pub(crate) k: Sink<'b>,
    pub(crate) v: Sink<'b>,
}

impl<'b> Read<'b> {
    /// The tokens at these positions of one layer.
    #[must_use]
    pub fn new(sequence: impl Into<SequenceId>, layer: u32, positions: Range<u64>) -> Self {
        Read {
            raw: sys::kvm_read_params {
                seq: sequence.into().0,
                layer,
                position: positions.start,
                n_tokens: positions.end.saturating_sub(positions.start),
                ..Default::default()
            },
            k: Sink::none(),
            v: Sink::none(),
        }
    }

    /// Receives `[n_tokens][n_kv_heads][head_dim_k]`.
    #[must_use]
    pub fn k(mut self, k: impl Into<Sink<'b>>) -> Self {
        self.k = k.into();
        self
    }

    /// Receives `[n_tokens][n_kv_heads][head_dim_v]`.
    #[must_use]
    pub fn v(mut self, v: impl Into<Sink<'b>>) -> Self {
        self.v = v.into();
        self
    }

    /// The tensors, to have their memory back from a completed request.
    ///
    /// ```
    /// # use kvm::*;
    /// # fn example<'b>(read: Read<'b>) -> Result<&'b mut [f32]> {
    /// let (k, _v) = read.into_outputs();
    /// k.into_slice::<f32>()
    /// # }
    /// ```
    #[must_use]
    pub fn into_outputs(self) -> (Sink<'b>, Sink<'b>) {
        (self.k, self.v)
    }

    pub(crate) fn to_raw(&self) -> sys::kvm_read_params {
        sys::kvm_read_params {
            k: self.k.raw,
            v: self.v.raw,
            ..self.raw
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_come_back_as_they_went() {
        let accuracy = Accuracy {
            eps: 0.1,
            delta: 0.2,
        };
        let time = Some(Duration::from_micros(7));
        for mode in [
            Mode::Exact,
            Mode::TopK { budget: 3 },
            Mode::Sampled {
                budget: 3,
                accuracy,
            },
            Mode::Verified {
                budget: 700,
                accuracy,
            },
            Mode::Auto { time, accuracy },
        ] {
            let (code, budget, accuracy) = mode.to_raw();
            assert_eq!(Mode::from_raw(code, budget, accuracy), Some(mode));
        }
        assert_eq!(Mode::from_raw(6, 0, accuracy), None);
        for proposal in [Proposal::Default, Proposal::Sketch, Proposal::Lsh] {
            assert_eq!(Proposal::from_code(proposal.code()), Some(proposal));
        }
        assert_eq!(Proposal::from_code(3), None);
    }

    #[test]
    fn a_time_is_a_budget_and_no_time_is_none() {
        assert_eq!(time_budget(None), 0);
        assert_eq!(time_budget(Some(Duration::ZERO)), 1);
        assert_eq!(time_budget(Some(Duration::from_micros(3))), 3000);
        assert_eq!(time_budget(Some(Duration::MAX)), u64::MAX);
    }
}
