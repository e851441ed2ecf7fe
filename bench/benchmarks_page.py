"""Writes docs/benchmarks.md and its pictures from the figures of bench/suite.py."""

from __future__ import annotations

from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from figures import HEAD, Figure, Table, from_json, row

INTRODUCTION = """\
# Benchmarks

`make bench` measures all this and writes this page; `make bench PEERS=1` measures other libraries beside it.

How to read: a value is a median, with its quartiles and the number of repeats. "Beside it" is the median
of what it is compared with in the same run (a bare loop, one copy, a raw write); "difference" is the median
of the differences of neighbours in time; "ratio" is 1 plus the difference by what stands beside it. A goal is
for the ratio where there is one, else for the median. Absolute times belong to one machine; ratios carry over
better. A machine of two shared cores is noisy: look at the quartiles, and at the row that compares the bare
loop with itself.
"""
LEFT, WIDTH, BAR, ROW_HEIGHT = 290, 860, 12, 22
STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .ours { fill: #2f7fd0; }  .theirs { fill: #afb8c1; }  .goal { stroke: #1a7f5a; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }  .title { fill: #e6edf3; }  .theirs { fill: #57606a; }  .goal { stroke: #56c596; }
  }"""
PICTURES = {
    "steps": ("A step", "us", "microseconds of CPU that a library adds to a step", False),
    "start": ("A start", "ms", "milliseconds of CPU that a start takes longer", False),
    "data": ("Data", "", "a batch by our streams, over what they replace", True),
}
"""Part -> title of the table that is drawn, unit, what is drawn, whether that is the ratio."""
OURS = ("TrainLoop", "Supervisor", "Trainer", "everstep", "data.", "import everstep", "first step in")
"""How the names of our rows begin."""


def write(found: dict[str, Any], docs: Path) -> None:
    """Write the page and the pictures into a folder."""
    parts = []
    for name, part in found.items():
        where, (before, after) = part["where"], part["load"]
        said = (
            f"{where['day']}, commit `{where['commit']}`; {where['machine']}; {where['versions']}; "
            f"load {before:.1f} before and {after:.1f} after. `python bench/{name}.py`"
        )
        tables = [from_json(table) for table in part["tables"]]
        picture = drawn(name, tables)
        if picture is not None:
            (docs / "images" / f"benchmark_{name}.svg").write_text(picture)
        for number, table in enumerate(tables):
            lines = [f"## {table.title}", "", table.how, ""]
            if number == 0:
                lines += [said, ""]
            if picture is not None and table.title == PICTURES[name][0]:
                lines += [f"![{PICTURES[name][2]}](images/benchmark_{name}.svg)", ""]
            parts.append("\n".join([*lines, *markdown(table), ""]))
    (docs / "benchmarks.md").write_text("\n".join([INTRODUCTION, *parts]))


def markdown(table: Table) -> list[str]:
    rows = [HEAD, ["---"] * len(HEAD), *map(row, table.figures)]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def drawn(name: str, tables: list[Table]) -> str | None:
    """Bars of the rows that are compared with something; None for a part without a picture."""
    if name not in PICTURES:
        return None
    title, unit, what, is_ratio = PICTURES[name]
    figures = [
        each
        for table in tables
        if table.title == title
        for each in table.figures
        if each.over and (not unit or each.unit == unit)
    ]
    lengths = [float(each.ratio or 0) if is_ratio else max(0.0, median(each.differences)) for each in figures]
    most = max(lengths)
    height = 60 + ROW_HEIGHT * len(figures) + 8
    body = [f'<text class="title" x="16" y="26">{escape(what)}</text>']
    for number, (figure, length) in enumerate(zip(figures, lengths, strict=True)):
        body += bar(figure, length, 60 + ROW_HEIGHT * number, (WIDTH - LEFT - 90) / most, is_ratio)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(what)}">\n<style>{STYLE}\n</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


def bar(figure: Figure, length: float, y: float, scale: float, is_ratio: bool) -> list[str]:
    """A name, a bar, its length in words, and a stroke at its goal."""
    kind = "ours" if figure.name.startswith(OURS) else "theirs"
    said = f"{length:.2f}" if is_ratio else f"{length:,.1f}"
    found = [
        f'<text x="{LEFT - 10}" y="{y + 10}" text-anchor="end">{escape(figure.name)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{max(1.0, length * scale):.1f}" height="{BAR}"/>',
        f'<text x="{LEFT + length * scale + 6:.1f}" y="{y + 10}">{said}</text>',
    ]
    if figure.goal is not None:
        goal = figure.goal if is_ratio else (figure.goal - 1) * median(figure.over)
        found.append(f'<path class="goal" d="M{LEFT + goal * scale:.1f} {y - 2}v{BAR + 4}"/>')
    return found
