# SPDX-License-Identifier: Apache-2.0
"""Starts kvmd, kvmctl and clients for the tests of this folder."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

BIN = os.environ["KVM_BIN_DIR"]


class Daemon:
    """A kvmd with a socket in a folder of its own. Use it in a `with` statement."""

    def __init__(self, *arguments, folder=None, env=None):
        self.own_folder = folder is None
        self.folder = tempfile.mkdtemp(prefix="kvmd-") if folder is None else folder
        self.socket = os.path.join(self.folder, "kvmd.sock")
        self.log_path = os.path.join(self.folder, "log")
        self.arguments = ["--socket", self.socket, "--host-capacity", "256MiB", *arguments]
        self.env = {**os.environ, **(env or {})}
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.own_folder:
            shutil.rmtree(self.folder)

    def start(self):
        """Starts kvmd and waits until it takes clients. Its first lines may follow: an answer of it
        comes after them."""
        with open(self.log_path, "ab") as log:
            n_before = self.log().count("listening at")
            self.process = subprocess.Popen([f"{BIN}/kvmd", *self.arguments], stderr=log,
                                            env=self.env)
        self.wait_until(lambda: self.log().count("listening at") > n_before)

    def log(self):
        with open(self.log_path, encoding="utf-8") as log:
            return log.read()

    def wait_until(self, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"kvmd has ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"waited {seconds} s; the log:\n{self.log()}"
            time.sleep(0.01)

    def end(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=20)

    def kvmctl(self, *arguments, stdout=subprocess.PIPE):
        return kvmctl("--socket", self.socket, *arguments, stdout=stdout)

    def json(self, *arguments):
        result = self.kvmctl("--json", *arguments)
        # What doctor finds is the machine's.
        assert result.returncode == 0 or (arguments[0] == "doctor" and result.returncode == 4), \
            result.stderr
        return json.loads(result.stdout)

    def hold(self, *names):
        """A client with one space and three sequences, one of them saved under names, ready."""
        holder, said = self.client("daemon_holder", *names)
        assert not said
        return holder

    def client(self, program, *arguments):
        """A client program once it is ready, and the lines that it has said before."""
        process = subprocess.Popen([f"{BIN}/{program}", *arguments], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "KVM_SOCKET": self.socket})
        said = []
        while (line := process.stdout.readline()) != "ready\n":
            assert line, f"{program} has ended"
            said.append(line.rstrip())
        return process, said


def kvmctl(*arguments, stdout=subprocess.PIPE):
    return subprocess.run([f"{BIN}/kvmctl", *arguments], stdout=stdout, stderr=subprocess.PIPE,
                          text=True, check=False, timeout=60)


def run_kvmd(*arguments, env=None, stdout=subprocess.PIPE):
    """A kvmd that is expected to end by itself."""
    return subprocess.run([f"{BIN}/kvmd", *arguments], stdout=stdout, stderr=subprocess.PIPE,
                          text=True, check=False, timeout=20, env={**os.environ, **(env or {})})
