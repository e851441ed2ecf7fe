"""A start on another machine, or under other settings of it: said first, and nothing is called equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.contracts.group import DataRanks
from everstep.supervisor.opening.configuration import changes, fingerprint
from tiny_runs import Boom, Tiny, boom_at


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Here(Tiny):
    """A program whose numbers depend on the number of threads, as those of a kernel may."""

    def __init__(self, run_dir: Path, threads: int, **arguments: Any) -> None:
        torch.set_num_threads(threads)
        services = [everstep.Checkpoints(everstep.Every(steps=4))]
        super().__init__(run_dir, services=services, **{"max_epoch": 2, **arguments})

    def update(self, ids: Any) -> None:
        self.w += 1e-9 * torch.get_num_threads()
        super().update(ids)

    def said(self, text: str) -> list[int]:
        return [at for at, line in enumerate(self.lines) if text in line]


def crash(here: Here, at: int) -> Here:
    with pytest.raises(Boom):
        here.train(inside=boom_at(at))
    return here


DIFFERENCE = "torch.threads: stored 1, given 2"


def test_another_fingerprint_is_said_first_and_its_numbers_are_no_divergence(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 2).train()
    (first,) = now.said("warning: the checkpoint was computed on another machine")
    assert first < now.said("resuming")[0]
    assert (
        DIFFERENCE in now.lines[first] and "may differ from those of an uninterrupted run" in now.lines[first]
    )
    assert now.said("not compared (they were computed on another machine") and not now.said("differs")
    assert not now.loop.ending.one_fingerprint and DIFFERENCE in now.loop.ending.warnings[0]


def test_the_run_stays_marked_and_a_finished_one_computes_nothing(tmp_path: Path) -> None:
    crash(Here(tmp_path / "a", 1), 5)
    Here(tmp_path / "a", 2).train()
    Here(tmp_path / "b", 1).train()
    for run, epochs, same in (("a", 2, False), ("a", 3, False), ("b", 2, True)):
        again = Here(tmp_path / run, 2, max_epoch=epochs).train()
        assert not again.said("machine") and again.loop.ending.one_fingerprint is same


def test_it_is_that_of_the_start_that_wrote_the_checkpoint(tmp_path: Path) -> None:
    """Not that of the start before: what it did was superseded, and its rows are no measure either."""
    crash(Here(tmp_path, 1), 5)
    crash(Here(tmp_path, 2), 7)
    back = Here(tmp_path, 1).train()
    assert not back.said("machine, or under other settings of it:") and not back.said("state=")
    assert back.loop.ending.one_fingerprint
    undisturbed = Here(tmp_path.with_name("undisturbed"), 1).train()
    assert back.result() == undisturbed.result()


def test_under_the_same_one_a_difference_is_the_program_s(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 1)
    now.update = lambda ids: now.loop.collect_metrics(loss=0.5)  # type: ignore[method-assign]
    now.train()
    assert now.said("state=")


def test_a_framework_that_one_side_has_not_imported_is_no_difference() -> None:
    here = fingerprint({}, DataRanks([0]))
    assert changes({"numpy": here["numpy"], "machine": here["machine"]}, here) == []
    assert changes(None, here) == []
    other = {**here, "machine": {**here["machine"], "processor": "abacus"}}
    (found,) = changes(other, here)
    assert str(found) == f"machine.processor: stored abacus, given {here['machine']['processor']}"
