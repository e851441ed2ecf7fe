"""Tables and charts as HTML that a notebook shows, and charts as SVG, readable on white and on black.

Only elements and attributes that survive the sanitizers of GitHub, nbviewer and nbconvert: no style, no
script, and each SVG inside an `<img>`, because SVG elements of a page are removed there.  Strings of a run
are text, never markup.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from everstep.display.cells import cell, flat, in_line, is_number_column

_MOST_CHARTS, _MOST_ROWS, _MOST_COLUMNS, _LONGEST = 6, 25, 20, 120
"""Most charts, most rows and columns of a table, most characters of a cell."""

Rows = Sequence[Mapping[str, Any]]


def notebook_html(
    title: str, charts: Iterable[Chart], tables: Iterable[tuple[str, Rows, Sequence[str]]]
) -> str:
    """Write what a notebook shows: a headline, charts beside each other, tables.

    Args:
        tables: caption, rows and columns of each table; those without rows are left out.
    """
    head = f"<p>{_escape(title)}</p>" if title else ""
    pictures = ""
    for chart in list(charts)[:_MOST_CHARTS]:
        data, text = base64.b64encode(draw_svg(chart).encode()).decode(), _escape(chart.legend())
        pictures += f'<img align="top" alt="{text}" src="data:image/svg+xml;base64,{data}">'
    return head + pictures + "".join(_table(*table) for table in tables if table[1])


def charts_of(rows: Rows) -> list[Chart]:
    """Draw rows with "step", "value" and "name": a chart for each "phase" and name, a line for each "run"."""
    charts = dict[str, Chart]()
    for row in rows:
        name = row.get("name")
        numbers = isinstance(row.get("value"), int | float) and isinstance(row.get("step"), int)
        if name is None or not numbers:
            return []
        title = f"{row['phase']}/{name}" if "phase" in row else str(name)
        chart = charts.setdefault(title, Chart(title, {}))
        chart.lines.setdefault(str(row.get("run", title)), []).append((row["step"], row["value"]))
    return list(charts.values())


def _escape(text: str) -> str:
    """Write any string as text of HTML: no markup, no control characters, in one line."""
    return html.escape(in_line(text))


def _table(title: str, rows: Rows, columns: Sequence[str]) -> str:
    """Write rows as a table: numbers to the right, the first rows and columns, long strings cut."""
    rows, left_out = [dict(flat(row)) for row in rows], len(rows) - _MOST_ROWS
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in columns if name in names] or list(names)
    more = [f"{left_out} more rows"] if left_out > 0 else []
    more += [f"{len(columns) - _MOST_COLUMNS} more columns"] if len(columns) > _MOST_COLUMNS else []
    aligned = {name: "right" if is_number_column(name, rows) else "left" for name in columns[:_MOST_COLUMNS]}
    head = "".join(f"<th>{_escape(name)}</th>" for name in aligned)
    body = "".join(f"<tr>{_cells(row, aligned)}</tr>" for row in rows[:_MOST_ROWS])
    caption = f"<p><b>{_escape(title)}</b></p>" if title else ""
    end = f"<p>... and {' and '.join(more)}</p>" if more else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"


def _cells(row: Mapping[str, Any], aligned: Mapping[str, str]) -> str:
    texts = ((side, cell(name, row.get(name))) for name, side in aligned.items())
    cut = ((side, text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…") for side, text in texts)
    return "".join(f'<td align="{side}">{html.escape(text)}</td>' for side, text in cut)


WIDTH, HEIGHT = 420, 240
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 24, WIDTH - 12, HEIGHT - 34
"""Edges of the plot; the legend is below the height."""
_ROW, _LETTERS = 15, 48
"""Height of a line of the legend, and most characters in it."""
_COLORS = ("#2f7fd0", "#d55e00", "#159a6c", "#c05fa0", "#a87d00", "#4aa3df", "#8a63d2", "#888888")
"""Colours of the lines, which differ in brightness, too, with a contrast of 3 and more to white and black."""


Points = list[tuple[float, float]]


class Chart(NamedTuple):
    """Chart of lines by name, over the steps, such as the loss of several runs; the first eight are drawn."""

    title: str
    lines: dict[str, Points]

    def legend(self) -> str:
        """Say what the chart shows: each line with its number of points and its last value."""
        lines = (f"{name}: {len(points)} points, last {points[-1][1]:.6g}" for name, points in self.shown())
        return "; ".join([f"{self.title} by step", *lines, *self.rest()])

    def shown(self) -> list[tuple[str, Points]]:
        return list(self.lines.items())[: len(_COLORS)]

    def rest(self) -> list[str]:
        more = len(self.lines) - len(_COLORS)
        return [f"... and {more} more"] if more > 0 else []


def draw_svg(chart: Chart) -> str:
    """Draw a chart as an SVG document; values that are not finite are left out and counted."""
    finite = [[point for point in line if all(map(math.isfinite, point))] for _, line in chart.shown()]
    marks = [f'fill="none" stroke="{color}" stroke-width="1.6"' for color in _COLORS]
    body = [_text(_LEFT, 15, chart.title, 'font-weight="600"'), *_plot(finite, marks)]
    y = HEIGHT
    for (name, line), points, mark in zip(chart.shown(), finite, marks, strict=False):
        left_out = len(line) - len(points)
        if len(chart.lines) > 1 or left_out:
            if len(name) > _LETTERS:
                name = f"{name[: _LETTERS // 2]}…{name[1 - _LETTERS // 2 :]}"
            note = f" ({left_out} not finite)" if left_out else ""
            body += [f'<path d="M{_LEFT} {y}h24" {mark}/>', _text(_LEFT + 30, y + 4, name + note)]
            y += _ROW
    for text in chart.rest():
        body.append(_text(_LEFT + 30, y + 4, text))
        y += _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11" fill="#7a7a7a">'
        f"{''.join(body)}</svg>"
    )


def _plot(lines: Sequence[Points], marks: Sequence[str]) -> Iterator[str]:
    if not any(lines):
        yield _text(WIDTH / 2, HEIGHT / 2, "no finite value", 'text-anchor="middle"')
        return
    xs, ys = zip(*(point for points in lines for point in points), strict=True)
    across, up = _Axis(min(xs), max(xs), _LEFT, _RIGHT), _Axis(min(ys), max(ys), _BOTTOM, _TOP)
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#888" stroke-opacity=".3"/>'
    for value in {up.least, up.most}:
        yield _text(_LEFT - 6, up.place(value) + 4, f"{value:.5g}", 'text-anchor="end"')
    for value in {across.least, across.most}:
        yield _text(across.place(value), _BOTTOM + 15, f"{value:.6g}", 'text-anchor="middle"')
    yield _text(WIDTH / 2, HEIGHT - 6, "step", 'text-anchor="middle"')
    for points, mark in zip(lines, marks, strict=False):
        places = [(across.place(x), up.place(y)) for x, y in _thinned(points, _RIGHT - _LEFT)]
        if len(places) == 1:
            yield f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" {mark}/>'
        elif places:
            yield f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}" {mark}/>'


def _thinned(points: Points, columns: int) -> Points:
    """Keep of each column of pixels the first, least, largest and last point, in their order."""
    if len(points) <= 4 * columns:
        return points
    thinned: Points = []
    for column in range(columns):
        start, end = column * len(points) // columns, (column + 1) * len(points) // columns
        by_value = sorted(range(start, end), key=lambda at: points[at][1])
        thinned += [points[at] for at in sorted({start, by_value[0], by_value[-1], end - 1})]
    return thinned


class _Axis(NamedTuple):
    least: float
    most: float
    start: float
    end: float

    def place(self, value: float) -> float:
        # halves, because the difference of two large numbers may not be a number
        span = self.most / 2 - self.least / 2
        part = (value / 2 - self.least / 2) / span if span else 0.5
        return self.start + part * (self.end - self.start)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{html.escape(in_line(text))}</text>'
