"""Data that is not what the checkpoint read: refused with both values, or gone on with, said aloud."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import everstep
from everstep.data import arrays
from everstep.errors import DataError

X = torch.arange(8, dtype=torch.float64)
SAMPLES = TensorDataset(X)

EPOCH_END, INSIDE = 4, 6  # steps of a pass of 4 batches


IN_ORDER, SHUFFLED = SequentialSampler(SAMPLES), RandomSampler(SAMPLES)


def start(run_dir: Path, make: Callable[[], Any], steps: int, **arguments: Any) -> Any:
    """One start of a loop that reads `make()`, to `steps`; the weights and the loop."""
    w, lines = np.zeros(1), []
    loop = everstep.TrainLoop(
        run_dir,
        {"w": w},
        max_step=steps,
        seed=arguments.pop("seed", 5),
        services=[everstep.services.Console(sink=lines.append)],
        **arguments,
    )
    data = make()
    with loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                part = batch[0] if isinstance(batch, list | tuple) else batch
                w[0] = w[0] * 0.5 + float(part.sum()) * step
    return w[0], loop, lines


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "batch size": (
        lambda: arrays(X, batch_size=2),
        lambda: arrays(X, batch_size=4),
        "batch_size was 2 at the checkpoint and is 4 now",
    ),
    "length": (lambda: arrays(X, batch_size=2), lambda: arrays(X[:7], batch_size=2), "length was 8.*is 7"),
    "kind": (lambda: [X[:2]] * 4, lambda: arrays(X, batch_size=2), "kind was 'sequence'.*is 'arrays'"),
    "shuffle of a DataLoader": (
        lambda: DataLoader(SAMPLES, 2),
        lambda: DataLoader(SAMPLES, 2, shuffle=True),
        "sampler was 'SequentialSampler' at the checkpoint and is 'RandomSampler' now; give",
    ),
}


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("at", [EPOCH_END, INSIDE], ids=["between passes", "inside a pass"])
@pytest.mark.parametrize(("before", "now", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_refused_with_both_values_or_chosen(
    tmp_path: Path, before: Any, now: Any, message: str, at: int
) -> None:
    start(tmp_path / "run", before, at)
    with pytest.raises(DataError, match=f"stream 'train': .*{message}.*on_change=\"override\""):
        start(tmp_path / "run", now, 12)
    _, loop, lines = start(tmp_path / "run", now, 12, on_change="override")
    assert loop.ending.step == 12
    [said] = [line for line in lines if "is used as given" in line]
    assert ("starts from its beginning" in said) == (at == INSIDE)
    assert not any("as given" in line for line in start(tmp_path / "run", now, 14)[2])  # it is the run's now


def test_workers_of_a_plain_dataloader_are_free_between_passes(tmp_path: Path) -> None:
    start(tmp_path / "run", lambda: DataLoader(SAMPLES, 2, num_workers=1), EPOCH_END)
    start(tmp_path / "run", lambda: DataLoader(SAMPLES, 2), INSIDE)
    changed = "num_workers was 0 at the checkpoint and is 1 now; give the same until the pass ends, or pass"
    with pytest.raises(DataError, match=changed) as refused:
        start(tmp_path / "run", lambda: DataLoader(SAMPLES, 2, num_workers=1), 8)
    assert "train2" not in str(refused.value)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [EPOCH_END, INSIDE], ids=["between passes", "inside a pass"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_chosen_seed_begins_anew_only_what_depends_on_it(tmp_path: Path, shuffle: bool, at: int) -> None:
    def make() -> Any:
        return arrays(X, batch_size=2, shuffle=shuffle)

    start(tmp_path / "run", make, at)
    [_, loop, lines] = start(tmp_path / "run", make, 8, seed=6, on_change="override")
    said = [line for line in lines if "stream 'train' is used as given" in line]
    assert len(said) == shuffle and loop.seed == 6 and loop.step == 8
    assert all("seed was 5 at the checkpoint and is 6 now" in line for line in said)
    assert any("starts from its beginning" in line for line in said) == (shuffle and at == INSIDE)


def program(run_dir: Path, epochs: int, **arguments: Any) -> tuple[Any, list[str]]:
    """A program whose batch size grows with the epoch, made anew each time; crashes in none."""
    w, lines = np.zeros(1), []
    services = [everstep.services.Console(sink=lines.append)]
    with everstep.TrainLoop(
        run_dir, {"w": w}, max_epoch=epochs, seed=5, services=services, **arguments
    ) as loop:
        for epoch in loop.iter_epochs():
            data = arrays(X, batch_size=epoch, shuffle=True)
            for step, [x] in loop.iter_steps(data):
                w[0] = w[0] * 0.5 + float(x[0]) * step
    return (w[0], loop.ending.digest), lines


def test_data_that_was_seen_to_vary_goes_on_and_says_so(tmp_path: Path) -> None:
    program(tmp_path / "run", 1)
    with pytest.raises(DataError, match=r"batch_size was 1.*is 2 now.*name=\"train2\""):
        program(tmp_path / "run", 2)
    program(tmp_path / "run", 3, on_change="override")
    result, lines = program(tmp_path / "run", 4)
    assert result == program(tmp_path / "straight", 4)[0]
    assert any("is used as given: batch_size was 3 at the checkpoint and is 4 now" in line for line in lines)
