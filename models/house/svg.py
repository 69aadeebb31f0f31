# SPDX-License-Identifier: Apache-2.0
"""Line plots as SVG text, without a plotting library: the same input gives the same bytes.

Colours carry the series, and so do dashes, for readers who see no colours.
"""
import html
import math

COLOURS = ("#1b6ca8", "#c8553d", "#2a7f4f", "#7b4fa3", "#b8860b", "#555555", "#d0679d", "#128a8a")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 55


def ticks(low, high, logarithmic):
    """Round numbers from low to high."""
    if logarithmic:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
    else:
        span = (high - low) or 1.0
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 6)
        found = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9) or low <= t <= high]


def label(value):
    return f"{value:.3g}"


class Axis:
    """Maps data to pixels."""

    def __init__(self, values, begin, end, logarithmic):
        low, high = min(values), max(values)
        if low == high:
            low, high = (low / 2, high * 2) if logarithmic else (low - 0.5, high + 0.5)
        self.low, self.high, self.logarithmic = low, high, logarithmic
        self.begin, self.end = begin, end

    def at(self, value):
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)


def usable(point, log_x, log_y):
    x, y = point
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)


def line_plot(path, title, x_title, y_title, series, log_x=False, log_y=False):
    """series: [(name, [(x, y), ...])]; a point that an axis cannot show is left out."""
    series = [(name, [p for p in points if usable(p, log_x, log_y)]) for name, points in series]
    series = [(name, points) for name, points in series if points]
    every = [point for _, points in series for point in points]
    if not every:
        raise ValueError(f"{title}: nothing to plot")
    x = Axis([p[0] for p in every], LEFT, WIDTH - RIGHT, log_x)
    y = Axis([p[1] for p in every], HEIGHT - BOTTOM, TOP, log_y)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
           f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="22" font-size="14">{html.escape(title)}</text>']
    for value in ticks(x.low, x.high, log_x):
        out.append(f'<line x1="{x.at(value):.1f}" x2="{x.at(value):.1f}" y1="{TOP}" '
                   f'y2="{HEIGHT - BOTTOM}" stroke="#dddddd"/>')
        out.append(f'<text x="{x.at(value):.1f}" y="{HEIGHT - BOTTOM + 16}" '
                   f'text-anchor="middle">{label(value)}</text>')
    for value in ticks(y.low, y.high, log_y):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(value):.1f}" '
                   f'y2="{y.at(value):.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y.at(value) + 4:.1f}" '
                   f'text-anchor="end">{label(value)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" '
               f'text-anchor="middle">{html.escape(x_title)}</text>')
    out.append(f'<text x="16" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
               f'transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2})">'
               f'{html.escape(y_title)}</text>')
    for index, (name, points) in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        path_text = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)
        style = f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
        if len(points) > 1:
            out.append(f'<polyline points="{path_text}" fill="none" {style}/>')
        if len(points) <= 12:
            out += [f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3" fill="{colour}"/>'
                    for a, b in points]
        row = TOP + 10 + 17 * index
        out.append(f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 36}" y1="{row}" '
                   f'y2="{row}" {style}/>')
        out.append(f'<text x="{WIDTH - RIGHT + 42}" y="{row + 4}">{html.escape(name)}</text>')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n</svg>\n")
