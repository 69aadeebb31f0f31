# SPDX-License-Identifier: Apache-2.0
"""What a space is made of: overrides for layers, and how heads keep, store and index their tokens.

Each is one entry of the list of the same name of `Client.register_space`; later entries win. Layers
are counted from 0; `n_layers=0` means "to the last layer", `heads=None` every kv head."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ._constants import (Budgets, CodecId, Dtype, IndexKind, LayerKind, Merging, Positions,
                         Retention)
from ._native import codec_find, codec_name

_DTYPES = {
    "float32": Dtype.F32, "f32": Dtype.F32, "fp32": Dtype.F32,
    "float16": Dtype.F16, "f16": Dtype.F16, "fp16": Dtype.F16,
    "bfloat16": Dtype.BF16, "bf16": Dtype.BF16,
}


def dtype_of(value: Dtype | str | Any | None) -> int:
    """The Dtype of a name ("bf16"), a `Dtype`, or a dtype of NumPy or PyTorch; 0 of None."""
    if value is None:
        return 0
    if isinstance(value, Dtype):
        return value
    name = _name_of(value)
    if name not in _DTYPES:
        raise ValueError(f"dtype is {value!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def codec_of(value: CodecId | str | Any | None) -> int:
    """The codec of a name ("int8"), a `CodecId`, or a dtype of NumPy or PyTorch; 0 of None."""
    if value is None:
        return 0
    if isinstance(value, CodecId):
        return value
    name = _name_of(value)
    if name in _DTYPES:
        return CodecId[_DTYPES[name].name]
    code = codec_find(name)
    if code == 0:
        raise ValueError(f"codec is {value!r}; it must be one of {', '.join(codec_names())}")
    return code


def codec_names() -> list[str]:
    """The names of all codecs, in the order of their numbers."""
    names: list[str] = []
    while (name := codec_name(len(names) + 1)) is not None:
        names.append(name)
    return names


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.")


def mask_of(heads: Iterable[int]) -> tuple[int, int]:
    """kv_head_mask of these heads, which may be none."""
    bits = 0
    for head in heads:
        if not 0 <= head < 128:
            raise ValueError(f"kv head {head} is named; there are at most 128")
        bits |= 1 << head
    return bits & (2**64 - 1), bits >> 64


def _mask(heads: Iterable[int] | None) -> tuple[int, int]:
    if heads is None:
        return 0, 0
    mask = mask_of(heads)
    if mask == (0, 0):
        raise ValueError("heads is empty; None means all of them")
    return mask


@dataclasses.dataclass(frozen=True)
class Layer:
    """Layers that differ from the space (kvm_layer_params)."""

    begin: int
    n_layers: int = 1
    kind: LayerKind = LayerKind.OWN
    target: int = 0  #: ALIAS: the layer whose keys and values this one reads
    n_q_heads: int = 0  #: 0: as the space
    n_kv_heads: int = 0
    window: int = 0  #: a query at p sees keys at positions > p - window; 0: all
    head_dim: int = 0  #: of keys; 0: as the space, of an ALIAS as its target
    head_dim_v: int = 0
    pair_t: float = 0.0  #: PAIR: weight of this layer's directions; 0: 0.6
    pair_gamma: float = 0.0  #: PAIR: share of tokens that keep the rows of both layers; 0: 0.05

    def _fields(self) -> dict[str, Any]:
        return {"layer_begin": self.begin, "n_layers": self.n_layers, "kind": int(self.kind),
                "target": self.target, "n_q_heads": self.n_q_heads,
                "n_kv_heads": self.n_kv_heads, "window": self.window,
                "head_dim_k": self.head_dim, "head_dim_v": self.head_dim_v,
                "pair_t": self.pair_t, "pair_gamma": self.pair_gamma}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which tokens kv heads keep (kvm_policy_params)."""

    retention: Retention = Retention.FULL
    n_sinks: int = 0
    n_recent: int = 0  #: at least 1 but for FULL and PROMPT
    n_heavy: int = 0  #: HEAVY only
    merge: Merging = Merging.NONE  #: HEAVY only: what becomes of tokens that are not kept
    budgets: Budgets = Budgets.EQUAL  #: HEAVY only: whether some layers keep more than others
    slack: int = 0  #: tokens kept beyond n_recent, so that truncating has room
    positions: Positions = Positions.ABSOLUTE
    begin: int = 0
    n_layers: int = 0
    heads: Iterable[int] | None = None

    def _fields(self) -> dict[str, Any]:
        return {"layer_begin": self.begin, "n_layers": self.n_layers,
                "kv_head_mask": _mask(self.heads), "retention": int(self.retention),
                "positions": int(self.positions), "n_sinks": self.n_sinks,
                "n_recent": self.n_recent, "slack": self.slack, "n_heavy": self.n_heavy,
                "merge": int(self.merge), "budgets": int(self.budgets)}


@dataclasses.dataclass(frozen=True)
class Codec:
    """How kv heads are stored (kvm_codec_params). None: as the space says."""

    codec_k: CodecId | str | Any | None = None
    codec_v: CodecId | str | Any | None = None
    #: of tokens that heads with `Merging.DEMOTED` demote; None for other heads
    demoted_k: CodecId | str | Any | None = None
    demoted_v: CodecId | str | Any | None = None
    begin: int = 0
    n_layers: int = 0
    heads: Iterable[int] | None = None

    def _fields(self) -> dict[str, Any]:
        return {"layer_begin": self.begin, "n_layers": self.n_layers,
                "kv_head_mask": _mask(self.heads), "codec_k": int(codec_of(self.codec_k)),
                "codec_v": int(codec_of(self.codec_v)),
                "demoted_k": int(codec_of(self.demoted_k)),
                "demoted_v": int(codec_of(self.demoted_v))}


@dataclasses.dataclass(frozen=True)
class Index:
    """What is kept beside the keys of kv heads for approximate modes (kvm_index_params)."""

    kind: IndexKind = IndexKind.SKETCH
    n_sinks: int = 0  #: first tokens that are always read; 0: 4
    n_recent: int = 0  #: last tokens that are always read; 0: 64
    min_tokens: int = 0  #: from this length on there is an index: 256 to 8192; 0: 4096
    lsh_bits: int = 0  #: LSH only; 0: 10
    lsh_tables: int = 0  #: LSH only; 0: 150
    seed: int = 0
    begin: int = 0
    n_layers: int = 0
    heads: Iterable[int] | None = None

    def _fields(self) -> dict[str, Any]:
        return {"layer_begin": self.begin, "n_layers": self.n_layers,
                "kv_head_mask": _mask(self.heads), "kind": int(self.kind),
                "lsh_bits": self.lsh_bits, "lsh_tables": self.lsh_tables,
                "n_sinks": self.n_sinks, "n_recent": self.n_recent,
                "min_tokens": self.min_tokens, "seed": self.seed}
