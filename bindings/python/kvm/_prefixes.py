# SPDX-License-Identifier: Apache-2.0
"""Hashes of prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import _native
from ._constants import PREFIX_TOKENS
from ._errors import whole

HASH_BYTES = 32


class PrefixHashes:
    """Hashes of the full pages of a run of tokens, each of its page and all before it. Made by
    `Space.prefix_hashes`.

    `len` counts the pages of PREFIX_TOKENS tokens, `hashes[i]` has the 32 bytes of one, and `bytes`
    all of them. One thread at a time may let it grow; `copy.copy` gives one that grows by itself.
    """

    __slots__ = ("_data", "_rest", "_seed")

    def __init__(self, seed: bytes, data: bytes = b"") -> None:
        self._seed = seed
        self._data = data
        self._rest = b""  # the tokens behind the last full page

    def extend(self, tokens: Iterable[int] | Any) -> None:
        """Goes on with the tokens that follow: an array with one axis, or any iterable."""
        data, rest = _native.hash_tokens(self._data[-HASH_BYTES:] or self._seed, self._rest, tokens)
        if data:
            self._data += data
        self._rest = rest

    def up_to(self, n_tokens: int) -> PrefixHashes:
        """Those of the pages that end within the first n_tokens."""
        n_bytes = whole("n_tokens", n_tokens) // PREFIX_TOKENS * HASH_BYTES
        return PrefixHashes(self._seed, self._data[:n_bytes])

    @property
    def n_tokens(self) -> int:
        """Tokens that it was given, those behind the last full page included."""
        return len(self) * PREFIX_TOKENS + len(self._rest) // 4

    def __len__(self) -> int:
        return len(self._data) // HASH_BYTES

    def __getitem__(self, index: int) -> bytes:
        n = len(self)
        at = index + n if index < 0 else index
        if not 0 <= at < n:
            raise IndexError(f"index is {index}; there are {n} hashes")
        return self._data[at * HASH_BYTES:(at + 1) * HASH_BYTES]

    def __bytes__(self) -> bytes:
        return self._data

    def __repr__(self) -> str:
        return f"<kvm.PrefixHashes of {self.n_tokens} tokens>"


def data_of(hashes: PrefixHashes | bytes) -> bytes:
    """The hashes, one after another."""
    if isinstance(hashes, PrefixHashes):
        return hashes._data
    if not isinstance(hashes, bytes):
        raise TypeError(f"hashes is a {type(hashes).__name__}; it must be a kvm.PrefixHashes, "
                        "which Space.prefix_hashes makes of token ids, or bytes")
    return hashes


def keep_ns(keep: float | None) -> int:
    """As kvm.h has it, where 0 is for ever."""
    if keep is None:
        return 0
    if not isinstance(keep, (int, float)) or not 0 < keep < float("inf"):
        raise ValueError(f"keep is {keep!r}; it must be a number of seconds above 0, or None")
    return min(max(1, int(keep * 1e9)), 2**64 - 1)
