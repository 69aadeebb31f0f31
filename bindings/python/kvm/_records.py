# SPDX-License-Identifier: Apache-2.0
# Written by bindings/python/generate.py from include/kvm.h.
"""What the service says about itself: a class for each structure that it fills."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Amounts:
    """How much of each resource; NO_LIMIT: any. Fields as in kvm_amounts (kvm.h)."""

    sequences: int
    bytes: int
    arenas: int
    arena_bytes: int
    queues: int
    requests: int
    memory_bytes: int
    snapshot_bytes: int


@dataclasses.dataclass(frozen=True)
class ClientInfo:
    """Facts about a connection, and its limits. Fields as in kvm_client_info (kvm.h)."""

    protocol_major: int
    protocol_minor: int
    features: int
    epoch: int
    client_id: int
    server_pid: int
    n_threads: int
    max_queues: int
    max_arenas: int
    max_outstanding: int
    max_items: int
    max_query_rows: int
    max_spaces: int
    max_arena_bytes: int
    max_sequences: int
    host_capacity_bytes: int
    quota_bytes: int
    isa: str
    server_version: str


@dataclasses.dataclass(frozen=True)
class SpaceInfo:
    """A space as it is registered. Fields as in kvm_space_info (kvm.h)."""

    n_layers: int
    space: int
    name: str
    fingerprint: bytes
    n_q_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    codec: int
    n_head_classes: int
    n_sequences: int
    bytes_per_token: int
    page_tokens: int
    default_mode: int
    default_proposal: int
    default_eps: float
    default_delta: float
    default_budget: int
    uid: int
    flags: int
    layout_digest: bytes
    policy_digest: bytes
    index_digest: bytes
    geometry_digest: bytes


@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """What a sequence holds. Fields as in kvm_seq_info (kvm.h)."""

    flags: int
    seq: int
    space: int
    client_id: int
    n_tokens_min: int
    n_tokens_max: int
    n_committed: int
    n_pages: int
    bytes: int
    bytes_shared: int
    n_entries_dropped: int
    bytes_observed: int
    n_rows_observed: int
    bytes_index: int
    bytes_paid: int
    bytes_away: int


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """A sequence that was saved. Fields as in kvm_snapshot_info (kvm.h)."""

    flags: int
    uid: int
    name: str
    space_name: str
    layout: bytes
    policy: bytes
    fingerprint: bytes
    n_tokens: int
    bytes: int
    saved_ns: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of the whole service. Fields as in kvm_stats (kvm.h)."""

    n_clients: int
    uptime_ns: int
    n_spaces: int
    n_sequences: int
    n_pages: int
    host_used_bytes: int
    host_capacity_bytes: int
    host_peak_bytes: int
    host_page_bytes: int
    index_bytes: int
    observed_bytes: int
    n_requests: int
    n_requests_failed: int
    n_tokens_appended: int
    n_rows_attended: int
    keys_present: int
    keys_read: int
    bytes_read: int
    bytes_appended: int
    n_pages_dropped: int
    n_pages_copied: int
    n_clients_total: int
    n_protocol_errors: int
    busy_ns: int
    n_index_blocks: int
    n_index_refused: int
    n_index_dropped: int
    n_pages_moved: int
    n_pages_away: int
    away_bytes: int


@dataclasses.dataclass(frozen=True)
class ClientEntry:
    """A connected client, as an operator sees it. Fields as in kvm_client_entry (kvm.h)."""

    uid: int
    pid: int
    client_id: int
    name: str
    used: Amounts
    limits: Amounts
    n_refused: int
    n_requests: int
    n_by_duration: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class UserEntry:
    """All clients of a user together. Fields as in kvm_user_entry (kvm.h)."""

    uid: int
    n_clients: int
    used: Amounts
    limits: Amounts


@dataclasses.dataclass(frozen=True)
class EvictResult:
    """What `Client.evict` has freed. Fields as in kvm_evict_result (kvm.h)."""

    n_sequences: int
    bytes: int
