# SPDX-License-Identifier: Apache-2.0
"""The programs that come with the package: where they lie, and a kvmd for as long as it is needed.

    with kvm.start_daemon(capacity="4GiB") as daemon:
        client = kvm.connect(daemon.socket)
"""

from __future__ import annotations

import os
import shutil
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

_FOLDER = Path(__file__).parent

_LOG_LINES = 20
_STOP_SECONDS = 10.0

# Asks the kernel to end this process together with the thread that started it (argv[1] is that
# thread's process), and becomes the program of argv[2:]. It is a program of its own because code
# of Python between fork and exec may wait for ever for a lock that another thread held.
_BECOME = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def program_path(name: str) -> Path:
    """The path of `kvmd` or `kvmctl` of this package."""
    return _FOLDER / "bin" / name


def library_path(name: str = "kvm") -> Path:
    """The path of `libkvm` (or of `libkvm_embedded`, for the name "kvm_embedded")."""
    found = sorted((_FOLDER / "lib").glob(f"lib{name}.so.*"))
    return found[0] if found else _FOLDER / "lib" / f"lib{name}.so"


def include_path() -> Path:
    """The folder of `kvm.h`."""
    return _FOLDER / "include"


def become(name: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by a program of the package."""
    path = program_path(name)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, [str(path), *arguments])
    except OSError as error:
        sys.exit(f"kvm: cannot run {path}: {error.strerror}")


def run_kvmd() -> NoReturn:
    """The console script `kvmd`."""
    become("kvmd", sys.argv[1:])


def run_kvmctl() -> NoReturn:
    """The console script `kvmctl`."""
    become("kvmctl", sys.argv[1:])


def _flags(options: dict[str, str | int | bool]) -> list[str]:
    """Options as kvmd's command line has them: `log_level="debug"` is `--log-level=debug`."""
    flags = []
    for name, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        flags.append(f"--{name.replace('_', '-')}={text}")
    return flags


def _environment(notify: str) -> dict[str, str]:
    """This process's environment, with a service manager of our own in the place of another."""
    theirs = {"WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"}
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    environment["NOTIFY_SOCKET"] = notify
    return environment


class _Running:
    """A kvmd and the thread that started it. It knows nothing of the Daemon that owns it, so that
    a forgotten Daemon can be collected."""

    def __init__(self, command: list[str], environment: dict[str, str], log: IO[bytes]) -> None:
        self.owner = os.getpid()
        self.log = log
        # A program that Python is embedded in may not know an interpreter.
        become = [sys.executable, "-I", "-S", "-c", _BECOME, str(self.owner)]
        self._command = [*become, *command] if sys.executable else command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        # The kernel's signal comes when the thread ends that started the process, not when its
        # process does. So this one stays until kvmd has ended.
        self._thread = threading.Thread(target=self._run, name="kvmd", daemon=True)

    def start(self) -> subprocess.Popen[bytes]:
        self._thread.start()
        self._started.wait()
        if self._process is None:
            raise RuntimeError(f"cannot run {self._command[0]}: {self._error}") from self._error
        return self._process

    def _run(self) -> None:
        try:
            # In a session of its own: Ctrl-C is for this process, which may need kvmd to end well.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                env=self._environment, start_new_session=True)
        except OSError as error:
            self._error = error
        self._started.set()
        if self._process is not None:
            self._process.wait()

    def stop(self, timeout: float) -> None:
        if self._process is None or os.getpid() != self.owner:
            return  # A child that was forked does not own it.
        for number, seconds in ((signal.SIGTERM, timeout), (signal.SIGKILL, None)):
            self._process.send_signal(number)
            self._thread.join(seconds)
            if not self._thread.is_alive():
                return

    def last_lines(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        tail = os.pread(self.log.fileno(), 65536, max(0, size - 65536))
        return "\n".join(tail.decode(errors="replace").splitlines()[-_LOG_LINES:])


def _clean_up(running: _Running, folder: str, timeout: float = _STOP_SECONDS) -> None:
    if os.getpid() != running.owner:
        return
    running.stop(timeout)
    running.log.close()
    shutil.rmtree(folder, ignore_errors=True)


class Daemon:
    """A kvmd that runs until `stop()`, the end of the `with` block, or the end of this process,
    whichever comes first; also where nothing refers to this object any more, or this process is
    killed. A process that was forked from this one may use the socket, but does not stop kvmd.

    Attributes:
        socket: the path of its socket, for `kvm.connect`.
        process: the process. Another thread waits for it: ask `process.poll()`, and end it by
            `stop()`.
    """

    socket: str
    process: subprocess.Popen[bytes]

    def __init__(self, socket: str | os.PathLike[str] | None, timeout: float,
                 options: dict[str, str | int | bool]) -> None:
        program = program_path("kvmd")
        if not os.access(program, os.X_OK):
            raise RuntimeError(f"there is no program at {program}")
        # For us alone: it holds the socket, where none is named, and where kvmd says it is ready.
        self._folder = folder = tempfile.mkdtemp(prefix="kvm-")
        self.socket = os.path.join(folder, "kvmd.sock") if socket is None else os.fspath(socket)
        notify = os.path.join(folder, "ready")
        command = [str(program), f"--socket={self.socket}", *_flags(options)]
        # Appended to, so that kvmd and its reader share the file, but no position in it.
        log_path = os.path.join(folder, "log")
        log = open(log_path, "ab+", buffering=0)
        os.unlink(log_path)
        self._running = _Running(command, _environment(notify), log)
        self._finalizer = weakref.finalize(self, _clean_up, self._running, folder)
        try:
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
                manager.bind(notify)
                self.process = self._running.start()
                self._wait_until_ready(manager, timeout)
        except BaseException:
            self._finalizer()
            raise

    def _wait_until_ready(self, manager: sockets.socket, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        manager.settimeout(0.02)
        while True:
            try:
                if b"READY=1" in manager.recv(4096):
                    return
            except TimeoutError:
                pass
            if self.process.poll() is not None:
                raise RuntimeError(f"kvmd ended with status {self.process.returncode}:\n"
                                   f"{self.log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"kvmd was not ready within {timeout:g} s:\n{self.log()}")

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self.process.pid

    def log(self) -> str:
        """The last lines that kvmd has written; empty after `stop()`."""
        return self._running.last_lines() if self._finalizer.alive else ""

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """Ends kvmd: with SIGTERM, and where it still runs after `timeout` seconds, with SIGKILL.
        Its clients get `kvm.DisconnectedError`. Does nothing the second time."""
        # detach() answers once, to one thread.
        if os.getpid() == self._running.owner and self._finalizer.detach() is not None:
            _clean_up(self._running, self._folder, timeout)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self.process.poll() is not None else f"pid {self.pid}"
        return f"<kvm.Daemon at {self.socket!r}, {state}>"


def start_daemon(socket: str | os.PathLike[str] | None = None, capacity: str | int | None = None,
                 *, timeout: float = 20.0, **options: str | int | bool) -> Daemon:
    """Starts a kvmd of this process and returns when it takes clients.

    Args:
        socket: the path of its socket, at most 107 bytes. None: one in a new private folder.
        capacity: the memory for keys and values, as bytes, as a size ("4GiB") or as a share of
            the free memory ("60%", the default).
        timeout: how long to wait for it, in seconds.
        options: other options of kvmd, by their names in docs/configuration.md:
            `log_level="debug"`, `threads=2`.

    Raises:
        RuntimeError: it did not start. The message has the last lines that kvmd wrote.
    """
    if capacity is not None:
        options["host_capacity"] = capacity
    return Daemon(socket, timeout, options)
