"""Timeline of a program as a line of characters: steps from left to right."""

from __future__ import annotations

from collections import Counter

from everstep.drill.divergence import Undisturbed
from everstep.drill.program import ProgramStart

WIDTH = 32
ONCE, AGAIN, STRUCK, NEVER = "━", "▓", "✗", "·"


def positions(undisturbed: Undisturbed) -> dict[tuple[str, int, int], int]:
    """Map (run, epoch, step) to the number of steps that the undisturbed program has then done, from 1."""
    steps = [
        record for start in undisturbed.program.starts for record in start.records if record.at == "step"
    ]
    return {(record.run, record.epoch, record.step): n for n, record in enumerate(steps, 1)}


def done_by(start: ProgramStart, place: dict[tuple[str, int, int], int]) -> list[int]:
    """List the steps that a start completed, as positions."""
    keys = [(record.run, record.epoch, record.step) for record in start.records if record.at == "step"]
    return [place[key] for key in keys if key in place]


def executed_again(starts: list[ProgramStart], place: dict[tuple[str, int, int], int]) -> Counter[int]:
    """Count, for each step that was completed more than once, how often it was executed again."""
    done = Counter(step for start in starts for step in done_by(start, place))
    return Counter({step: times - 1 for step, times in done.items() if times > 1})


def draw_timeline(
    starts: list[ProgramStart], place: dict[tuple[str, int, int], int], width: int = WIDTH
) -> str:
    """Draw columns of steps: done once, done again, struck, never done."""
    total = max(place.values(), default=1)
    times = [0] * total
    marks: set[int] = set()
    reached = 0
    for start in starts:
        done = done_by(start, place)
        for step in done:
            times[step - 1] += 1
        reached = done[-1] if done else reached
        if start.strike is not None and start.status:
            marks.add(_column(max(reached, 1), total, width))
    cells = []
    for column in range(width):
        first = column * total // width
        span = times[first : max(first + 1, (column + 1) * total // width)]
        cells.append(
            STRUCK if column in marks else AGAIN if max(span) > 1 else ONCE if max(span) == 1 else NEVER
        )
    return "".join(cells)


def _column(step: int, total: int, width: int) -> int:
    return min(width - 1, (step - 1) * width // total)
