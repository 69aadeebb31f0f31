#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The C++ estimator against models/house/estimators.py, on records.

attention_approx_dump says what the sketches estimate of every key, which keys it drew, and what it
answered. From the estimates the reference computes p and the draws; from the draws the answer, its
log-sum-exp and its error bar. A record with the statistics of real models is written here; those
that lie in the tree (models/house/sample) are taken too."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

ROOT = pathlib.Path(os.environ["KVM_SOURCE_DIR"])
sys.path.insert(0, str(ROOT / "models" / "house"))
import estimators  # noqa: E402
import kvrec  # noqa: E402
import sketches  # noqa: E402
import synthetic  # noqa: E402

DUMP = pathlib.Path(os.environ["KVM_BIN_DIR"]) / "attention_approx_dump"
MIN_SIZE = 1e-7


class Answer:
    """One query set, as C++ answered it and as NumPy sees the same keys."""

    def __init__(self, path, group, query, budget, seed):
        text = subprocess.run([DUMP, path, str(group), str(query), str(budget), str(seed)],
                              check=True, capture_output=True, text=True).stdout
        self.seed = seed
        self.dump = {name: np.array(value, np.float64 if name != "positions" else np.int64)
                     for name, value in json.loads(text).items()}
        with kvrec.Reader(path) as record:
            entry = record.groups[group]
            n = int(record.array("query_steps")[query]) + 1
            in_exact = np.ones(n, bool)
            in_exact[self.dump["positions"]] = False
            self.problem = estimators.Problem(
                record.array(entry["q"])[query], record.array(entry["k"])[:n],
                record.array(entry["v"])[:n], record.meta["softmax_scale"], in_exact)
        rows = len(self.problem.q)
        self.scores = np.zeros((rows, n))
        self.scores[:, self.dump["positions"]] = self.dump["logits"]
        sizes = np.exp(self.dump["logits"] + self.dump["log_c"][:, None]) * self.dump["norms"]
        self.p = np.clip(sizes.max(axis=0), MIN_SIZE, 1.0)
        self.drawn = np.isin(self.dump["positions"], self.dump["drawn"].astype(np.int64))

    def reference(self, head):
        return estimators.sampled_head(self.problem, head, self.scores[head], self.p, self.drawn,
                                       "scalar", None, self.dump["told"].astype(np.int64))


class ApproxNumpyTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        made = pathlib.Path(cls.folder.name) / "made.kvrec"
        synthetic.write_record(made, n_tokens=4096, seed=3, n_queries=4)
        cls.answers = []
        for path in [made, *sorted((ROOT / "models" / "house" / "sample").glob("*.kvrec"))]:
            with kvrec.Reader(path) as record:
                groups, queries = len(record.groups), len(record.array("query_steps"))
            for group in range(min(groups, 8)):
                answer = Answer(path, group, queries - 1, 150, 11 + group)
                cls.answers.append((f"{path.name} group {group}", answer))

    def each(self):
        for name, answer in self.answers:
            with self.subTest(name):
                yield answer

    def test_random_numbers(self):
        for answer in self.each():
            at = answer.dump["drawn"].astype(np.int64)
            wanted = sketches.permanent_random(answer.seed, len(answer.problem.k))[at]
            np.testing.assert_allclose(answer.dump["random"], wanted, rtol=0, atol=2**-26)

    def test_draws(self):
        for answer in self.each():
            u = sketches.permanent_random(answer.seed, len(answer.problem.k))
            u = u[answer.dump["positions"]]
            self.assertGreater(answer.drawn.sum(), 50)
            self.assertLess(answer.drawn.sum(), len(u))
            # Sizes are of fp32: keys within a rounding of their random number may go either way.
            near = np.abs(u / answer.p - 1) < 1e-3
            np.testing.assert_array_equal((u < answer.p)[~near], answer.drawn[~near])
            self.assertLess(near.mean(), 0.01)

    def test_output_and_lse(self):
        for answer in self.each():
            for head, o in enumerate(answer.dump["o"].reshape(len(answer.problem.q), -1)):
                wanted, lse = answer.reference(head)[:2]
                self.assertLess(np.linalg.norm(o - wanted) / np.linalg.norm(wanted), 1e-3)
                self.assertLess(abs(answer.dump["lse"][head] - lse), 1e-3)

    def test_bar_and_noise(self):
        for answer in self.each():
            for head in range(len(answer.problem.q)):
                o, _, _, _, bar, noise = answer.reference(head)
                self.assertLess(abs(answer.dump["noise"][head] - noise), 1e-3 + 0.01 * noise)
                # Weights meet values in bf16 there.
                wanted = bar / np.linalg.norm(o)
                self.assertLess(abs(answer.dump["err_o"][head] / wanted - 1), 0.05)


if __name__ == "__main__":
    unittest.main()
