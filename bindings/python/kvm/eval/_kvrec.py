# SPDX-License-Identifier: Apache-2.0
"""Reads and writes .kvrec files: recorded queries, keys and values.

models/house/FORMAT.md in kvm's sources has the layout; kvrec.py beside it is their other reader."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"\x89KVREC\r\n"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQI20x")
_ALIGNMENT = 64
_STORED: dict[str, np.dtype[Any]] = {"bf16": np.dtype("<u2"), "fp16": np.dtype("<f2"),
                                     "i32": np.dtype("<i4")}

Array = np.ndarray[Any, np.dtype[Any]]


class RecordError(ValueError):
    """The file is no record, is damaged, or contradicts itself."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The query heads of a kv head."""

    layer: int
    kv_head: int
    q_heads: tuple[int, ...]
    arrays: Mapping[str, str]  # of q, k, v and perhaps k_pre: the name in the file


def write(path: str | Path, metadata: Mapping[str, Any],
          arrays: Mapping[str, tuple[str, Array]]) -> None:
    """Writes a record. metadata: all of FORMAT.md's but `arrays`. arrays: by name, the type that
    is stored ("bf16", "fp16", "i32") and the values."""
    stored = {name: (kind, _encoded(name, kind, values)) for name, (kind, values) in arrays.items()}
    # Offsets are in the text whose length they depend on: repeat until it fits.
    begin = _HEADER.size
    while True:
        entries: dict[str, dict[str, Any]] = {}
        at = begin
        for name, (kind, values) in stored.items():
            entries[name] = {"dtype": kind, "shape": list(values.shape), "offset": at,
                             "bytes": values.nbytes, "crc32": zlib.crc32(values.tobytes())}
            at = _aligned(at + values.nbytes)
        text = json.dumps({**metadata, "arrays": entries}, sort_keys=True).encode()
        if _aligned(_HEADER.size + len(text)) <= begin:
            break
        begin = _aligned(_HEADER.size + len(text))
    last = list(entries.values())[-1]
    size = last["offset"] + last["bytes"]
    unfinished = Path(f"{path}.part")
    with unfinished.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, _HEADER.size, len(text), begin, size,
                                zlib.crc32(text)))
        file.write(text)
        for name, (_, values) in stored.items():
            file.write(bytes(entries[name]["offset"] - file.tell()))
            file.write(values.tobytes())
    unfinished.replace(path)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def _encoded(name: str, kind: str, values: Array) -> Array:
    if kind == "i32":
        return np.ascontiguousarray(values, dtype="<i4")
    if kind == "bf16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        made: Array = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        is_finite = np.isfinite(_decoded(kind, made)).all()
    else:
        with np.errstate(over="ignore"):
            made = np.asarray(values).astype("<f2")
        is_finite = np.isfinite(made).all()
    if not is_finite:
        raise RecordError(f"a value of {name} is not finite as {kind}")
    return np.ascontiguousarray(made)


def _decoded(kind: str, stored: Array) -> Array:
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.int32 if kind == "i32" else np.float32)


class Reader:
    """A mapped record: `meta`, its `groups`, and arrays by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.stat().st_size < _HEADER.size:
            raise RecordError(f"{path} is too short for a record")
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        magic, version, _, json_bytes, begin, size, crc = _HEADER.unpack(
            self._data[:_HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION:
            raise RecordError(f"{path} is no record of version {VERSION}")
        if size != self._data.size or not _HEADER.size + json_bytes <= begin <= size:
            raise RecordError(f"{path} has {self._data.size} bytes; {size} were written")
        text = self._data[_HEADER.size:_HEADER.size + json_bytes].tobytes()
        if zlib.crc32(text) != crc:
            raise RecordError(f"{path}: the checksum of the metadata differs")
        self.meta: dict[str, Any] = json.loads(text)
        try:
            self.n_tokens = int(self.meta["n_tokens"])
            self.head_dim = int(self.meta["head_dim"])
            self.scale = float(self.meta["softmax_scale"])
            self.steps = self.array("query_steps")
            self.groups = [
                Group(int(group["layer"]), int(group["kv_head"]), tuple(group["q_heads"]),
                      {key: group[key] for key in ("q", "k", "v", "k_pre") if key in group})
                for group in self.meta["groups"]]
            for group in self.groups:
                self._check(group)
        except (KeyError, TypeError) as error:
            raise RecordError(f"{path}: the metadata lacks {error}") from None
        if not self.groups or self.steps.size == 0:
            raise RecordError(f"{path} has no queries")
        if (np.diff(self.steps) <= 0).any() or not 0 <= self.steps[0] <= self.steps[-1] < \
                self.n_tokens:
            raise RecordError(f"{path}: query_steps does not ascend within the tokens")

    def _check(self, group: Group) -> None:
        queries = [self.steps.size, len(group.q_heads), self.head_dim]
        for key, name in group.arrays.items():
            shape = queries if key == "q" else [self.n_tokens, self.head_dim]
            if self.meta["arrays"][name]["shape"] != shape:
                raise RecordError(f"{self.path}: {name} has the shape "
                                  f"{self.meta['arrays'][name]['shape']}; wanted {shape}")

    def array(self, name: str) -> Array:
        """As int32 or float32, a copy; its checksum is compared."""
        entry = self.meta["arrays"][name]
        begin, kind = entry["offset"], entry["dtype"]
        raw = self._data[begin:begin + entry["bytes"]]
        wanted = int(np.prod(entry["shape"])) * _STORED[kind].itemsize
        if raw.size != entry["bytes"] or raw.size != wanted:
            raise RecordError(f"{self.path}: {name} has {raw.size} bytes; its shape needs {wanted}")
        if zlib.crc32(raw.tobytes()) != entry["crc32"]:
            raise RecordError(f"{self.path}: the checksum of {name} differs")
        return _decoded(kind, raw.view(_STORED[kind])).reshape(entry["shape"])
