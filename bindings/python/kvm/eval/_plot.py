# SPDX-License-Identifier: Apache-2.0
"""Plots of quality against bytes out of the JSON lines of `kvm-eval real` and `tensors`."""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402

# By the kind of line: what the ordinate is, its name, and what a panel is.
_QUALITY = {"real": ("kl", "KL to exact, nats a token", "text"),
            "tensors": ("error", "mean relative error of o", "record")}
MARKERS = "osD^vPX*<>"


def plot(files: Iterable[Path], out: Path, is_mean: bool) -> int:
    """Draws all modes of the files into `out` (.svg, .png, .pdf), a panel for each text, or one of
    the means over texts. Returns how many points there are."""
    lines = [json.loads(line) for path in files
             for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    kinds = {line.get("eval") for line in lines} & set(_QUALITY)
    if len(kinds) != 1:
        raise ValueError("the files have no lines of `kvm-eval real` or `kvm-eval tensors`, or "
                         "both kinds; a plot is of one")
    kind = kinds.pop()
    quality, label, panel = _QUALITY[kind]
    points = _points([line for line in lines if line.get("eval") == kind], quality, panel)
    if is_mean:
        points = _mean(points)
    curves = sorted({curve for settings in points.values() for curve, _ in settings})
    n_columns = min(len(points), 2)
    n_rows = -(-len(points) // n_columns)
    figure, axes = pyplot.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True,
                                   layout="constrained",
                                   figsize=(1.2 + 4.6 * n_columns, 0.8 + 3.4 * n_rows))
    for axis in axes.flat[len(points):]:
        axis.set_axis_off()
    for axis, (title, settings) in zip(axes.flat, sorted(points.items()), strict=False):
        for number, curve in enumerate(curves):
            mine = sorted((share, y, setting) for (of, setting), (share, y) in settings.items()
                          if of == curve)
            if not mine:
                continue
            xs, ys, names = zip(*mine, strict=True)
            axis.plot(xs, ys, marker=MARKERS[number % len(MARKERS)], markersize=5, linewidth=1,
                      label=curve, color=f"C{number % 10}",
                      linestyle="none" if curve.startswith("exact") else "-")
            for x, y, name in mine:
                axis.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6)
        axis.set(title=title, yscale="log", xscale="log")
        axis.grid(True, which="both", linewidth=0.3)
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.FormatStrFormatter("%g"))
        axis.tick_params(labelsize=7, which="both")
    figure.supxlabel("bytes read, % of exact attention over bfloat16 rows (index included)",
                     fontsize=9)
    figure.supylabel(label, fontsize=9)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7)
    save(figure, out)
    return sum(len(settings) for settings in points.values())


def save(figure: Any, out: Path) -> None:
    """Without the date and with fixed names inside: the same figures give the same file."""
    with pyplot.rc_context({"svg.hashsalt": "kvm-eval", "svg.fonttype": "none"}):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


_Points = dict[str, dict[tuple[str, str], tuple[float, float]]]


def _points(lines: list[dict[str, Any]], quality: str, panel: str) -> _Points:
    """{panel: {(curve, setting): (bytes in percent, quality)}}; means over seeds."""
    found: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = \
        collections.defaultdict(lambda: collections.defaultdict(list))
    for line in lines:
        if not line[quality] > 0:
            continue  # has no place on a logarithmic axis
        curve, setting = line["mode"], line["setting"]
        # A dtype behind a setting, or what else stands behind a budget (a sketch), makes a curve of
        # its own; a second number, an eps, does not.
        for pattern in (r"(.+) (int8|fp8|bfloat16|float32)", r"(\d+),? (?!\+|[\d.]+$)(.+)"):
            parts = re.fullmatch(pattern, setting)
            if parts is not None:
                curve, setting = f"{curve}, {parts[2]}", parts[1]
        if line.get("chunk", 1) != 1:
            curve += f", {line['chunk']} tokens a step"
        if line.get("steps", "decode") != "decode":
            curve += f", {line['steps']}"
        title = f"{line[panel]}, {line['tokens']:,} tokens"
        found[title][curve, setting].append((100 * line["bytes_fraction"], line[quality]))
    if not found:
        raise ValueError("no line has a quality above 0")
    return {title: {key: (math.fsum(x for x, _ in values) / len(values),
                          math.fsum(y for _, y in values) / len(values))
                    for key, values in settings.items()} for title, settings in found.items()}


def _mean(points: _Points) -> _Points:
    """Of the settings that every text has."""
    common = set.intersection(*(set(settings) for settings in points.values()))
    if not common:
        raise ValueError("no setting is there for every text; --mean needs some")
    n = len(points)
    return {f"mean of {n}": {key: (math.fsum(settings[key][0] for settings in points.values()) / n,
                                   math.fsum(settings[key][1] for settings in points.values()) / n)
                             for key in sorted(common)}}
