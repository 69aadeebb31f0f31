#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvmctl against a live daemon: what it prints, its JSON, its exit statuses."""

import os
import signal
import socket
import tempfile
import threading
import unittest

from daemon_harness import Daemon, kvmctl

COMMANDS = ("status", "ping", "doctor", "spaces", "seqs")


class Kvmctl(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon().__enter__()
        cls.holder = cls.daemon.hold()

    @classmethod
    def tearDownClass(cls):
        cls.holder.stdin.close()
        cls.holder.wait()
        cls.holder.stdout.close()
        cls.daemon.__exit__()

    def test_every_command_prints_a_table(self):
        for command in COMMANDS:
            result = self.daemon.kvmctl(command)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertTrue(result.stdout.strip(), command)
            for line in result.stdout.splitlines():
                self.assertEqual(line, line.rstrip(), command)

    def test_status(self):
        status = self.daemon.json("status")
        self.assertEqual(status["pid"], self.daemon.process.pid)
        self.assertEqual(status["sequences"], 3)
        self.assertEqual(status["spaces"], 1)
        self.assertEqual(status["clients"], 2, "the holder and kvmctl")
        self.assertEqual(status["tokens_appended"], 3 * 100 * 2)
        self.assertGreater(status["host_used_bytes"], 0)
        self.assertLessEqual(status["host_page_bytes"], status["host_used_bytes"])
        self.assertEqual(status["requests_failed"], 0)

    def test_ping(self):
        ping = self.daemon.json("ping", "-c", "10")
        self.assertEqual(ping["count"], 10)
        self.assertLessEqual(ping["min_us"], ping["median_us"])
        self.assertLessEqual(ping["median_us"], ping["max_us"])

    def test_spaces(self):
        (space,) = self.daemon.json("spaces")
        self.assertEqual(space["name"], "holder")
        self.assertEqual(space["layers"], 2)
        self.assertEqual(space["sequences"], 3)
        self.assertEqual(space["bytes_per_token"], 2 * 2 * 64 * 2 * 2)

    def test_seqs(self):
        sequences = self.daemon.json("seqs")
        self.assertEqual(len(sequences), 3)
        for sequence in sequences:
            self.assertEqual(sequence["tokens_min"], 100)
            self.assertEqual(sequence["tokens_max"], 100)
            self.assertGreater(sequence["bytes"], 0)

    def test_doctor(self):
        findings = {finding["subject"]: finding for finding in self.daemon.json("doctor")}
        for subject in ("daemon", "instruction set", "transparent huge pages", "io_uring",
                        "locked memory limit", "open files limit"):
            self.assertIn(findings[subject]["verdict"], ("good", "fallback", "problem"))
        self.assertEqual(findings["daemon"]["verdict"], "good")
        for finding in findings.values():
            if finding["verdict"] != "good":
                self.assertTrue(finding["consequence"], finding)

    def test_wrong_usage_is_status_2(self):
        for arguments in ([], ["frobnicate"], ["ping", "-c", "0"], ["status", "--jsn"]):
            result = kvmctl(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertTrue(result.stderr)
            self.assertEqual(kvmctl("--help").returncode, 0)

    def test_no_daemon_is_status_3_and_says_what_to_do(self):
        for command in ("status", "ping", "spaces", "seqs"):
            result = kvmctl("--socket", "/tmp/no/such.sock", command)
            self.assertEqual(result.returncode, 3)
            self.assertIn("/tmp/no/such.sock", result.stderr)
            self.assertIn("kvmd", result.stderr)
            self.assertIn("no such file", result.stderr)

    def test_sentences_tell_one_cause_from_another(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "notes.txt")
            with open(path, "w", encoding="utf-8") as file:
                file.write("precious")
            result = kvmctl("--socket", path, "status")
            self.assertEqual(result.returncode, 3)
            self.assertIn("no socket", result.stderr)

            path = os.path.join(folder, "left.sock")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(1)
                answer = threading.Thread(target=self.answer_nonsense, args=(listener,))
                answer.start()
                result = kvmctl("--socket", path, "status")
                answer.join()
            self.assertEqual(result.returncode, 3)
            self.assertIn("KVM_ERR_PROTOCOL", result.stderr)
            self.assertIn("is no kvmd", result.stderr)

            result = kvmctl("--socket", path, "status")
            self.assertEqual(result.returncode, 3)
            self.assertIn("has ended left its socket", result.stderr)
            self.assertIn("has ended left its socket", kvmctl("--socket", path, "doctor").stdout)

            result = kvmctl("--socket", "x" * 200, "status")
            self.assertEqual(result.returncode, 2)
            self.assertIn("107", result.stderr)

    @staticmethod
    def answer_nonsense(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.send(b"hello, I am a teapot")
            connection.recv(4096)


class Clients(unittest.TestCase):
    def test_killed_client_gives_everything_back(self):
        with Daemon() as daemon:
            for _ in range(2):
                holder = daemon.hold()
                self.assertEqual(daemon.json("status")["sequences"], 3)
                holder.send_signal(signal.SIGKILL)
                holder.wait()
                holder.stdin.close()
                holder.stdout.close()
                daemon.wait_until(lambda: daemon.json("status")["sequences"] == 0)
            status = daemon.json("status")
            self.assertEqual(status["pages"], 0)
            self.assertEqual(status["host_page_bytes"], 0)
            self.assertEqual(status["clients"], 1)
            self.assertEqual(daemon.end(), 0)


if __name__ == "__main__":
    unittest.main()
