"""Draw the pictures of examples/README.md: each example is run, and a metric of its run is drawn.

python tools/gallery.py [EXAMPLE ...]
"""

from __future__ import annotations

import html
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
        (PICTURES / f"{name}.svg").write_text(drawn(metric, steps, values))


def drawn(title: str, steps: list[int], values: list[float]) -> str:
    """A line over the steps as an SVG document, readable on white and on black."""
    least, most = min(values), max(values)
    places = [
        f"{62 + 346 * step / steps[-1]:.1f} {206 - 182 * (value - least) / (most - least):.1f}"
        for step, value in zip(steps, values, strict=True)
    ]
    labels = {(62, 15): title, (62, 226): str(steps[0]), (380, 226): str(steps[-1])}
    labels |= {(8, 28): f"{most:.3g}", (8, 206): f"{least:.3g}"}
    texts = "".join(f'<text x="{x}" y="{y}">{html.escape(text)}</text>' for (x, y), text in labels.items())
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="420" height="240" font-family="sans-serif" '
        f'font-size="11" fill="#7a7a7a">{texts}<path d="M62 24V206H408" fill="none" stroke="#888"/>'
        f'<path d="M{"L".join(places)}" fill="none" stroke="#2f7fd0" stroke-width="1.6"/></svg>\n'
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or EXAMPLES:
        draw(chosen)
