# SPDX-License-Identifier: Apache-2.0
"""Published systems by name: what they keep and how they store it, as entries of a space."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from . import _native
from ._constants import (Budgets, CodecId, IndexKind, LayerKind, Merging, Mode, Positions,
                         Retention)
from ._errors import text
from ._heads import HeadFile, read_heads
from ._params import Codec, Index, Layer, Policy, mask_of

_NUMBERS = {"n_tokens": int, "share": float, "speed_up": int, "window": int, "slack": int,
            "n_pairs": int}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a preset comes to: entries for `Client.register_space`, of which any may be replaced."""

    layers: list[Layer]
    policies: list[Policy]
    codecs: list[Codec]
    indexes: list[Index]
    default_mode: Mode
    default_budget: int
    text: str  #: the same in words, and what else the engine does

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published system with the settings of its paper (kvm_preset_params); 0: the paper's.

    Names are those of `preset_names()`; docs/policies has a page for each.
    """

    name: str
    n_tokens: int = 0  #: what shares are of, the length of prompts, say; 0: 4096
    share: float = 0.0  #: of n_tokens that a head keeps, or that is read of it
    speed_up: int = 0  #: unified_layer_skipping: one of so many layers decodes
    window: int = 0  #: yi_lightning: tokens; memory_mosaics: h
    n_pairs: int = 0  #: minicache: pairs of layers, from the last on; 0: half of the layers pair
    slack: int = 0  #: tokens kept beyond windows, so that truncating has room
    #: duo_attention, razor_attention: of each layer the kv heads that do not retrieve, as
    #: `read_heads` gives them, for instance
    heads: Iterable[Iterable[int]] | None = None

    @classmethod
    def parse(cls, words: str) -> Preset:
        """Of "h2o", or "h2o:n_tokens=8192,share=0.3"."""
        name, _, rest = words.partition(":")
        numbers: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            field, _, value = part.partition("=")
            if field in numbers:
                raise ValueError(f"{words!r} sets {field} twice")
            if field not in _NUMBERS:
                raise ValueError(f"{words!r} sets {field!r}; a preset has {', '.join(_NUMBERS)}")
            try:
                numbers[field] = _NUMBERS[field](value)
            except ValueError:
                raise ValueError(f"{words!r} sets {field} to {value!r}, which is no number") \
                    from None
        return cls(name, **numbers)

    def resolve(self, n_layers: int) -> Resolved:
        """What it comes to in a model of so many layers."""
        masks = None
        if self.heads is not None:
            masks = [word for heads in self.heads for word in mask_of(heads)]
        numbers = {field: getattr(self, field) for field in _NUMBERS}
        found = _native.preset(text("name", self.name), {"n_layers": n_layers, **numbers}, masks)
        return Resolved([_layer(entry) for entry in found["layers"]],
                        [_policy(entry) for entry in found["policies"]],
                        [_codec(entry) for entry in found["codecs"]],
                        [_index(entry) for entry in found["indexes"]],
                        Mode(found["default_mode"]), found["default_budget"], found["text"])


def preset_names() -> list[str]:
    """The names of all presets."""
    names: list[str] = []
    while (name := _native.preset_name(len(names))) is not None:
        names.append(name)
    return names


def preset_of(value: Preset | str | None,
              head_file: HeadFile | str | os.PathLike[str] | None = None) -> Preset | None:
    """A preset as it is, or of what `Preset.parse` takes, with the heads of the file."""
    if value is None:
        if head_file is not None:
            raise ValueError("head_file is given without policy; duo_attention and razor_attention "
                             "take one")
        return None
    preset = value if isinstance(value, Preset) else Preset.parse(text("policy", value))
    if head_file is None:
        return preset
    if preset.heads is not None:
        raise ValueError(f"policy {preset.name} has heads, and head_file is given; there is one "
                         "table")
    found = head_file if isinstance(head_file, HeadFile) else read_heads(head_file)
    return dataclasses.replace(preset, heads=found)


def resolved(preset: Preset, n_layers: int, n_kv_heads: int, fingerprint: bytes = b"") -> Resolved:
    """What it comes to in this model. A head file for another one is refused; fingerprint: empty:
    not compared."""
    if isinstance(preset.heads, HeadFile):
        preset.heads.check(n_layers, n_kv_heads, fingerprint)
    return preset.resolve(n_layers)


def _heads(mask: tuple[int, int]) -> tuple[int, ...] | None:
    bits = mask[0] | mask[1] << 64
    return tuple(head for head in range(128) if bits >> head & 1) or None


def _layer(entry: dict[str, Any]) -> Layer:
    return Layer(entry["layer_begin"], entry["n_layers"], LayerKind(entry["kind"]),
                 entry["target"], window=entry["window"], pair_t=entry["pair_t"],
                 pair_gamma=entry["pair_gamma"])


def _policy(entry: dict[str, Any]) -> Policy:
    return Policy(Retention(entry["retention"]), n_sinks=entry["n_sinks"],
                  n_recent=entry["n_recent"], n_heavy=entry["n_heavy"],
                  merge=Merging(entry["merge"]), budgets=Budgets(entry["budgets"]),
                  slack=entry["slack"], positions=Positions(entry["positions"]),
                  begin=entry["layer_begin"], n_layers=entry["n_layers"],
                  heads=_heads(entry["kv_head_mask"]))


def _codec(entry: dict[str, Any]) -> Codec:
    codec_k, codec_v, demoted_k, demoted_v = (
        CodecId(entry[of]) if entry[of] != 0 else None
        for of in ("codec_k", "codec_v", "demoted_k", "demoted_v"))
    return Codec(codec_k, codec_v, demoted_k, demoted_v,
                 begin=entry["layer_begin"], n_layers=entry["n_layers"],
                 heads=_heads(entry["kv_head_mask"]))


def _index(entry: dict[str, Any]) -> Index:
    return Index(IndexKind(entry["kind"]), entry["n_sinks"], entry["n_recent"],
                 entry["min_tokens"], entry["lsh_bits"], entry["lsh_tables"], entry["seed"],
                 begin=entry["layer_begin"], n_layers=entry["n_layers"],
                 heads=_heads(entry["kv_head_mask"]))
