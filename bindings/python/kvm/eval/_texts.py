# SPDX-License-Identifier: Apache-2.0
"""Texts to judge a model by, from what every Python has: the language's reference, and programs."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path


def _reference(parts: tuple[str, ...]) -> str:
    """Topics share sections; each paragraph is taken once, for copies are predicted for nothing."""
    topics = pydoc_data.topics.topics
    chosen = sorted(name for name in topics if name[0].lower() in parts)
    paragraphs = "\n\n".join(topics[name] for name in chosen).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def _module(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"this Python has no source of the module {name}")
    return Path(spec.origin).read_text(encoding="utf-8")


BUILT_IN: dict[str, Callable[[], str]] = {
    "reference-a": lambda: _reference(("a", "b", "c")),
    "reference-s": lambda: _reference(("s", "t", "u")),
    "argparse.py": lambda: _module("argparse"),
    "typing.py": lambda: _module("typing"),
}


def read(name: str) -> str:
    """A built-in text by its name, or the file of this path."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if not Path(name).is_file():
        raise ValueError(f"there is no text {name}: neither a file of that name nor one of those "
                         f"that are built in, {', '.join(BUILT_IN)}")
    return Path(name).read_text(encoding="utf-8")
