#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvmctl against a live daemon: what it prints, its JSON, its exit statuses."""

import os
import signal
import socket
import tempfile
import threading
import unittest

from daemon_harness import Daemon, kvmctl, run_kvmd

COMMANDS = ("status", "ping", "doctor", "spaces", "seqs", "audit")


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


# Rates with which samples pay from 6,000 tokens on.
RATES = "exact_bf16=13.5,exact_int8=7,scan=1,gather=20,start=5000,threads=1"
EXACT, TOPK, SAMPLED, VERIFIED, AUTO = range(1, 6)


class Audits(unittest.TestCase):
    def attend(self, daemon):
        """Lets a client attend in every mode and leave; returns (asked, done) modes."""
        client, said = daemon.client("daemon_attender")
        client.stdin.close()
        client.wait()
        client.stdout.close()
        return [tuple(int(word) for word in line.split()[:2]) for line in said]

    @staticmethod
    def accounted(audit):
        return sum(mode["answers"] for mode in audit["modes"]) + sum(audit["skipped"].values())

    def test_true_errors_beside_estimated_ones(self):
        with Daemon("--audit-every", "1", "--cost-model", RATES) as daemon:
            client, said = daemon.client("daemon_attender")
            done = [tuple(int(word) for word in line.split()[:2]) for line in said]
            # AUTO says what it took: a sample for an error, another for a time.
            self.assertEqual(set(done), {(EXACT, EXACT), (TOPK, TOPK), (SAMPLED, SAMPLED),
                                         (AUTO, VERIFIED), (AUTO, SAMPLED)})
            # Of two kv heads each, but for the exact ones.
            n_due = 2 * sum(mode != EXACT for _, mode in done)
            daemon.wait_until(lambda: self.accounted(daemon.json("audit")) >= n_due)
            audit = daemon.json("audit")
            self.assertEqual(self.accounted(audit), n_due)
            self.assertEqual(audit["every"], 1)
            modes = {mode["mode"]: mode for mode in audit["modes"]}
            self.assertEqual(set(modes), {"topk", "sampled", "verified"})
            self.assertGreater(sum(mode["answers"] for mode in audit["modes"]), 0)
            for mode in audit["modes"]:
                self.assertEqual(mode["rows"], mode["answers"], "a group of one")
                if mode["rows"]:
                    error = mode["true_error"]
                    self.assertGreater(error["mean"], 0)
                    self.assertLess(error["mean"], 0.5)
                    self.assertLessEqual(error["p95"], error["p99"])
                barred = 0 if mode["mode"] == "topk" else mode["rows"]
                self.assertEqual(mode["rows_with_bar"], barred)
                if barred:
                    self.assertAlmostEqual(mode["allowed_share"], 0.01, places=5)
                    self.assertEqual(mode["over_share"], mode["rows_over"] / barred)
                else:
                    self.assertIsNone(mode["over_share"])
                    self.assertIsNone(mode["estimated_error"]["mean"])
            table = daemon.kvmctl("audit").stdout
            self.assertIn("verified", table)
            self.assertIn("One of 1 approximate answers", table)
            client.stdin.close()
            client.wait()
            client.stdout.close()
            daemon.wait_until(lambda: daemon.json("status")["pages"] == 0)
            self.assertEqual(daemon.end(), 0)

    def test_off(self):
        with Daemon("--audit-every", "0") as daemon:
            self.attend(daemon)
            audit = daemon.json("audit")
            self.assertEqual(audit["every"], 0)
            self.assertEqual(self.accounted(audit), 0)
            self.assertIn("audits are off", daemon.kvmctl("audit").stdout.lower())

    def test_wrong_rates_are_an_option_that_is_wrong(self):
        result = run_kvmd("--cost-model", "quick")
        self.assertEqual(result.returncode, 2)
        self.assertIn("cost_model has the part 'quick'", result.stderr)


if __name__ == "__main__":
    unittest.main()
