# SPDX-License-Identifier: Apache-2.0
# Written by bindings/python/generate.py from include/kvm.h.
"""The constants of include/kvm.h."""

import enum


class Status(enum.IntEnum):
    """What became of a call. Negative ones are failures. KVM_* constants: KVM_ERR_*."""

    OK = 0
    INVALID = -1
    NOT_FOUND = -2
    EXISTS = -3
    AGAIN = -4
    TIMEOUT = -5
    BUSY = -6
    HOLE = -7
    PARTIAL = -8
    STALE = -9
    NO_MEMORY = -10
    NO_SPACE = -11
    QUOTA = -12
    LIMIT = -13
    IO = -20
    CORRUPT = -21
    LOST = -22
    DISCONNECTED = -30
    PROTOCOL = -31
    VERSION = -32
    PERMISSION = -33
    FORKED = -34
    UNSUPPORTED = -40
    DEVICE = -41
    CANCELLED = -50
    DEADLINE = -51
    ACCURACY = -52
    INTERRUPTED = -53
    INTERNAL = -99


class LogLevel(enum.IntEnum):
    """Of a message for `set_log`. KVM_* constants: KVM_LOG_*."""

    ERROR = 0
    WARNING = 1
    INFO = 2
    DEBUG = 3


class Feature(enum.IntFlag):
    """What a service offers (`ClientInfo.features`). KVM_* constants: KVM_FEATURE_*."""

    EVENTFD = 1 << 0
    EMBEDDED = 1 << 1
    DEVICE = 1 << 2


class BufferKind(enum.IntEnum):
    """Where the bytes of a tensor lie. KVM_* constants: KVM_BUFFER_*."""

    NONE = 0
    HOST = 1
    ARENA = 2
    DEVICE = 3


class Dtype(enum.IntEnum):
    """Types of the elements of tensors. KVM_* constants: KVM_DTYPE_*."""

    F32 = 1
    F16 = 2
    BF16 = 3


class CodecId(enum.IntEnum):
    """How K and V are stored. KVM_* constants: KVM_CODEC_*."""

    F32 = 1
    F16 = 2
    BF16 = 3
    I8 = 4
    F8E4M3 = 5
    I8_CHANNEL = 6
    I4 = 7
    I4_CHANNEL = 8
    I4_CENTRED = 9
    I2 = 10
    I2_CHANNEL = 11
    I2_CENTRED = 12
    GEAR4_CHANNEL = 13
    GEAR4 = 14
    GEAR2_CHANNEL = 15
    GEAR2 = 16
    I4_BALANCED = 17
    I2_BALANCED = 18
    I3 = 19
    I3_CHANNEL = 20
    I3_CENTRED = 21
    I3_BALANCED = 22
    GEAR3_CHANNEL = 23
    GEAR3 = 24


class Rope(enum.IntEnum):
    """Which channels a rotation pairs. KVM_* constants: KVM_ROPE_*."""

    NONE = 0
    HALF = 1
    INTERLEAVED = 2


class SpaceFlag(enum.IntFlag):
    """How a space stores values (`SpaceInfo.flags`). KVM_* constants: KVM_SPACE_*."""

    V_IN_K = 1 << 0


class LayerKind(enum.IntEnum):
    """What a layer stores. KVM_* constants: KVM_LAYER_*."""

    OWN = 0
    ALIAS = 1
    ABSENT = 2
    PAIR = 3


class Retention(enum.IntEnum):
    """Which tokens a kv head keeps. KVM_* constants: KVM_RETAIN_*."""

    FULL = 0
    SINKS_RECENT = 1
    SINKS_RECENT_FOLD = 2
    HEAVY = 3
    PROMPT = 4


class Merging(enum.IntEnum):
    """What a head makes of the tokens that it gives up. KVM_* constants: KVM_MERGE_*."""

    NONE = 0
    WEIGHTED = 1
    COUNTED = 2
    DEMOTED = 3


class Budgets(enum.IntEnum):
    """How what heads may keep is shared out among layers. KVM_* constants: KVM_BUDGETS_*."""

    EQUAL = 0
    BY_DENSITY = 1


class Positions(enum.IntEnum):
    """What a query's position means to a head's keys. KVM_* constants: KVM_POSITIONS_*."""

    ABSOLUTE = 0
    IN_CACHE = 1


class IndexKind(enum.IntEnum):
    """What is kept beside keys to find those that count. KVM_* constants: KVM_INDEX_*."""

    NONE = 0
    SKETCH = 1
    SKETCH_1BIT = 2
    SKETCH_8I8 = 3
    SKETCH_2BIT = 4
    LSH = 5


class SequenceFlag(enum.IntFlag):
    """Of `Space.create_sequence` and `SequenceInfo`. KVM_* constants: KVM_SEQ_*."""

    MANUAL_COMMIT = 1 << 0
    PUBLISHED = 1 << 1


class ListFlag(enum.IntFlag):
    """Of `Client.sequences`. KVM_* constants: KVM_LIST_*."""

    ALL_CLIENTS = 1 << 0


class ItemFlag(enum.IntFlag):
    """Of an `Item`. KVM_* constants: KVM_ITEM_*."""

    NOT_CAUSAL = 1 << 0
    TREE = 1 << 1
    EXCLUDE_RANGES = 1 << 2
    LAST_LAYER = 1 << 3
    PROMPT_END = 1 << 4
    RESTORE = 1 << 5


class Mode(enum.IntEnum):
    """How attention is computed. KVM_* constants: KVM_MODE_*."""

    DEFAULT = 0
    EXACT = 1
    TOPK = 2
    SAMPLED = 3
    VERIFIED = 4
    AUTO = 5


class Proposal(enum.IntEnum):
    """What an approximate mode chooses keys by. KVM_* constants: KVM_PROPOSAL_*."""

    DEFAULT = 0
    SKETCH = 1
    LSH = 2
    GRAPH = 3


class StepFlag(enum.IntFlag):
    """Of a `Step`. KVM_* constants: KVM_STEP_*."""

    F32_VALUES = 1 << 0
    NO_STATISTICS = 1 << 1


class Evict(enum.IntEnum):
    """What `Client.evict` frees. KVM_* constants: KVM_EVICT_*."""

    SEQ = 1
    CLIENT = 2
    SPACE = 3


class QuotaOf(enum.IntEnum):
    """Whose limits `Client.set_quota` sets. KVM_* constants: KVM_QUOTA_*."""

    CLIENT = 1
    USER = 2


class SaveFlag(enum.IntFlag):
    """Of a save (`Sequence.save`). KVM_* constants: KVM_SAVE_*."""

    REPLACE = 1 << 0


class SnapshotFlag(enum.IntFlag):
    """Of a `SnapshotInfo`. KVM_* constants: KVM_SNAPSHOT_*."""

    LOST = 1 << 0


PRIORITY_DEFAULT = 50
PRIORITY_MAX = 100
EVICT_DISCONNECT = 1 << 0
POSITION_END = 2**64 - 1
PREFIX_TOKENS = 64
NO_LIMIT = 2**64 - 1
