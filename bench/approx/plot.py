#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots what the benches of approximate attention wrote with --json: error against bytes and time.

    python3 bench/approx/plot.py FIGURES.jsonl OUT_FOLDER

Lines of `error` give error-bytes-DATA-TOKENS.svg, lines of `sampled` and `magicpig` give
error-time-DATA-TOKENS.svg. A line that another of the same settings follows is left out: the later
run counts. The title is the measured point of `sampled` that is nearest to an error of 3 %. Modes
of kvm are coloured, what they are compared with is grey. Nothing but Python is needed.
"""
import collections
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models" / "house"))
import svg  # noqa: E402

# These fields tell two lines of one bench apart.
SETTINGS = ("bench", "data", "tokens", "threads", "mode", "code", "rows", "budget", "eps")
TIMED = ("sampled", "magicpig")
GREY = "#8a8a8a"
TITLE_ERROR = 0.03  # the point of the title is the one nearest to this

# How a mode is called and drawn; those that come later are drawn on top.
MODES = {
    "page_bounds": ("pages by min and max of keys", svg.Style(GREY, "cross", width=1.4)),
    "oracle_topk": ("true top-k (oracle)", svg.Style(GREY, "triangle", width=1.4)),
    "uniform_residual": ("true top-k + random rest (oracle)", svg.Style(GREY, "down", width=1.4)),
    "magicpig": ("MagicPIG", svg.Style(GREY, "plus", width=1.4)),
    "exact": ("exact", svg.Style("#222222", "hexagon")),
    "topk": ("top-k", svg.Style("#2a7f4f", "diamond")),
    "verified": ("verified", svg.Style("#c8553d", "square")),
    "sampled_eps": ("sampled to an error", svg.Style("#7b4fa3", "left")),
    "sampled": ("sampled", svg.Style("#1b6ca8", "circle", width=2.8)),
}
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # of the codes of a mode, one after the other


def read_lines(path):
    """The newest line of each setting, in the order of the file."""
    lines = {}
    with open(path, encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if line.get("bench") in ("error",) + TIMED:
                lines[tuple(line.get(key) for key in SETTINGS)] = line
    return list(lines.values())


def series_of(lines, x):
    """[(label, Style, [(x, error in %)])], points ascending in x. A code is named where a mode has
    several; hollow markers are int8 rows."""
    points = collections.defaultdict(list)
    codes = collections.defaultdict(list)
    for line in lines:
        mode, code = line["mode"], line["code"]
        points[mode, code, line["rows"]].append((line[x], 100 * line["rel_error_mean"]))
        if code not in codes[mode]:
            codes[mode].append(code)
    series = []
    rank = list(MODES)
    order = sorted(points, key=lambda key: rank.index(key[0]) if key[0] in rank else -1)
    for mode, code, rows in order:
        name, style = MODES.get(mode, (mode, svg.Style(GREY)))
        which = codes[mode].index(code)
        series.append((name + (f", {code}" if len(codes[mode]) > 1 else "") +
                       (", int8" if rows == "int8" else ""),
                       svg.Style(style.colour, style.marker, rows != "int8",
                                 DASHES[(which + (rows == "int8")) % len(DASHES)], style.width),
                       sorted(points[mode, code, rows])))
    return series


def percent(share):
    return f"{100 * share:.2g} %"


def finding(lines, kind):
    """What the title says, and the lines below it: of measured points alone."""
    tokens, data = lines[0]["tokens"], lines[0]["data"]
    about = [f"Data '{data}', {tokens:,} tokens."]
    if any(MODES.get(line["mode"], ("", svg.Style(GREY)))[1].colour == GREY for line in lines):
        about.append("Grey: what kvm is compared with; an oracle knows the largest keys unread.")
    ours = [line for line in lines if line["mode"] == "sampled" and line["rel_error_mean"] > 0]
    ours = [line for line in ours if line["rows"] == "bf16"] or ours
    if not ours:
        return "What an error costs", about
    best = min(ours, key=lambda line: abs(math.log(line["rel_error_mean"] / TITLE_ERROR)))
    error = percent(best["rel_error_mean"])
    if kind == "time":
        return f"{error} error, {best['speedup']:.1f} times as fast as exact attention", about
    title = f"{error} error at {percent(best['bytes_fraction'])} of the bytes of exact attention"
    rivals = [line for line in lines if line["mode"] == "topk" and line["rows"] == best["rows"] and
              line["bytes_fraction"] >= best["bytes_fraction"]]
    if rivals:
        rival = min(rivals, key=lambda line: line["bytes_fraction"])
        about[0] += (f" The largest keys alone (top-k) err by {percent(rival['rel_error_mean'])} "
                     f"at {percent(rival['bytes_fraction'])}.")
    return title, about


def is_shown(line, kind):
    """Not exact attention over keys as they are, whose rounding lies far below the plot; nor what
    top-k does over int8 rows and hash tables, which its other lines stand for."""
    mode, is_int8 = line["mode"], line["rows"] == "int8"
    if mode == "exact":
        return kind == "time" or is_int8
    return mode != "topk" or not (is_int8 or re.fullmatch(r"K\d+L\d+", line["code"]))


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
            x = "bytes_percent"
            x_title = "bytes read of keys, values and index, % of exact attention"
        else:
            x, x_title = "ms", "time for one layer's attention, ms"
        shown = [line for line in some if is_shown(line, kind)]
        title, about = finding(some, kind)
        svg.labelled_plot(path, title, about, x_title, "error of the output, % of its length",
                          series_of(shown or some, x))
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
