# SPDX-License-Identifier: Apache-2.0
"""Line plots as SVG text, without a plotting library: the same input gives the same bytes.

Colours carry the series, and so do dashes, for readers who see no colours. `line_plot` has a legend
beside the plot; `labelled_plot` has a marker for each series and its name where its line ends.
"""
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Style:
    colour: str = "#555555"
    # circle, square, diamond, triangle, down, left, hexagon, cross, plus
    marker: str = "circle"
    is_filled: bool = True
    dash: str = ""
    width: float = 2.0


def marker(style, x, y, r=4.5):
    """A marker around (x, y). Crosses and pluses are lines; the others are filled, or hollow."""
    paint = (f'fill="{style.colour if style.is_filled else "white"}" stroke="{style.colour}" '
             f'stroke-width="1.6"')
    if style.marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r - 0.5}" {paint}/>'
    if style.marker in ("cross", "plus"):
        ends = ((-r, -r, r, r), (-r, r, r, -r)) if style.marker == "cross" else ((-r, 0, r, 0),
                                                                                (0, -r, 0, r))
        return "".join(f'<line x1="{x + a:.1f}" y1="{y + b:.1f}" x2="{x + c:.1f}" y2="{y + d:.1f}" '
                       f'stroke="{style.colour}" stroke-width="2"/>' for a, b, c, d in ends)
    corners = {"square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
               "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
               "triangle": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
               "down": ((0, 1.2), (1.1, -0.9), (-1.1, -0.9)),
               "left": ((-1.2, 0), (0.9, 1.1), (0.9, -1.1)),
               "hexagon": ((-1.2, 0), (-0.6, 1), (0.6, 1), (1.2, 0), (0.6, -1),
                           (-0.6, -1))}[style.marker]
    text = " ".join(f"{x + a * (r - 0.6):.1f},{y + b * (r - 0.6):.1f}" for a, b in corners)
    return f'<polygon points="{text}" {paint}/>'


def spread(wanted, gap, low, high):
    """Heights nearest to the wanted ones, in their order, that keep a gap and stay in the range."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = dict.fromkeys(order, 0.0)
    floor = low
    for i in order:
        heights[i] = floor = max(wanted[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        heights[i] = ceiling = min(heights[i], ceiling)
        ceiling -= gap
    return [heights[i] for i in range(len(wanted))]


def labelled_plot(path, title, subtitles, x_title, y_title, series, log_x=True, log_y=True):
    """series: [(label, Style, [(x, y), ...])], those that matter most last: they are drawn on top.
    Labels stand at the right, at the height where their line ends, with a thin line to it."""
    series = [(name, style, [p for p in points if usable(p, log_x, log_y)])
              for name, style, points in series]
    series = [entry for entry in series if entry[2]]
    every = [point for _, _, points in series for point in points]
    if not every:
        raise ValueError(f"{title}: nothing to plot")
    top = 56 + 18 * len(subtitles)
    width, height, left, right, bottom = 870, 460 + top, 78, 260, 62
    x = Axis([p[0] for p in every], left + 12, width - right - 12, log_x)
    y = Axis([p[1] for p in every], height - bottom - 12, top + 12, log_y)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
           f'font-size="13" fill="#222222">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="30" font-size="19" font-weight="bold">{html.escape(title)}</text>']
    out += [f'<text x="{left}" y="{52 + 18 * line}" fill="#555555">{html.escape(text)}</text>'
            for line, text in enumerate(subtitles)]
    for value in ticks(x.low, x.high, log_x):
        at = x.at(value)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - bottom}" '
                   f'stroke="#e8e8e8"/>')
        out.append(f'<text x="{at:.1f}" y="{height - bottom + 18}" '
                   f'text-anchor="middle">{label(value)}</text>')
    for value in ticks(y.low, y.high, log_y):
        at = y.at(value)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" '
                   f'stroke="#e8e8e8"/>')
        out.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{label(value)}</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 16}" '
               f'text-anchor="middle">{html.escape(x_title)}</text>')
    middle = (top + height - bottom) / 2
    out.append(f'<text x="20" y="{middle}" text-anchor="middle" '
               f'transform="rotate(-90 20 {middle})">{html.escape(y_title)}</text>')
    ends = [(x.at(points[-1][0]), y.at(points[-1][1])) for _, _, points in series]
    heights = spread([at for _, at in ends], 17, top + 4, height - bottom)
    for (name, style, points), (end_x, end_y), at in zip(series, ends, heights):
        begin = width - right + 10
        out.append(f'<polyline points="{end_x + 6:.1f},{end_y:.1f} {begin - 4},{at:.1f}" '
                   f'fill="none" stroke="{style.colour}" stroke-width="0.7" '
                   f'stroke-dasharray="1 3"/>')
        out.append(marker(style, begin + 4, at))
        out.append(f'<text x="{begin + 16}" y="{at + 4.5:.1f}" fill="{style.colour}">'
                   f'{html.escape(name)}</text>')
    for name, style, points in series:
        spots = [(x.at(a), y.at(b)) for a, b in points]
        if len(points) > 1:
            text = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            out.append(f'<polyline points="{text}" fill="none" stroke="{style.colour}" '
                       f'stroke-width="{style.width}" stroke-dasharray="{style.dash}"/>')
        out += [marker(style, a, b) for a, b in spots]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n</svg>\n")
