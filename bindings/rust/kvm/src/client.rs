// SPDX-License-Identifier: Apache-2.0
use std::ffi::CString;
use std::fmt;
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use kvm_sys as sys;

use crate::arena::Arena;
use crate::error::{check, text_of, Error, Result, Status};
use crate::queue::{Queue, QueueParams};
use crate::sequence::{Sequence, SequenceInfo, SnapshotInfo};
use crate::space::{Space, SpaceInfo, SpaceParams};

pub(crate) fn c_string(bytes: &[u8], what: &str) -> Result<CString> {
    CString::new(bytes).map_err(|_| Error::new(Status::Invalid, format!("{what} has a NUL byte")))
}

/// Nanoseconds as the header counts them: what does not fit is the largest number.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// How to reach the daemon. Everything has a default.
///
/// ```no_run
/// use std::time::Duration;
/// let params = kvm::ConnectParams::new()
///     .socket_path("/run/kvm/kvmd.sock")
///     .client_name("my-engine")
///     .timeout(Duration::from_secs(2));
/// let client = kvm::Client::connect(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ConnectParams {
    socket_path: Option<PathBuf>,
    client_name: Option<String>,
    timeout_ns: u64,
}

impl ConnectParams {
    /// The socket of `$KVM_SOCKET`, else the usual places; 5 s for each control call.
    #[must_use]
    pub fn new() -> Self {
        ConnectParams::default()
    }

    /// Path of the daemon's socket; at most 107 bytes.
    #[must_use]
    pub fn socket_path(mut self, path: impl AsRef<Path>) -> Self {
        self.socket_path = Some(path.as_ref().to_path_buf());
        self
    }

    /// The name that the daemon's log calls this client; at most 63 bytes.
    #[must_use]
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = Some(name.into());
        self
    }

    /// For the handshake, and for each control call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ns = nanoseconds(timeout);
        self
    }
}

/// Limits of what the engine in this process may use. Everything has a default.
///
/// ```
/// let params = kvm::EmbeddedParams::new().threads(1).host_capacity_bytes(64 << 20);
/// let client = kvm::Client::open_embedded(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct EmbeddedParams {
    n_threads: u32,
    host_capacity_bytes: u64,
}

impl EmbeddedParams {
    /// One thread per core, 60 % of the machine's free memory.
    #[must_use]
    pub fn new() -> Self {
        EmbeddedParams::default()
    }

    /// Threads that compute, the calling thread included.
    #[must_use]
    pub fn threads(mut self, n_threads: u32) -> Self {
        self.n_threads = n_threads;
        self
    }

    /// Hard cap of KV memory.
    #[must_use]
    pub fn host_capacity_bytes(mut self, bytes: u64) -> Self {
        self.host_capacity_bytes = bytes;
        self
    }
}

/// The C handle. Everything that makes calls on it owns it together, so it is closed after them.
pub(crate) struct Connection {
    raw: NonNull<sys::kvm_client>,
}

// SAFETY: kvm.h allows calls on a client from any thread. The two exceptions, reconnect and close,
// happen with the only reference in hand.
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}

impl Connection {
    pub(crate) fn raw(&self) -> *mut sys::kvm_client {
        self.raw.as_ptr()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the last reference; queues and arenas hold one, so they are gone.
        unsafe { sys::kvm_client_close(self.raw()) }
    }
}

/// A connection to kvmd, or an engine in this process.
///
/// May be used from any thread. A clone is the same connection; it is closed when the last clone,
/// [`Queue`], [`Arena`], [`Space`] and [`Sequence`] of it is gone.
///
/// ```
/// use kvm::{Client, EmbeddedParams, SpaceParams};
/// let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// let space = client.register_space(&SpaceParams::new("my-model", 2, 4, 64))?;
/// let sequence = space.create_sequence()?;
/// # drop(sequence);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone)]
pub struct Client {
    connection: Arc<Connection>,
}

impl Client {
    /// Connects to the daemon. Fails with `Disconnected` (nobody listens), `Version`, `Permission`,
    /// `Limit`, `Timeout`, `Protocol`, `Invalid` or `Io`.
    pub fn connect(params: &ConnectParams) -> Result<Self> {
        let path = match &params.socket_path {
            Some(path) => Some(c_string(path.as_os_str().as_bytes(), "socket_path")?),
            None => None,
        };
        let name = match &params.client_name {
            Some(name) => Some(c_string(name.as_bytes(), "client_name")?),
            None => None,
        };
        let raw = sys::kvm_connect_params {
            socket_path: path.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
            client_name: name.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
            timeout_ns: params.timeout_ns,
            ..Default::default()
        };
        let mut out = ptr::null_mut();
        // SAFETY: the parameters, their strings and the output live through the call.
        check(unsafe { sys::kvm_connect(&raw, &mut out) })?;
        Ok(Client::own(out))
    }

    /// Opens an engine in this process. Needs the feature `embedded` (libkvm_embedded): without it
    /// the answer is `Unsupported`.
    pub fn open_embedded(params: &EmbeddedParams) -> Result<Self> {
        let raw = sys::kvm_embedded_params {
            n_threads: params.n_threads,
            host_capacity_bytes: params.host_capacity_bytes,
            ..Default::default()
        };
        let mut out = ptr::null_mut();
        // SAFETY: the parameters and the output live through the call.
        check(unsafe { sys::kvm_open_embedded(&raw, &mut out) })?;
        Ok(Client::own(out))
    }

    fn own(raw: *mut sys::kvm_client) -> Self {
        let raw = NonNull::new(raw).expect("a call that succeeded gave no client");
        let connection = Arc::new(Connection { raw });
        Client { connection }
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Connects again after `Disconnected`. Clones, queues, arenas, spaces and sequences of this
    /// client must have been dropped, else it fails with `Busy`: the sequences are gone with the
    /// old connection, and spaces must be registered again. On a live connection nothing happens.
    ///
    /// ```
    /// # let mut client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let ask = |_: &kvm::Client| Err::<(), _>(kvm::Status::Disconnected);
    /// if ask(&client) == Err(kvm::Status::Disconnected) {
    ///     client.reconnect()?;
    /// }
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn reconnect(&mut self) -> Result<()> {
        if Arc::get_mut(&mut self.connection).is_none() {
            return Err(Error::new(
                Status::Busy,
                "other handles of this client exist: drop its clones, queues, arenas, spaces and \
                 sequences first",
            ));
        }
        // SAFETY: a live client; no other call on it is running, for nobody else has it.
        check(unsafe { sys::kvm_client_reconnect(self.connection.raw()) })
    }

    /// Facts about the connection and its limits; no round trip.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let info = client.info()?;
    /// println!("kernels: {}, {} query rows at most", info.isa, info.max_query_rows);
    /// # assert!(info.is_embedded && info.n_threads == 1);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn info(&self) -> Result<ClientInfo> {
        let mut raw = sys::kvm_client_info::default();
        // SAFETY: a live client and an output with its size.
        check(unsafe { sys::kvm_client_get_info(self.connection.raw(), &mut raw) })?;
        Ok(ClientInfo::from_raw(&raw))
    }

    /// One null request there and back: the time it took.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// println!("there and back in {:?}", client.ping()?);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn ping(&self) -> Result<Duration> {
        let mut ns = 0;
        // SAFETY: a live client and an output.
        check(unsafe { sys::kvm_client_ping(self.connection.raw(), &mut ns) })?;
        Ok(Duration::from_nanos(ns))
    }

    /// Makes a queue. Fails with `Limit`, `Quota`, `NoMemory`, `Timeout` or `Invalid`.
    pub fn create_queue(&self, params: &QueueParams) -> Result<Queue> {
        Queue::create(self, params)
    }

    /// Makes an arena of this many bytes (0: 16 MiB), rounded up to 4096. Fails with `Limit`,
    /// `Quota`, `NoMemory` or `Timeout`.
    pub fn create_arena(&self, size_bytes: u64) -> Result<Arena> {
        Arena::create(self, size_bytes)
    }

    /// Registers a space, or finds the one that has this name when every parameter agrees. Fails
    /// with `Exists` (the name has other parameters), `Invalid`, `Unsupported`, `Limit` or
    /// `Timeout`.
    pub fn register_space(&self, params: &SpaceParams) -> Result<Space> {
        Space::register(self, params)
    }

    /// Finds a space by name. Fails with `NotFound` or `Timeout`.
    pub fn find_space(&self, name: &str) -> Result<Space> {
        Space::find(self, name)
    }

    /// All spaces, in the order of their ids.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let _space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// for space in client.spaces()? {
    ///     println!("{}: {} layers, {} sequences", space.name, space.n_layers, space.n_sequences);
    /// }
    /// # assert_eq!(client.spaces()?.len(), 1);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn spaces(&self) -> Result<Vec<SpaceInfo>> {
        let raw = list(|out, capacity, count| {
            // SAFETY: a live client, `capacity` structures at `out`, and a count.
            unsafe { sys::kvm_space_list(self.connection.raw(), out, capacity, count) }
        })?;
        Ok(raw.iter().map(SpaceInfo::from_raw).collect())
    }

    /// The sequences of this client in one space, or in all.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
    /// let sequence = space.create_sequence()?;
    /// assert_eq!(client.sequences(Some(&space))?[0].sequence, sequence.id());
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn sequences(&self, space: Option<&Space>) -> Result<Vec<SequenceInfo>> {
        self.list_sequences(space, 0)
    }

    /// The same of all clients: for the daemon's own user and root; else `Permission`.
    pub fn sequences_of_all_clients(&self, space: Option<&Space>) -> Result<Vec<SequenceInfo>> {
        self.list_sequences(space, sys::KVM_LIST_ALL_CLIENTS)
    }

    fn list_sequences(&self, space: Option<&Space>, flags: u32) -> Result<Vec<SequenceInfo>> {
        let space = space.map_or(0, |space| space.id().0);
        let raw = list(|out, capacity, count| {
            // SAFETY: a live client, `capacity` structures at `out`, and a count.
            unsafe { sys::kvm_seq_list(self.connection.raw(), space, flags, out, capacity, count) }
        })?;
        Ok(raw.iter().map(SequenceInfo::from_raw).collect())
    }

    /// What was saved ([`Sequence::save`](crate::Sequence::save)) by this user. Fails with
    /// `Unsupported` (kvmd has no disk) or `Timeout`.
    pub fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.list_snapshots(0)
    }

    /// The same of all users: for the daemon's own user and root; else `Permission`.
    pub fn snapshots_of_all_users(&self) -> Result<Vec<SnapshotInfo>> {
        self.list_snapshots(sys::KVM_LIST_ALL_CLIENTS)
    }

    fn list_snapshots(&self, flags: u32) -> Result<Vec<SnapshotInfo>> {
        let raw = list(|out, capacity, count| {
            // SAFETY: a live client, `capacity` structures at `out`, and a count.
            unsafe { sys::kvm_snapshot_list(self.connection.raw(), flags, out, capacity, count) }
        })?;
        Ok(raw.iter().map(SnapshotInfo::from_raw).collect())
    }

    /// Deletes a snapshot of this user; sequences that were loaded from it stay. Fails with
    /// `Unsupported`, `Invalid` (the name), `NotFound`, `Io`, `NoSpace` or `Timeout`.
    pub fn delete_snapshot(&self, name: &str) -> Result<()> {
        let name = c_string(name.as_bytes(), "the name")?;
        // SAFETY: a live client and a string.
        check(unsafe { sys::kvm_snapshot_delete(self.connection.raw(), name.as_ptr()) })
    }

    /// Counters of the whole service.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let stats = client.stats()?;
    /// println!("{} of {} bytes", stats.host_used_bytes, stats.host_capacity_bytes);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn stats(&self) -> Result<Stats> {
        let mut raw = sys::kvm_stats::default();
        // SAFETY: a live client and an output with its size.
        check(unsafe { sys::kvm_get_stats(self.connection.raw(), &mut raw) })?;
        Ok(Stats::from_raw(&raw))
    }

    /// The same in Prometheus' text format.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// assert!(client.stats_text()?.contains("# TYPE kvm_"));
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn stats_text(&self) -> Result<String> {
        let mut text = vec![0u8; 16 << 10];
        loop {
            let mut length = 0;
            let (out, capacity) = (text.as_mut_ptr().cast::<c_char>(), text.len());
            // SAFETY: a live client, `capacity` bytes at `out`, and a length.
            check(unsafe {
                sys::kvm_get_stats_text(self.connection.raw(), out, capacity, &mut length)
            })?;
            if length < capacity {
                text.truncate(length);
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            text.resize(length + 1024, 0); // Counters may have grown by the next call.
        }
    }

    /// A sequence of this client by its id: what another part of the program kept with
    /// [`Sequence::into_id`].
    pub fn own_sequence(&self, id: crate::SequenceId) -> Sequence {
        Sequence::own(Arc::clone(&self.connection), id)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// Calls a listing function until all that it counts has room.
fn list<T: Default + Clone>(
    mut call: impl FnMut(*mut T, usize, *mut usize) -> sys::kvm_status,
) -> Result<Vec<T>> {
    let mut found = vec![T::default(); 64];
    loop {
        let mut count = 0;
        check(call(found.as_mut_ptr(), found.len(), &mut count))?;
        if count <= found.len() {
            found.truncate(count);
            return Ok(found);
        }
        // Some room for what comes until the next call. The first element says the distance.
        found = vec![T::default(); count + count / 4];
    }
}

/// Facts about a connection, and its limits. See [`Client::info`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientInfo {
    /// [`Queue::fd`] works.
    pub has_eventfd: bool,
    /// This client is an engine in this process.
    pub is_embedded: bool,
    /// Major number of the protocol.
    pub protocol_major: u32,
    /// Minor number of the protocol.
    pub protocol_minor: u32,
    /// Differs for every start of the service.
    pub epoch: u64,
    /// The service's number for this client.
    pub client_id: u64,
    /// Process id of the service.
    pub server_pid: u32,
    /// Threads that compute.
    pub n_threads: u32,
    /// Queues that this client may have.
    pub max_queues: u32,
    /// Arenas that this client may have.
    pub max_arenas: u32,
    /// Requests in flight per queue.
    pub max_outstanding: u32,
    /// Items per request.
    pub max_items: u32,
    /// Query rows of one item.
    pub max_query_rows: u32,
    /// Spaces of the service.
    pub max_spaces: u32,
    /// Bytes of arenas of this client.
    pub max_arena_bytes: u64,
    /// Sequences of this client.
    pub max_sequences: u64,
    /// The service's KV memory.
    pub host_capacity_bytes: u64,
    /// KV memory that this client may hold.
    pub quota_bytes: u64,
    /// Kernel table in use: "scalar", "avx2", "avx512", "avx512bf16".
    pub isa: String,
    /// Version of the service.
    pub server_version: String,
}

impl ClientInfo {
    fn from_raw(raw: &sys::kvm_client_info) -> Self {
        ClientInfo {
            has_eventfd: raw.features & sys::KVM_FEATURE_EVENTFD != 0,
            is_embedded: raw.features & sys::KVM_FEATURE_EMBEDDED != 0,
            protocol_major: raw.protocol_major,
            protocol_minor: raw.protocol_minor,
            epoch: raw.epoch,
            client_id: raw.client_id,
            server_pid: raw.server_pid,
            n_threads: raw.n_threads,
            max_queues: raw.max_queues,
            max_arenas: raw.max_arenas,
            max_outstanding: raw.max_outstanding,
            max_items: raw.max_items,
            max_query_rows: raw.max_query_rows,
            max_spaces: raw.max_spaces,
            max_arena_bytes: raw.max_arena_bytes,
            max_sequences: raw.max_sequences,
            host_capacity_bytes: raw.host_capacity_bytes,
            quota_bytes: raw.quota_bytes,
            isa: text_of(&raw.isa),
            server_version: text_of(&raw.server_version),
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the whole service. See [`Client::stats`].
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            /// Connections.
            pub n_clients: u32,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            fn from_raw(raw: &sys::kvm_stats) -> Self {
                Stats { n_clients: raw.n_clients, $($name: raw.$name,)* }
            }
        }
    };
}

counters! {
    /// Since the start of the service.
    uptime_ns,
    /// Spaces.
    n_spaces,
    /// Sequences of all clients.
    n_sequences,
    /// Pages of keys and values in use, each counted once.
    n_pages,
    /// Physical bytes, in 2-MiB extents.
    host_used_bytes,
    /// Physical bytes that may be used.
    host_capacity_bytes,
    /// The most that was used.
    host_peak_bytes,
    /// Bytes in pages in use, of indexes too.
    host_page_bytes,
    /// Bytes of indexes.
    index_bytes,
    /// Bytes kept from [`Observe`](crate::Observe).
    observed_bytes,
    /// Requests completed, with any status.
    n_requests,
    /// Requests that failed.
    n_requests_failed,
    /// Tokens appended, per layer.
    n_tokens_appended,
    /// Query rows attended, per layer.
    n_rows_attended,
    /// Keys visible to requests.
    keys_present,
    /// Keys read.
    keys_read,
    /// Bytes of K and V read.
    bytes_read,
    /// Bytes of K and V appended.
    bytes_appended,
    /// Pages dropped by policies.
    n_pages_dropped,
    /// Pages copied on write.
    n_pages_copied,
    /// Connections since the start.
    n_clients_total,
    /// Connections closed for breaking the protocol.
    n_protocol_errors,
    /// The time that all compute threads together were busy.
    busy_ns,
    /// Blocks of 64 keys of a kv head that were indexed.
    n_index_blocks,
    /// Blocks that found no memory, each once: their keys are read exactly.
    n_index_refused,
    /// Blocks that made way for keys and values: likewise.
    n_index_dropped,
    /// Pages moved to others of their kind, so that emptied memory can be given back.
    n_pages_moved,
    /// Of `n_pages`, those that lie in a slower tier than memory.
    n_pages_away,
    /// Bytes of these.
    away_bytes,
}
