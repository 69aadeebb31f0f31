# SPDX-License-Identifier: Apache-2.0
"""kvm: KV caches of language models in a service beside the engine, or in the process.

    import kvm
    client = kvm.connect()                 # or kvm.open_embedded()
    space = client.register_space("llama", n_layers=32, n_q_heads=32, n_kv_heads=8, head_dim=128)
    seq = space.create_sequence()
    result = client.step(space, 0, [kvm.Item(seq, append=1, query=1)], k=k, v=v, q=q)

docs/python.md begins at the beginning.
"""

from collections.abc import Callable as _Callable

try:
    from . import _native
except ImportError as _error:
    if _error.name != __name__:
        raise  # it is there, and cannot be loaded
    import os as _os
    import sys as _sys
    raise ImportError(
        f"{_os.path.dirname(__file__)} has no module _native for Python {_sys.version_info[0]}."
        f"{_sys.version_info[1]}: it was not built, or for another Python. In a build folder "
        "`cmake --build FOLDER --target kvm_python` builds it") from None

from ._constants import (NO_LIMIT, POSITION_END, PREFIX_TOKENS, PRIORITY_DEFAULT, PRIORITY_MAX,
                         Budgets, CodecId, Dtype, Evict, Feature, IndexKind, LayerKind, LogLevel,
                         Merging, Mode, Positions, Proposal, QuotaOf, Retention, Rope, SaveFlag,
                         SequenceFlag, SnapshotFlag, SpaceFlag, Status)
from ._errors import (CancelledError, DisconnectedError, Error, FullError, InvalidError,
                      NotFoundError, PartialError, RefusedError, UnsupportedError,
                      WaitTimeoutError)
from ._heads import HeadFile, read_heads
from ._objects import (Client, Queue, Sequence, Space, connect, merge, open_embedded, probe_heads)
from ._params import Codec, Index, Layer, Policy
from ._prefixes import PrefixHashes
from ._presets import Preset, Resolved, preset_names
from ._programs import Daemon, start_daemon
from ._records import (Amounts, ClientEntry, ClientInfo, EvictResult, SequenceInfo, SnapshotInfo,
                       SpaceInfo, Stats, UserEntry)
from ._requests import Item, Request, Step, StepResult, StepStats

__version__: str = _native.version()


def set_log(listener: _Callable[[LogLevel, str], None] | None) -> None:
    """Calls `listener(level, message)` for what the library has to say; None: for nothing."""
    if listener is None:
        _native.set_log(None)
        return
    _native.set_log(lambda level, message: listener(LogLevel(level), message))


__all__ = [
    "NO_LIMIT", "POSITION_END", "PREFIX_TOKENS", "PRIORITY_DEFAULT", "PRIORITY_MAX", "Amounts",
    "Budgets", "CancelledError", "Client", "ClientEntry", "ClientInfo", "Codec", "CodecId",
    "Daemon", "DisconnectedError", "Dtype", "Error", "Evict", "EvictResult", "Feature", "FullError",
    "HeadFile", "Index", "IndexKind", "InvalidError", "Item", "Layer", "LayerKind", "LogLevel",
    "Merging", "Mode", "NotFoundError", "PartialError", "Policy", "Positions", "PrefixHashes",
    "Preset", "Proposal", "Queue", "QuotaOf", "RefusedError", "Request", "Resolved", "Retention",
    "Rope", "SaveFlag", "Sequence", "SequenceFlag", "SequenceInfo", "SnapshotFlag", "SnapshotInfo",
    "Space", "SpaceFlag", "SpaceInfo", "Stats", "Status", "Step", "StepResult", "StepStats",
    "UnsupportedError", "UserEntry", "WaitTimeoutError", "connect", "merge", "open_embedded",
    "preset_names", "probe_heads", "read_heads", "set_log", "start_daemon",
]
