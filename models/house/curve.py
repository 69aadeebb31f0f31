# SPDX-License-Identifier: Apache-2.0
"""Plots of training and evaluation: the loss curve of a log, and heat maps.

    python3 models/house/curve.py build/house/cpu/log.csv loss.svg
"""
import csv
import html
import os
import sys

import svg

_CELL_W, _CELL_H, _LEFT, _TOP = 64, 30, 90, 60


def draw(log_path, path, points=60):
    """Draws every column of a log of train.py over the tokens seen, smoothed to `points` means."""
    if not os.path.exists(log_path):
        return
    with open(log_path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    series = []
    for name in rows[0] if rows else ():
        found = [(float(row["tokens"]) / 1e6, float(row[name])) for row in rows if row[name]]
        if name in ("step", "trained_s", "tokens") or not found:
            continue
        size = max(1, len(found) // points)
        chunks = [found[at:at + size] for at in range(0, len(found), size)]
        series.append((name, [tuple(sum(column) / len(chunk) for column in zip(*chunk))
                              for chunk in chunks]))
    if series:
        svg.line_plot(path, "Training loss", "tokens seen, millions", "nats per token", series)


def heat_map(path, title, columns, rows, values, column_title, row_title):
    """values[r][c] in 0 ... 1, or None: a cell each, its value in percent written into it."""
    width, height = _LEFT + _CELL_W * len(columns) + 20, _TOP + _CELL_H * len(rows) + 50
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="20" y="24" font-size="14">{html.escape(title)}</text>']
    for r, row in enumerate(rows):
        y = _TOP + _CELL_H * r
        out.append(f'<text x="{_LEFT - 8}" y="{y + 19}" text-anchor="end">{row}</text>')
        for c, value in enumerate(values[r]):
            if value is None:
                continue
            x = _LEFT + _CELL_W * c
            shade = [round(low + (high - low) * value) for low, high in
                     ((200, 27), (85, 108), (61, 168))]
            out.append(f'<rect x="{x}" y="{y}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" '
                       f'fill="rgb({shade[0]},{shade[1]},{shade[2]})"/>')
            out.append(f'<text x="{x + _CELL_W / 2 - 1}" y="{y + 19}" text-anchor="middle" '
                       f'fill="white">{100 * value:.0f}</text>')
    bottom = _TOP + _CELL_H * len(rows)
    for c, column in enumerate(columns):
        out.append(f'<text x="{_LEFT + _CELL_W * (c + 0.5)}" y="{bottom + 18}" '
                   f'text-anchor="middle">{column}</text>')
    out.append(f'<text x="{_LEFT + _CELL_W * len(columns) / 2}" y="{bottom + 40}" '
               f'text-anchor="middle">{html.escape(column_title)}</text>')
    out.append(f'<text x="20" y="{_TOP - 12}">{html.escape(row_title)}</text>')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2])
