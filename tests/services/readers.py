"""What other programs read of a run's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EVERYTHING = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}


def points(run_dir: Path, folder: str = "logs/tensorboard") -> dict[str, list[Any]]:
    """Tag -> (step, value) of each point, as TensorBoard's own reader finds them."""
    events = EventAccumulator(str(run_dir / folder), EVERYTHING)
    events.Reload()
    tags = events.Tags()
    found: dict[str, list[Any]] = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["images"]:
        found[tag] = [(e.step, e.width, e.height, e.encoded_image_string) for e in events.Images(tag)]
    for tag in tags["histograms"]:
        found[tag] = [(e.step, e.histogram_value) for e in events.Histograms(tag)]
    for tag in tags["tensors"]:
        found[tag] = [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors(tag)]
    return found
