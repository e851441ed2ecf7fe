"""Tables and charts as HTML that a notebook shows.

Only elements and attributes that survive the sanitizers of GitHub, nbviewer and nbconvert: no style, no
script, and each SVG inside an `<img>`, because SVG elements of a page are removed there.  Strings of a run
are text, never markup.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.display.cells import cell, in_line, is_number_column
from everstep.display.line_chart import Chart, drawn

_MOST_ROWS = 25
_LONGEST = 120
"""Most rows of a table, and most characters of a cell."""


def escaped(text: str) -> str:
    """Write any string as text of HTML: no markup, no control characters, in one line."""
    return html.escape(in_line(text))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str = "") -> str:
    """Write rows as a table: numbers to the right, the first 25 rows, long strings cut."""
    right = {name for name in columns if is_number_column(name, rows)}
    head = "".join(f"<th>{escaped(name)}</th>" for name in columns)
    body = "".join(_row(row, columns, right) for row in rows[:_MOST_ROWS])
    caption = f"<p><b>{escaped(title)}</b></p>" if title else ""
    more = f"<p>... and {len(rows) - _MOST_ROWS} more rows</p>" if len(rows) > _MOST_ROWS else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _row(row: Mapping[str, Any], columns: Sequence[str], right: set[str]) -> str:
    cells = (
        f'<td align="{"right" if name in right else "left"}">{_cell(name, row)}</td>' for name in columns
    )
    return f"<tr>{''.join(cells)}</tr>"


def _cell(name: str, row: Mapping[str, Any]) -> str:
    text = cell(name, row.get(name))
    return html.escape(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def charts(of: Iterable[Chart]) -> str:
    """Write charts beside each other, as pictures with their data in words for who cannot see them."""
    return "".join(map(_picture, of))


def _picture(chart: Chart) -> str:
    data = base64.b64encode(drawn(chart).encode()).decode()
    return f'<img align="top" alt="{escaped(chart.words())}" src="data:image/svg+xml;base64,{data}">'
