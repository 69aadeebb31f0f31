#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvm-bench writes the fields that documents and plots are made from, in ranges that make sense.

Sizes are tiny: what the figures are is nobody's business here."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

BENCH = pathlib.Path(os.environ["KVM_BIN_DIR"]) / "kvm-bench"

ERROR = {"bench", "data", "mode", "code", "rows", "tokens", "keys_read_fraction", "bytes_fraction",
         "rel_error_mean", "rel_error_p95", "rel_error_p99", "lse_error"}
COVERAGE = {"bench", "data", "tokens", "eps", "delta", "trials", "heads", "miss_rate",
            "bar_miss_rate", "worst_row", "rows_failed", "fallback_rate", "keys_read_fraction"}
TIMED = {"bench", "data", "tokens", "threads", "mode", "speedup", "rel_error_mean",
         "index_bytes_per_token"}
DECODE = {"bench", "mode", "tokens", "ms_per_token", "gbps", "ipc_overhead_fraction", "bytes_read",
          "rss_bytes", "rel_error_mean", "keys_read_fraction"}
DECODE_EXACT = DECODE | {"ceiling_gbps", "fraction"}
DECODE_APPROXIMATE = DECODE | {"speedup", "index_bytes_per_token"}
SHORT = {"bench", "where", "tokens", "gap_us", "beside", "p50_ms", "p90_ms", "one_thread_ms",
         "steal_share"}
SHORT_ALONE = SHORT | {"reads_speedup", "reads_p90_ratio", "slow_threads",
                       "slow_outside_ms", "slow_waiting_ms", "slow_computing_ms"}
SHORT_BESIDE = SHORT | {"setting", "tokens_per_s", "alone_per_s", "of_best"}
MOVES = {"bench", "moved_gbps", "decode_slowdown", "dispatcher_stall_p99_us", "pages_copied",
         "used_gib_before", "used_gib_after", "pages_gib"}
COLD = {"bench", "case", "tokens", "n_query", "fraction_of_tier", "page_reads_per_page",
        "dispatcher_stall_p99_us"}
DISK = {"bench", "case", "gbps", "backend", "direct"}
OVERFLOW = {"bench", "case", "ms_per_token", "disk_gbps", "stall_fraction", "bit_equal"}
DISK_MOVES = {"bench", "case", "cap_gbps", "moved_gbps", "decode_slowdown",
              "dispatcher_stall_p99_us"}
COLD_SAMPLED = {"bench", "shape", "mode", "budget", "ms", "keys_read", "io_kb"}
PREFIX = {"bench", "case", "n_prefixes", "tokens", "stored", "hash_ns_per_token", "miss_ns",
          "miss_p99_ns", "hit_ns", "hit_us", "fork_us", "fork_p99_us", "fork_paid_bytes", "ping_us"}
SHARES = ("keys_read_fraction", "miss_rate", "fallback_rate", "ipc_overhead_fraction",
          "steal_share")


class FiguresTest(unittest.TestCase):
    def run_bench(self, *arguments, fails=False):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "figures.jsonl"
            done = subprocess.run([BENCH, *arguments, "--repeats", "7", "--json", path],
                                  capture_output=True, text=True, check=False)
            if not fails:
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(path, encoding="utf-8") as file:
                return [json.loads(line) for line in file]

    def check(self, lines, bench, fields):
        self.assertTrue(lines)
        for line in lines:
            self.assertEqual(line["bench"], bench)
            self.assertLessEqual(fields, set(line), f"missing: {fields - set(line)}")
            for name in fields & set(SHARES):
                self.assertGreaterEqual(line[name], 0, name)
                self.assertLessEqual(line[name], 1, name)
            for name in ("rel_error_mean", "lse_error"):
                self.assertGreaterEqual(line.get(name, 0), 0, name)

    def test_moves(self):
        lines = self.run_bench("moves", "--quick", "--memory", "1gb")
        self.check(lines, "moves", MOVES)
        for line in lines:
            self.assertGreater(line["moved_gbps"], 0)
            self.assertEqual(line["pages_copied"], 0)
            self.assertLess(line["used_gib_after"], line["used_gib_before"])
            self.assertGreaterEqual(line["used_gib_after"], line["pages_gib"])

    def test_cold(self):
        lines = self.run_bench("cold", "--quick")
        self.check(lines, "cold", COLD)
        self.assertEqual({line["case"] for line in lines}, {"decode", "chunk"})
        for line in lines:
            self.assertGreater(line["fraction_of_tier"], 0)
            self.assertEqual(line["page_reads_per_page"], 1)

    def test_disk(self):
        lines = self.run_bench("disk", "--quick")
        self.check(lines, "disk", DISK)
        self.assertEqual([line["case"] for line in lines],
                         ["sequential_write", "sequential_read", "random_read"])
        for line in lines:
            self.assertGreater(line["gbps"], 0)
            # fio is there or is not.
            self.assertEqual("fio_gbps" in line, "fraction" in line)

    def test_overflow(self):
        lines = self.run_bench("overflow", "--quick")
        self.check(lines, "overflow", OVERFLOW)
        self.assertEqual([line["case"] for line in lines],
                         ["decode", "with_prompt", "one_client", "one_client_between"])
        for line in lines:
            self.assertTrue(line["bit_equal"])
            self.assertGreater(line["disk_gbps"], 0)
            self.assertEqual("fio_gbps" in line, "disk_fraction" in line)

    def test_disk_moves(self):
        lines = self.run_bench("disk_moves", "--quick")
        self.check(lines, "disk_moves", DISK_MOVES)
        self.assertEqual([line["case"] for line in lines], ["to_disk", "to_memory", "replace"])

    def test_cold_sampled(self):
        lines = self.run_bench("cold_sampled", "--quick")
        self.check(lines, "cold_sampled", COLD_SAMPLED)
        self.assertLessEqual({"exact", "sampled", "auto"}, {line["mode"] for line in lines})
        for line in lines:
            if line["mode"] == "exact":
                self.assertEqual(line["keys_read"], 1)
            self.assertLessEqual(line["io_share"], 1)

    def test_error(self):
        lines = self.run_bench("error", "--quick", "--data", "model", "--tokens", "1024",
                               "--heads", "1")
        self.check(lines, "error", ERROR)
        modes = {line["mode"] for line in lines}
        self.assertLessEqual({"exact", "topk", "sampled", "verified", "magicpig", "oracle_topk",
                              "uniform_residual", "page_bounds", "magicpig_fp64"}, modes)
        for line in lines:
            if line["mode"] == "exact" and line["rows"] == "bf16":
                self.assertLess(line["rel_error_mean"], 1e-2)
                self.assertEqual(line["keys_read_fraction"], 1)
        self.assertTrue(any(line["keys_read_fraction"] < 1 for line in lines))

    def test_coverage(self):
        lines = self.run_bench("coverage", "--quick", "--data", "model", "--tokens", "4096",
                               "--heads", "3", "--seeds", "4")
        self.check(lines, "coverage", COVERAGE)
        self.assertEqual([(line["mode"], line["eps"], line["budget"], line["delta"])
                          for line in lines],
                         [("verified", 0.05, 0, 0.1), ("sampled", 0, 200, 0.1),
                          ("sampled", 0.03, 200, 0.1), ("verified", 0.05, 0, 0.01),
                          ("sampled", 0, 200, 0.01), ("sampled", 0.03, 200, 0.01)])
        for line in lines:
            self.assertEqual(line["heads"], 3)
            self.assertEqual(line["trials"], 3 * 4 * 4 * 4)  # heads, sets, rows, seeds

    def test_sampled(self):
        lines = self.run_bench("sampled", "--quick", "--data", "model", "--tokens", "1024")
        self.check(lines, "sampled", TIMED)
        self.assertLessEqual({"exact", "sampled", "verified"}, {line["mode"] for line in lines})

    def test_magicpig(self):
        lines = self.run_bench("magicpig", "--quick", "--data", "real", "--tokens", "1024")
        self.check(lines, "magicpig", TIMED)

    def test_decode(self):
        # A ceiling over so little memory is none, and the run may fail for that.
        lines = self.run_bench("decode", "--mode", "exact,sampled,verified", "--max-tokens", "1024",
                               fails=True)
        self.check(lines, "decode", DECODE)
        self.assertEqual([line["mode"] for line in lines], ["exact", "sampled", "verified"])
        self.check(lines[:1], "decode", DECODE_EXACT)
        self.check(lines[1:], "decode", DECODE_APPROXIMATE)
        self.assertEqual((lines[0]["rel_error_mean"], lines[0]["keys_read_fraction"]), (0, 1))
        # The sample was one, and it was judged by the exact answers.
        self.assertLess(lines[1]["keys_read_fraction"], 1)
        self.assertGreater(lines[1]["rel_error_mean"], 1e-3)
        self.assertLess(lines[1]["rel_error_mean"], 0.2)

    def test_short(self):
        lines = self.run_bench("short", "--quick", "--tokens", "256")
        alone = [line for line in lines if line["beside"] == "none"]
        beside = [line for line in lines if line["beside"] == "engine"]
        self.check(alone, "short", SHORT_ALONE)
        self.check(beside, "short", SHORT_BESIDE)
        self.assertEqual({(line["where"], line["gap_us"]) for line in alone},
                         {(where, gap) for where in ("daemon", "embedded")
                          for gap in (0, 300, 2000)})
        self.assertEqual({line["where"] for line in beside if line["setting"] == "default"},
                         {"daemon", "embedded"})
        for line in beside:
            self.assertLessEqual(line["of_best"], 1)

    def test_prefix(self):
        lines = self.run_bench("prefix", "--quick")
        self.check(lines, "prefix", PREFIX)
        self.assertEqual([line["case"] for line in lines], ["small", "8b"])
        for line in lines:
            self.assertEqual(line["fork_paid_bytes"], 0)
            self.assertGreater(line["miss_ns"], 0)
            self.assertGreater(line["fork_us"], 0)
            # A hit is a find, which lies within it, and a fork.
            self.assertGreater(line["hit_us"], line["hit_ns"] * 1e-3)


if __name__ == "__main__":
    unittest.main()
