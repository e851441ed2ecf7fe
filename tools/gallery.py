"""Draw the pictures of examples/README.md: each example is run, and a metric of its run is drawn.

python tools/gallery.py [EXAMPLE ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from everstep.display.html import Chart, Line, drawn
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
        (PICTURES / f"{name}.svg").write_text(
            drawn(Chart(metric, [Line(name, [*map(float, steps)], values)])) + "\n"
        )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or EXAMPLES:
        draw(chosen)
