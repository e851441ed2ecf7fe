"""Draw the pictures of examples/README.md: each example is run, and a metric of its run is drawn.

python tools/gallery.py [EXAMPLE ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from everstep.record import RunJournal

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"

EXAMPLES = {
    "digits": ("--run", ["--epochs", "20"], "valid_loss"),
    "logistic_numpy": ("--run", ["--steps", "800"], "loss"),
    "gan": ("--run", [], "generator_loss"),
    "transformer": ("--run", ["--small"], "loss"),
}
"""Example -> its option for the run's directory, further ones, and the metric to plot."""


def draw(name: str) -> None:
    option, further, metric = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(ROOT / "examples" / f"{name}.py"), option, f"runs/{name}", *further]
        subprocess.run(run, cwd=folder, check=True)
        steps, values = RunJournal(Path(folder, "runs", name)).series(metric)
        (PICTURES / f"{name}.svg").write_text(picture(metric, steps, values))


def picture(title: str, steps: list[int], values: list[float]) -> str:
    """Draw finite values over increasing steps, with the first and last step and the extremes as labels."""
    low, high = min(values), max(values)
    points = " ".join(
        f"{62 + 346 * (step - steps[0]) / (steps[-1] - steps[0]):.1f},"
        f"{206 - 182 * (value - low) / (high - low or 1):.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    labels = [(62, 15, "start", title), (56, 28, "end", f"{high:.5g}"), (56, 210, "end", f"{low:.5g}")]
    labels += [(62, 221, "start", str(steps[0])), (408, 221, "end", str(steps[-1]))]
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{at}">{text}</text>' for x, y, at, text in labels)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 240" font-family="sans-serif" '
        f'font-size="11" fill="#7a7a7a">{texts}'
        f'<polyline points="{points}" fill="none" stroke="#2f7fd0" stroke-width="1.6"/></svg>\n'
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or EXAMPLES:
        draw(chosen)
