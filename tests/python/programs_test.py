#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs of the Python package: kvmd started and stopped from Python, `python -m kvm`."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import kvm
from kvm import _programs


def run(*arguments, **options):
    return subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=60, **options)


def ping(socket):
    return run(_programs.program_path("kvmctl"), "--socket", socket, "ping").returncode


def is_alive(pid):
    """Whether a process runs; one that ended, but that nobody has asked for, does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_for_end(pid, seconds=20):
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


class Programs(unittest.TestCase):
    def setUp(self):
        # Everything that start_daemon leaves behind would be here.
        folder = tempfile.TemporaryDirectory(prefix="kvm-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        before = tempfile.tempdir
        tempfile.tempdir = folder.name
        self.addCleanup(setattr, tempfile, "tempdir", before)

    def leftovers(self):
        return sorted(str(path) for path in self.folder.rglob("*"))

    def start(self, *arguments, **options):
        daemon = kvm.start_daemon(*arguments, capacity="64MiB", threads=1, **options)
        self.addCleanup(daemon.stop)
        return daemon


class StartDaemon(Programs):
    def test_it_takes_clients_until_it_is_stopped(self):
        with self.start() as daemon:
            self.assertEqual(ping(daemon.socket), 0)
            self.assertTrue(is_alive(daemon.pid))
            self.assertIn(str(daemon.pid), repr(daemon))
            # The folder of the socket is nobody else's to look into.
            mode = os.stat(os.path.dirname(daemon.socket)).st_mode & 0o777
            self.assertEqual(mode, 0o700)
        self.assertEqual(daemon.process.returncode, 0)
        self.assertFalse(is_alive(daemon.pid))
        self.assertIn("stopped", repr(daemon))
        self.assertEqual(self.leftovers(), [])
        daemon.stop()

    def test_a_socket_that_is_named(self):
        path = self.folder / "here.sock"
        daemon = self.start(path)
        self.assertEqual(daemon.socket, str(path))
        self.assertEqual(ping(path), 0)
        with self.assertRaisesRegex(RuntimeError, "another daemon listens"):
            self.start(path)
        self.assertEqual(ping(path), 0, "the first one still answers")
        daemon.stop()
        self.assertEqual(self.leftovers(), [])

    def test_options_are_those_of_kvmd(self):
        daemon = self.start(log_level="debug", pin_threads=False, max_clients=3)
        dump = run(_programs.program_path("kvmctl"), "--socket", daemon.socket, "config", "dump")
        self.assertEqual(dump.returncode, 0, dump.stderr)
        self.assertRegex(dump.stdout, r"host_capacity\W+64MiB")
        self.assertRegex(dump.stdout, r"max_clients\W+3\b")
        self.assertIn("listening at", daemon.log())

    def test_a_capacity_in_bytes(self):
        with kvm.start_daemon(capacity=80 << 20, threads=1) as daemon:
            self.assertIn("80 MiB for keys and values", daemon.log().replace("80MiB", "80 MiB"))

    def test_an_error_has_the_sentence_of_kvmd(self):
        with self.assertRaisesRegex(RuntimeError, "(?s)status 2.*kvmd: .*capacity"):
            kvm.start_daemon(capacity="much")
        with self.assertRaisesRegex(RuntimeError, "(?s)status 2.*no-such-option"):
            kvm.start_daemon(no_such_option=1)
        with self.assertRaisesRegex(RuntimeError, "(?s)status 2.*107 bytes"):
            kvm.start_daemon(self.folder / ("x" * 107))
        self.assertEqual(self.leftovers(), [])

    def test_one_that_does_not_get_ready_is_given_up(self):
        with unittest.mock.patch.object(_programs, "_BECOME", "import time; time.sleep(60)"):
            with self.assertRaisesRegex(RuntimeError, "not ready within 0.1 s"):
                self.start(timeout=0.1)
        self.assertEqual(self.leftovers(), [])

    def test_one_that_does_not_end_is_killed(self):
        daemon = self.start()
        os.kill(daemon.pid, signal.SIGSTOP)
        daemon.stop(timeout=0.1)
        self.assertEqual(daemon.process.returncode, -signal.SIGKILL)
        self.assertEqual(self.leftovers(), [])

    def test_one_that_died_can_be_stopped(self):
        daemon = self.start()
        os.kill(daemon.pid, signal.SIGKILL)
        self.assertTrue(wait_for_end(daemon.pid))
        daemon.stop()
        self.assertEqual(self.leftovers(), [])

    def test_it_ends_with_the_object(self):
        daemon = self.start()
        pid = daemon.pid
        self.doCleanups_of(daemon)
        del daemon
        gc.collect()
        self.assertTrue(wait_for_end(pid))

    def doCleanups_of(self, daemon):
        """Takes back the reference to it that setUp's cleanups hold."""
        self._cleanups = [c for c in self._cleanups if c[0] != daemon.stop]

    def test_it_outlives_the_thread_that_asked_for_it(self):
        made = []
        thread = threading.Thread(target=lambda: made.append(self.start()))
        thread.start()
        thread.join()
        time.sleep(0.1)
        self.assertEqual(ping(made[0].socket), 0)

    def test_a_forked_child_does_not_stop_it(self):
        daemon = self.start()
        pid = os.fork()
        if pid == 0:
            try:
                daemon.stop()
                del daemon
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        self.assertEqual(ping(daemon.socket), 0)

    def test_it_ends_with_its_process(self):
        """However that ends: here, by the end of its program, and killed."""
        script = ("import kvm, sys\n"
                  "daemon = kvm.start_daemon(capacity='64MiB', threads=1)\n"
                  "print(daemon.pid, flush=True)\n"
                  "sys.stdin.read()\n")
        for is_killed in (False, True):
            with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "TMPDIR": str(self.folder)}) as process:
                pid = int(process.stdout.readline())
                self.assertTrue(is_alive(pid))
                if is_killed:
                    process.kill()
                process.stdin.close()
                self.assertEqual(process.wait(60), -signal.SIGKILL if is_killed else 0)
            self.assertTrue(wait_for_end(pid))
            # A killed process cannot take its folder away; kvmd takes its socket.
            self.assertFalse([p for p in self.leftovers() if p.endswith(".sock")])
            self.assertTrue(is_killed or not self.leftovers())


class Main(Programs):
    def test_it_tells_what_is_installed(self):
        with self.start() as daemon:
            shown = run(sys.executable, "-m", "kvm", "--socket", daemon.socket)
            self.assertEqual(shown.returncode, 0, shown.stderr)
            for name in ("kvmd", "kvmctl"):
                self.assertIn(str(_programs.program_path(name)), shown.stdout)
                self.assertTrue(os.access(_programs.program_path(name), os.X_OK))
            self.assertIn(kvm.__version__, shown.stdout)
            self.assertTrue(_programs.library_path("kvm_embedded").exists())
            self.assertTrue((_programs.include_path() / "kvm.h").exists())
            # As from the environment, as all clients take it.
            shown = run(sys.executable, "-m", "kvm",
                        env={**os.environ, "KVM_SOCKET": daemon.socket})
            self.assertEqual(shown.returncode, 0, shown.stdout)
        shown = run(sys.executable, "-m", "kvm", "--socket", daemon.socket)
        self.assertEqual(shown.returncode, 1)
        self.assertIn("none answers", shown.stdout)

    def test_start_is_kvmd_itself(self):
        shown = run(sys.executable, "-m", "kvm", "start", "--version")
        self.assertEqual(shown.stdout, f"kvmd {kvm.__version__}\n")
        shown = run(sys.executable, "-m", "kvm", "start", "--no-such-option")
        self.assertEqual(shown.returncode, 2)
        self.assertIn("kvmd: ", shown.stderr)


if __name__ == "__main__":
    unittest.main()
