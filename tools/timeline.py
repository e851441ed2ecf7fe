"""Draws docs/timeline.svg from the journals of two real runs of the digits demo.

One is killed at moments chosen at random and started again, the other is left alone.  The picture is
drawn only if both end in the same state, leaf by leaf and row by row.

    python tools/timeline.py            (about a minute)
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint import CheckpointName, read_checkpoint
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

ROOT = Path(__file__).parent.parent
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGKILL)
LABELS = {signal.SIGKILL: "kill -9", signal.SIGINT: "Ctrl-C"}


# ------------------------------------------------------------------------------------- the runs


def demo(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "examples/digits.py", "--run", str(run)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train_to_the_end(run: Path) -> None:
    output, _ = demo(run).communicate()
    if "digest of the state" not in output:
        raise SystemExit(f"the demo failed:\n{output}")


def train_under_fire(run: Path, seed: int) -> list[tuple[float, signal.Signals]]:
    """Start the demo, send it a signal at a random moment, start it again ...; when what was sent."""
    moments = random.Random(seed)
    sent, epoch = [], 0
    for number in SIGNALS:
        epoch += moments.randint(4, 7)
        process = demo(run)
        assert process.stdout is not None
        while f"[Epoch {epoch}/" not in (line := process.stdout.readline()):
            if not line:
                raise SystemExit("the demo ended before it was killed; start with another --seed")
        time.sleep(moments.uniform(0, 0.3))
        sent.append((time.time(), number))
        process.send_signal(number)
        process.communicate()
    train_to_the_end(run)
    return sent


# ---------------------------------------------------------------------------------- the journals


@dataclass
class Start:
    """One start of the process, as the journal has it.

    Attributes:
        points: (seconds since the run's first row, step).
        resumed_at: the step it went on from; None for the first.
        verified: until which step it compared what it executed again, None if nothing was.
    """

    points: list[tuple[float, int]]
    resumed_at: int | None = None
    verified: int | None = None


def read(run: Path) -> tuple[list[Start], float]:
    """The starts of a run that did some steps, and when the first began (seconds since 1970)."""
    starts: list[Start] = []
    began, reached = 0.0, 0
    for segment in RunJournal(run).segments():
        points = [
            (each.time, int(each.block.steps[-1])) for each in segment.blocks if each.block.phase == "step"
        ]
        if not points:
            continue
        opening = next(event for event in segment.events if event.kind == "segment")
        began = began or opening.time
        name = opening.data["facts"]["resumed_from"]
        at = 0 if name is None else CheckpointName.parse(name).step
        start = Start([(t - began, step) for t, step in [(opening.time, at), *points]])
        if name is not None:
            start.resumed_at = at
        for event in segment.events:
            if event.kind == "verified" and event.data["report"].startswith("resume verified"):
                start.verified = reached
        reached = points[-1][1]
        starts.append(start)
    return starts, began


# ----------------------------------------------------------------------------------- the picture

WIDTH, HEIGHT = 860, 410
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 84, 34
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


def draw(
    fire: list[Start], calm: list[Start], sent: list[tuple[float, signal.Signals]], began: float, digest: str
) -> str:
    """The SVG: steps over wall time, each start a line, each signal a cross."""
    seconds, steps = fire[-1].points[-1][0] * 1.02, fire[-1].points[-1][1]
    canvas = Canvas(seconds, steps)
    for step in range(0, steps + 1, 300):
        canvas.line([(0, step), (seconds, step)], "grid")
        canvas.text(LEFT - 8, canvas.y(step) + 4, f"{step:,}", anchor="end")
    for second in range(0, int(seconds) + 1, 5):
        canvas.text(canvas.x(second), HEIGHT - BOTTOM + 18, f"{second} s", anchor="middle")
    canvas.line(calm[0].points, "calm")
    middle = calm[0].points[len(calm[0].points) * 2 // 3]
    canvas.text(canvas.x(middle[0]) - 14, canvas.y(middle[1]), "never stopped", anchor="end")
    for number, start in enumerate(fire):
        canvas.line(start.points, "run")
        if start.verified is not None:
            again = [point for point in start.points if point[1] <= start.verified]
            canvas.line(again, "twice")
        if start.resumed_at is not None:
            canvas.dot(*start.points[0])
        if number < len(sent):
            reached = start.points[-1][1]
            moment = sent[number][0] - began
            canvas.line([(moment, reached), fire[number + 1].points[0]], "back")
            canvas.cross(moment, reached)
            canvas.text(canvas.x(moment) - 10, canvas.y(reached) - 8, LABELS[sent[number][1]], "mark", "end")
            _say_resumed(canvas, fire[number + 1])
    kills = sum(kind is signal.SIGKILL for _, kind in sent)
    canvas.text(LEFT, 24, f"One training run, stopped {len(sent)} times ({kills} by kill -9)", "title")
    canvas.text(LEFT, 44, f"Both runs end in the same state, to the last bit: digest {digest}")
    canvas.text(LEFT - 8, TOP - 14, "step", anchor="end")
    body = "\n".join(canvas.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Steps of a training run over time: stopped and resumed, it ends as the run that was '
        f'never stopped">\n<style>{STYLE}\n</style>\n{body}\n</svg>\n'
    )


def _say_resumed(canvas: Canvas, start: Start) -> None:
    seconds, step = start.points[0]
    x, y = canvas.x(seconds) + 10, canvas.y(step)
    canvas.text(x, y + 14, f"from step {step:,}:", "again")
    if start.verified is None:
        canvas.text(x, y + 29, "no step lost", "again")
    else:
        canvas.text(x, y + 29, f"{start.verified - step} executed again, all equal", "again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=4, help="of the moments of the signals")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timeline.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calm, fire = Path(folder, "calm"), Path(folder, "fire")
        train_to_the_end(calm)
        sent = train_under_fire(fire, options.seed)
        if differences := compare_runs(calm, fire):
            raise SystemExit(f"the two runs differ: {differences[:3]}")
        starts, began = read(fire)
        newest = max((fire / "checkpoints").iterdir(), key=lambda path: CheckpointName.parse(path.name))
        options.out.write_text(draw(starts, read(calm)[0], sent, began, read_checkpoint(newest).digest))
    print(f"both runs are equal; drew {options.out}")


if __name__ == "__main__":
    main()
