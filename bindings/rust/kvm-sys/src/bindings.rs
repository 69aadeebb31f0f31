// SPDX-License-Identifier: Apache-2.0
// Written by bindings/rust/generate.py from include/kvm.h.

use std::os::raw::{c_char, c_int, c_void};

pub type kvm_status = i32;
pub type kvm_space_id = u64;
pub type kvm_seq_id = u64;

pub const KVM_OK: kvm_status = 0;
pub const KVM_ERR_INVALID: kvm_status = -1;
pub const KVM_ERR_NOT_FOUND: kvm_status = -2;
pub const KVM_ERR_EXISTS: kvm_status = -3;
pub const KVM_ERR_AGAIN: kvm_status = -4;
pub const KVM_ERR_TIMEOUT: kvm_status = -5;
pub const KVM_ERR_BUSY: kvm_status = -6;
pub const KVM_ERR_HOLE: kvm_status = -7;
pub const KVM_ERR_PARTIAL: kvm_status = -8;
pub const KVM_ERR_STALE: kvm_status = -9;
pub const KVM_ERR_NO_MEMORY: kvm_status = -10;
pub const KVM_ERR_NO_SPACE: kvm_status = -11;
pub const KVM_ERR_QUOTA: kvm_status = -12;
pub const KVM_ERR_LIMIT: kvm_status = -13;
pub const KVM_ERR_IO: kvm_status = -20;
pub const KVM_ERR_CORRUPT: kvm_status = -21;
pub const KVM_ERR_LOST: kvm_status = -22;
pub const KVM_ERR_DISCONNECTED: kvm_status = -30;
pub const KVM_ERR_PROTOCOL: kvm_status = -31;
pub const KVM_ERR_VERSION: kvm_status = -32;
pub const KVM_ERR_PERMISSION: kvm_status = -33;
pub const KVM_ERR_FORKED: kvm_status = -34;
pub const KVM_ERR_UNSUPPORTED: kvm_status = -40;
pub const KVM_ERR_DEVICE: kvm_status = -41;
pub const KVM_ERR_CANCELLED: kvm_status = -50;
pub const KVM_ERR_DEADLINE: kvm_status = -51;
pub const KVM_ERR_ACCURACY: kvm_status = -52;
pub const KVM_ERR_INTERRUPTED: kvm_status = -53;
pub const KVM_ERR_INTERNAL: kvm_status = -99;
pub const KVM_LOG_ERROR: c_int = 0;
pub const KVM_LOG_WARNING: c_int = 1;
pub const KVM_LOG_INFO: c_int = 2;
pub const KVM_LOG_DEBUG: c_int = 3;
pub const KVM_FEATURE_EVENTFD: u32 = 1 << 0;
pub const KVM_FEATURE_EMBEDDED: u32 = 1 << 1;
pub const KVM_FEATURE_DEVICE: u32 = 1 << 2;
pub const KVM_BUFFER_NONE: u32 = 0;
pub const KVM_BUFFER_HOST: u32 = 1;
pub const KVM_BUFFER_ARENA: u32 = 2;
pub const KVM_BUFFER_DEVICE: u32 = 3;
pub const KVM_DTYPE_F32: u32 = 1;
pub const KVM_DTYPE_F16: u32 = 2;
pub const KVM_DTYPE_BF16: u32 = 3;
pub const KVM_ROPE_NONE: u32 = 0;
pub const KVM_ROPE_HALF: u32 = 1;
pub const KVM_ROPE_INTERLEAVED: u32 = 2;
pub const KVM_LAYER_OWN: u32 = 0;
pub const KVM_LAYER_ALIAS: u32 = 1;
pub const KVM_LAYER_ABSENT: u32 = 2;
pub const KVM_LAYER_PAIR: u32 = 3;
pub const KVM_RETAIN_FULL: u32 = 0;
pub const KVM_RETAIN_SINKS_RECENT: u32 = 1;
pub const KVM_RETAIN_SINKS_RECENT_FOLD: u32 = 2;
pub const KVM_RETAIN_HEAVY: u32 = 3;
pub const KVM_RETAIN_PROMPT: u32 = 4;
pub const KVM_MERGE_NONE: u32 = 0;
pub const KVM_MERGE_WEIGHTED: u32 = 1;
pub const KVM_MERGE_COUNTED: u32 = 2;
pub const KVM_MERGE_DEMOTED: u32 = 3;
pub const KVM_BUDGETS_EQUAL: u32 = 0;
pub const KVM_BUDGETS_BY_DENSITY: u32 = 1;
pub const KVM_POSITIONS_ABSOLUTE: u32 = 0;
pub const KVM_POSITIONS_IN_CACHE: u32 = 1;
pub const KVM_CODEC_F32: u32 = 1;
pub const KVM_CODEC_F16: u32 = 2;
pub const KVM_CODEC_BF16: u32 = 3;
pub const KVM_CODEC_I8: u32 = 4;
pub const KVM_CODEC_F8E4M3: u32 = 5;
pub const KVM_CODEC_I8_CHANNEL: u32 = 6;
pub const KVM_CODEC_I4: u32 = 7;
pub const KVM_CODEC_I4_CHANNEL: u32 = 8;
pub const KVM_CODEC_I4_CENTRED: u32 = 9;
pub const KVM_CODEC_I2: u32 = 10;
pub const KVM_CODEC_I2_CHANNEL: u32 = 11;
pub const KVM_CODEC_I2_CENTRED: u32 = 12;
pub const KVM_CODEC_GEAR4_CHANNEL: u32 = 13;
pub const KVM_CODEC_GEAR4: u32 = 14;
pub const KVM_CODEC_GEAR2_CHANNEL: u32 = 15;
pub const KVM_CODEC_GEAR2: u32 = 16;
pub const KVM_CODEC_I4_BALANCED: u32 = 17;
pub const KVM_CODEC_I2_BALANCED: u32 = 18;
pub const KVM_CODEC_I3: u32 = 19;
pub const KVM_CODEC_I3_CHANNEL: u32 = 20;
pub const KVM_CODEC_I3_CENTRED: u32 = 21;
pub const KVM_CODEC_I3_BALANCED: u32 = 22;
pub const KVM_CODEC_GEAR3_CHANNEL: u32 = 23;
pub const KVM_CODEC_GEAR3: u32 = 24;
pub const KVM_INDEX_NONE: u32 = 0;
pub const KVM_INDEX_SKETCH: u32 = 1;
pub const KVM_INDEX_SKETCH_1BIT: u32 = 2;
pub const KVM_INDEX_SKETCH_8I8: u32 = 3;
pub const KVM_INDEX_SKETCH_2BIT: u32 = 4;
pub const KVM_INDEX_LSH: u32 = 5;
pub const KVM_SPACE_V_IN_K: u32 = 1 << 0;
pub const KVM_SEQ_MANUAL_COMMIT: u32 = 1 << 0;
pub const KVM_SEQ_PUBLISHED: u32 = 1 << 1;
pub const KVM_LIST_ALL_CLIENTS: u32 = 1 << 0;
pub const KVM_PRIORITY_DEFAULT: u32 = 50;
pub const KVM_PRIORITY_MAX: u32 = 100;
pub const KVM_SAVE_REPLACE: u32 = 1 << 0;
pub const KVM_SNAPSHOT_LOST: u32 = 1 << 0;
pub const KVM_ITEM_NOT_CAUSAL: u32 = 1 << 0;
pub const KVM_ITEM_TREE: u32 = 1 << 1;
pub const KVM_ITEM_EXCLUDE_RANGES: u32 = 1 << 2;
pub const KVM_ITEM_LAST_LAYER: u32 = 1 << 3;
pub const KVM_ITEM_PROMPT_END: u32 = 1 << 4;
pub const KVM_ITEM_RESTORE: u32 = 1 << 5;
pub const KVM_MODE_DEFAULT: u32 = 0;
pub const KVM_MODE_EXACT: u32 = 1;
pub const KVM_MODE_TOPK: u32 = 2;
pub const KVM_MODE_SAMPLED: u32 = 3;
pub const KVM_MODE_VERIFIED: u32 = 4;
pub const KVM_MODE_AUTO: u32 = 5;
pub const KVM_PROPOSAL_DEFAULT: u32 = 0;
pub const KVM_PROPOSAL_SKETCH: u32 = 1;
pub const KVM_PROPOSAL_LSH: u32 = 2;
pub const KVM_PROPOSAL_GRAPH: u32 = 3;
pub const KVM_STEP_F32_VALUES: u32 = 1 << 0;
pub const KVM_STEP_NO_STATISTICS: u32 = 1 << 1;
pub const KVM_EVICT_SEQ: u32 = 1;
pub const KVM_EVICT_CLIENT: u32 = 2;
pub const KVM_EVICT_SPACE: u32 = 3;
pub const KVM_EVICT_DISCONNECT: u32 = 1 << 0;
pub const KVM_QUOTA_CLIENT: u32 = 1;
pub const KVM_QUOTA_USER: u32 = 2;
pub const KVM_VERSION_MAJOR: u32 = 0;
pub const KVM_VERSION_MINOR: u32 = 1;
pub const KVM_VERSION_PATCH: u32 = 0;
pub const KVM_POSITION_END: u64 = u64::MAX;
pub const KVM_PREFIX_TOKENS: u32 = 64;
pub const KVM_NO_LIMIT: u64 = u64::MAX;

#[repr(C)]
#[derive(Debug)]
pub struct kvm_client {
    _opaque: [u8; 0],
    _not_ours: crate::NotOurs,
}

#[repr(C)]
#[derive(Debug)]
pub struct kvm_queue {
    _opaque: [u8; 0],
    _not_ours: crate::NotOurs,
}

#[repr(C)]
#[derive(Debug)]
pub struct kvm_arena {
    _opaque: [u8; 0],
    _not_ours: crate::NotOurs,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_connect_params {
    pub struct_size: u32,
    pub flags: u32,
    pub socket_path: *const c_char,
    pub client_name: *const c_char,
    pub timeout_ns: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_connect_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_embedded_params {
    pub struct_size: u32,
    pub flags: u32,
    pub n_threads: u32,
    pub reserved0: u32,
    pub host_capacity_bytes: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_embedded_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_client_info {
    pub struct_size: u32,
    pub protocol_major: u32,
    pub protocol_minor: u32,
    pub features: u32,
    pub epoch: u64,
    pub client_id: u64,
    pub server_pid: u32,
    pub n_threads: u32,
    pub max_queues: u32,
    pub max_arenas: u32,
    pub max_outstanding: u32,
    pub max_items: u32,
    pub max_query_rows: u32,
    pub max_spaces: u32,
    pub max_arena_bytes: u64,
    pub max_sequences: u64,
    pub host_capacity_bytes: u64,
    pub quota_bytes: u64,
    pub isa: [c_char; 16],
    pub server_version: [c_char; 16],
    pub reserved: [u64; 4],
}

impl Default for kvm_client_info {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_queue_params {
    pub struct_size: u32,
    pub flags: u32,
    pub n_entries: u32,
    pub reserved0: u32,
    pub spin_ns: u64,
    pub is_interrupted: Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>,
    pub interrupt_user: *mut c_void,
    pub reserved: [u64; 2],
}

impl Default for kvm_queue_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_buffer {
    pub kind: u32,
    pub region: u32,
    pub r#where: u64,
    pub size: u64,
}

impl Default for kvm_buffer {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_arena_params {
    pub struct_size: u32,
    pub flags: u32,
    pub size: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_arena_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_tensor {
    pub buffer: kvm_buffer,
    pub dtype: u32,
    pub reserved: u32,
    pub stride_layer: u64,
    pub stride_row: u64,
    pub stride_head: u64,
}

impl Default for kvm_tensor {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_layer_params {
    pub layer_begin: u32,
    pub n_layers: u32,
    pub kind: u32,
    pub target: u32,
    pub n_q_heads: u32,
    pub n_kv_heads: u32,
    pub window: u64,
    pub head_dim_k: u32,
    pub head_dim_v: u32,
    pub pair_t: f32,
    pub pair_gamma: f32,
}

impl Default for kvm_layer_params {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_policy_params {
    pub layer_begin: u32,
    pub n_layers: u32,
    pub kv_head_mask: [u64; 2],
    pub retention: u32,
    pub positions: u32,
    pub n_sinks: u64,
    pub n_recent: u64,
    pub slack: u64,
    pub n_heavy: u64,
    pub merge: u32,
    pub budgets: u32,
}

impl Default for kvm_policy_params {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_codec_params {
    pub layer_begin: u32,
    pub n_layers: u32,
    pub kv_head_mask: [u64; 2],
    pub codec_k: u32,
    pub codec_v: u32,
    pub demoted_k: u32,
    pub demoted_v: u32,
    pub reserved: [u64; 1],
}

impl Default for kvm_codec_params {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_index_params {
    pub layer_begin: u32,
    pub n_layers: u32,
    pub kv_head_mask: [u64; 2],
    pub kind: u32,
    pub lsh_bits: u32,
    pub lsh_tables: u32,
    pub n_sinks: u32,
    pub n_recent: u32,
    pub min_tokens: u32,
    pub seed: u64,
    pub reserved: [u64; 2],
}

impl Default for kvm_index_params {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_space_params {
    pub struct_size: u32,
    pub flags: u32,
    pub name: *const c_char,
    pub fingerprint: [u8; 32],
    pub n_layers: u32,
    pub n_q_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim_k: u32,
    pub head_dim_v: u32,
    pub codec: u32,
    pub softmax_scale: f32,
    pub logit_softcap: f32,
    pub rope_layout: u32,
    pub n_rope_pairs: u32,
    pub rope_inv_freq: *const f32,
    pub sink_logits: *const f32,
    pub shard_index: u32,
    pub n_shards: u32,
    pub layers: *const kvm_layer_params,
    pub policies: *const kvm_policy_params,
    pub codecs: *const kvm_codec_params,
    pub n_layer_params: u32,
    pub n_policies: u32,
    pub n_codecs: u32,
    pub n_indexes: u32,
    pub indexes: *const kvm_index_params,
    pub default_mode: u32,
    pub default_proposal: u32,
    pub default_eps: f32,
    pub default_delta: f32,
    pub default_budget: u64,
    pub alibi_slopes: *const f32,
    pub reserved: [u64; 3],
}

impl Default for kvm_space_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_preset_params {
    pub struct_size: u32,
    pub flags: u32,
    pub name: *const c_char,
    pub n_layers: u32,
    pub speed_up: u32,
    pub n_tokens: u64,
    pub share: f32,
    pub n_pairs: u32,
    pub window: u64,
    pub slack: u64,
    pub kv_head_masks: *const u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_preset_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_preset {
    pub struct_size: u32,
    pub n_layer_params: u32,
    pub n_policies: u32,
    pub n_codecs: u32,
    pub layers: *mut kvm_layer_params,
    pub policies: *mut kvm_policy_params,
    pub codecs: *mut kvm_codec_params,
    pub text: [c_char; 1024],
    pub n_indexes: u32,
    pub default_mode: u32,
    pub indexes: *mut kvm_index_params,
    pub default_budget: u64,
}

impl Default for kvm_preset {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_space_info {
    pub struct_size: u32,
    pub n_layers: u32,
    pub space: kvm_space_id,
    pub name: [c_char; 64],
    pub fingerprint: [u8; 32],
    pub n_q_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim_k: u32,
    pub head_dim_v: u32,
    pub codec: u32,
    pub n_head_classes: u32,
    pub n_sequences: u64,
    pub bytes_per_token: u64,
    pub page_tokens: u64,
    pub default_mode: u32,
    pub default_proposal: u32,
    pub default_eps: f32,
    pub default_delta: f32,
    pub default_budget: u64,
    pub uid: u32,
    pub flags: u32,
    pub layout_digest: [u8; 16],
    pub policy_digest: [u8; 16],
    pub index_digest: [u8; 16],
    pub geometry_digest: [u8; 16],
}

impl Default for kvm_space_info {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_seq_params {
    pub struct_size: u32,
    pub flags: u32,
    pub reserve: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_seq_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_prefix_hash {
    pub bytes: [u8; 32],
}

impl Default for kvm_prefix_hash {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_prefix_find_params {
    pub struct_size: u32,
    pub flags: u32,
    pub space: kvm_space_id,
    pub hashes: *const kvm_prefix_hash,
    pub n_hashes: u64,
    pub prefill_rate: f64,
    pub reserved: [u64; 3],
}

impl Default for kvm_prefix_find_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_prefix {
    pub struct_size: u32,
    pub flags: u32,
    pub seq: kvm_seq_id,
    pub n_tokens: u64,
    pub n_tokens_slower: u64,
    pub read_ns: u64,
    pub reserved: [u64; 3],
}

impl Default for kvm_prefix {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_seq_info {
    pub struct_size: u32,
    pub flags: u32,
    pub seq: kvm_seq_id,
    pub space: kvm_space_id,
    pub client_id: u64,
    pub n_tokens_min: u64,
    pub n_tokens_max: u64,
    pub n_committed: u64,
    pub n_pages: u64,
    pub bytes: u64,
    pub bytes_shared: u64,
    pub n_entries_dropped: u64,
    pub bytes_observed: u64,
    pub n_rows_observed: u64,
    pub bytes_index: u64,
    pub bytes_paid: u64,
    pub bytes_away: u64,
    pub reserved: [u64; 1],
}

impl Default for kvm_seq_info {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_priority_params {
    pub struct_size: u32,
    pub priority: u32,
    pub seq: kvm_seq_id,
    pub begin: u64,
    pub end: u64,
    pub keep_ns: u64,
    pub reserved: [u64; 2],
}

impl Default for kvm_priority_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_snapshot_info {
    pub struct_size: u32,
    pub flags: u32,
    pub uid: u32,
    pub reserved0: u32,
    pub name: [c_char; 128],
    pub space_name: [c_char; 64],
    pub layout: [u8; 16],
    pub policy: [u8; 16],
    pub fingerprint: [u8; 32],
    pub n_tokens: u64,
    pub bytes: u64,
    pub saved_ns: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_snapshot_info {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_range {
    pub begin: u64,
    pub end: u64,
}

impl Default for kvm_range {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_item {
    pub seq: kvm_seq_id,
    pub append_position: u64,
    pub n_append: u32,
    pub append_row: u32,
    pub n_query: u32,
    pub query_row: u32,
    pub query_position: u64,
    pub range_begin: u32,
    pub n_ranges: u32,
    pub tree_begin: u32,
    pub flags: u32,
    pub reserved: u64,
}

impl Default for kvm_item {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_step_params {
    pub struct_size: u32,
    pub flags: u32,
    pub space: kvm_space_id,
    pub layer_begin: u32,
    pub n_layers: u32,
    pub n_items: u32,
    pub n_ranges: u32,
    pub items: *const kvm_item,
    pub ranges: *const kvm_range,
    pub tree_mask: *const u64,
    pub n_tree_words: u32,
    pub mode: u32,
    pub k: kvm_tensor,
    pub v: kvm_tensor,
    pub q: kvm_tensor,
    pub o: kvm_tensor,
    pub lse: kvm_tensor,
    pub err: kvm_tensor,
    pub scale: f32,
    pub proposal: u32,
    pub eps: f32,
    pub delta: f32,
    pub budget: u64,
    pub seed: u64,
    pub deadline_ns: u64,
    pub reserved: [u64; 8],
}

impl Default for kvm_step_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_step_stats {
    pub struct_size: u32,
    pub mode: u32,
    pub keys_present: u64,
    pub keys_read: u64,
    pub bytes_read: u64,
    pub service_ns: u64,
    pub compute_ns: u64,
    pub err_max: f32,
    pub n_exact: u32,
    pub n_not_finite: u64,
    pub reserved: u64,
}

impl Default for kvm_step_stats {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_observe_params {
    pub struct_size: u32,
    pub flags: u32,
    pub seq: kvm_seq_id,
    pub layer: u32,
    pub n_rows: u32,
    pub query_position: u64,
    pub column_begin: u64,
    pub n_columns: u64,
    pub q: kvm_tensor,
    pub column_sums: kvm_tensor,
    pub reserved: [u64; 4],
}

impl Default for kvm_observe_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_read_params {
    pub struct_size: u32,
    pub flags: u32,
    pub seq: kvm_seq_id,
    pub layer: u32,
    pub reserved0: u32,
    pub position: u64,
    pub n_tokens: u64,
    pub k: kvm_tensor,
    pub v: kvm_tensor,
    pub reserved: [u64; 4],
}

impl Default for kvm_read_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_merge_params {
    pub struct_size: u32,
    pub flags: u32,
    pub n_states: u32,
    pub n_rows: u32,
    pub n_heads: u32,
    pub dim: u32,
    pub o: *const kvm_tensor,
    pub lse: *const kvm_tensor,
    pub out_o: kvm_tensor,
    pub out_lse: kvm_tensor,
    pub reserved: [u64; 4],
}

impl Default for kvm_merge_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_probe_params {
    pub struct_size: u32,
    pub flags: u32,
    pub n_tokens: u32,
    pub n_prefix: u32,
    pub period: u32,
    pub n_rows: u32,
    pub n_q_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub scale: f32,
    pub q: kvm_tensor,
    pub k: kvm_tensor,
    pub reserved: [u64; 4],
}

impl Default for kvm_probe_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_completion {
    pub user_data: u64,
    pub status: kvm_status,
    pub mode: u32,
    pub keys_present: u64,
    pub keys_read: u64,
    pub bytes_read: u64,
    pub service_ns: u64,
    pub compute_ns: u64,
    pub err_max: f32,
    pub n_exact: u32,
    pub n_not_finite: u64,
    pub seq: kvm_seq_id,
    pub message: *const c_char,
    pub reserved: [u64; 5],
}

impl Default for kvm_completion {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_stats {
    pub struct_size: u32,
    pub n_clients: u32,
    pub uptime_ns: u64,
    pub n_spaces: u64,
    pub n_sequences: u64,
    pub n_pages: u64,
    pub host_used_bytes: u64,
    pub host_capacity_bytes: u64,
    pub host_peak_bytes: u64,
    pub host_page_bytes: u64,
    pub index_bytes: u64,
    pub observed_bytes: u64,
    pub n_requests: u64,
    pub n_requests_failed: u64,
    pub n_tokens_appended: u64,
    pub n_rows_attended: u64,
    pub keys_present: u64,
    pub keys_read: u64,
    pub bytes_read: u64,
    pub bytes_appended: u64,
    pub n_pages_dropped: u64,
    pub n_pages_copied: u64,
    pub n_clients_total: u64,
    pub n_protocol_errors: u64,
    pub busy_ns: u64,
    pub n_index_blocks: u64,
    pub n_index_refused: u64,
    pub n_index_dropped: u64,
    pub n_pages_moved: u64,
    pub n_pages_away: u64,
    pub away_bytes: u64,
    pub reserved: [u64; 2],
}

impl Default for kvm_stats {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_evict_params {
    pub struct_size: u32,
    pub flags: u32,
    pub what: u32,
    pub reserved0: u32,
    pub id: u64,
    pub reserved: [u64; 4],
}

impl Default for kvm_evict_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_evict_result {
    pub struct_size: u32,
    pub reserved0: u32,
    pub n_sequences: u64,
    pub bytes: u64,
}

impl Default for kvm_evict_result {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_amounts {
    pub sequences: u64,
    pub bytes: u64,
    pub arenas: u64,
    pub arena_bytes: u64,
    pub queues: u64,
    pub requests: u64,
    pub memory_bytes: u64,
    pub snapshot_bytes: u64,
}

impl Default for kvm_amounts {
    /// Zeros.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        unsafe { std::mem::zeroed() }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_client_entry {
    pub struct_size: u32,
    pub uid: u32,
    pub pid: u32,
    pub reserved0: u32,
    pub client_id: u64,
    pub name: [c_char; 64],
    pub used: kvm_amounts,
    pub limits: kvm_amounts,
    pub n_refused: u64,
    pub n_requests: u64,
    pub reserved: [u64; 3],
    pub n_by_duration: [u64; 24],
}

impl Default for kvm_client_entry {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_user_entry {
    pub struct_size: u32,
    pub uid: u32,
    pub n_clients: u32,
    pub reserved0: u32,
    pub used: kvm_amounts,
    pub limits: kvm_amounts,
    pub reserved: [u64; 4],
}

impl Default for kvm_user_entry {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvm_quota_params {
    pub struct_size: u32,
    pub flags: u32,
    pub whose: u32,
    pub reserved0: u32,
    pub id: u64,
    pub limits: kvm_amounts,
    pub reserved: [u64; 4],
}

impl Default for kvm_quota_params {
    /// Zeros, and `struct_size`.
    fn default() -> Self {
        // SAFETY: numbers and raw pointers; zero is a value of each.
        let mut zeros: Self = unsafe { std::mem::zeroed() };
        zeros.struct_size = std::mem::size_of::<Self>() as u32;
        zeros
    }
}

extern "C" {
    pub fn kvm_version() -> u32;
    pub fn kvm_version_string() -> *const c_char;
    pub fn kvm_status_name(status: kvm_status) -> *const c_char;
    pub fn kvm_last_error() -> *const c_char;
    pub fn kvm_set_log_callback(
        callback: Option<
            unsafe extern "C" fn(level: c_int, message: *const c_char, user: *mut c_void),
        >,
        user: *mut c_void,
    );
    pub fn kvm_connect(params: *const kvm_connect_params, out: *mut *mut kvm_client) -> kvm_status;
    pub fn kvm_open_embedded(
        params: *const kvm_embedded_params,
        out: *mut *mut kvm_client,
    ) -> kvm_status;
    pub fn kvm_client_reconnect(client: *mut kvm_client) -> kvm_status;
    pub fn kvm_client_close(client: *mut kvm_client);
    pub fn kvm_client_get_info(client: *mut kvm_client, out: *mut kvm_client_info) -> kvm_status;
    pub fn kvm_client_ping(client: *mut kvm_client, out_ns: *mut u64) -> kvm_status;
    pub fn kvm_queue_create(
        client: *mut kvm_client,
        params: *const kvm_queue_params,
        out: *mut *mut kvm_queue,
    ) -> kvm_status;
    pub fn kvm_queue_destroy(queue: *mut kvm_queue);
    pub fn kvm_queue_fd(queue: *mut kvm_queue) -> c_int;
    pub fn kvm_arena_create(
        client: *mut kvm_client,
        params: *const kvm_arena_params,
        out: *mut *mut kvm_arena,
    ) -> kvm_status;
    pub fn kvm_arena_destroy(arena: *mut kvm_arena);
    pub fn kvm_arena_alloc(
        arena: *mut kvm_arena,
        size: u64,
        alignment: u64,
        out: *mut kvm_buffer,
    ) -> kvm_status;
    pub fn kvm_arena_free(arena: *mut kvm_arena, buffer: kvm_buffer);
    pub fn kvm_arena_data(arena: *mut kvm_arena, buffer: kvm_buffer) -> *mut c_void;
    pub fn kvm_codec_name(codec: u32) -> *const c_char;
    pub fn kvm_codec_find(name: *const c_char) -> u32;
    pub fn kvm_policy_preset(params: *const kvm_preset_params, out: *mut kvm_preset) -> kvm_status;
    pub fn kvm_preset_name(index: u32) -> *const c_char;
    pub fn kvm_space_register(
        client: *mut kvm_client,
        params: *const kvm_space_params,
        out: *mut kvm_space_id,
    ) -> kvm_status;
    pub fn kvm_space_find(
        client: *mut kvm_client,
        name: *const c_char,
        out: *mut kvm_space_id,
    ) -> kvm_status;
    pub fn kvm_space_get_info(
        client: *mut kvm_client,
        space: kvm_space_id,
        out: *mut kvm_space_info,
    ) -> kvm_status;
    pub fn kvm_space_list(
        client: *mut kvm_client,
        out: *mut kvm_space_info,
        capacity: usize,
        out_count: *mut usize,
    ) -> kvm_status;
    pub fn kvm_space_drop(client: *mut kvm_client, space: kvm_space_id) -> kvm_status;
    pub fn kvm_seq_create(
        client: *mut kvm_client,
        space: kvm_space_id,
        params: *const kvm_seq_params,
        out: *mut kvm_seq_id,
    ) -> kvm_status;
    pub fn kvm_seq_fork(
        client: *mut kvm_client,
        parent: kvm_seq_id,
        n_tokens: u64,
        out: *mut kvm_seq_id,
    ) -> kvm_status;
    pub fn kvm_seq_truncate(client: *mut kvm_client, seq: kvm_seq_id, n_tokens: u64) -> kvm_status;
    pub fn kvm_seq_commit(client: *mut kvm_client, seq: kvm_seq_id, n_tokens: u64) -> kvm_status;
    pub fn kvm_seq_free(client: *mut kvm_client, seq: kvm_seq_id) -> kvm_status;
    pub fn kvm_seq_publish(client: *mut kvm_client, seq: kvm_seq_id) -> kvm_status;
    pub fn kvm_seq_take(client: *mut kvm_client, seq: kvm_seq_id) -> kvm_status;
    pub fn kvm_prefix_seed(
        client: *mut kvm_client,
        space: kvm_space_id,
        salt: *const c_void,
        salt_bytes: usize,
        out: *mut kvm_prefix_hash,
    ) -> kvm_status;
    pub fn kvm_prefix_hashes(
        before: *const kvm_prefix_hash,
        tokens: *const u32,
        n_tokens: u64,
        out: *mut kvm_prefix_hash,
    ) -> kvm_status;
    pub fn kvm_prefix_publish(
        client: *mut kvm_client,
        seq: kvm_seq_id,
        hashes: *const kvm_prefix_hash,
        n_hashes: u32,
        keep_ns: u64,
    ) -> kvm_status;
    pub fn kvm_prefix_find(
        client: *mut kvm_client,
        params: *const kvm_prefix_find_params,
        out: *mut kvm_prefix,
    ) -> kvm_status;
    pub fn kvm_seq_get_info(
        client: *mut kvm_client,
        seq: kvm_seq_id,
        out: *mut kvm_seq_info,
    ) -> kvm_status;
    pub fn kvm_seq_list(
        client: *mut kvm_client,
        space: kvm_space_id,
        flags: u32,
        out: *mut kvm_seq_info,
        capacity: usize,
        out_count: *mut usize,
    ) -> kvm_status;
    pub fn kvm_seq_prefetch(client: *mut kvm_client, seq: kvm_seq_id) -> kvm_status;
    pub fn kvm_seq_drop(
        client: *mut kvm_client,
        seq: kvm_seq_id,
        begin: u64,
        end: u64,
    ) -> kvm_status;
    pub fn kvm_seq_set_priority(
        client: *mut kvm_client,
        params: *const kvm_priority_params,
    ) -> kvm_status;
    pub fn kvm_seq_save(
        client: *mut kvm_client,
        seq: kvm_seq_id,
        name: *const c_char,
        flags: u32,
    ) -> kvm_status;
    pub fn kvm_seq_load(
        client: *mut kvm_client,
        space: kvm_space_id,
        name: *const c_char,
        out: *mut kvm_seq_id,
    ) -> kvm_status;
    pub fn kvm_snapshot_delete(client: *mut kvm_client, name: *const c_char) -> kvm_status;
    pub fn kvm_snapshot_list(
        client: *mut kvm_client,
        flags: u32,
        out: *mut kvm_snapshot_info,
        capacity: usize,
        out_count: *mut usize,
    ) -> kvm_status;
    pub fn kvm_append(queue: *mut kvm_queue, params: *const kvm_step_params) -> kvm_status;
    pub fn kvm_attend(
        queue: *mut kvm_queue,
        params: *const kvm_step_params,
        stats: *mut kvm_step_stats,
    ) -> kvm_status;
    pub fn kvm_step(
        queue: *mut kvm_queue,
        params: *const kvm_step_params,
        stats: *mut kvm_step_stats,
    ) -> kvm_status;
    pub fn kvm_observe(queue: *mut kvm_queue, params: *const kvm_observe_params) -> kvm_status;
    pub fn kvm_read(queue: *mut kvm_queue, params: *const kvm_read_params) -> kvm_status;
    pub fn kvm_merge(params: *const kvm_merge_params) -> kvm_status;
    pub fn kvm_probe_heads(
        params: *const kvm_probe_params,
        out_echo: *mut f32,
        out_induction: *mut f32,
    ) -> kvm_status;
    pub fn kvm_append_async(
        queue: *mut kvm_queue,
        params: *const kvm_step_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_attend_async(
        queue: *mut kvm_queue,
        params: *const kvm_step_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_step_async(
        queue: *mut kvm_queue,
        params: *const kvm_step_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_read_async(
        queue: *mut kvm_queue,
        params: *const kvm_read_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_observe_async(
        queue: *mut kvm_queue,
        params: *const kvm_observe_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_create_async(
        queue: *mut kvm_queue,
        space: kvm_space_id,
        params: *const kvm_seq_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_fork_async(
        queue: *mut kvm_queue,
        parent: kvm_seq_id,
        n_tokens: u64,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_truncate_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        n_tokens: u64,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_commit_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        n_tokens: u64,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_free_async(queue: *mut kvm_queue, seq: kvm_seq_id, user_data: u64)
        -> kvm_status;
    pub fn kvm_seq_publish_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_prefix_publish_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        hashes: *const kvm_prefix_hash,
        n_hashes: u32,
        keep_ns: u64,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_take_async(queue: *mut kvm_queue, seq: kvm_seq_id, user_data: u64)
        -> kvm_status;
    pub fn kvm_seq_prefetch_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_drop_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        begin: u64,
        end: u64,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_set_priority_async(
        queue: *mut kvm_queue,
        params: *const kvm_priority_params,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_save_async(
        queue: *mut kvm_queue,
        seq: kvm_seq_id,
        name: *const c_char,
        flags: u32,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_seq_load_async(
        queue: *mut kvm_queue,
        space: kvm_space_id,
        name: *const c_char,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_snapshot_delete_async(
        queue: *mut kvm_queue,
        name: *const c_char,
        user_data: u64,
    ) -> kvm_status;
    pub fn kvm_nop_async(queue: *mut kvm_queue, user_data: u64) -> kvm_status;
    pub fn kvm_submit(queue: *mut kvm_queue) -> kvm_status;
    pub fn kvm_poll(queue: *mut kvm_queue, out: *mut kvm_completion, n_max: u32) -> i32;
    pub fn kvm_wait(
        queue: *mut kvm_queue,
        out: *mut kvm_completion,
        n_max: u32,
        n_min: u32,
        timeout_ns: u64,
    ) -> i32;
    pub fn kvm_cancel(queue: *mut kvm_queue, user_data: u64) -> kvm_status;
    pub fn kvm_get_stats(client: *mut kvm_client, out: *mut kvm_stats) -> kvm_status;
    pub fn kvm_get_stats_text(
        client: *mut kvm_client,
        buffer: *mut c_char,
        capacity: usize,
        out_length: *mut usize,
    ) -> kvm_status;
    pub fn kvm_get_config_text(
        client: *mut kvm_client,
        buffer: *mut c_char,
        capacity: usize,
        out_length: *mut usize,
    ) -> kvm_status;
    pub fn kvm_evict(
        client: *mut kvm_client,
        params: *const kvm_evict_params,
        out: *mut kvm_evict_result,
    ) -> kvm_status;
    pub fn kvm_client_list(
        client: *mut kvm_client,
        out: *mut kvm_client_entry,
        capacity: usize,
        out_count: *mut usize,
    ) -> kvm_status;
    pub fn kvm_user_list(
        client: *mut kvm_client,
        out: *mut kvm_user_entry,
        capacity: usize,
        out_count: *mut usize,
    ) -> kvm_status;
    pub fn kvm_quota_set(client: *mut kvm_client, params: *const kvm_quota_params) -> kvm_status;
}
