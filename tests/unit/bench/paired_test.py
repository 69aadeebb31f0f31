# SPDX-License-Identifier: Apache-2.0
"""bench/paired.py: its interval, what it calls a loss, and pairs measured in parts; the programs it
compares write figures of which the truth is known."""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest

ROOT = os.environ["KVM_SOURCE_DIR"]
sys.path.insert(0, os.path.join(ROOT, "bench"))
import paired  # noqa: E402

FAKE = """#!{python}
import json, random, sys
path = sys.argv[sys.argv.index("--json") + 1]
noise = random.Random().uniform(0.97, 1.03)
with open(path, "w") as file:
    for row in ({{"bench": "x", "tokens": 1, "ms": {factor} * noise}},
                {{"bench": "x", "tokens": 2, "gbps": noise / {factor}}}):
        file.write(json.dumps(row) + "\\n")
sys.exit({status})
"""


def pairs_of(ratios):
    return [{"a": {"row": 1.0}, "b": {"row": ratio}} for ratio in ratios]


class Interval(unittest.TestCase):
    def test_ranks_are_those_of_the_binomial_distribution(self):
        # Of 30 values the 10th and the 21st: 95.7 %; the 11th and the 20th would hold 90.1 %.
        self.assertEqual(paired.interval([float(i) for i in range(1, 31)]), (15.5, 10.0, 21.0))
        held = sum(math.comb(30, k) for k in range(10, 21)) / 2**30
        self.assertGreaterEqual(held, 0.95)

    def test_it_holds_the_true_median_as_often_as_it_says(self):
        generator = random.Random(7)
        held = 0
        for _ in range(2000):  # of a skewed distribution, whose median is 1
            _, low, high = paired.interval([math.exp(generator.expovariate(1) - math.log(2))
                                            for _ in range(30)])
            held += low <= 1 <= high
        self.assertGreaterEqual(held / 2000, 0.94)

    def test_few_values_hold_everything(self):
        self.assertEqual(paired.interval([1.0, 2.0])[1:], (0.0, math.inf))


class Judge(unittest.TestCase):
    def test_a_loss_lies_wholly_above_the_limit(self):
        slower = [1.05 + 0.001 * (i % 10) for i in range(30)]
        self.assertEqual(paired.judge(pairs_of(slower))[0]["loss"], True)
        around = [1.00 + 0.002 * i for i in range(30)]  # its median is above, its low bound is not
        self.assertEqual(paired.judge(pairs_of(around))[0]["loss"], False)

    def test_fewer_than_thirty_pairs_prove_nothing(self):
        self.assertIsNone(paired.judge(pairs_of([2.0] * 29))[0]["loss"])


class Program(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(dir=".")
        self.addCleanup(self.folder.cleanup)

    def bench(self, name, factor, status=0):
        path = os.path.join(self.folder.name, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(FAKE.format(python=sys.executable, factor=factor, status=status))
        os.chmod(path, 0o755)
        return os.path.abspath(path)

    def run_pairs(self, *arguments, **changes):
        a, b = self.bench("a", 1.0), self.bench("b", **{"factor": 1.2, **changes})
        return subprocess.run([sys.executable, os.path.join(ROOT, "bench/paired.py"), "--a", a,
                               "--b", b, *arguments, "--", "x"], check=False, capture_output=True,
                              text=True)

    def test_finds_a_loss_of_times_and_of_rates(self):
        figures = os.path.join(self.folder.name, "figures.jsonl")
        result = self.run_pairs("--pairs", "30", "--json", figures)
        self.assertEqual(result.returncode, 1, result.stderr)
        with open(figures, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        self.assertEqual([row["row"] for row in rows], ["x tokens=1", "x tokens=2"])
        for row in rows:
            self.assertTrue(row["loss"])
            self.assertAlmostEqual(row["ratio"], 1.2, delta=0.03)

    def test_equals_are_no_loss(self):
        result = self.run_pairs("--pairs", "30", factor=1.0)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(result.stdout.count("no loss"), 2)

    def test_pairs_are_kept_and_continued_in_turned_order(self):
        kept = os.path.join(self.folder.name, "pairs.jsonl")
        self.assertIn("too few pairs", self.run_pairs("--pairs", "3", "--keep", kept).stdout)
        self.run_pairs("--pairs", "5", "--keep", kept)
        with open(kept, encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["order"] for line in file],
                             ["ab", "ba", "ab", "ba", "ab"])

    def test_a_bench_that_fails_ends_it(self):
        result = self.run_pairs("--pairs", "30", factor=1.0, status=3)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("ended with status 3", result.stderr)


if __name__ == "__main__":
    unittest.main()
