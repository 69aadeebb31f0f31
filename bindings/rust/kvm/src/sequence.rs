// SPDX-License-Identifier: Apache-2.0
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::time::Duration;

use kvm_sys as sys;

use crate::client::{c_string, nanoseconds, Connection};
use crate::error::{check, text_of, Result};
use crate::prefix::{PrefixHash, Publication};
use crate::space::SpaceId;

/// The number of a sequence. Never used again: that of a freed sequence gives `Stale`.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
/// # let sequence = space.create_sequence()?;
/// let id: kvm::SequenceId = sequence.id();
/// let item = kvm::Item::new(id).append(1); // as good as &sequence
/// # let _ = item;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(
    /// The number in `kvm.h`.
    pub u64,
);

impl From<&Sequence> for SequenceId {
    fn from(sequence: &Sequence) -> Self {
        sequence.id
    }
}

/// Where a range of tokens begins and ends; without an end, at `KVM_POSITION_END`.
pub(crate) fn positions_of(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let begin = match range.start_bound() {
        Bound::Included(begin) => *begin,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => sys::KVM_POSITION_END,
    };
    (begin, end)
}

/// How much a part of a sequence is worth in memory ([`Sequence::set_priority`]): from 0 to 100,
/// and [`Priority::DEFAULT`] where nobody said anything. Where memory fills up, the lowest leave
/// first. A part is whole pages of 64 tokens, those that its range touches.
///
/// ```
/// let whole = kvm::Priority::new(kvm::Priority::MAX);
/// let answer = kvm::Priority::new(10).tokens(4096..);
/// # let _ = (whole, answer);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Priority(sys::kvm_priority_params);

impl Priority {
    /// Of what nobody has set one for.
    pub const DEFAULT: u32 = sys::KVM_PRIORITY_DEFAULT;
    /// What has it stays as long as anything else can go.
    pub const MAX: u32 = sys::KVM_PRIORITY_MAX;

    /// Of a whole sequence, whatever it comes to hold, for good.
    pub fn new(priority: u32) -> Self {
        Priority(sys::kvm_priority_params {
            priority,
            end: sys::KVM_POSITION_END,
            ..Default::default()
        })
    }

    /// Of a range of its tokens alone.
    pub fn tokens(mut self, range: impl RangeBounds<u64>) -> Self {
        (self.0.begin, self.0.end) = positions_of(&range);
        self
    }

    /// For so long, and the default after that.
    pub fn keep(mut self, time: Duration) -> Self {
        self.0.keep_ns = nanoseconds(time).max(1);
        self
    }

    pub(crate) fn of(&self, sequence: SequenceId) -> sys::kvm_priority_params {
        sys::kvm_priority_params {
            seq: sequence.0,
            ..self.0
        }
    }
}

/// How a sequence is made.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
/// let params = kvm::SequenceParams::new().reserve(4096).manual_commit();
/// let sequence = space.create_sequence_with(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SequenceParams {
    reserve: u64,
    flags: u32,
}

impl SequenceParams {
    /// Makes the parameters of a sequence of unknown length, tokens final as soon as they are
    /// appended.
    #[must_use]
    pub fn new() -> Self {
        SequenceParams::default()
    }

    /// Tokens to expect, at most 2^38: a hint, for which the sequence's tables are made. It sets no
    /// memory for keys and values aside.
    #[must_use]
    pub fn reserve(mut self, n_tokens: u64) -> Self {
        self.reserve = n_tokens;
        self
    }

    /// Tokens become final by [`Sequence::commit`] only.
    #[must_use]
    pub fn manual_commit(mut self) -> Self {
        self.flags |= sys::KVM_SEQ_MANUAL_COMMIT;
        self
    }

    pub(crate) fn to_raw(&self) -> sys::kvm_seq_params {
        sys::kvm_seq_params {
            flags: self.flags,
            reserve: self.reserve,
            ..Default::default()
        }
    }
}

/// An ordered run of tokens with K and V in every layer, freed when dropped.
///
/// Dropping asks the service and waits as every control call does; what it answers is not looked
/// at. [`Sequence::free`] is the same with the answer.
///
/// May be used from any thread.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// let sequence = space.create_sequence()?;
/// # let kv = [0.0f32; 3 * 8];
/// queue.append(Step::new(&space, 0).item(Item::new(&sequence).append(3)).k(&kv).v(&kv))?;
/// let draft = sequence.fork(2)?; // shares two tokens, costs nothing until it is written
/// sequence.truncate(1)?;
/// assert_eq!(draft.info()?.n_tokens_max, 2);
/// assert_eq!(sequence.info()?.n_tokens_max, 1);
/// sequence.free()?;
/// # Ok::<(), Error>(())
/// ```
pub struct Sequence {
    connection: Arc<Connection>,
    id: SequenceId,
}

impl Sequence {
    pub(crate) fn own(connection: Arc<Connection>, id: SequenceId) -> Self {
        Sequence { connection, id }
    }

    pub(crate) fn create(
        connection: &Arc<Connection>,
        space: SpaceId,
        params: &SequenceParams,
    ) -> Result<Self> {
        let mut id = 0;
        // SAFETY: a live client, parameters and an output that live through the call.
        check(unsafe {
            sys::kvm_seq_create(connection.raw(), space.0, &params.to_raw(), &mut id)
        })?;
        Ok(Sequence::own(Arc::clone(connection), SequenceId(id)))
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Gives up ownership: the sequence lives until its client closes, or until
    /// [`Client::own_sequence`](crate::Client::own_sequence) takes it up again.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let id = space.create_sequence()?.into_id();
    /// let sequence = client.own_sequence(id);
    /// assert_eq!(sequence.info()?.n_tokens_max, 0);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn into_id(self) -> SequenceId {
        let this = ManuallyDrop::new(self);
        // SAFETY: read once, and never dropped where it was.
        drop(unsafe { std::ptr::read(&this.connection) });
        this.id
    }

    /// A sequence that shares the first `n_tokens`, copy-on-write. Fails with `Invalid` (longer
    /// than the longest layer), `Partial`, `Quota`, `Limit`, `Stale`, `Lost` or
    /// `Timeout`.
    pub fn fork(&self, n_tokens: u64) -> Result<Sequence> {
        Sequence::fork_of(&self.connection, self.id, n_tokens)
    }

    /// The same with all tokens, each layer as long as here.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// # let sequence = space.create_sequence()?;
    /// let candidates = (0..4).map(|_| sequence.fork_all()).collect::<kvm::Result<Vec<_>>>()?;
    /// # assert_eq!(candidates.len(), 4);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn fork_all(&self) -> Result<Sequence> {
        self.fork(sys::KVM_POSITION_END)
    }

    /// Gives the sequence to the library of the client's user: it keeps its id and outlives the
    /// client, and every client of that user may fork it ([`Space::fork_published`]) and take it
    /// ([`Space::take_sequence`]). Nobody can change it. Fails with `Quota` (sequences of the
    /// library), `Stale`, `Lost` or `Timeout`; the sequence lives on until its client closes then.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let prompt = space.create_sequence()?;
    /// // ... the prompt is appended ...
    /// let prompt = prompt.publish()?;
    /// let chat = space.fork_published(prompt, u64::MAX)?;
    /// # assert!(client.own_sequence(prompt).info()?.is_published);
    /// # drop(chat);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    ///
    /// [`Space::fork_published`]: crate::Space::fork_published
    /// [`Space::take_sequence`]: crate::Space::take_sequence
    pub fn publish(self) -> Result<SequenceId> {
        let connection = Arc::clone(&self.connection);
        let id = self.into_id();
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_publish(connection.raw(), id.0) })?;
        Ok(id)
    }

    /// Publishes it as [`Sequence::publish`] does, so that it is found by the tokens that it begins
    /// with ([`Space::fork_prefix`](crate::Space::fork_prefix)). It may have more tokens than there
    /// are hashes of. It is freed when nobody has forked it for as long as `keep` says (`None`: it
    /// stays).
    ///
    /// Fails with `Exists` (the same prefix is there already), `Invalid` (the hashes stand for more
    /// tokens than a layer has, there are none or more than 65536, or `keep` is zero or above 2^62
    /// ns), `Unsupported` (heads keep tokens by what queries asked; or kvmd is older), `Limit` (of
    /// hashes of the user), or as [`Sequence::publish`]. The sequence is freed then, as when it is
    /// dropped.
    ///
    /// ```
    /// # use kvm::*;
    /// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
    /// # let mut queue = client.create_queue(&QueueParams::new())?;
    /// # let tokens: Vec<u32> = (0..100).collect();
    /// let hashes = PrefixHashes::new(space.prefix_seed(b"")?, &tokens);
    /// let (chat, n_found) = space.fork_prefix(&hashes)?;
    /// assert_eq!(n_found, 0);
    /// # let kv = [0.0f32; 100 * 8];
    /// # queue.append(Step::new(&space, 0).item(Item::new(&chat).append(100)).k(&kv).v(&kv))?;
    /// // ... what follows n_found is computed and appended, and then for others: ...
    /// let ten_minutes = Some(std::time::Duration::from_secs(600));
    /// let prompt = chat.fork_all()?.publish_prefix(&hashes, ten_minutes)?;
    /// assert_eq!(space.fork_prefix(&hashes)?.1, 64);
    /// # client.own_sequence(prompt).free()?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn publish_prefix(
        self,
        hashes: &[PrefixHash],
        keep: Option<Duration>,
    ) -> Result<SequenceId> {
        let what = Publication::new(hashes, keep)?;
        // SAFETY: a live client, and as many hashes as are counted.
        check(unsafe {
            sys::kvm_prefix_publish(
                self.connection.raw(),
                self.id.0,
                what.hashes,
                what.n_hashes,
                what.keep_ns,
            )
        })?;
        Ok(self.into_id())
    }

    /// Saves what the sequence holds under a name, in kvmd's disk tier: when this returns, no crash
    /// takes it any more. A snapshot that has the name is replaced where `replace` says so, else
    /// this fails with `Exists`. Requests that follow go on meanwhile. Fails also with
    /// `Unsupported` (kvmd has no disk), `Invalid` (the name), `Quota`, `NoSpace`, `Io`, `Stale`,
    /// `Lost` or `Timeout`: it goes on then; [`Scope::save`](crate::Scope::save) has no such limit.
    pub fn save(&self, name: &str, replace: bool) -> Result<()> {
        let name = c_string(name.as_bytes(), "the name")?;
        let flags = if replace { sys::KVM_SAVE_REPLACE } else { 0 };
        // SAFETY: a live client and a string.
        check(unsafe { sys::kvm_seq_save(self.connection.raw(), self.id.0, name.as_ptr(), flags) })
    }

    pub(crate) fn load(
        connection: &Arc<Connection>,
        space: SpaceId,
        name: &str,
    ) -> Result<Sequence> {
        let name = c_string(name.as_bytes(), "the name")?;
        let mut id = 0;
        // SAFETY: a live client, a string and an output.
        check(unsafe { sys::kvm_seq_load(connection.raw(), space.0, name.as_ptr(), &mut id) })?;
        Ok(Sequence::own(Arc::clone(connection), SequenceId(id)))
    }

    /// Begins to bring what lies in a slower tier back into memory, as far as there is room. Fails
    /// with `Unsupported` (there is none), `Stale`, `Lost` or `Timeout`.
    pub fn prefetch(&self) -> Result<()> {
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_prefetch(self.connection.raw(), self.id.0) })
    }

    /// Says how much a part of the sequence is worth in memory, in place of what was said of it
    /// before. Fails with `Unsupported` (there is no slower tier), `Invalid`, `Limit` (16 parts of
    /// different priorities or times), `Stale`, `Lost` or `Timeout`.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// # let sequence = space.create_sequence()?;
    /// use kvm::Priority;
    /// let ten_minutes = std::time::Duration::from_secs(600);
    /// let system_prompt = Priority::new(90).tokens(0..2048).keep(ten_minutes);
    /// // An engine in the process has no slower tier.
    /// assert!(sequence.set_priority(&system_prompt).is_err());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn set_priority(&self, priority: &Priority) -> Result<()> {
        // SAFETY: a live client and a structure.
        check(unsafe { sys::kvm_seq_set_priority(self.connection.raw(), &priority.of(self.id)) })
    }

    /// Gives up K and V of a range of its tokens: of the full pages of 64 that are final. Attends
    /// that would see one are `Partial` until [`Item::restore`](crate::Item::restore) brings them
    /// back; items may leave them out. Heads with a policy that drops tokens go on by that alone.
    ///
    /// Fails: `Invalid` (it ends beyond what is final), `Permission` (it is published), `Stale`,
    /// `Lost` or `Timeout`.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// # let sequence = space.create_sequence()?;
    /// sequence.drop_tokens(..)?;
    /// assert!(sequence.drop_tokens(..64).is_err()); // nothing is final yet
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn drop_tokens(&self, tokens: impl RangeBounds<u64>) -> Result<()> {
        let (begin, end) = positions_of(&tokens);
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_drop(self.connection.raw(), self.id.0, begin, end) })
    }

    pub(crate) fn take(connection: &Arc<Connection>, id: SequenceId) -> Result<Sequence> {
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_take(connection.raw(), id.0) })?;
        Ok(Sequence::own(Arc::clone(connection), id))
    }

    pub(crate) fn fork_of(
        connection: &Arc<Connection>,
        parent: SequenceId,
        n_tokens: u64,
    ) -> Result<Sequence> {
        let mut id = 0;
        // SAFETY: a live client and an output.
        check(unsafe { sys::kvm_seq_fork(connection.raw(), parent.0, n_tokens, &mut id) })?;
        Ok(Sequence::own(Arc::clone(connection), SequenceId(id)))
    }

    /// Rolls every layer back to at most `n_tokens`. Fails with `Partial` (a policy has dropped
    /// what would be seen; nothing is changed), `Stale`, `Lost` or `Timeout`.
    pub fn truncate(&self, n_tokens: u64) -> Result<()> {
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_truncate(self.connection.raw(), self.id.0, n_tokens) })
    }

    /// Makes the first `n_tokens` final: policies may drop what no later query sees. Fails with
    /// `Invalid` (beyond the shortest layer), `Stale`, `Lost` or `Timeout`.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let params = kvm::SequenceParams::new().manual_commit();
    /// let sequence = space.create_sequence_with(&params)?;
    /// // ... a draft is appended, attended and judged ...
    /// sequence.commit_all()?;
    /// assert_eq!(sequence.commit(7).unwrap_err().status(), kvm::Status::Invalid);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn commit(&self, n_tokens: u64) -> Result<()> {
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_commit(self.connection.raw(), self.id.0, n_tokens) })
    }

    /// The same with all tokens.
    pub fn commit_all(&self) -> Result<()> {
        self.commit(sys::KVM_POSITION_END)
    }

    /// Lengths and bytes. Fails with `Stale`, `Lost` or `Timeout`.
    pub fn info(&self) -> Result<SequenceInfo> {
        let mut raw = sys::kvm_seq_info::default();
        // SAFETY: a live client and an output with its size.
        check(unsafe { sys::kvm_seq_get_info(self.connection.raw(), self.id.0, &mut raw) })?;
        Ok(SequenceInfo::from_raw(&raw))
    }

    /// Frees the sequence; pages that forks share stay with them. Requests that use it are finished
    /// first. On failure the sequence lives on until its client closes, or is gone already.
    pub fn free(self) -> Result<()> {
        let connection = Arc::clone(&self.connection);
        let id = self.into_id();
        // SAFETY: a live client.
        check(unsafe { sys::kvm_seq_free(connection.raw(), id.0) })
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // SAFETY: a live client. A failure leaves nothing to do: the service frees it at the latest
        // when the client closes.
        let _ = unsafe { sys::kvm_seq_free(self.connection.raw(), self.id.0) };
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sequence").field(&self.id.0).finish()
    }
}

/// Facts that are known of a sequence. See [`Sequence::info`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceInfo {
    /// The sequence itself.
    pub sequence: SequenceId,
    /// The space it belongs to.
    pub space: SpaceId,
    /// The client that owns it.
    pub client_id: u64,
    /// Tokens become final by commit only.
    pub is_manual_commit: bool,
    /// It is in the library of the user. See [`Sequence::publish`].
    pub is_published: bool,
    /// The length of the shortest layer that stores anything.
    pub n_tokens_min: u64,
    /// The length of the longest layer.
    pub n_tokens_max: u64,
    /// Tokens that are final.
    pub n_committed: u64,
    /// Page references held.
    pub n_pages: u64,
    /// Bytes of these pages, shared ones included.
    pub bytes: u64,
    /// The part of them that other sequences hold as well.
    pub bytes_shared: u64,
    /// (layer, head class, token) dropped by policies.
    pub n_entries_dropped: u64,
    /// Bytes kept from [`Observe`](crate::Observe).
    pub bytes_observed: u64,
    /// Query rows kept from [`Observe`](crate::Observe).
    pub n_rows_observed: u64,
    /// Bytes of indexes, shared ones included.
    pub bytes_index: u64,
    /// Of `bytes`, what is charged to the owner.
    pub bytes_paid: u64,
    /// Of `bytes`, what lies in a slower tier than memory.
    pub bytes_away: u64,
}

/// A sequence that was saved. See [`Client::snapshots`](crate::Client::snapshots).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// The user whose it is.
    pub uid: u32,
    /// The name under which it was saved.
    pub name: String,
    /// The name of the space that it was saved in.
    pub space_name: String,
    /// Parts of it are not there any more: it cannot be loaded.
    pub is_lost: bool,
    /// The digest of that space's layout.
    pub layout: [u8; 16],
    /// The digest of its policies.
    pub policy: [u8; 16],
    /// Its fingerprint.
    pub fingerprint: [u8; 32],
    /// Tokens of the longest layer.
    pub n_tokens: u64,
    /// Bytes that are charged for it.
    pub bytes: u64,
    /// When it was saved, in nanoseconds since 1970.
    pub saved_ns: u64,
}

impl SnapshotInfo {
    pub(crate) fn from_raw(raw: &sys::kvm_snapshot_info) -> Self {
        SnapshotInfo {
            uid: raw.uid,
            name: text_of(&raw.name),
            space_name: text_of(&raw.space_name),
            is_lost: raw.flags & sys::KVM_SNAPSHOT_LOST != 0,
            layout: raw.layout,
            policy: raw.policy,
            fingerprint: raw.fingerprint,
            n_tokens: raw.n_tokens,
            bytes: raw.bytes,
            saved_ns: raw.saved_ns,
        }
    }
}

impl SequenceInfo {
    pub(crate) fn from_raw(raw: &sys::kvm_seq_info) -> Self {
        SequenceInfo {
            sequence: SequenceId(raw.seq),
            space: SpaceId(raw.space),
            client_id: raw.client_id,
            is_manual_commit: raw.flags & sys::KVM_SEQ_MANUAL_COMMIT != 0,
            is_published: raw.flags & sys::KVM_SEQ_PUBLISHED != 0,
            n_tokens_min: raw.n_tokens_min,
            n_tokens_max: raw.n_tokens_max,
            n_committed: raw.n_committed,
            n_pages: raw.n_pages,
            bytes: raw.bytes,
            bytes_shared: raw.bytes_shared,
            n_entries_dropped: raw.n_entries_dropped,
            bytes_observed: raw.bytes_observed,
            n_rows_observed: raw.n_rows_observed,
            bytes_index: raw.bytes_index,
            bytes_paid: raw.bytes_paid,
            bytes_away: raw.bytes_away,
        }
    }
}
