# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files as far as Llama models need it: metadata, tensors of F32, F16, Q8_0 and Q4_1.

The format is that of ggml's docs/gguf.md, version 3, little-endian."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}
_STRING, _ARRAY = 8, 9
# Number of a tensor type: its name, elements of a block, bytes of a block.
_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}


class GgufError(ValueError):
    """The file is no GGUF that this reader knows."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]  # as NumPy counts: the last is next to each other
    kind: int
    offset: int


class Gguf:
    """A file: `metadata` by key, and tensors by name."""

    def __init__(self, path: str | Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        if self._take(4) != b"GGUF":
            raise GgufError(f"{path} does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise GgufError(f"{path} has version {version}; 2 and 3 are known")
        n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(n_tensors):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
            self._tensors[name] = _Tensor(shape[::-1], self._scalar("I"), self._scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        self._begin = (self._at + alignment - 1) // alignment * alignment

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor in float32."""
        tensor = self._tensors[name]
        if tensor.kind not in _TYPES:
            raise GgufError(f"{name} is of the type {tensor.kind}; known are "
                            + ", ".join(kind for kind, _, _ in _TYPES.values()))
        kind, n_elements, n_bytes = _TYPES[tensor.kind]
        n = int(np.prod(tensor.shape))
        size = n // n_elements * n_bytes
        begin = self._begin + tensor.offset
        if begin + size > self._data.size:
            raise GgufError(f"{name} ends behind the end of the file")
        raw = np.asarray(self._data[begin:begin + size])
        if kind == "F32":
            values = raw.view("<f4")
        elif kind == "F16":
            values = raw.view("<f2")
        else:
            blocks = raw.reshape(-1, n_bytes)
            scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
            if kind == "Q8_0":
                values = blocks[:, 2:].view(np.int8) * scale
            else:
                least = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
                halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
                values = halves * scale + least
        return values.astype(np.float32).reshape(tensor.shape)

    def _take(self, n: int) -> bytes:
        if self._at + n > self._data.size:
            raise GgufError("the file ends in the middle of its header")
        taken = self._data[self._at:self._at + n].tobytes()
        self._at += n
        return taken

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, n = self._scalar("I"), self._scalar("Q")
            return [self._value(of) for _ in range(n)]
        if kind not in _SCALARS:
            raise GgufError(f"a value of the type {kind} in the metadata")
        return self._scalar(_SCALARS[kind])
