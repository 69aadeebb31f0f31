#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvm-bench policies` has a line for each system, whose bytes are those of its formula, and enough
samples behind each p99. Sizes are small: times are nobody's business here."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

BENCH = pathlib.Path(os.environ["KVM_BIN_DIR"]) / "kvm-bench"

COMMON = {"bench", "case", "system", "layers", "tokens"}
LENGTH = COMMON | {"mb", "bytes_fraction", "formula", "step_us", "step_fraction",
                   "append_ns_per_token", "append_fraction"}
COMMIT = COMMON | {"commit_ms", "commit_ns_per_token", "n_small", "small_p90_us", "small_p99_us",
                   "alone_p99_us", "n_middle", "middle_p99_us", "middle_alone_p99_us",
                   "n_commits", "token_commit_us", "token_commit_p99_us"}
SYSTEMS = {("streaming_llm", 4), ("duo_attention", 4), ("razor_attention", 4), ("h2o", 4),
           ("mikv", 4), ("alisa", 4), ("d2o", 8), ("kivi3", 4), ("kivi4", 4), ("gear4", 4),
           ("gear3", 4), ("yi_lightning", 4), ("yi_lightning", 8), ("minicache", 4),
           ("skip_decode", 8), ("unified_layer_skipping", 8), ("memory_mosaics", 2)}
FULL = {("full", 2), ("full", 4), ("full", 8)}
N_SAMPLES = 70


class PoliciesTest(unittest.TestCase):
    def run_bench(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "figures.jsonl"
            done = subprocess.run([BENCH, "policies", "--quick", *arguments, "--json", path],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        of = {case: [line for line in lines if line["case"] == case]
              for case in ("length", "commit", "mass")}
        for case, fields in (("length", LENGTH), ("commit", COMMIT)):
            for line in of[case]:
                self.assertLessEqual(fields, set(line), f"missing: {fields - set(line)}")
        return of

    def check(self, of):
        for line in of["length"]:
            # Lists begin and end with pages of 64 tokens that are not full: up to three, of 40.
            self.assertAlmostEqual(line["bytes_fraction"], line["formula"], delta=3 / 40 + 0.01,
                                   msg=line["system"])
            self.assertGreater(line["step_fraction"], 0)
        for line in of["commit"]:
            self.assertGreaterEqual(min(line["n_small"], line["n_middle"],
                                        line["n_commits"]), N_SAMPLES)
            self.assertLessEqual(line["token_commit_us"], line["token_commit_p99_us"])

    def test_one_system(self):
        of = self.run_bench("--policy", "mikv")
        self.assertEqual([line["system"] for line in of["length"]], ["full", "mikv"])
        self.check(of)

    # Minutes, so by night only.
    def check_all_systems(self):
        of = self.run_bench()
        names = [(line["system"], line["layers"]) for line in of["length"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(set(names), SYSTEMS | FULL)
        self.check(of)
        # A system that decodes only has no prompt to commit.
        self.assertEqual({(line["system"], line["layers"]) for line in of["commit"]},
                         SYSTEMS - {("skip_decode", 8)} | {("full", 4)})
        self.assertEqual([line["rows"] for line in of["mass"]], [1, 4, 64])

    if "KVM_NIGHTLY" in os.environ:
        test_all_systems = check_all_systems

    def test_a_preset_that_is_not_in_the_table(self):
        of = self.run_bench("--policy", "kivi")
        for case in ("length", "commit"):
            self.assertEqual([line["system"] for line in of[case]], ["full", "kivi"])
        self.assertIsNone(of["length"][1]["formula"])  # nobody has said
        # Both take 2.5 bits a channel; of a page that is not full 16.
        self.assertAlmostEqual(of["length"][1]["bytes_fraction"], 2.5 / 16, delta=0.03)


if __name__ == "__main__":
    unittest.main()
