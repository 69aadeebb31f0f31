#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots what the benches of approximate attention wrote with --json: error against bytes and time.

    python3 bench/approx/plot.py FIGURES.jsonl OUT_FOLDER

Lines of `error` give error-bytes-DATA-TOKENS.svg, lines of `sampled` and `magicpig` give
error-time-DATA-TOKENS.svg. A line that another of the same settings follows is left out: the later
run counts. Nothing but Python is needed.
"""
import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models" / "house"))
import svg  # noqa: E402

# What tells two lines of one bench apart.
SETTINGS = ("bench", "data", "tokens", "threads", "mode", "code", "rows", "budget", "eps")
TIMED = ("sampled", "magicpig")


def read_lines(path):
    """The newest line of each setting, in the order of the file."""
    lines = {}
    with open(path, encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if line.get("bench") in ("error",) + TIMED:
                lines[tuple(line.get(key) for key in SETTINGS)] = line
    return list(lines.values())


def series_name(line):
    name = line["mode"]
    if line["code"] not in ("none", "oracle"):
        name += " " + line["code"]
    return name + (" int8" if line["rows"] == "int8" else "")


def series_of(lines, x):
    """[(name, [(x, error in %)])], points of a series ascending in x."""
    points = collections.defaultdict(list)
    for line in lines:
        points[series_name(line)].append((line[x], 100 * line["rel_error_mean"]))
    return [(name, sorted(some)) for name, some in points.items()]


def plot(lines, folder):
    """Writes one plot for each bench, data and length; returns the paths."""
    groups = collections.defaultdict(list)
    for line in lines:
        kind = "time" if line["bench"] in TIMED else "bytes"
        groups[kind, line["data"], line["tokens"]].append(line)
    paths = []
    for (kind, data, tokens), some in groups.items():
        name = re.sub(r"[^A-Za-z0-9_.]", "_", data)
        path = folder / f"error-{kind}-{name}-{tokens}.svg"
        if kind == "bytes":
            for line in some:
                line["bytes_percent"] = 100 * line["bytes_fraction"]
            x, x_title = "bytes_percent", "bytes read, % of exact attention over bf16"
        else:
            x, x_title = "ms", "time of a step of one layer, ms"
        svg.line_plot(path, f"{data}, {tokens} tokens", x_title, "relative error of the output, %",
                      series_of(some, x), log_x=True, log_y=True)
        paths.append(path)
    return paths


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lines = read_lines(sys.argv[1])
    if not lines:
        sys.exit(f"{sys.argv[1]}: no lines of error, sampled or magicpig")
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for path in plot(lines, folder):
        print(path)


if __name__ == "__main__":
    main()
