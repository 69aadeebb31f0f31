# SPDX-License-Identifier: Apache-2.0
"""Head files: which kv heads of a model do not retrieve, as `kvm-eval heads` writes them.

docs/eval.md has the format."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ._constants import Status
from ._errors import InvalidError
from ._params import mask_of

FORMAT = "kvm-heads"
VERSION = 1
SOURCES = ("probe", "published", "measured")
_MAX_KV_HEADS = 128  # a mask has two words of 64 bits

Scores = tuple[tuple[float | None, ...], ...]  # [layer][kv head]


def _invalid(sentence: str) -> InvalidError:
    return InvalidError(Status.INVALID, sentence)


@dataclasses.dataclass(frozen=True)
class HeadFile:
    """Which kv heads retrieve, and how somebody knows. Iterating gives, for each layer, the kv
    heads that do NOT retrieve: what `Preset.heads` takes.
    """

    heads: tuple[tuple[int, ...], ...]  #: of each layer, ascending
    n_kv_heads: int  #: of each layer
    source: str  #: "probe", "published" or "measured"
    model: str = ""  #: its name, for people
    fingerprint: bytes = b""  #: 32 bytes of its weights; empty: any model of this geometry
    #: How the source was asked, and what it said of each head.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    scores: Mapping[str, Scores] = dataclasses.field(default_factory=dict, compare=False,
                                                     repr=False)
    path: str = dataclasses.field(default="", compare=False)  #: where it was read

    @property
    def n_layers(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.heads)

    def check(self, n_layers: int, n_kv_heads: int, fingerprint: bytes = b"") -> None:
        """Raises InvalidError where the file is for another model.

        fingerprint:  of the model; empty: not compared.
        """
        name = self.path or "the head file"
        of = f", {self.model}" if self.model else ""
        if (n_layers, n_kv_heads) != (self.n_layers, self.n_kv_heads):
            raise _invalid(f"{name} is for a model of {self.n_layers} layers and {self.n_kv_heads} "
                           f"kv heads{of}; this one has {n_layers} and {n_kv_heads}")
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise _invalid(f"{name} is for other weights{of}: their fingerprint is "
                           f"{self.fingerprint.hex()[:16]}.., this model's is "
                           f"{fingerprint.hex()[:16]}..; `kvm-eval heads` makes a file for it")

    def to_json(self) -> str:
        """The file's text."""
        fields: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, "source": self.source,
            "model": {"name": self.model, "n_layers": self.n_layers, "n_kv_heads": self.n_kv_heads,
                      "fingerprint": self.fingerprint.hex()},
            "settings": dict(self.settings),
            "kv_head_masks": [[f"{word:#018x}" for word in mask_of(heads)] for heads in self.heads],
            "scores": {name: [list(row) for row in rows] for name, rows in self.scores.items()},
        }
        # A line for each entry, and for each layer of a table.
        lines = []
        for key, value in fields.items():
            if key == "kv_head_masks":
                text = _table(value, "    ")
            elif key == "scores":
                text = ("{" + ",".join(f"\n    {json.dumps(name)}: {_table(rows, '      ')}"
                                       for name, rows in value.items()) + "\n  }"
                        if value else "{}")
            else:
                text = json.dumps(value)
            lines.append(f'  "{key}": {text}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file: all of it, or nothing."""
        unfinished = Path(f"{os.fspath(path)}.part")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        unfinished.replace(path)


def _table(rows: Any, indent: str) -> str:
    return "[" + ",".join(f"\n{indent}{json.dumps(row)}" for row in rows) + f"\n{indent[2:]}]"


def read_heads(path: str | os.PathLike[str]) -> HeadFile:
    """Reads a head file. Raises InvalidError where it is none, or of another version; OSError."""
    name = os.fspath(path)
    try:
        found = json.loads(Path(name).read_bytes())
    except ValueError as error:
        raise _invalid(f"{name} is no head file: it is not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _invalid(f'{name} is no head file: it does not say "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise _invalid(f"{name} is a head file of version {found.get('version')}; this kvm reads "
                       f"version {VERSION}")
    try:
        return _parsed(name, found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InvalidError):
            raise
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _invalid(f"{name} is a damaged head file: {what}") from None


def _parsed(name: str, found: dict[str, Any]) -> HeadFile:
    model, masks = found["model"], found["kv_head_masks"]
    n_layers, n_kv_heads = model["n_layers"], model["n_kv_heads"]
    if not isinstance(n_kv_heads, int) or not 1 <= n_kv_heads <= _MAX_KV_HEADS:
        raise _invalid(f"{name} is a damaged head file: n_kv_heads is {n_kv_heads!r}; there may be "
                       f"1 to {_MAX_KV_HEADS}")
    if not isinstance(masks, list) or len(masks) != n_layers:
        n = len(masks) if isinstance(masks, list) else "no"
        raise _invalid(f"{name} is a damaged head file: it has {n} masks for {n_layers!r} layers")
    if found["source"] not in SOURCES:
        raise _invalid(f"{name} is a damaged head file: source is {found['source']!r}; it is one "
                       f"of {', '.join(SOURCES)}")
    fingerprint = bytes.fromhex(model.get("fingerprint", ""))
    if len(fingerprint) not in (0, 32):
        raise _invalid(f"{name} is a damaged head file: its fingerprint has {len(fingerprint)} "
                       "bytes; there are 32, or none")
    heads = tuple(_heads_of(name, layer, mask, n_kv_heads) for layer, mask in enumerate(masks))
    scores = {key: tuple(map(tuple, rows)) for key, rows in found.get("scores", {}).items()}
    return HeadFile(heads, n_kv_heads, found["source"], str(model.get("name", "")), fingerprint,
                    dict(found.get("settings", {})), scores, name)


def _heads_of(name: str, layer: int, mask: Any, n_kv_heads: int) -> tuple[int, ...]:
    words = [_word(word) for word in mask] if isinstance(mask, list) else []
    if len(words) != 2 or None in words:
        raise _invalid(f"{name} is a damaged head file: {mask!r} of layer {layer} is no mask: two "
                       'words of 64 bits such as "0x0000000000000006"')
    bits = sum(word << 64 * i for i, word in enumerate(words) if word)
    if bits >> n_kv_heads:
        raise _invalid(f"{name} is a damaged head file: the mask of layer {layer} names kv head "
                       f"{bits.bit_length() - 1}; there are {n_kv_heads}")
    return tuple(head for head in range(n_kv_heads) if bits >> head & 1)


def _word(text: Any) -> int | None:
    # int() would take signs, spaces and underscores, too.
    if not isinstance(text, str) or not text.startswith("0x") or not 3 <= len(text) <= 18 or \
            set(text[2:]) - set("0123456789abcdefABCDEF"):
        return None
    return int(text, 16)
