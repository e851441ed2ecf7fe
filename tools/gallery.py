"""Draw the pictures of examples/README.md: each example is run, and a metric of its run is plotted.

    python tools/gallery.py [EXAMPLE ...]

docs/pictures/EXAMPLE.svg is what `everstep plot RUN METRIC --out FILE` draws.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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
        plot = ["plot", name, metric, "--out", str(PICTURES / f"{name}.svg")]
        subprocess.run([sys.executable, "-m", "everstep", *plot], cwd=folder, check=True)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or EXAMPLES:
        draw(chosen)
