"""Draws the picture of the demo: the steps of both twins over time, as an SVG.

docs/timeline.svg is one of these pictures: make demo ARGS="--picture docs/timeline.svg"
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from everstep.drill.program import ProgramStart

WIDTH, HEIGHT = 860, 410
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 84, 34
LABEL = 200
"""Width of the words beside a resume."""
STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .mark { font-weight: 600; fill: #b3261e; }  .again { fill: #1a7f5a; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  .calm { stroke: #afb8c1; stroke-width: 2; }
  .run { stroke: #2f5fb3; stroke-width: 2.5; stroke-linejoin: round; }
  .twice { stroke: #1a7f5a; stroke-width: 5; }  .back { stroke: #b3261e; stroke-dasharray: 2 3; }
  .cross { stroke: #b3261e; stroke-width: 2.5; stroke-linecap: round; }
  .dot { fill: #1a7f5a; }  path { fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }  .title { fill: #e6edf3; }  .mark { fill: #f2827a; }  .again { fill: #56c596; }
    .grid { stroke: #30363d; }  .calm { stroke: #57606a; }  .run { stroke: #7aa7f0; }
    .twice { stroke: #56c596; }  .back, .cross { stroke: #f2827a; }  .dot { fill: #56c596; }
  }"""


class Canvas:
    """Scales from (seconds, steps) to the page, and the elements drawn so far."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps
        self.elements: list[str] = []

    def x(self, seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.seconds, 1)

    def y(self, step: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * step / self.steps, 1)

    def line(self, points: list[tuple[float, int]], kind: str) -> None:
        where = " L".join(f"{self.x(seconds)} {self.y(step)}" for seconds, step in points)
        self.elements.append(f'<path class="{kind}" d="M{where}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.elements.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{text}</text>')

    def cross(self, seconds: float, step: int) -> None:
        x, y = self.x(seconds), self.y(step)
        self.elements.append(f'<path class="cross" d="M{x - 5} {y - 5}l10 10m0 -10l-10 10"/>')

    def dot(self, seconds: float, step: int) -> None:
        self.elements.append(f'<circle class="dot" cx="{self.x(seconds)}" cy="{self.y(step)}" r="4"/>')


def draw(calm: list[ProgramStart], struck: list[ProgramStart], digest: str) -> str:
    """The SVG: each start a line, each kill a cross, each resume a dot, green what was executed again."""
    began = min(calm[0].began, struck[0].began)
    courses = [points(start, began) for start in struck]
    alone = points(calm[0], began)
    seconds = 1.02 * max(alone[-1][0], courses[-1][-1][0])
    steps = alone[-1][1]
    canvas = Canvas(seconds, steps)
    draw_grid(canvas, seconds, steps)
    canvas.line(alone, "calm")
    middle = alone[len(alone) * 2 // 3]
    canvas.text(canvas.x(middle[0]) - 14, canvas.y(middle[1]), "undisturbed", anchor="end")
    for course in courses:
        canvas.line(course, "run")
    for killed, resumed in pairwise(courses):
        draw_kill(canvas, killed[-1], resumed)
    kills = " and ".join(str(course[-1][1]) for course in courses[:-1])
    canvas.text(LEFT, 24, f"Two runs of one script, one of them killed by kill -9 at steps {kills}", "title")
    canvas.text(LEFT, 44, f"Both end in the same state, to the last bit: digest {digest}")
    canvas.text(LEFT - 8, TOP - 14, "step", anchor="end")
    body = "\n".join(canvas.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Steps of a training run over time: killed and resumed, it ends as the run that was '
        f'never killed">\n<style>{STYLE}\n</style>\n{body}\n</svg>\n'
    )


def points(start: ProgramStart, began: float) -> list[tuple[float, int]]:
    """(seconds, step) at the opening of the run and after each step."""
    records = [record for record in start.records if record.at in ("enter", "step")]
    return [(record.time - began, record.step) for record in records]


def draw_grid(canvas: Canvas, seconds: float, steps: int) -> None:
    for step in range(0, steps + 1, 90):
        canvas.line([(0, step), (seconds, step)], "grid")
        canvas.text(LEFT - 8, canvas.y(step) + 4, f"{step:,}", anchor="end")
    for second in range(0, int(seconds) + 1, ceil(seconds / 10)):
        canvas.text(canvas.x(second), HEIGHT - BOTTOM + 18, f"{second} s", anchor="middle")


def draw_kill(canvas: Canvas, killed: tuple[float, int], resumed: list[tuple[float, int]]) -> None:
    """The cross, the way back to the checkpoint, and the steps that are executed again."""
    (seconds, step), start = killed, resumed[0]
    canvas.line([point for point in resumed if point[1] <= step], "twice")
    canvas.line([killed, start], "back")
    canvas.cross(seconds, step)
    canvas.dot(*start)
    canvas.text(canvas.x(seconds) - 10, canvas.y(step) - 8, "kill -9", "mark", "end")
    x, y = canvas.x(start[0]) + 10, canvas.y(start[1])
    words = (f"from step {start[1]:,}:", f"{step - start[1]} executed again, all equal")
    fits = x + LABEL < WIDTH
    for below, line in zip((14, 29), words, strict=True):
        canvas.text(x if fits else WIDTH - 4, y + below, line, "again", "start" if fits else "end")
