#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP: the text by a parser of this file's own, the address, hostile scrapers."""

import contextlib
import http.client
import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
import unittest

from daemon_harness import Daemon, run_kvmd

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")  # no colon: those are for recording rules
SAMPLE = re.compile(r'([a-zA-Z_]\w*)(?:\{(.*)\})? (\S+)\Z')
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|\Z)')
TYPES = {"counter", "gauge", "histogram"}


class Exposition:
    """Prometheus' text format, read strictly: raises ValueError where a scraper would stumble."""

    def __init__(self, text):
        self.types = {}
        self.helps = {}
        self.samples = {}  # (name, ((label, value), ...)) -> number
        self.order = []    # families as they come
        if not text.endswith("\n"):
            raise ValueError("no newline at the end")
        for line in text[:-1].split("\n"):
            self.read_line(line)
        self.check_families()
        self.check_histograms()

    def read_line(self, line):
        if line.startswith("# "):
            _, keyword, name, rest = line.split(" ", 3)
            table = {"HELP": self.helps, "TYPE": self.types}[keyword]
            if name in table:
                raise ValueError(f"{keyword} of {name} twice")
            if keyword == "TYPE" and rest not in TYPES:
                raise ValueError(f"{name} is of the type {rest}")
            table[name] = rest
            if keyword == "TYPE":
                self.order.append(name)
            return
        match = SAMPLE.match(line)
        if not match:
            raise ValueError(f"not a sample: {line!r}")
        name, labels, value = match.groups()
        pairs = tuple(sorted(LABEL.findall(labels or "")))
        if labels and sum(len(f'{k}="{v}"') for k, v in pairs) + len(pairs) - 1 != len(labels):
            raise ValueError(f"labels of {line!r}")
        if (name, pairs) in self.samples:
            raise ValueError(f"{name}{dict(pairs)} twice")
        if not self.order or self.family(name) != self.order[-1]:
            raise ValueError(f"{name} is not among the samples of its family")
        number = math.inf if value == "+Inf" else float(value)
        if math.isnan(number):
            raise ValueError(f"{name} is NaN")
        self.samples[name, pairs] = number

    def family(self, name):
        for suffix in ("_bucket", "_sum", "_count"):
            base = name.removesuffix(suffix)
            if base != name and self.types.get(base) == "histogram":
                return base
        return name

    def check_families(self):
        for name, kind in self.types.items():
            if not NAME.match(name) or not name.startswith("kvm_"):
                raise ValueError(f"the name {name}")
            if not self.helps.get(name, "").endswith("."):
                raise ValueError(f"the help of {name}")
            if (kind == "counter") != name.endswith("_total"):
                raise ValueError(f"{name} is a {kind}")
            if not any(self.family(sample) == name for sample, _ in self.samples):
                raise ValueError(f"{name} has no samples")
        for name, pairs in self.samples:
            if self.types[self.family(name)] != "gauge" and self.samples[name, pairs] < 0:
                raise ValueError(f"{name} is negative")

    def check_histograms(self):
        for name in (n for n, kind in self.types.items() if kind == "histogram"):
            series = {}
            for (sample, pairs), value in self.samples.items():
                if sample == f"{name}_bucket":
                    rest = tuple(p for p in pairs if p[0] != "le")
                    bound = dict(pairs)["le"]
                    series.setdefault(rest, []).append(
                        (math.inf if bound == "+Inf" else float(bound), value))
            for rest, buckets in series.items():
                bounds = [bound for bound, _ in buckets]
                counts = [count for _, count in buckets]
                if bounds != sorted(set(bounds)) or bounds[-1] != math.inf:
                    raise ValueError(f"bounds of {name}{rest}: {bounds}")
                if counts != sorted(counts):
                    raise ValueError(f"{name}{rest} goes down")
                if counts[-1] != self.samples[f"{name}_count", rest]:
                    raise ValueError(f"{name}{rest}: count and last bucket differ")
                if (self.samples[f"{name}_sum", rest] > 0) and counts[-1] == 0:
                    raise ValueError(f"{name}{rest}: a sum of nothing")

    def total(self, name, **labels):
        found = [value for (sample, pairs), value in self.samples.items()
                 if sample == name and all(dict(pairs).get(k) == v for k, v in labels.items())]
        if not found:
            raise ValueError(f"no sample of {name}{labels}")
        return sum(found)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def fetch(connection, path="/metrics", method="GET"):
    with contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read().decode()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def daemon_with_metrics():
    """A kvmd whose metrics are at the second value, a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "metrics.sock")
        with Daemon("--metrics-listen", f"unix:{path}", folder=folder) as daemon:
            yield daemon, path


class TheParser(unittest.TestCase):
    GOOD = ("# HELP kvm_a_total A.\n# TYPE kvm_a_total counter\n"
            'kvm_a_total{x="1"} 2\nkvm_a_total{x="2"} 3\n')

    def test_accepts_and_rejects(self):
        self.assertEqual(Exposition(self.GOOD).total("kvm_a_total"), 5)
        for bad in (
                self.GOOD[:-1], self.GOOD + 'kvm_a_total{x="1"} 4\n', self.GOOD + "kvm_b 1\n",
                self.GOOD.replace("counter", "gauge"), self.GOOD.replace("counter", "meter"),
                self.GOOD.replace('"1"', '1'), self.GOOD + "# TYPE kvm_a_total counter\n",
                self.GOOD.replace("kvm_", "vllm:"), self.GOOD.replace(" 2", " -2"),
                self.GOOD + "# HELP kvm_c C.\n# TYPE kvm_c gauge\n",
                "# HELP kvm_h H.\n# TYPE kvm_h histogram\nkvm_h_bucket{le=\"1\"} 2\n"
                'kvm_h_bucket{le="+Inf"} 1\nkvm_h_sum 1\nkvm_h_count 1\n'):
            with self.assertRaises((ValueError, KeyError), msg=bad):
                Exposition(bad)


class Metrics(unittest.TestCase):
    def scrape(self, path):
        status, kind, text = fetch(UnixConnection(path))
        self.assertEqual(status, 200)
        self.assertEqual(kind, "text/plain; version=0.0.4; charset=utf-8")
        return Exposition(text)

    def test_text_from_the_start_and_after_work(self):
        with daemon_with_metrics() as (daemon, path):
            before = self.scrape(path)
            for name, kind in before.types.items():
                if kind == "counter" and name != "kvm_dispatcher_sleeps_total":
                    self.assertEqual(before.total(name), 0, f"{name} at the start")
            holder = daemon.hold()
            daemon.json("status")
            time.sleep(0.2)  # A copy serves for 0.1 s.
            after = self.scrape(path)
            self.assertEqual(set(before.samples), set(after.samples), "series come and go")
            self.assertEqual(after.total("kvm_sequences"), 3)
            self.assertGreater(after.total("kvm_appended_tokens_total"), 0)
            self.assertEqual(after.total("kvm_requests_total"),
                             after.total("kvm_request_duration_seconds_count"))
            self.assertEqual(after.total("kvm_request_duration_seconds_count", verb="sequence"), 3)
            for part, whole in (("kvm_attend_keys_present_total", "kvm_keys_present_total"),
                                ("kvm_attend_keys_read_total", "kvm_keys_read_total")):
                self.assertEqual(after.total(part), after.total(whole))
            client, said = daemon.client("daemon_attender")
            time.sleep(0.2)
            attended = self.scrape(path)
            self.assertEqual(attended.total("kvm_attend_requests_total"), len(said))
            for mode in ("exact", "topk", "sampled"):
                self.assertGreater(attended.total("kvm_attend_requests_total", mode=mode), 0)
            self.assertEqual(attended.total("kvm_attend_keys_read_total"),
                             attended.total("kvm_keys_read_total"))
            for process in (holder, client):
                process.stdin.close()
                process.wait()
                process.stdout.close()
            self.assertEqual(daemon.end(), 0)
            self.assertFalse(os.path.exists(path), "the socket is removed")

    def test_paths_methods_and_permissions(self):
        with daemon_with_metrics() as (_, path):
            self.assertEqual(fetch(UnixConnection(path), "/healthz")[0::2], (200, "ok\n"))
            self.assertEqual(fetch(UnixConnection(path), "/metrics", "HEAD")[0::2], (200, ""))
            self.assertEqual(fetch(UnixConnection(path), "/etc/passwd")[0], 404)
            self.assertEqual(fetch(UnixConnection(path), "/metrics", "POST")[0], 405)
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o660)

    def test_loopback_port(self):
        port = free_port()
        with Daemon("--metrics-listen", f"127.0.0.1:{port}"):
            status, _, text = fetch(http.client.HTTPConnection("127.0.0.1", port, timeout=20))
            self.assertEqual(status, 200)
            Exposition(text)

    def test_addresses_that_others_could_reach_are_refused(self):
        for address in ("0.0.0.0:9464", "[::]:9464", "9464", "127.0.0.1:0", "127.0.0.1:70000",
                        "unix:relative", "example.com:80", "unix:/" + "x" * 107):
            result = run_kvmd("--metrics-listen", address)
            self.assertEqual(result.returncode, 2, address)
            self.assertIn("it must be off, unix:/PATH", result.stderr)

    def test_a_port_that_is_taken_is_a_start_that_fails(self):
        with socket.socket() as taken, tempfile.TemporaryDirectory() as folder:
            taken.bind(("127.0.0.1", 0))
            taken.listen(1)
            result = run_kvmd("--socket", f"{folder}/kvmd.sock", "--metrics-listen",
                              f"127.0.0.1:{taken.getsockname()[1]}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("for metrics", result.stderr)

    def test_hostile_scrapers_do_not_hold_the_service_up(self):
        with daemon_with_metrics() as (daemon, path), contextlib.ExitStack() as stack:
            def dial():
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(20)
                sock.connect(path)
                return sock

            silent = dial()
            half = dial()
            half.sendall(b"GET /metr")
            deaf = dial()  # asks and never reads
            with contextlib.suppress(OSError):
                for _ in range(200):
                    deaf.settimeout(0.05)
                    deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            large = dial()
            with contextlib.suppress(OSError):
                large.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n")
                self.assertRegex(large.recv(64), rb"\AHTTP/1.1 4\d\d |\A\Z")
            junk = dial()
            with contextlib.suppress(OSError):
                junk.sendall(bytes(range(256)) * 64)
            # While they hang on, the service works and a decent scraper gets its text.
            self.assertEqual(daemon.json("ping", "-c", "20")["count"], 20)
            self.scrape(path)
            # Only what was never sent is waited for: silence and halves end by themselves.
            dripper = threading.Thread(target=self.drip, args=(half,))
            dripper.start()
            started = time.monotonic()
            self.assertEqual(silent.recv(64), b"")
            half_end = half.recv(64)
            self.assertTrue(half_end == b"" or b" 408 " in half_end, half_end)
            self.assertLess(time.monotonic() - started, 15)
            dripper.join()
            self.assertEqual(daemon.end(), 0)

    @staticmethod
    def drip(sock):
        """A byte a second: never idle, never done."""
        with contextlib.suppress(OSError):
            for _ in range(12):
                sock.sendall(b"x")
                time.sleep(1)

    def test_connections_are_bounded(self):
        with daemon_with_metrics() as (daemon, path), contextlib.ExitStack() as stack:
            for _ in range(100):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(5)
                with contextlib.suppress(OSError):
                    sock.connect(path)
            fds = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
            self.assertLess(fds, 80)
            self.assertEqual(daemon.json("ping", "-c", "5")["count"], 5)

    def test_a_dispatcher_that_does_not_turn_is_said(self):
        # Stopped whole, the daemon answers nobody; what matters is that it goes on afterwards.
        with daemon_with_metrics() as (daemon, path):
            daemon.process.send_signal(signal.SIGSTOP)
            waiting = UnixConnection(path)
            waiting.request("GET", "/healthz")
            time.sleep(0.3)
            daemon.process.send_signal(signal.SIGCONT)
            self.assertIn(waiting.getresponse().status, (200, 503))
            waiting.close()
            self.scrape(path)


if __name__ == "__main__":
    unittest.main()
