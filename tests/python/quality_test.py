# SPDX-License-Identifier: Apache-2.0
"""What docs/eval.md promises of settings, on the real model and on single facts: `./dev nightly
quality`, for it takes an hour. The lines go to build/quality-*.jsonl."""

import collections
import json
import os
import statistics
import unittest
from pathlib import Path

from kvm.eval import _smollm
from kvm.eval.__main__ import main

ROOT = Path(os.environ["KVM_SOURCE_DIR"])
MODEL = ROOT / "build" / "model" / Path(_smollm.MEMBER).name


def lines_of(command, *arguments):
    path = ROOT / "build" / f"quality-{command}.jsonl"
    path.unlink(missing_ok=True)
    if main([command, *arguments, "--json", str(path)]) != 0:
        raise AssertionError(f"kvm-eval {command} failed")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Quality(unittest.TestCase):
    def test_the_real_model(self):
        """Means over four texts of 8,192 tokens; the tightest bound on a text is twice that."""
        rows = collections.defaultdict(list)
        judged = [part for mode in ("exact", "sampled", "balanced", "verified")
                  for part in ("--only", mode)]
        for line in lines_of("real", "--model", str(MODEL), "--scored", "256", *judged):
            rows[line["mode"], line["setting"]].append(line)
        for (mode, setting), kl, most in (
                (("exact", "int8"), 1e-3, 0.52), (("sampled", "512 int8"), 2e-3, 0.15),
                (("balanced", "128, 0.05"), 2e-3, 0.15), (("balanced", "256, 0.015"), 5e-4, 0.2),
                (("balanced", "256, 0.025 int8"), 1.5e-3, 0.15),
                (("verified", "(0.1, 0.1)"), 1.5e-3, 0.18),
                (("verified", "(0.1, 0.1) int8"), 1.5e-3, 0.15),
                (("verified", "(0.07, 0.1)"), 5e-4, 0.2)):
            with self.subTest(mode=mode, setting=setting):
                lines = rows[mode, setting]
                self.assertEqual(len(lines), 4)
                self.assertFalse(any(line["is_mixed"] for line in lines))
                self.assertLessEqual(statistics.mean(line["kl"] for line in lines), kl)
                self.assertLessEqual(max(line["kl"] for line in lines), 2 * kl)
                self.assertLessEqual(statistics.mean(line["bytes_fraction"] for line in lines),
                                     most)

    def test_single_facts(self):
        rows = lines_of("tasks", "--house", str(ROOT / "models/house"), "--prompts", "1000",
                        "--only", "verified", "--only", "sampled")
        claims = {(row["mode"], row["setting"]): row["claim"] for row in rows}
        self.assertTrue(claims["verified", "(0.1, 0.1)"])
        self.assertTrue(claims["sampled", "256"])
        self.assertFalse(any(row["is_mixed"] for row in rows))


if __name__ == "__main__":
    unittest.main()
