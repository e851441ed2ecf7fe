"""Tables and charts as HTML that a notebook shows, and charts as SVG, readable on white and on black.

Only elements and attributes that survive the sanitizers of GitHub, nbviewer and nbconvert: no style, no
script, and each SVG inside an `<img>`, because SVG elements of a page are removed there.  Strings of a run
are text, never markup.
"""

from __future__ import annotations

import base64
import html
import math
from collections import defaultdict
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
    head = f"<p>{_escaped(title)}</p>" if title else ""
    pictures = "".join(_picture(chart) for chart in list(charts)[:_MOST_CHARTS])
    return head + pictures + "".join(_table(*table) for table in tables if table[1])


def charts_of(rows: Rows, metric: str | None = None) -> list[Chart]:
    """Draw the values of metrics over the steps: a chart for each metric, a line for each run.

    Args:
        rows: with "step", "value" and, where they are of several, "run", "phase" and "name".
        metric: the metric of rows that do not name theirs; None: they may be of several, and are not drawn.
    """
    lines: dict[str, dict[str, Line]] = defaultdict(dict)
    for row in rows:
        name, value, step = row.get("name", metric), row.get("value"), row.get("step")
        if name is None or not isinstance(value, int | float) or not isinstance(step, int):
            return []
        title = f"{row['phase']}/{name}" if "phase" in row else str(name)
        run = str(row.get("run", title))
        line = lines[title].setdefault(run, Line(run, [], []))
        line.x.append(step)
        line.y.append(value)
    return [Chart(title, list(each.values())) for title, each in lines.items()]


def _escaped(text: str) -> str:
    """Write any string as text of HTML: no markup, no control characters, in one line."""
    return html.escape(in_line(text))


def _table(title: str, rows: Rows, columns: Sequence[str]) -> str:
    """Write rows as a table: numbers to the right, the first rows and columns, long strings cut."""
    rows, left_out = [dict(flat(row)) for row in rows], len(rows) - _MOST_ROWS
    there = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in columns if name in there] or list(there)
    more = [f"{left_out} more rows"] if left_out > 0 else []
    more += [f"{len(columns) - _MOST_COLUMNS} more columns"] if len(columns) > _MOST_COLUMNS else []
    aligned = {name: "right" if is_number_column(name, rows) else "left" for name in columns[:_MOST_COLUMNS]}
    head = "".join(f"<th>{_escaped(name)}</th>" for name in aligned)
    body = "".join(f"<tr>{_cells(row, aligned)}</tr>" for row in rows[:_MOST_ROWS])
    caption = f"<p><b>{_escaped(title)}</b></p>" if title else ""
    end = f"<p>... and {' and '.join(more)}</p>" if more else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"


def _cells(row: Mapping[str, Any], aligned: Mapping[str, str]) -> str:
    texts = ((side, cell(name, row.get(name))) for name, side in aligned.items())
    cut = ((side, text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…") for side, text in texts)
    return "".join(f'<td align="{side}">{html.escape(text)}</td>' for side, text in cut)


def _picture(chart: Chart) -> str:
    """Write a chart as a picture, with its data in words for who cannot see it."""
    data = base64.b64encode(drawn(chart).encode()).decode()
    return f'<img align="top" alt="{_escaped(chart.words())}" src="data:image/svg+xml;base64,{data}">'


WIDTH, HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 24, 34
_ROW, _LETTERS = 15, 48
"""Height of a line of the legend, and most characters in it."""
_FLAT = 1e-300
"""Half of a span that is too small to divide."""
MOST_LINES = 16
"""Most lines of a chart."""
_COLORS = ("#2f7fd0", "#d55e00", "#159a6c", "#c05fa0", "#a87d00", "#4aa3df", "#8a63d2", "#888888")
"""Colours that differ in brightness, too, with a contrast of 3 and more to white and to black."""
_DASHES = ("", "7 3", "2 2", "9 3 2 3", "4 4", "1 3", "12 4", "6 2 2 2")


class Line(NamedTuple):
    """Line of a chart: its name, and the places of its points."""

    name: str
    x: list[float]
    y: list[float]


class Chart(NamedTuple):
    """Chart of lines over the steps, such as the loss of several runs."""

    title: str
    lines: Sequence[Line]

    def words(self) -> str:
        """Say what the chart shows: each line with its number of points and its last value."""
        lines = (
            f"{name}: {f'{len(y)} points, last {y[-1]:.6g}' if y else 'no points'}"
            for name, _, y in self.lines[:MOST_LINES]
        )
        more = len(self.lines) - MOST_LINES
        return f"{self.title} by step. {'; '.join(lines)}" + (f"; {more} more" if more > 0 else "")


def drawn(chart: Chart) -> str:
    """Draw a chart as an SVG document; values that are not finite are left out and counted."""
    lines = chart.lines[:MOST_LINES]
    finite = [
        [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
        for line in lines
    ]
    legend = list(_legend(chart, finite))
    height = HEIGHT + _ROW * len(legend)
    body = [_text(_LEFT, 15, chart.title, 'font-weight="600"')]
    if any(points for points in finite):
        body += _plot(chart, finite)
    else:
        body.append(_text(WIDTH / 2, HEIGHT / 2, "no finite value", 'text-anchor="middle"'))
    for row, (mark, text) in enumerate(legend):
        y = HEIGHT + _ROW * row
        body += [f'<path d="M{_LEFT} {y}h24" {mark}/>' if mark else "", _text(_LEFT + 30, y + 4, text)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11" fill="#7a7a7a">'
        f"{''.join(body)}</svg>"
    )


Points = list[tuple[float, float]]


def _legend(chart: Chart, finite: Sequence[Points]) -> Iterator[tuple[str, str]]:
    """Yield the mark and the words of each line that needs some."""
    marks = zip(chart.lines, finite, _marks(), strict=False)
    for line, points, mark in marks:
        left_out = len(line.y) - len(points)
        note = f" ({left_out} not finite)" if left_out else ""
        if len(chart.lines) > 1 or note:
            yield mark, _cut(line.name) + note
    if len(chart.lines) > MOST_LINES:
        yield "", f"... and {len(chart.lines) - MOST_LINES} more"


def _marks() -> Iterator[str]:
    for at in range(MOST_LINES):  # a colour that comes again has another dash
        color, dash = _COLORS[at % len(_COLORS)], _DASHES[(at + at // len(_COLORS)) % len(_DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'fill="none" stroke="{color}" stroke-width="1.6"{dashes}'


def _cut(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS // 2]}…{text[1 - _LETTERS // 2 :]}"


def _plot(chart: Chart, finite: Sequence[Points]) -> Iterator[str]:
    xs, ys = zip(*(point for points in finite for point in points), strict=True)
    across = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    up = _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    for value in up.ticks():
        at = f"{up.place(value):.1f}"
        yield f'<path d="M{_LEFT} {at}H{WIDTH - _RIGHT}" stroke="#888" stroke-opacity=".3"/>'
        yield _text(_LEFT - 6, float(at) + 4, f"{value:.5g}", 'text-anchor="end"')
    for value in across.ticks():
        yield _text(across.place(value), HEIGHT - _BOTTOM + 15, f"{value:.6g}", 'text-anchor="middle"')
    yield _text(WIDTH - _RIGHT, HEIGHT - 6, "step", 'text-anchor="end"')
    for points, mark in zip(finite, _marks(), strict=False):
        places = [(across.place(x), up.place(y)) for x, y in _thinned(points, WIDTH - _LEFT - _RIGHT)]
        if len(places) == 1:
            yield f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" {mark}/>'
        elif places:
            yield f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}" {mark}/>'


def _thinned(points: Points, columns: int) -> Points:
    """Keep of each column of pixels the first, least, largest and last point, in their order."""
    if len(points) <= 4 * columns:
        return points
    left: Points = []
    for column in range(columns):
        start, end = column * len(points) // columns, (column + 1) * len(points) // columns
        by_value = sorted(range(start, end), key=lambda at: points[at][1])
        left += [points[at] for at in sorted({start, by_value[0], by_value[-1], end - 1})]
    return left


class _Axis:
    """Axis from the least to the largest value, at two places of the picture."""

    def __init__(self, least: float, most: float, start: float, end: float) -> None:
        if most / 2 - least / 2 < _FLAT:  # a flat line stands in the middle
            margin = abs(least) / 10 or 1.0
            least, most = least - margin, most + margin
        self._least, self._most, self._start, self._end = least, most, start, end

    def place(self, value: float) -> float:
        # halves, because the difference of two large numbers may not be a number
        part = (value / 2 - self._least / 2) / (self._most / 2 - self._least / 2)
        return self._start + part * (self._end - self._start)

    def ticks(self) -> list[float]:
        """List round numbers, one to six, between the ends."""
        span = self._most / 2 - self._least / 2
        if span < _FLAT:
            return [self._least]
        unit = 10.0 ** math.floor(math.log10(span))
        step = next(unit * part for part in (0.5, 1, 2, 5) if span / (unit * part) <= 2.5)
        return [at * step for at in range(math.ceil(self._least / step), math.floor(self._most / step) + 1)]


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{html.escape(in_line(text))}</text>'
