#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvmd from its start to its end: signals, sockets, the service manager, options."""

import os
import signal
import socket
import stat
import unittest

from daemon_harness import Daemon, run_kvmd


class Lifecycle(unittest.TestCase):
    def test_signals_end_it_with_status_0_and_remove_the_socket(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with Daemon() as daemon:
                self.assertTrue(os.path.exists(daemon.socket))
                self.assertEqual(daemon.end(number), 0)
                self.assertFalse(os.path.exists(daemon.socket))

    def test_ends_with_clients_connected(self):
        with Daemon() as daemon:
            holder = daemon.hold()
            self.assertEqual(daemon.end(), 0)
            self.assertFalse(os.path.exists(daemon.socket))
            holder.stdin.close()
            self.assertEqual(holder.wait(timeout=20), 0)
            holder.stdout.close()

    def test_tells_the_service_manager(self):
        with Daemon() as daemon:
            path = os.path.join(daemon.folder, "notify")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(path)
                manager.settimeout(20)
                second = Daemon("--socket", os.path.join(daemon.folder, "second.sock"),
                                folder=daemon.folder, env={"NOTIFY_SOCKET": path})
                second.arguments = second.arguments[2:]
                second.log_path += "2"
                with second:
                    self.assertEqual(manager.recv(100), b"READY=1")
                    self.assertEqual(second.end(), 0)
                    self.assertEqual(manager.recv(100), b"STOPPING=1")

    def test_second_daemon_at_the_same_socket_is_refused(self):
        with Daemon() as daemon:
            result = run_kvmd("--socket", daemon.socket, "--host-capacity", "64MiB")
            self.assertEqual(result.returncode, 1)
            self.assertIn("another daemon listens", result.stderr)
            self.assertEqual(daemon.json("status")["pid"], daemon.process.pid)
            self.assertNotIn("closed", daemon.log(), "nothing has come of it that anybody misses")

    def test_restart_after_a_kill_has_a_new_epoch(self):
        with Daemon() as daemon:
            epoch = daemon.json("status")["epoch"]
            daemon.end(signal.SIGKILL)
            self.assertTrue(os.path.exists(daemon.socket), "nobody was there to remove it")
            daemon.start()
            self.assertNotEqual(daemon.json("status")["epoch"], epoch)
            self.assertEqual(daemon.end(), 0)

    def test_socket_mode_and_folder(self):
        with Daemon("--socket-mode", "0600") as daemon:
            mode = os.stat(daemon.socket).st_mode
            self.assertEqual(stat.S_IMODE(mode), 0o600)
            nested = Daemon(folder=daemon.folder)
            nested.socket = os.path.join(daemon.folder, "made", "kvmd.sock")
            nested.arguments[1] = nested.socket
            nested.log_path += "2"
            with nested:
                self.assertTrue(os.path.exists(nested.socket))

    def test_wrong_options(self):
        for arguments, sentence in (
                (["--threds", "2"], "did you mean '--threads'?"),
                (["--threads", "many"], "threads is 'many'"),
                (["--config", "/nonexistent.toml"], "/nonexistent.toml")):
            result = run_kvmd(*arguments)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(sentence, result.stderr)
        result = run_kvmd(env={"KVM_SPIN_MAX": "2"}, *["--print-config"])
        self.assertEqual(result.returncode, 0, "not near enough to be a misspelling")

    def test_pages_for_people(self):
        self.assertIn("--spin-max-us", run_kvmd("--help").stdout)
        self.assertRegex(run_kvmd("--version").stdout, r"^kvmd \d+\.\d+\.\d+\n$")
        printed = run_kvmd("--print-config", env={"KVM_THREADS": "3"}).stdout
        self.assertRegex(printed, r"threads = 3 +# environment")

    def test_path_that_cannot_be(self):
        result = run_kvmd("--socket", "/tmp/" + "x" * 200, "--host-capacity", "64MiB")
        self.assertEqual(result.returncode, 2)
        self.assertIn("must be a path of at most 107 bytes", result.stderr)

    def test_directory_that_is_not_there(self):
        with Daemon() as daemon:
            path = os.path.join(daemon.folder, "none")
            result = run_kvmd("--socket", daemon.socket + "2", "--host-capacity", "64MiB",
                              "--disk-directories", path)
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"directory {path} is not there; make it first", result.stderr)

    def test_quotas_larger_than_their_whole(self):
        result = run_kvmd("--host-capacity", "1GiB", "--default-quota", "2GiB")
        self.assertEqual(result.returncode, 2)
        self.assertIn("default_quota is 2 GiB, more than host_capacity, which is 1 GiB",
                      result.stderr)


if __name__ == "__main__":
    unittest.main()
