"""Another number of ranks and another layout at once: DistributedDataParallel, FSDP2, one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, outputs, started
from sharded_loops import HEAD
from test_other_ranks import losses

pytestmark = pytest.mark.campaign("long")


def test_ddp_on_four_fsdp_on_two_one_process_fsdp_on_three(tmp_path: Path) -> None:
    straight, run = str(tmp_path / "straight"), str(tmp_path / "run")
    outputs(f"{HEAD}\ntrain({straight!r}, 'alone')", 1)
    for how, size, dies in (("ddp", 4, 5), ("fsdp", 2, 8), ("alone", 1, 12)):
        with started(f"{HEAD}\ntrain({run!r}, {how!r}, kill_at={dies}, slow=0.05)", size) as processes:
            said = ended(processes)
            assert all(process.returncode for process in processes), "\n".join(said)
    said = outputs(f"{HEAD}\ntrain({run!r}, 'fsdp', uneven='weight')", 3)
    assert "the checkpoint is of 1 rank, and this start has 3 ranks" in said[0]
    expected = losses(Path(straight))
    found = losses(Path(run))
    assert found.keys() == expected.keys()
    for place, loss in found.items():
        assert loss == pytest.approx(expected[place], abs=1e-10), place


def test_an_open_window_of_a_sharded_model_is_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with started(f"{HEAD}\ntrain({run!r}, 'window', kill_at=6, slow=0.05)", 2) as processes:
        ended(processes)
    program = f"{HEAD}\ntry: train({run!r}, 'window')\nexcept EverstepError as error: say('refused', error)"
    for text in outputs(program, 4):
        assert "window of accumulated gradients" in text and "start with 2 ranks" in text, text
