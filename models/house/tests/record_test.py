# SPDX-License-Identifier: Apache-2.0
"""The recorder writes what the model handed over, at the steps and heads that were chosen; what it
writes can be measured; and a second run says the same."""
import contextlib
import io
import os
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import geometry  # noqa: E402
import kvrec  # noqa: E402
import measure  # noqa: E402
import record  # noqa: E402
import synthetic  # noqa: E402

N, D = 600, 32
SHAPE = {"name": "fake", "layers": 3, "q_heads": 4, "kv_heads": 2, "rope_theta": 1e4,
         "rope_layout": "rotate_half"}


def value(layer, name, head):
    """[N, D] of one head: distinct for each, and exact in bf16."""
    kind = ("q_pre", "q", "k_pre", "k", "v").index(name)
    grid = (np.arange(N)[:, None] + np.arange(D)) % 4
    return grid + 4 * (layer + 3 * (head + 4 * kind))


def fake_model(tokens, positions, capture):
    assert tokens.shape == (1, N) and positions.shape == (N,)
    for layer in range(SHAPE["layers"]):
        for name in ("q_pre", "q", "k_pre", "k", "v"):
            heads = SHAPE["q_heads"] if name.startswith("q") else SHAPE["kv_heads"]
            capture(layer, name, np.stack([value(layer, name, h) for h in range(heads)])[None])


class RecordTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "r.kvrec")

    def tearDown(self):
        self.folder.cleanup()

    def write(self, path, model=fake_model):
        prompt = {"name": "p", "kind": "task", "seed": 3, "answers": [[100, 103], [N - 5, N]]}
        with contextlib.redirect_stdout(io.StringIO()):
            record.record_prompt(path, model, np.arange(N) % 50, SHAPE, {0: [1], 2: [0, 1]},
                                 prompt, pairs=20)

    def test_every_array_is_the_models(self):
        self.write(self.path)
        with kvrec.Reader(self.path) as found:
            found.verify()
            steps = found.array("query_steps")
            self.assertEqual([(g["layer"], g["kv_head"]) for g in found.groups],
                             [(0, 1), (2, 0), (2, 1)])
            for group in found.groups:
                layer, head = group["layer"], group["kv_head"]
                self.assertEqual(group["q_heads"], [2 * head, 2 * head + 1])
                for name in ("k_pre", "k", "v"):
                    np.testing.assert_array_equal(found.array(group[name]),
                                                  value(layer, name, head).astype(np.float32))
                q = found.array(group["q"])
                for index, q_head in enumerate(group["q_heads"]):
                    np.testing.assert_array_equal(q[:, index], value(layer, "q", q_head)[steps])

    def test_steps(self):
        steps = record.choose_steps(N, 20, [[100, 103], [N - 5, N]])
        self.assertTrue((np.diff(steps) > 0).all())
        self.assertEqual(list(steps[:3]), [99, 100, 101])           # each predicts an answer token
        self.assertTrue(set(range(N - 6, N - 1)) <= set(steps.tolist()))
        pairs = record.choose_steps(N, 20, [])
        self.assertTrue(all(s + 1 in pairs or s - 1 in pairs for s in pairs))

    def test_a_silent_model_is_an_error(self):
        with self.assertRaisesRegex(RuntimeError, "hand over q of layer 0"):
            self.write(self.path, model=lambda tokens, positions, capture: None)

    def test_same_run_same_file(self):
        other = self.path + "2"
        self.write(self.path)
        self.write(other)
        with open(self.path, "rb") as first, open(other, "rb") as second:
            self.assertEqual(first.read(), second.read())


class ProgrammeTest(unittest.TestCase):
    """measure.py and geometry.py from a file to their reports."""

    def run_twice(self, main, arguments, report):
        texts = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "s.kvrec")
                synthetic.write_record(path, n_tokens=2048, n_queries=8, types=["medium", "needle"])
                sys.argv = ["x", path, "--out", folder] + arguments
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    main()
                with open(os.path.join(folder, report), encoding="utf-8") as file:
                    texts.append((out.getvalue(), file.read()))
        self.assertEqual(texts[0], texts[1])
        return texts[0][0]

    def test_measure(self):
        out = self.run_twice(measure.main, ["--queries", "2", "--draws", "1", "--fractions",
                                            "0.01,0.05"], "estimators.json")
        for word in ("ht 8i8+1b", "lsh 10,150", "ht-diff", "uniform", "all records: mean error"):
            self.assertIn(word, out)

    def test_geometry(self):
        out = self.run_twice(geometry.main, [], "geometry.json")
        self.assertIn("sharp retrieval: ", out)
        self.assertIn("1.0.0", out)


if __name__ == "__main__":
    unittest.main()
