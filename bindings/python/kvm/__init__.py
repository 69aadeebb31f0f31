# SPDX-License-Identifier: Apache-2.0
"""kvm: a KV-cache service for LLM inference engines."""

from kvm import _native
from kvm._programs import Daemon, start_daemon

__version__: str = _native.version()

__all__ = ["Daemon", "start_daemon"]
