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
                 error_line("oracle_topk", 0.1, 0.2, code="oracle"), error_line("new", 0.5, 0.5)]
        series = plot.series_of(lines, "bytes_fraction")
        self.assertEqual([(name, points) for name, _, points in series],
                         [("new", [(0.5, 50.0)]), ("true top-k (oracle)", [(0.1, 20.0)]),
                          ("sampled", [(0.1, 3.0), (0.2, 2.0)]),
                          ("sampled, int8", [(0.1, 4.0)])])
        styles = {name: style for name, style, _ in series}
        self.assertEqual(styles["true top-k (oracle)"].colour, plot.GREY)
        self.assertNotEqual(styles["sampled"].colour, plot.GREY)
        self.assertEqual([styles[name].is_filled for name in ("sampled", "sampled, int8")],
                         [True, False])
        self.assertEqual(len({style.marker for _, style in plot.MODES.values()}), len(plot.MODES))
        codes = plot.series_of(lines + [error_line("sampled", 0.3, 0.01, code="1b")],
                               "bytes_fraction")
        self.assertIn("sampled, 1b", [name for name, _, _ in codes])

    def test_the_title_is_a_measured_point(self):
        lines = [error_line("sampled", 0.11, 0.034), error_line("sampled", 0.3, 0.007),
                 error_line("sampled", 0.01, 0.03, rows="int8"), error_line("topk", 0.05, 0.5),
                 error_line("topk", 0.13, 0.28), error_line("exact", 1.0, 1e-4, code="none")]
        title, about = plot.finding(lines, "bytes")
        self.assertEqual(title, "3.4 % error at 11 % of the bytes of exact attention")
        self.assertEqual(about, ["Data 'model', 8,192 tokens. The largest keys alone (top-k) err "
                                 "by 28 % at 13 %."])
        timed = [error_line("sampled", 0.1, 0.02, speedup=4.25),
                 error_line("page_bounds", 0.1, 0.5)]
        title, about = plot.finding(timed, "time")
        self.assertEqual(title, "2 % error, 4.2 times as fast as exact attention")
        self.assertIn("Grey", about[1])
        self.assertEqual(plot.finding(lines[3:4], "bytes")[0], "What an error costs")

    def test_one_plot_for_each_bench_data_and_length(self):
        timed = error_line("sampled", 0.1, 0.03, bench="sampled", ms=2.0, threads=2, speedup=3.0)
        lines = self.read([error_line("topk", 0.1, 0.2), error_line("topk", 0.1, 0.2, tokens=64),
                           error_line("topk", 0.1, 0.2, data="a/b c"), timed])
        names = {path.name for path in plot.plot(lines, self.path)}
        self.assertEqual(names, {"error-bytes-model-8192.svg", "error-bytes-model-64.svg",
                                 "error-bytes-a_b_c-8192.svg", "error-time-model-8192.svg"})
        text = (self.path / "error-bytes-model-8192.svg").read_text(encoding="utf-8")
        self.assertIn("top-k", text)
        self.assertEqual(text.count("<polygon"), 2, "the point, and the marker of the label")


if __name__ == "__main__":
    unittest.main()
