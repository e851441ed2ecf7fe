"""Draws docs/reliability.svg: each run of the campaign a line, each kill a stroke at its step."""

from __future__ import annotations

import html
from collections import Counter
from typing import Any

WIDTH, LEFT, RIGHT, TOP = 860, 224, 30, 92
ROW, GAP, LEAST = 5, 12, 16
"""Height of a run, room between programs, and least height of a program."""
PHASES = {
    "start-up": "#d55e00",
    "body": "#2f7fd0",
    "commit": "#c05fa0",
    "tail": "#a87d00",
    "shutdown": "#888888",
}
LEGEND = (
    "A line is one run, from its first step to its last; behind it its epochs. A stroke is a kill;",
    "a pale one came before the first scheduled checkpoint and does not count. A dot: exact at the end.",
)
STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .run { stroke: #afb8c1; }  .epoch { stroke: #d8dee4; }  .exact { fill: #1a7f5a; }  .pale { opacity: .35; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }  .title { fill: #e6edf3; }
    .run { stroke: #57606a; }  .epoch { stroke: #30363d; }  .exact { fill: #56c596; }
  }"""

Run = dict[str, Any]
"""A run that was killed: its program, steps, steps of an epoch, [step, phase, counted] kills, and its end."""


def draw(runs: list[Run]) -> str:
    """Draw runs, those of one program together."""
    body: list[str] = []
    y = TOP
    for program in sorted({run["program"] for run in runs}):
        of = [run for run in runs if run["program"] == program]
        height = max(ROW * len(of), LEAST)
        body.append(_text(LEFT - 12, y + height / 2 + 4, program, 'text-anchor="end"'))
        for step in range(0, of[0]["steps"] + 1, of[0]["epoch"]):
            body.append(f'<path class="epoch" d="M{_x(step, of[0])} {y}v{height}"/>')
        for number, run in enumerate(of):
            body += _drawn(run, y + ROW * number + ROW / 2)
        y += height + GAP
    kills = Counter(phase for run in runs for _, phase, counted in run["kills"] if counted)
    said = ", ".join(f"{phase} {kills[phase]:,}" for phase in PHASES)
    title = f"{len(runs):,} runs, killed {kills.total():,} times"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="'
        f'{title}, by where the kill struck: {said}">\n<style>{STYLE}\n</style>\n'
        + "\n".join([*_head(title, kills), *body])
        + "\n</svg>\n"
    )


def _head(title: str, kills: Counter[str]) -> list[str]:
    found = [_text(16, 24, title, 'class="title"'), _text(16, 42, LEGEND[0]), _text(16, 58, LEGEND[1])]
    for number, (phase, color) in enumerate(PHASES.items()):
        x = 16 + 120 * number
        found.append(f'<rect x="{x}" y="69" width="3" height="10" fill="{color}"/>')
        found.append(_text(x + 8, 78, f"{phase}: {kills[phase]:,}"))
    return found


def _drawn(run: Run, y: float) -> list[str]:
    found = [f'<path class="run" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>']
    for step, phase, counted in run["kills"]:
        pale = "" if counted else ' class="pale"'
        place = f"M{_x(step, run)} {y - ROW / 2}v{ROW - 0.5}"
        found.append(f'<path{pale} stroke="{PHASES[phase]}" stroke-width="2" d="{place}"/>')
    if run["ended"] == "exact":
        found.append(f'<circle class="exact" cx="{WIDTH - RIGHT + 8}" cy="{y}" r="2"/>')
    return found


def _x(step: int, run: Run) -> str:
    part = min(step / run["steps"], 1.0)
    return f"{LEFT + (WIDTH - LEFT - RIGHT) * part:.1f}"


def _text(x: float, y: float, text: str, how: str = "") -> str:
    return f'<text x="{x}" y="{y}" {how}>{html.escape(text)}</text>'
