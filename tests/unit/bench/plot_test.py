#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/approx/plot.py: one plot for each bench, data and length; the newest figures count."""
import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench" / "approx"))
import plot  # noqa: E402


def error_line(mode, fraction, error, **more):
    line = {"bench": "error", "data": "model", "tokens": 8192, "mode": mode, "code": "2b",
            "rows": "bf16", "budget": fraction, "eps": 0.0, "bytes_fraction": fraction,
            "rel_error_mean": error}
    return {**line, **more}


class PlotTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def read(self, lines):
        file = self.path / "figures.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return plot.read_lines(file)

    def test_later_figures_of_the_same_settings_count(self):
        lines = self.read([error_line("sampled", 0.1, 0.5), error_line("sampled", 0.1, 0.03),
                           error_line("sampled", 0.2, 0.02), {"bench": "decode", "tokens": 1}])
        self.assertEqual([line["rel_error_mean"] for line in lines], [0.03, 0.02])

    def test_series_are_told_apart_by_mode_code_and_rows(self):
        lines = [error_line("sampled", 0.2, 0.02), error_line("sampled", 0.1, 0.03),
                 error_line("sampled", 0.1, 0.04, rows="int8"),
                 error_line("oracle_topk", 0.1, 0.2, code="oracle")]
        self.assertEqual(plot.series_of(lines, "bytes_fraction"),
                         [("sampled 2b", [(0.1, 3.0), (0.2, 2.0)]),
                          ("sampled 2b int8", [(0.1, 4.0)]), ("oracle_topk", [(0.1, 20.0)])])

    def test_one_plot_for_each_bench_data_and_length(self):
        timed = error_line("sampled", 0.1, 0.03, bench="sampled", ms=2.0, threads=2)
        lines = self.read([error_line("topk", 0.1, 0.2), error_line("topk", 0.1, 0.2, tokens=64),
                           error_line("topk", 0.1, 0.2, data="a/b c"), timed])
        names = {path.name for path in plot.plot(lines, self.path)}
        self.assertEqual(names, {"error-bytes-model-8192.svg", "error-bytes-model-64.svg",
                                 "error-bytes-a_b_c-8192.svg", "error-time-model-8192.svg"})
        text = (self.path / "error-bytes-model-8192.svg").read_text(encoding="utf-8")
        self.assertIn("topk 2b", text)
        self.assertEqual(text.count("<circle"), 1)


if __name__ == "__main__":
    unittest.main()
