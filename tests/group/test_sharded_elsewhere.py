"""Runs of sharded models in another layout, and read by one process that is in no group."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from processes import ended, outputs, started
from sharded_loops import HEAD

import everstep
import warm
from everstep.errors import DamagedCheckpointError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(5, 23), torch.nn.Tanh(), torch.nn.Linear(23, 12), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(12, 1)).double()


def everstep_says(*words: object) -> tuple[int, str]:
    """Exit status and output of a command."""
    command = [sys.executable, "-m", "everstep", *map(str, words)]
    done = warm.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_one_process_loads_verifies_copies_and_compares(tmp_path: Path) -> None:
    run, newest = tmp_path / "run", "epoch-0002-step-00000010"
    said = outputs(f"{HEAD}\ntrain({str(run)!r}, epochs=2)", 2)
    digest = said[0].partition("digest ")[2].split()[0]
    folder, copies = run / "checkpoints" / newest, tmp_path / "copies"
    loaded, trained = model(), model()
    optimizer = torch.optim.AdamW(loaded.parameters())
    assert everstep.load(run, {"model": loaded, "optimizer": optimizer}).digest == digest
    everstep.load(run / "best/valid_loss", {"model": trained})
    assert len(optimizer.state_dict()["state"]) == 6

    assert newest in everstep_says("checkpoints", run)[1]
    assert everstep_says("checkpoints", run, "verify")[0] == 0
    status, text = everstep_says("checkpoints", run, "copy", newest, "--to", copies)
    assert status == 0, text
    shutil.copytree(run, tmp_path / "other")
    assert compare_runs(run, tmp_path / "other") == []
    assert everstep_says("compare", run, tmp_path / "other")[0] == 0

    torn = folder / "pieces-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"x")
    status, text = everstep_says("checkpoints", run, "verify")
    assert status == 1 and torn.name in text
    again = model()
    everstep.load(copies / newest, {"model": again})
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    with pytest.raises(DamagedCheckpointError, match=torn.name):
        everstep.load(folder, {"model": again, "optimizer": optimizer})


def test_another_mesh_of_as_many_ranks_is_another_layout_and_no_divergence(tmp_path: Path) -> None:
    run, changed = tmp_path / "run", "results are not bit-identical to those before"

    def train(how: str, kill_at: int = 0) -> str:
        with started(f"{HEAD}\ntrain({str(run)!r}, {how!r}, {kill_at}, every=5)", 4) as processes:
            return "".join(ended(processes))

    train("fsdp", kill_at=9)
    assert changed not in train("fsdp", kill_at=8)
    said = train("hsdp", kill_at=9)
    was, now = re.findall(r"laid out as (.*), and is (.*) in this start", said)[0]
    assert was.startswith("Shard(dim=0) over 4, ") and now.startswith(
        "Replicate(), Shard(dim=0) over 2 x 2, "
    )
    assert said.count(changed) == 1 and "resume differs" not in said
    last = train("hsdp")
    assert "resume verified" in last and "resume differs" not in last
    journal = RunJournal(run)
    decided = [e.data for e in journal.events("decision", valid=False) if e.data["what"] == "chosen"]
    assert [(each["why"], each["step"]) for each in decided] == [("another layout of the sharded state", 5)]
    assert "more than one kind of machine" in everstep_says("show", run)[1]


def trained(run: Path, how: str, kill_at: int = 0, more: str = "") -> str:
    """What two ranks say; a program that is refused says so."""
    train = f"train({str(run)!r}, {how!r}, {kill_at}, every=2{more})"
    program = f"{HEAD}\ntry:\n    {train}\nexcept EverstepError as error:\n    say('refused', error)"
    with started(program, 2) as processes:
        return "".join(ended(processes))


def test_another_grouping_of_the_parameters_is_another_layout(tmp_path: Path) -> None:
    """The ranks reduce other buffers, so other elements meet in other places."""
    trained(tmp_path / "run", "fsdp", kill_at=5)
    again = trained(tmp_path / "run", "fsdp", kill_at=7)
    assert "another layout" not in again and "not bit-identical" not in again and "resume verified" in again
    said = trained(tmp_path / "run", "one group")
    was, now = re.findall(r"laid out as (.*), and is (.*) in this start", said)[0]
    assert "over 2, 3 groups of parameters" in was and "over 2, 1 group of parameters" in now
    assert "resume differs" not in said and said.count("digest") == 2


def test_another_precision_of_a_sharded_model_is_a_changed_setting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, "reduced in bfloat16", kill_at=5)
    refused = trained(run, "fsdp")
    assert "state 'model': mp_policy" in refused and "reduce_dtype=torch.bfloat16" in refused
    assert "digest" not in refused
    assert "mp_policy" not in trained(run, "reduced in bfloat16", kill_at=7)
    said = trained(run, "fsdp", more=", on_change='override'")
    assert "used as given" in said and said.count("digest") == 2 and "resume differs" not in said
