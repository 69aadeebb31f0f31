#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvmctl against a live daemon: what it prints, its JSON, its exit statuses."""

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import threading
import unittest

from daemon_harness import BIN, Daemon, kvmctl, run_kvmd

COMMANDS = ("status", "ping", "doctor", "spaces", "seqs", "audit", "metrics", "config dump",
            "clients", "quota get", "top --once -i 0.1",
            "completion bash")


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
            result = self.daemon.kvmctl(*command.split())
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
        self.assertEqual(space["default_mode"], "exact")

    def test_seqs(self):
        sequences = self.daemon.json("seqs")
        self.assertEqual(len(sequences), 3)
        table = self.daemon.kvmctl("seqs").stdout
        for sequence in sequences:
            for name in ("id", "client", "space"):
                self.assertRegex(sequence[name], r"\A0x[0-9a-f]+\Z")
            self.assertIn(f"{sequence['id']}  {sequence['client']} ", table)
            self.assertEqual(sequence["tokens_min"], 100)
            self.assertEqual(sequence["tokens_max"], 100)
            self.assertGreater(sequence["bytes"], 0)

    def test_doctor(self):
        findings = {finding["subject"]: finding for finding in self.daemon.json("doctor")}
        for subject in ("daemon", "instruction set", "transparent huge pages", "io_uring",
                        "locked memory limit", "open files limit"):
            self.assertIn(findings[subject]["verdict"], ("good", "fallback", "problem"))
        self.assertEqual(findings["daemon"]["verdict"], "good")
        problems = [finding for finding in findings.values() if finding["verdict"] == "problem"]
        self.assertEqual(self.daemon.kvmctl("doctor").returncode, 4 if problems else 0)
        for finding in findings.values():
            if finding["verdict"] != "good":
                self.assertTrue(finding["consequence"], finding)

    def test_doctor_tells_whether_kvmd_itself_gets_huge_pages(self):
        libc = ctypes.CDLL(None, use_errno=True)
        set_thp_disable = 41
        self.assertEqual(libc.prctl(set_thp_disable, 1, 0, 0, 0), 0)  # kvmd inherits it
        try:
            daemon = Daemon().__enter__()
        finally:
            libc.prctl(set_thp_disable, 0, 0, 0, 0)
        try:
            findings = {finding["subject"]: finding for finding in daemon.json("doctor")}
            huge_pages = findings["transparent huge pages"]
            self.assertEqual(huge_pages["found"], "disabled (for kvmd)")
            self.assertEqual(huge_pages["verdict"], "fallback")
            self.assertIn('kvm_huge_pages_info{setting="disabled"} 1\n',
                          daemon.kvmctl("metrics").stdout)
        finally:
            daemon.__exit__()

    def test_doctor_looks_at_the_limits_of_kvmd(self):
        pid = self.daemon.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4000, before[1]))
            findings = {finding["subject"]: finding for finding in self.daemon.json("doctor")}
            self.assertEqual(findings["open files limit"]["found"], "4000 (of kvmd)")
            self.assertEqual(findings["open files limit"]["verdict"], "fallback")
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def test_every_command_has_json(self):
        for command in COMMANDS:
            if not command.startswith("completion"):
                self.assertTrue(self.daemon.json(*command.split()) is not None, command)

    def test_top(self):
        self.daemon.json("ping", "-c", "3")
        lines = self.daemon.kvmctl("--json", "top", "-i", "0.1", "-n", "3").stdout.splitlines()
        looks = [json.loads(line) for line in lines]
        self.assertEqual(len(looks), 3)
        for look in looks:
            self.assertEqual(look["sequences"], 3)
            self.assertGreaterEqual(look["busy_share"], 0)
            self.assertLessEqual(look["busy_share"], 1.05)
        self.assertLess(looks[0]["uptime_seconds"], looks[2]["uptime_seconds"])

    def test_clients_and_users(self):
        clients = {c["name"]: c for c in self.daemon.json("clients")}
        self.assertEqual(set(clients), {"daemon_holder", "kvmctl"})
        holder = clients["daemon_holder"]
        self.assertEqual(holder["pid"], self.holder.pid)
        self.assertEqual(holder["uid"], os.getuid())
        self.assertEqual(holder["used"]["sequences"], 3)
        self.assertEqual(holder["used"]["bytes"],
                         sum(s["bytes"] for s in self.daemon.json("seqs")))
        # Since it connected: it has made sequences and appended to them.
        self.assertGreater(holder["requests"], 0)
        self.assertGreater(holder["request_p50_seconds"], 0)
        self.assertLessEqual(holder["request_p50_seconds"], holder["request_p99_seconds"])
        quota = self.daemon.json("quota", "get")
        (user,) = quota["users"]
        self.assertEqual(user["uid"], os.getuid())
        self.assertEqual(user["clients"], 2)
        for name in ("sequences", "bytes"):
            self.assertEqual(user["used"][name],
                             sum(c["used"][name] for c in quota["clients"]), name)
        for written in (holder["id"], str(int(holder["id"], 16))):
            only = self.daemon.json("quota", "get", "--client", written)
            self.assertEqual([c["id"] for c in only["clients"]], [holder["id"]])
            self.assertEqual(only["users"], [])

    def test_limits_of_clients_are_those_of_the_configuration(self):
        options = {o["name"]: o["value"] for o in self.daemon.json("config", "dump")["options"]}
        for client in self.daemon.json("clients"):
            self.assertEqual(client["limits"]["queues"], options["max_queues"])
            self.assertEqual(client["limits"]["arenas"], options["max_arenas"])

    def test_kvmctl_leaves_no_lines_in_the_log(self):
        before = self.daemon.log()
        self.daemon.json("status")
        self.daemon.json("seqs")
        self.assertEqual(self.daemon.log(), before)
        self.assertRegex(before, r"client 0x[0-9a-f]+ 'daemon_holder' .* works with sequences")

    def test_top_refuses_times_with_a_sentence(self):
        for text in ("nan", "inf", "-1", "0", "1e9"):
            result = self.daemon.kvmctl("top", "--once", f"--interval={text}")
            self.assertEqual(result.returncode, 2, text)
            self.assertIn(f"'{text}' is no time; allowed are 0.05 to 3600 seconds", result.stderr)

    def test_top_has_rates_of_clients_and_durations(self):
        look = json.loads(self.daemon.kvmctl("--json", "top", "--once", "-i", "0.1").stdout)
        self.assertEqual({c["name"] for c in look["by_client"]}, {"daemon_holder", "kvmctl"})
        for client in look["by_client"]:
            self.assertGreaterEqual(client["requests_per_second"], 0)
        # What a bench asks meanwhile is seen, as a rate of its own and in the durations.
        with subprocess.Popen([f"{BIN}/kvmctl", "--socket", self.daemon.socket, "bench",
                               "--tokens", "512", "--seconds", "3"],
                              stdout=subprocess.DEVNULL) as bench:
            busy = []
            look = {"request_p50_seconds": 0}
            # The clients and the whole are asked for one after the other: the first requests may
            # lie between.
            while bench.poll() is None and not (busy and look["request_p50_seconds"] > 0):
                look = json.loads(self.daemon.kvmctl("--json", "top", "--once", "-i",
                                                     "0.2").stdout)
                busy = [c for c in look["by_client"] if c["requests_per_second"] > 0]
            self.assertEqual([c["name"] for c in busy], ["kvmctl"])
            self.assertGreater(busy[0]["request_p50_seconds"], 0)
            self.assertLessEqual(busy[0]["request_p50_seconds"], busy[0]["request_p99_seconds"])
            (idle,) = [c for c in look["by_client"] if c["name"] == "daemon_holder"]
            self.assertEqual(idle["request_p99_seconds"], 0, "it asks for nothing meanwhile")
            self.assertGreater(look["request_p50_seconds"], 0)
            self.assertLessEqual(look["request_p50_seconds"], look["request_p99_seconds"])
            bench.wait()

    def test_top_fits_the_terminal(self):
        for columns in (40, 60, 80, 120):
            lines = self.on_terminal(columns, "top", "-n", "1", "-i", "0.05").splitlines()
            lines = [line.replace("\x1b[H\x1b[J", "") for line in lines]
            self.assertLessEqual(max(len(line) for line in lines), columns, lines)
            text = "\n".join(lines)
            for word in ("p99", "CLIENT", "REQUESTS", "daemon_holder"):
                self.assertIn(word, text)
            # Of each client, the latter first where there is little room.
            self.assertIn("P99", text)
            self.assertEqual("P50" in text, columns >= 60, text)
            self.assertEqual("ARENA MEMORY" in text, columns == 120, text)

    def on_terminal(self, columns, *arguments):
        """What kvmctl writes to a terminal so wide."""
        leader, follower = pty.openpty()
        try:
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            process = self.daemon.kvmctl(*arguments, stdout=follower)
            self.assertEqual(process.returncode, 0, process.stderr)
            os.set_blocking(leader, False)
            text = b""
            with contextlib.suppress(BlockingIOError):  # a part for each line; then no more
                while True:
                    text += os.read(leader, 65536)
            return text.decode()
        finally:
            os.close(follower)
            os.close(leader)

    def test_one_is_no_plural(self):
        with Daemon("--threads", "1") as daemon:
            status = daemon.kvmctl("status").stdout
            self.assertIn("1 thread,", status)
            self.assertIn("1 thread,", daemon.log())
            self.assertNotRegex(self.daemon.kvmctl("status").stdout, r"\b1 \w+s\b")

    def test_metrics(self):
        self.assertIn("\nkvm_sequences 3\n", self.daemon.kvmctl("metrics").stdout)

    def test_wrong_usage_is_status_2(self):
        for arguments in ([], ["frobnicate"], ["ping", "-c", "0"], ["status", "--jsn"], ["evict"],
                          ["evict", "--client", "1", "--space", "x"], ["config"],
                          ["config", "check"], ["evict", "--seq", "xyz"], ["evict", "--seq", ""],
                          ["quota", "get", "--user", ""], ["top", "-i", "0"],
                          ["top", "-i", "nan"], ["top", "-i", "inf"], ["top", "-i", "-1"],
                          ["bench", "--seconds", "nan"], ["evict", "--seq", "1f"],
                          ["evict", "--client", "abc"]):
            result = self.daemon.kvmctl(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertTrue(result.stderr)
            self.assertEqual(kvmctl("--help").returncode, 0)

    def test_an_answer_that_cannot_be_written_is_status_1(self):
        for command in COMMANDS + ("--json seqs", "config dump --offline"):
            with open("/dev/full", "w", encoding="utf-8") as full:
                result = self.daemon.kvmctl(*command.split(), stdout=full)
            self.assertEqual(result.returncode, 1, command)
            self.assertIn("cannot be written: No space left", result.stderr, command)
        with open("/dev/full", "w", encoding="utf-8") as full:
            for option in ("--help", "--version", "--print-config"):
                result = run_kvmd(option, stdout=full)
                self.assertEqual(result.returncode, 1, option)
                self.assertIn("No space left", result.stderr, option)

    def test_wrong_usage_points_to_the_help_of_the_command(self):
        for arguments, sentence in (
                ([], "kvmctl: a command is missing\nCommands: status,"),
                (["quota"], "kvmctl quota: a command is missing\nCommands: get, set. "
                            "See kvmctl quota --help.\n"),
                (["quota", "show"], "kvmctl quota: there is no 'show'\nCommands: get, set."),
                (["statsu"], "kvmctl: there is no 'statsu'; did you mean 'status'?\nCommands: "),
                (["quota", "gte"], "kvmctl quota: there is no 'gte'; did you mean 'get'?\n"),
                (["config", "check"], "\nSee kvmctl config check --help.\n")):
            self.assertIn(sentence, kvmctl(*arguments).stderr, arguments)

    def test_wrong_usage_is_told_without_a_daemon(self):
        for arguments in (["evict", "--seq", "xyz"], ["quota", "get", "--user", "no such user"]):
            self.assertEqual(kvmctl("--socket", "/tmp/no/such.sock", *arguments).returncode, 2)

    def test_no_daemon_is_status_3_and_says_what_to_do(self):
        for command in ("status", "ping", "spaces", "seqs", "top"):
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
            result = kvmctl("--socket", path, "doctor")
            self.assertEqual(result.returncode, 3)
            self.assertIn("has ended left its socket", result.stdout)

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


class Config(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.file = os.path.join(self.folder.name, "kvmd.toml")

    def tearDown(self):
        self.folder.cleanup()

    def write(self, text):
        with open(self.file, "w", encoding="utf-8") as file:
            file.write(text)

    def options(self, dump):
        return {option["name"]: option for option in dump["options"]}

    def test_dump_has_the_origin_of_each_value(self):
        self.write('max_clients = 7\n[metrics]\nsocket_mode = "0600"\n')
        with Daemon("--config", self.file, "--spin-max-us", "50",
                    env={"KVM_THREADS": "2"}) as daemon:
            dump = daemon.json("config", "dump")
            self.assertEqual(dump["file"], self.file)
            options = self.options(dump)
            for name, value, origin, place in (
                    ("max_clients", 7, "file", f"{self.file}:1"),
                    ("metrics.socket_mode", "0600", "file", f"{self.file}:3"),
                    ("threads", 2, "environment", "KVM_THREADS"),
                    ("spin_max_us", 50, "command line", "--spin-max-us"),
                    ("max_queues", 16, "default", None)):
                self.assertEqual(options[name]["value"], value)
                self.assertEqual(options[name]["origin"], origin)
                self.assertEqual(options[name]["place"], place)
            self.assertEqual(options["spin_max_us"]["default"], 200)
            text = daemon.kvmctl("config", "dump").stdout
            self.assertRegex(text, rf"max_clients = 7 +# file: {self.file}:1\n")
            self.assertRegex(text, r"max_queues = 16 +# default\n")
            # What is printed is a file that means the same.
            self.write(text)
            again = self.options(json.loads(kvmctl("--json", "config", "check", self.file).stdout))
            self.assertEqual({n: o["value"] for n, o in again.items()},
                             {n: o["value"] for n, o in options.items()})

    def test_offline_dump_is_of_this_environment(self):
        result = subprocess.run([f"{BIN}/kvmctl", "--json", "config", "dump", "--offline"],
                                capture_output=True, text=True, check=True,
                                env={**os.environ, "KVM_THREADS": "3"})
        threads = self.options(json.loads(result.stdout))["threads"]
        self.assertEqual((threads["value"], threads["origin"]), (3, "environment"))

    def test_check(self):
        self.write("threads = 2\n")
        checked = json.loads(kvmctl("--json", "config", "check", self.file).stdout)
        self.assertTrue(checked["valid"])
        for nothing in (self.file + ".empty", "/dev/null"):
            with open(nothing, "w", encoding="utf-8"):
                pass
            checked_nothing = kvmctl("config", "check", nothing)
            self.assertEqual(checked_nothing.returncode, 0, checked_nothing.stderr)
            self.assertIn("sets 0 options", checked_nothing.stdout)
        self.assertEqual(kvmctl("config", "check", os.path.dirname(self.file)).returncode, 4)
        self.assertEqual([o["name"] for o in checked["options"]], ["threads"])
        for text, sentence in (("threads = 2000\n", f"threads is '2000' in {self.file}:1"),
                               ("a = 1\n\nthreds = 1\n", f"unknown option 'a' in {self.file}:1"),
                               ("[metrics]\nlisten = 'all'\n", "must be off, unix:/PATH"),
                               ("[metrics]\nlissen = 'off'\n", "did you mean 'metrics.listen'?"),
                               ("[device]\nthreds = 1\n", "did you mean 'threads', which stands"),
                               ("[device]\npol = 1\n", "did you mean 'device.pool'?"),
                               ("[metrics]\nquoota = 1\n", "did you mean 'quota' below [device]"),
                               ("cost_model = 'quick'\n", "cost_model has the part 'quick'"),
                               ("host_capacity = '1GiB'\ndefault_quota = '2GiB'\n", "more than"),
                               ("x = = 1\n", f"{self.file}:1 is not TOML")):
            self.write(text)
            result = kvmctl("config", "check", self.file)
            self.assertEqual(result.returncode, 4, text)
            self.assertIn(sentence, result.stderr)
            checked = json.loads(kvmctl("--json", "config", "check", self.file).stdout)
            self.assertFalse(checked["valid"])
            self.assertIn(sentence, checked["error"])
        self.assertEqual(kvmctl("config", "check", "/no/such.toml").returncode, 4)

    def test_check_names_everything_that_is_wrong(self):
        self.write("threads = 2000\nthreds = 1\nmax_arena = '9EiB'\ncost_model = 'quick'\n"
                   "log_level = 3\nhost_capacity = '1GiB'\ndefault_quota = '2GiB'\n")
        checked = json.loads(kvmctl("--json", "config", "check", self.file).stdout)
        self.assertEqual(len(checked["errors"]), 6, checked)
        for sentence in (f"threads is '2000' in {self.file}:1; it must be a whole number from 0",
                         f"unknown option 'threds' in {self.file}:2; did you mean 'threads'?",
                         f"max_arena is '9EiB' in {self.file}:3; it must be a size such as",
                         "cost_model has the part 'quick'",
                         f"log_level is '3' in {self.file}:5; it must be one of error, warning",
                         "default_quota is 2 GiB, more than host_capacity, which is 1 GiB"):
            self.assertTrue(any(error.startswith(sentence) for error in checked["errors"]),
                            (sentence, checked["errors"]))
        self.assertEqual(kvmctl("config", "check", self.file).stderr.count("kvmctl: "), 6)
        self.write("".join(f"nonsense_{i} = 1\n" for i in range(100)))
        errors = json.loads(kvmctl("--json", "config", "check", self.file).stdout)["errors"]
        self.assertEqual((len(errors), errors[-1]), (21, "and 80 more"))

    def test_check_reads_only_files_and_not_without_end(self):
        for path, sentence in (("/dev/zero", "it must be a file"),
                               (self.folder.name, "it is a folder")):
            result = kvmctl("config", "check", path)
            self.assertEqual(result.returncode, 4)
            self.assertIn(f"'{path}': ", result.stderr)
            self.assertIn(sentence, result.stderr)
        self.write("# " + "x" * (1 << 20))
        self.assertIn("larger than 1 MiB", kvmctl("config", "check", self.file).stderr)
        read, write = os.pipe()
        os.write(write, b"threads = 2000\n")
        os.close(write)
        checked = subprocess.run([f"{BIN}/kvmctl", "config", "check", f"/dev/fd/{read}"],
                                 pass_fds=[read], capture_output=True, text=True, check=False)
        os.close(read)
        self.assertEqual(checked.returncode, 4)
        self.assertIn("threads is '2000'", checked.stderr)


class Bench(unittest.TestCase):
    def test_measures_checks_and_gives_back(self):
        with Daemon() as daemon:
            holder = daemon.hold()
            bench = daemon.json("bench", "--tokens", "1536", "--seconds", "0.05")
            self.assertTrue(bench["answer_is_right"])
            self.assertEqual(bench["geometry"]["tokens"], 1536)
            self.assertEqual(bench["append"]["count"], 3)
            for part in ("ping", "append", "attend"):
                self.assertLessEqual(bench[part]["p50_us"], bench[part]["p90_us"])
                self.assertLessEqual(bench[part]["p90_us"], bench[part]["p99_us"])
                self.assertLessEqual(bench[part]["p99_us"], bench[part]["max_us"])
            self.assertGreater(bench["attend"]["bytes_per_second"], 0)
            self.assertEqual([s["name"] for s in daemon.json("spaces")], ["holder"])
            self.assertEqual(len(daemon.json("seqs")), 3, "everything is given back")
            table = daemon.kvmctl("bench", "--tokens", "512", "--seconds", "0.01").stdout
            self.assertIn("The answer is right.", table)
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()


class Quota(unittest.TestCase):
    def test_limits_hold_and_go(self):
        with Daemon() as daemon:
            me = str(os.getuid())
            set_ = daemon.json("quota", "set", "--user", me, "--bytes", "64KiB", "--queues", "9")
            (user,) = set_["users"]
            self.assertEqual(user["limits"]["bytes"], 65536)
            self.assertEqual(user["limits"]["queues"], 9)
            self.assertIsNone(user["limits"]["sequences"])
            result = daemon.kvmctl("bench", "--tokens", "512", "--seconds", "0.01")
            self.assertEqual(result.returncode, 1)
            self.assertIn("KVM_ERR_QUOTA", result.stderr)
            daemon.json("quota", "set", "--user", me, "--bytes", "unlimited")
            self.assertTrue(daemon.json("bench", "--tokens", "512", "--seconds", "0.01")
                            ["answer_is_right"])
            for size, bytes_ in (("1.5GiB", 3 << 29), ("0.5 MiB", 1 << 19), ("1EiB", 1 << 60)):
                (user,) = daemon.json("quota", "set", "--user", me, "--bytes", size)["users"]
                self.assertEqual(user["limits"]["bytes"], bytes_)
            for size, sentence in (("1e9", "'1e9' is no size"), ("nan", "is no size"),
                                   ("0", "above 0"), ("60%", "is no size"),
                                   ("99999999TiB", "below 8EiB"), ("8EiB", "below 8EiB")):
                result = daemon.kvmctl("quota", "set", "--user", me, "--bytes", size)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(f"the limit of bytes: '{size}' is", result.stderr)
                self.assertIn(sentence, result.stderr)
            daemon.json("quota", "set", "--user", me, "--bytes", "unlimited")
            holder = daemon.hold()
            client = str(next(c["id"] for c in daemon.json("clients")
                              if c["name"] == "daemon_holder"))
            shown = daemon.json("quota", "set", "--client", client, "--sequences", "3")
            self.assertEqual(shown["clients"][0]["limits"]["sequences"], 3)
            self.assertIn(f"sets limits of client {client}: sequences=3", daemon.log())
            for arguments, status in ((["--client", "999999", "--sequences", "1"], 1),
                                      (["--client", client], 2), (["--sequences", "1"], 2),
                                      (["--client", client, "--sequences", "-1"], 2),
                                      (["--client", client, "--sequences", "0"], 2),
                                      (["--client", client, "--bytes", "much"], 2),
                                      (["--user", "nobody-at-all", "--bytes", "1GiB"], 2)):
                self.assertEqual(daemon.kvmctl("quota", "set", *arguments).returncode, status,
                                 arguments)
            self.assertEqual(
                daemon.json("evict", "--client", client, "--disconnect")["sequences"], 3)
            daemon.wait_until(lambda: len(daemon.json("clients")) == 1)
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()


class Snapshots(unittest.TestCase):
    def release(self, holder):
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()

    def test_list_delete_and_status(self):
        with tempfile.TemporaryDirectory() as disk, \
             Daemon("--disk-directories", disk, "--disk-capacity", "256MiB") as daemon:
            self.assertEqual(daemon.json("snapshot", "list"), [])
            self.release(daemon.hold("chat/1", "chat/2", "prompt"))
            saved = daemon.json("snapshot", "list")
            self.assertEqual([s["name"] for s in saved], ["chat/1", "chat/2", "prompt"])
            for snapshot in saved:
                self.assertEqual(snapshot["uid"], os.getuid())
                self.assertEqual(snapshot["space"], "holder")
                self.assertEqual(snapshot["tokens"], 100)
                self.assertFalse(snapshot["lost"])
                self.assertGreater(snapshot["bytes"], 2 * 2 * 100 * 2 * 64 * 2)
                self.assertRegex(snapshot["saved"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
            total = sum(s["bytes"] for s in saved)
            status = daemon.json("status")
            self.assertEqual((status["snapshots"], status["snapshot_bytes"]), (3, total))
            self.assertEqual(daemon.json("snapshot", "list", "--all"), saved)
            (user,) = daemon.json("quota", "get")["users"]
            self.assertEqual(user["used"]["snapshot_bytes"], total)
            table = daemon.kvmctl("snapshot", "list").stdout
            self.assertEqual(len(table.splitlines()), 4)
            for line in table.splitlines():
                self.assertEqual(line, line.rstrip())
            # Another daemon finds them, and says so.
            daemon.end(signal.SIGKILL)
            daemon.start()
            daemon.wait_until(lambda: "3 snapshots with" in daemon.log())
            self.assertEqual(daemon.json("snapshot", "list"), saved)
            result = daemon.kvmctl("snapshot", "delete", "chat/1", "nothing", "prompt")
            self.assertEqual(result.returncode, 1)
            self.assertIn("nothing", result.stderr)
            self.assertIn("KVM_ERR_NOT_FOUND", result.stderr)
            self.assertNotIn("prompt", result.stderr, "that is deleted nevertheless")
            self.assertEqual([s["name"] for s in daemon.json("snapshot", "list")], ["chat/2"])
            self.assertEqual(daemon.json("status")["snapshots"], 1)
            self.assertEqual(daemon.kvmctl("snapshot", "delete").returncode, 2)
            result = daemon.kvmctl("snapshot", "delete", "no spaces")
            self.assertEqual(result.returncode, 1)
            self.assertIn("KVM_ERR_INVALID", result.stderr)

    def test_limits_of_users(self):
        with tempfile.TemporaryDirectory() as disk, \
             Daemon("--disk-directories", disk, "--disk-capacity", "256MiB", "--tenants",
                    f"{os.getuid()}: snapshot_bytes=1MiB") as daemon:
            (user,) = daemon.json("quota", "get")["users"]
            self.assertEqual(user["limits"]["snapshot_bytes"], 1 << 20)
            (user,) = daemon.json("quota", "set", "--user", str(os.getuid()), "--snapshot-bytes",
                                  "3MiB")["users"]
            self.assertEqual(user["limits"]["snapshot_bytes"], 3 << 20)
            self.assertRegex(daemon.kvmctl("quota", "get").stdout, r"SNAPSHOTS\n.* of 3\.0 MiB\n")
            (client,) = daemon.json("quota", "get")["clients"]
            self.assertNotIn("snapshot_bytes", client["limits"], "clients have none")
            result = daemon.kvmctl("quota", "set", "--client", client["id"], "--snapshot-bytes",
                                   "1MiB")
            self.assertEqual(result.returncode, 2)
            self.assertIn("goes with --user", result.stderr)

    def test_without_a_disk(self):
        with Daemon() as daemon:
            for command in (["list"], ["delete", "one"]):
                result = daemon.kvmctl("snapshot", *command)
                self.assertEqual(result.returncode, 1)
                self.assertIn("KVM_ERR_UNSUPPORTED", result.stderr)
            self.assertEqual(daemon.json("status")["snapshots"], 0)


class Isa(unittest.TestCase):
    def test_a_table_that_is_not_there_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            result = run_kvmd("--socket", f"{folder}/kvmd.sock", "--host-capacity", "64MiB",
                              env={"KVM_FORCE_ISA": "bogus"})
        self.assertEqual(result.returncode, 2)
        self.assertIn("KVM_FORCE_ISA is 'bogus'; this machine can run scalar", result.stderr)
        with Daemon(env={"KVM_FORCE_ISA": "scalar"}) as daemon:
            self.assertEqual(daemon.json("status")["isa"], "scalar")


class Evict(unittest.TestCase):
    def test_sequence_client_space(self):
        with Daemon() as daemon:
            holders = [daemon.hold(), daemon.hold()]
            seqs = daemon.json("seqs")
            self.assertEqual(len(seqs), 6)
            first = seqs[0]
            done = daemon.json("evict", "--seq", first["id"])
            self.assertEqual(done["sequences"], 1)
            self.assertEqual(done["bytes"], first["bytes"])
            daemon.wait_until(lambda: len(daemon.json("seqs")) == 5)
            # Gone is gone, and what never was is not found.
            for seq in (first["id"], str(int(first["id"], 16)), "1"):
                result = daemon.kvmctl("evict", "--seq", seq)
                self.assertEqual(result.returncode, 1)
                self.assertRegex(result.stderr, "KVM_ERR_(STALE|NOT_FOUND|LOST)")
            self.assertEqual(daemon.json("evict", "--client", first["client"])["sequences"], 2)
            daemon.wait_until(lambda: len(daemon.json("seqs")) == 3)
            self.assertNotIn(first["client"], {s["client"] for s in daemon.json("seqs")})
            self.assertEqual(daemon.json("evict", "--space", "holder")["sequences"], 3)
            daemon.wait_until(lambda: daemon.json("status")["pages"] == 0)
            self.assertEqual(daemon.kvmctl("evict", "--space", "nowhere").returncode, 1)
            self.assertIn("evicts 1 sequence with", daemon.log())
            for holder in holders:
                self.assertIsNone(holder.poll(), "its owner lives on")
                holder.stdin.close()
                holder.wait()
                holder.stdout.close()

    @unittest.skipUnless(os.geteuid() == 0, "needs a second user")
    def test_other_users_are_refused_with_the_reason(self):
        with Daemon("--socket-mode", "0666") as daemon:
            os.chmod(daemon.folder, 0o755)
            holder = daemon.hold()
            def run(*command):
                return subprocess.run([f"{BIN}/kvmctl", "--socket", daemon.socket, *command],
                                      capture_output=True, text=True, check=False, user=65534,
                                      group=65534, extra_groups=[])
            seq = daemon.json("seqs")[0]["id"]
            result = daemon.kvmctl("evict", "--space", "holder", "--user", "65534")
            self.assertEqual(result.returncode, 1)
            self.assertIn('no space of user 65534 is named "holder"', result.stderr)
            self.assertEqual(daemon.kvmctl("evict", "--seq", seq, "--user", "0").returncode, 2)
            for command in (["evict", "--seq", seq], ["config", "dump"], ["seqs"],
                            ["clients"], ["quota", "set", "--user", "0", "--queues", "1"]):
                result = run(*command)
                if "Permission denied" in result.stderr:
                    self.skipTest("other users cannot run the programs of this build")
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn("KVM_ERR_PERMISSION", result.stderr)
                self.assertIn("that is for root and user 0, which runs kvmd", result.stderr)
            # Nor do they see spaces of others.
            result = run("evict", "--space", "holder")
            self.assertEqual(result.returncode, 1)
            self.assertIn('no space is named "holder"', result.stderr)
            self.assertEqual(json.loads(run("--json", "spaces").stdout), [])
            self.assertEqual(len(daemon.json("seqs")), 3)
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()


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
