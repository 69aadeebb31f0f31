#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian package and its unit under a systemd that is process 1 of its own namespaces (see
systemd_root.sh): installed, started, watched, killed, stopped, upgraded, removed. Arguments: cpack,
the build folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from deb import PACKAGES, make_debs

CPACK, BUILD = sys.argv[-2:]
del sys.argv[-2:]
BIN = os.environ["KVM_BIN_DIR"]
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "systemd_root.sh")
# What an operator might set. LeakSanitizer would trace the process, which the unit rightly forbids.
DROP_IN = """[Service]
Environment=KVM_HOST_CAPACITY=64MiB KVM_THREADS=2 KVM_METRICS_LISTEN=127.0.0.1:9464
Environment=ASAN_OPTIONS=detect_leaks=0
LimitMEMLOCK=1M
WatchdogSec=8
"""


def documented_drop_in():
    """The one of docs/operations.md, which people copy."""
    with open(os.path.join(os.environ["KVM_SOURCE_DIR"], "docs/operations.md"),
              encoding="utf-8") as file:
        lines = file.read().split("\n    [Service]\n")[1].split("\n\n")[0]
    return "[Service]\n" + "".join(line.strip() + "\n" for line in lines.splitlines())


class Machine:
    """A systemd in namespaces. `cannot` says why there is none."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="kvm-systemd-")
        self.base = os.path.join(self.folder, "base")
        os.mkdir(self.base)
        self.pid = None
        self.cannot = ""
        # A file, for nobody reads a pipe while the machine runs.
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(
                [SCRIPT, "boot", self.base], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KVM_ROOT_BINDS": f"{BUILD}:{self.folder}"})
        self.boot()

    def boot(self):
        deadline = time.monotonic() + 60
        said = ""
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                with open(os.path.join(self.folder, "log"), encoding="utf-8") as log:
                    self.cannot = log.read().strip() or f"it ended: {self.process.returncode}"
                return
            self.pid = self.first_child()
            if self.pid:
                said = self.run("systemctl", "is-system-running", check=False)
                if said.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(0.1)
        self.cannot = f"it is not up after a minute: {said}"

    def first_child(self):
        """Process 1 of the namespaces, once it is systemd: the child of the last unshare."""
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    name, fields = file.read().rsplit(")", 1)
            except (OSError, NotADirectoryError):
                continue
            if name.endswith("(systemd") and int(fields.split()[1]) == self.process.pid:
                return int(entry)
        return None

    def end(self):
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 20
        # The cgroup is free once the last process is gone.
        while subprocess.run([SCRIPT, "clean", self.base], check=False,
                             capture_output=True).returncode and time.monotonic() < deadline:
            time.sleep(0.1)
        shutil.rmtree(self.folder)

    def enter(self, *command):
        return ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--cgroup", "--ipc",
                "--uts", "--net", "--root", "--wd", "--", *command]

    def run(self, *command, check=True):
        result = subprocess.run(self.enter("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                                           "DEBIAN_FRONTEND=noninteractive", *command),
                                stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                check=False, timeout=90)
        if check and result.returncode != 0:
            raise AssertionError(f"{command}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def as_user(self, user, groups, *command):
        return self.run("setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={groups}",
                        *command, check=False)

    def show(self, name):
        """A property of the service."""
        return self.run("systemctl", "show", "--value", "-p", name, "kvmd").stdout.strip()

    def journal(self):
        return self.run("journalctl", "--no-pager", "-u", "kvmd").stdout


class Service(unittest.TestCase):
    # In the order of their names: an operator's day.
    @classmethod
    def setUpClass(cls):
        cls.machine = Machine()
        try:
            if cls.machine.cannot:
                print(f"no systemd here: {cls.machine.cannot}")
                sys.stdout.flush()
                cls.machine.end()
                os._exit(77)
            cls.debs = make_debs(CPACK, BUILD, cls.machine.folder)
        except BaseException:
            cls.machine.end()
            raise

    @classmethod
    def tearDownClass(cls):
        cls.machine.end()

    def wait_until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, self.machine.journal())
            time.sleep(0.1)

    def wait_for_another(self, pid):
        """Waits for a kvmd that is ready and not that one, and returns its pid."""
        self.wait_until(lambda: self.machine.show("ActiveState") == "active" and
                        self.machine.show("MainPID") not in ("0", pid))
        return self.machine.show("MainPID")

    def kvmctl(self, *arguments):
        result = self.machine.run("kvmctl", "--json", *arguments)
        return json.loads(result.stdout)

    def holder(self):
        """A client outside of the unit, ready and with three sequences."""
        process = subprocess.Popen(
            self.machine.enter("env", "-i", "ASAN_OPTIONS=detect_leaks=0",
                               f"{BIN}/daemon_holder"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.assertEqual(process.stdout.readline(), "ready\n")
        return process

    def let_go(self, holder):
        holder.stdin.close()
        holder.stdout.close()
        holder.wait(timeout=30)

    def drop_in(self, text):
        self.machine.run("sh", "-c", 'printf %s "$1" >/etc/systemd/system/kvmd.service.d/test.conf',
                         "sh", text)
        self.machine.run("systemctl", "daemon-reload")

    def test_1_install_and_start(self):
        machine = self.machine
        machine.run("dpkg", "--purge", *PACKAGES)  # of the system below, if it is there
        machine.run("dpkg", "--install", "--force-depends", *self.debs)
        self.assertEqual(machine.show("ActiveState"), "inactive", "installing starts nothing")
        self.assertEqual(machine.show("UnitFileState"), "disabled")
        machine.run("mkdir", "-p", "/etc/systemd/system/kvmd.service.d")
        self.drop_in(documented_drop_in())
        self.assertEqual(machine.show("MemoryMax"), str(220 << 30))
        self.assertNotIn("ignoring", machine.run("journalctl", "--no-pager").stdout)
        self.drop_in(DROP_IN)
        # Type=notify: this returns once kvmd is ready, so that the next line may connect.
        machine.run("systemctl", "enable", "--now", "kvmd")
        status = self.kvmctl("status")
        self.assertEqual(str(status["pid"]), machine.show("MainPID"))
        self.assertEqual(machine.show("NotifyAccess"), "main")
        self.assertEqual(machine.run("stat", "-c", "%A %U %G", "/run/kvm").stdout,
                         "drwxr-xr-x kvmd kvmd\n")
        self.assertEqual(machine.run("stat", "-c", "%A %U %G", "/run/kvm/kvmd.sock").stdout,
                         "srw-rw---- kvmd kvmd\n")

    def test_2_who_may_connect(self):
        machine = self.machine
        self.assertIn("daemon_holder", [client["name"] for client in self.with_holder("clients")])
        kvmd = machine.run("id", "-g", "kvmd").stdout.strip()
        self.assertEqual(machine.as_user(4711, kvmd, "kvmctl", "status").returncode, 0)
        refused = machine.as_user(4711, kvmd, "kvmctl", "clients")
        self.assertEqual(refused.returncode, 1, refused.stdout)
        outside = machine.as_user(4711, 4711, "kvmctl", "status")
        self.assertEqual(outside.returncode, 3, outside.stdout)
        self.assertIn("KVM_ERR_PERMISSION", outside.stderr)
        # From a login session, which has a folder of its own for sockets.
        machine.run("env", "XDG_RUNTIME_DIR=/run/user/0", "kvmctl", "status")

    def with_holder(self, *arguments):
        holder = self.holder()
        try:
            return self.kvmctl(*arguments)
        finally:
            self.let_go(holder)

    def test_3_what_the_unit_leaves_it(self):
        machine = self.machine
        pid = machine.show("MainPID")
        text = machine.run("cat", f"/proc/{pid}/status").stdout
        status = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
        self.assertRegex(machine.run("cat", f"/proc/{pid}/limits").stdout,
                         r"Max core file size +0 ")
        for name, value in (("CapEff", "0" * 16), ("CapBnd", "0" * 16), ("NoNewPrivs", "1"),
                            ("Seccomp", "2")):
            self.assertEqual(status[name].strip(), value, name)
        self.assertRegex(machine.run("cat", f"/proc/{pid}/limits").stdout,
                         r"Max locked memory +1048576 ")
        # What it takes from the system all the same: completion eventfds, and the loopback.
        self.assertNotIn("io_uring", machine.journal())
        answer = machine.run("python3", "-c", "import urllib.request as u; print(u.urlopen("
                             "'http://127.0.0.1:9464/healthz', timeout=20).status)").stdout
        self.assertEqual(answer, "200\n")
        bench = self.kvmctl("bench", "--seconds", "0.2", "--tokens", "1024")
        self.assertTrue(bench)

    def test_4_restarts(self):
        machine = self.machine
        pid = machine.show("MainPID")
        self.assertEqual(machine.show("NRestarts"), "0")
        machine.run("kill", "-KILL", pid)
        second = self.wait_for_another(pid)
        self.assertEqual(str(self.kvmctl("status")["pid"]), second)
        machine.run("kill", "-STOP", second)
        third = self.wait_for_another(second)
        self.assertEqual(str(self.kvmctl("status")["pid"]), third)
        self.assertIn("Watchdog timeout", machine.journal())
        self.assertEqual(machine.show("NRestarts"), "2")
        # Pings come while nothing happens, too.
        time.sleep(10)
        self.assertEqual(machine.show("MainPID"), third)

    def test_5_stops_with_clients(self):
        machine = self.machine
        holder = self.holder()
        machine.run("systemctl", "stop", "kvmd")
        self.assertEqual(machine.show("Result"), "success", machine.journal())
        self.assertEqual(machine.show("ExecMainStatus"), "0")
        self.assertNotEqual(machine.run("test", "-e", "/run/kvm", check=False).returncode, 0)
        self.let_go(holder)
        refused = machine.run("kvmctl", "status", check=False)
        self.assertEqual(refused.returncode, 3, refused.stdout)

    def test_6_wrong_configuration(self):
        machine = self.machine
        machine.run("sh", "-c", "echo 'threds = 2' >>/etc/kvm/kvmd.toml")
        self.assertNotEqual(machine.run("systemctl", "start", "kvmd", check=False).returncode, 0)
        # At once and for good, not after five attempts.
        self.assertEqual(machine.show("ActiveState"), "failed", machine.journal())
        self.assertEqual(machine.show("NRestarts"), "0")
        self.assertIn("did you mean 'threads'", machine.journal())
        machine.run("sed", "-i", "/threds/d", "/etc/kvm/kvmd.toml")
        machine.run("systemctl", "reset-failed", "kvmd")
        machine.run("systemctl", "start", "kvmd")

    def test_7_upgrade_remove_purge(self):
        machine = self.machine
        pid = machine.show("MainPID")
        self.assertNotEqual(pid, "0")
        machine.run("dpkg", "--install", "--force-depends", *self.debs)
        self.assertNotEqual(machine.show("MainPID"), pid, "an upgrade starts it anew")
        self.assertEqual(machine.show("ActiveState"), "active")
        machine.run("dpkg", "--remove", "kvm")
        self.assertEqual(machine.show("ActiveState"), "inactive")
        self.assertEqual(machine.run("systemctl", "is-enabled", "kvmd", check=False).returncode, 1)
        machine.run("dpkg", "--purge", *PACKAGES)
        self.assertNotEqual(machine.run("test", "-e", "/etc/kvm", check=False).returncode, 0)


if __name__ == "__main__":
    missing = [name for name in ("unshare", "nsenter", "setpriv", "pivot_root", "systemctl", "dpkg",
                                 "dpkg-shlibdeps", "file") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        print(f"not here: {', '.join(missing) or 'root'}")
        sys.exit(77)
    unittest.main()
