# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr while a command works, where stderr is a terminal.

tqdm, because transformers needs it anyway."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


def bar(total: int, unit: str) -> Any:
    """A context manager with `update(n)` and `set_postfix_str(text)`."""
    # None: only on a terminal.
    return tqdm(total=total, unit=unit, file=sys.stderr, disable=None, dynamic_ncols=True,
                leave=False)
