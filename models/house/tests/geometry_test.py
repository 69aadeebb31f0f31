# SPDX-License-Identifier: Apache-2.0
"""The statistics find what was planted: spectra, masses, overlaps, and heads of each class."""
import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import geometry  # noqa: E402
import kvrec  # noqa: E402
import measure  # noqa: E402
import svg  # noqa: E402

N, D = 2048, 32


def one_head(logits, tokens=None, v=None, step=N - 1):
    """Statistics of a head with the given logits [N]."""
    tokens = np.full(N, -1) if tokens is None else tokens
    v = np.random.default_rng(1).standard_normal((N, D)) if v is None else v
    return geometry.head_statistics(logits, geometry.softmax(logits), v, tokens, step)[0]


def labels(logits, tokens=None):
    stats = one_head(logits, tokens)
    stats["sharp"] = float(stats["few"] >= 0.5)
    return geometry.classify(stats)


class KeyTest(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(2)

    def test_spectrum_of_a_power_law(self):
        x = self.rng.standard_normal((20000, D)) * np.arange(1, D + 1) ** -0.65
        summary = geometry.spectrum_summary(geometry.spectrum(x))
        self.assertAlmostEqual(summary["power"], 1.3, delta=0.05)
        self.assertAlmostEqual(summary["top1"], 1 / (np.arange(1, D + 1) ** -1.3).sum(), delta=0.02)

    def test_alignment_of_isotropic_and_of_shared_axes(self):
        iso = geometry.alignment(self.rng.standard_normal((4000, D)),
                                 self.rng.standard_normal((4000, D)))
        self.assertAlmostEqual(iso["excess"], 1.0, delta=0.02)
        self.assertAlmostEqual(iso["balanced8"], 8 / D, delta=0.06)
        axes = np.where(np.arange(D) < 8, 3.0, 0.01)
        shared = geometry.alignment(self.rng.standard_normal((4000, D)) * axes,
                                    self.rng.standard_normal((4000, D)) * axes)
        self.assertGreater(shared["pca8"], 0.999)
        self.assertAlmostEqual(shared["excess"], D / 8, delta=0.1)

    def test_blocks(self):
        iid = geometry.explained_by_blocks(self.rng.standard_normal((8192, D)))
        for size in geometry.BLOCKS:
            self.assertAlmostEqual(iid[str(size)], 1 / size, delta=0.02)
        smooth = np.repeat(self.rng.standard_normal((256, D)), 32, axis=0)
        self.assertAlmostEqual(geometry.explained_by_blocks(smooth)["32"], 1.0)
        self.assertAlmostEqual(geometry.explained_by_blocks(smooth)["64"], 0.5, delta=0.03)

    def test_mean_sink_and_norms(self):
        mean = np.zeros(D)
        mean[3] = 10.0
        k = self.rng.standard_normal((N, D)) + mean
        k[0] = -2 * mean
        v = self.rng.standard_normal((N, D))
        v[0] *= 0.1
        q = self.rng.standard_normal((16, 4, D)) - 3 * mean
        stats = geometry.key_statistics(q, k, v, k - mean)
        self.assertAlmostEqual(stats["mean_norm"], 10.0, delta=0.3)
        self.assertAlmostEqual(stats["centred_rms"], D**0.5, delta=0.2)
        self.assertLess(stats["cos_sink_mean"], -0.99)
        self.assertLess(stats["cos_query_mean"], -0.9)
        self.assertLess(stats["sink_value_norm"], 0.2)
        self.assertGreater(stats["mahalanobis_ratio"], 5.0)
        self.assertAlmostEqual(stats["code_alignment"], 0.798, delta=0.02)
        self.assertEqual(stats["keys"]["rank90"], stats["keys_pre"]["rank90"])


class AttentionTest(unittest.TestCase):
    def test_uniform(self):
        stats = one_head(np.zeros(N))
        self.assertAlmostEqual(stats["effective"], N)
        self.assertAlmostEqual(stats["top5"], 0.05, delta=1e-3)
        self.assertAlmostEqual(stats["far_top20"], 0.2, delta=1e-3)
        self.assertAlmostEqual(stats["sink"], 4 / N)
        self.assertAlmostEqual(stats["local"], 64 / N)
        self.assertEqual(stats["spread"], 0.0)

    def test_diversity_by_hand(self):
        logits = np.full(N, -100.0)
        logits[[500, 600]] = 0.0
        v = np.zeros((N, D))
        v[500, 0], v[600, 1] = 3.0, 4.0     # o = (1.5, 2): |v - o| = 2.5 = |o| for both
        self.assertAlmostEqual(one_head(logits, v=v)["diversity"], 1.0)

    def test_overlaps(self):
        rng = np.random.default_rng(3)
        row = np.exp(rng.standard_normal(2000))
        same = geometry.overlap_statistics(np.tile(row, (4, 1)), np.tile(row[:-1], (4, 1)))
        self.assertEqual(same["heads"], 1.0)
        self.assertEqual(same["unique"], 0.25)
        self.assertGreater(same["steps"], 0.9)
        self.assertGreater(same["shared"], 0.99)
        other = geometry.overlap_statistics(np.exp(rng.standard_normal((4, 2000))), None)
        self.assertLess(other["heads"], 0.1)
        self.assertNotIn("steps", other)

    def test_far_mass_behind_copies(self):
        tokens = np.arange(N) + 10
        tokens[[300, N - 1]] = 5             # seen before at 300
        logits = np.full(N, -50.0)
        logits[301] = 0.0
        stats = one_head(logits, tokens)
        self.assertAlmostEqual(stats["induction"], 1.0)
        self.assertAlmostEqual(stats["induction_chance"], 1 / (N - 68))
        self.assertTrue(np.isnan(stats["copy"]))


class ClassTest(unittest.TestCase):
    def test_planted_heads(self):
        rng = np.random.default_rng(4)
        noise = 0.1 * rng.standard_normal(N)
        sink, local, needle, copy = (noise.copy() for _ in range(4))
        sink[0] += 12.0
        local[-64:] += 8.0
        needle[777] += 12.0
        tokens = rng.integers(100, 200, N)
        tokens[[400, 900, N - 1]] = 7
        copy[[401, 901]] += 11.0
        self.assertEqual(labels(sink), ["sink-dominated"])
        self.assertEqual(labels(local), ["local"])
        self.assertEqual(labels(needle, tokens), ["sharp retrieval"])
        self.assertEqual(labels(copy, tokens), ["sharp retrieval", "induction"])
        self.assertEqual(labels(noise), ["flat aggregation"])
        self.assertEqual(labels(2.1 * rng.standard_normal(N)), [])

    def test_names(self):
        flat, sink = one_head(np.zeros(N)), one_head(np.r_[12.0, np.zeros(N - 1)])
        for stats in (flat, sink):
            stats["sharp"] = 0.0
        named = geometry.name_classes({(0, 0, 0): flat, (0, 0, 1): sink})
        self.assertEqual(named["sink-dominated"]["members"], [(0, 0, 1)])
        self.assertEqual(named["flat aggregation"]["best"], (0, 0, 0))
        self.assertEqual(named["local"]["members"], [])
        self.assertIsNone(named["induction"]["best"])

    def test_lines_of_records(self):
        rng = np.random.default_rng(5)
        k = rng.standard_normal((N, 16))
        k[0] = 8.0
        arrays = {"positions": ("i32", np.arange(N)), "tokens": ("i32", rng.integers(0, 99, N)),
                  "query_steps": ("i32", np.arange(N - 8, N)),
                  # The first head looks at the first key, the second at nothing.
                  "q": ("bf16", np.stack([np.full((8, 16), 1.0), np.zeros((8, 16))], axis=1)),
                  "k": ("bf16", k), "v": ("bf16", rng.standard_normal((N, 16)))}
        group = {"layer": 3, "kv_head": 1, "q_heads": [2, 3], "q": "q", "k": "k", "v": "v"}
        with tempfile.TemporaryDirectory() as folder:
            record, lines = (os.path.join(folder, name) for name in ("one.kvrec", "lines.jsonl"))
            kvrec.write(record, {"n_tokens": N, "n_queries": 8, "head_dim": 16,
                                 "softmax_scale": 0.25, "model": {}, "prompt": {},
                                 "groups": [group]}, arrays)
            out = io.StringIO()
            arguments = ["geometry.py", record, record, "--out", folder, "--lines", lines]
            with unittest.mock.patch.object(sys, "argv", arguments), \
                    contextlib.redirect_stdout(out):
                geometry.main()
            with open(lines, encoding="utf-8") as file:
                found = [json.loads(line) for line in file]
        self.assertEqual([(line["layer"], line["kv_head"], line["q_head"], line["classes"])
                          for line in found], [(3, 1, 2, ["sink-dominated"]),
                                               (3, 1, 3, ["flat aggregation"])])
        self.assertGreater(found[0]["sink"], 0.9)
        self.assertIsNone(found[0]["pre"])
        self.assertIn("over 2 heads", out.getvalue())
        rows = [line.split() for line in out.getvalue().splitlines()]
        self.assertIn(["sink-dominated", "1"], [row[:2] for row in rows])


class RepairTest(unittest.TestCase):
    def repair(self, error, noise, error_2b=0.1, noise_2b=0.9, true_w=0.01, group=0.1, errors=()):
        entry = {"over_error": error > 0.06, "over_noise": noise > 0.7, "error_2b": error_2b,
                 "error_true_w": true_w, "error_group": group, "noise": {"2b": noise_2b}}
        return measure.repair(entry, errors)

    def test_words(self):
        self.assertEqual(self.repair(0.05, 0.5), "")
        self.assertEqual(self.repair(0.07, 0.8, error_2b=0.05, noise_2b=0.6), "2b")
        self.assertEqual(self.repair(0.07, 0.5, errors=[(0.01, 0.07), (0.02, 0.05)]),
                         "2 % of the rows")
        self.assertEqual(self.repair(0.2, 0.9, true_w=0.1, errors=[(0.1, 0.1)]),
                         "over 10 % of the rows (too flat: true weights miss too)")
        self.assertEqual(self.repair(0.07, 0.5, group=0.05), "the rows of the whole group")
        self.assertEqual(self.repair(0.01, 0.9), "more bits, for the bar only")


class PlotTest(unittest.TestCase):
    def test_points_land_where_the_axes_say(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.svg")
            svg.line_plot(path, "a < b", "x", "y", [("one", [(1, 1), (10, 5), (100, 9)]),
                                                    ("none", [(float("nan"), 2), (0, 1)])],
                          log_x=True)
            root = xml.etree.ElementTree.parse(path).getroot()
            spots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter()
                     if c.tag.endswith("circle")]
            self.assertEqual(len(spots), 3)
            self.assertAlmostEqual(spots[1][0], (spots[0][0] + spots[2][0]) / 2, delta=0.1)
            self.assertAlmostEqual(spots[1][1], (spots[0][1] + spots[2][1]) / 2, delta=0.1)
            with self.assertRaises(ValueError):
                svg.line_plot(path, "t", "x", "y", [("none", [])])

    def test_labels_stand_where_lines_end_and_apart(self):
        self.assertEqual(svg.spread([50, 10, 51], 17, 0, 100), [50, 10, 67])
        self.assertEqual(svg.spread([99, 98, 97], 17, 0, 100), [100, 83, 66])
        markers = ("circle", "square", "diamond", "triangle", "down", "left", "hexagon",
                   "cross", "plus")
        drawn = {svg.marker(svg.Style(marker=name), 0, 0) for name in markers}
        self.assertEqual(len(drawn), len(markers))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.svg")
            svg.labelled_plot(path, "a < b", ["c"], "x", "y",
                              [("one", svg.Style(), [(1, 1), (10, 5), (100, 9)]),
                               ("none", svg.Style(), [(0, 1)])])
            root = xml.etree.ElementTree.parse(path).getroot()
            spots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter()
                     if c.tag.endswith("circle")]
            self.assertEqual(len(spots), 4, "three points and the label")
            label, last = spots[0], spots[3]
            self.assertEqual(label[1], last[1])
            self.assertAlmostEqual(spots[2][0], (spots[1][0] + spots[3][0]) / 2, delta=0.1)
            with self.assertRaises(ValueError):
                svg.labelled_plot(path, "t", [], "x", "y", [("none", svg.Style(), [])])


if __name__ == "__main__":
    unittest.main()
