"""A run with pictures, texts and histograms of `add_summary`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from everstep.services import Histogram, Image, TensorBoard
from tiny_runs import Tiny

TEXT = "<img src=x onerror=alert(1)> epoch "


def pictured(run_dir: Path, epochs: int = 3) -> Path:
    """Train; each epoch adds `seen/noise` (a picture), `seen/weights` (a histogram) and `note` (a text)."""

    def tail(loop: Any, epoch: int) -> None:
        draws = np.random.default_rng(epoch)
        pixels, weights = draws.random((32, 48, 3)), draws.standard_normal(1000)
        loop.add_summary({"seen": {"noise": Image(pixels), "weights": Histogram(weights)}})
        loop.add_summary({"note": f"{TEXT}{epoch}"})
        loop.collect_metrics(valid_loss=1 / epoch)

    Tiny(run_dir, max_epoch=epochs, services=[TensorBoard()]).train(tail=tail)
    return run_dir
