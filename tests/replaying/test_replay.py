"""Replay: steps of a run happen again in a copy, exactly, and the run stays as it is in any case."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
import warm
from everstep.errors import ReplayError
from everstep.record import Journal, RunJournal
from everstep.record.rundir import _encode
from everstep.replaying.execution import program_of

SCRIPTS = Path(__file__).parent.parent / "drill" / "scripts"
PROGRAM = Path(__file__).parent / "replay_program.py"
WITH_SCRIPTS = f"{SCRIPTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
"""PYTHONPATH with which a copy of a script finds its modules."""


def start(*command: str | Path, status: int = 0, **environment: str) -> str:
    """A Python program in a process of its own; what it prints to both."""
    done = warm.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "COLUMNS": "120", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return str(done.stdout)


def replay(*arguments: str | Path, status: int = 0, **environment: str) -> str:
    return start("-m", "everstep", "replay", *arguments, status=status, **environment)


def as_it_is(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Content and time of each file, and the times of all folders."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
            path.stat().st_size,
        )
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, 30 steps of everything.py; no test changes it."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, SCRIPTS / "everything.py"]
    subprocess.run(command, cwd=folder, env={**os.environ, "EVERSTEP_INDEX": "off"}, check=True)
    return folder


@pytest.fixture
def run(trained: Path) -> Iterator[Path]:
    """The run, which must be as before when the test ends."""
    before = as_it_is(trained)
    yield trained / "runs" / "tiny"
    assert as_it_is(trained) == before


# ------------------------------------------------------------------------------------ verification


def test_every_recorded_value_is_found_again_and_the_run_stays_as_it_is(run: Path, temporary: Path) -> None:
    told = replay(run, "--verify", "26:30", "--json", "found.json")
    assert "steps 25 to 30 executed again from epoch-0004-step-00000024" in told
    assert "\nverified: all recorded values are equal" in told
    found = json.loads(Path("found.json").read_text())
    assert found["equal"] == {
        "batch digest": 6,
        "loss": 7,
        "random state": 2,
        "state digest": 10,
        "state of a checkpoint": 2,
        "valid_loss": 1,
    }
    assert list(temporary.glob("everstep-replay-*")) == []


def test_a_run_with_a_given_seed_is_executed_from_its_beginning_where_no_checkpoint_is_older(
    run: Path,
) -> None:
    told = replay(run, "--verify", ":9")
    assert "steps 1 to 9 executed again from the start of the run" in told and "verified" in told


@pytest.mark.campaign("long")
def test_another_program_is_found_out_at_its_first_other_value(run: Path) -> None:
    changed = Path("changed.py")
    program = (SCRIPTS / "everything.py").read_text()
    changed.write_text(program.replace('["rate"] *= 0.9', '["rate"] *= 0.8'))
    given = ("--verify", ":", "--json", "found.json", "--", changed, run)
    told = replay(run, *given, status=1, PYTHONPATH=WITH_SCRIPTS)
    first = json.loads(Path("found.json").read_text())["first"]
    # behind step 6 the rate is changed, which is an entry of the state
    assert (first["step"], first["component"], first["name"]) == (6, "state", "state 'notes'"), told
    assert "differ: state (state 'notes') step 6: " in told and " values differ)" in told


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("door", "more"), [("TrainLoop", ()), ("Supervisor", ()), ("TrainLoop", ("--workers", "2"))]
)
def test_each_door_is_replayed(door: str, more: tuple[str, ...]) -> None:
    start(PROGRAM, "runs/one", "--door", door, *more)
    before = as_it_is(Path("runs"))
    assert "\nverified: " in replay("runs/one", "--verify", "8:20")
    # neither the message of `Notify` is sent again, nor is a line run behind the loop
    assert as_it_is(Path("runs")) == before and Path("runs/one.told").read_text() == "x"


@pytest.mark.campaign("long")
def test_the_run_of_a_config_is_replayed(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "experiment"))
    from tiny_experiment import write

    write(tmp_path)
    train = ["train", "tiny.yaml", "trainer.max_epoch=2", "--run-dir", "runs/tiny"]
    # a fresh interpreter, as the replay has: which frameworks are imported decides what is seeded
    subprocess.run([sys.executable, "-m", "everstep", *train], check=True, capture_output=True)
    before = as_it_is(Path("runs/tiny"))
    assert "\nverified: " in replay("runs/tiny", "--verify", ":")
    assert as_it_is(Path("runs/tiny")) == before


# ------------------------------------------------------------------------------------ one step


def test_the_batch_and_the_metrics_of_a_step_are_shown(run: Path) -> None:
    told = replay(run, "--step", "9", "--json", "found.json")
    assert "batch of step 9:\n(array([[" in told and "steps 1 to 9 executed again" in told
    rows = RunJournal(run).rows()
    (loss,) = [row.value for row in rows if (row.phase, row.name, row.step) == ("step", "loss", 9)]
    assert f"metrics of step 9:\n  loss {loss!r}" in told
    assert json.loads(Path("found.json").read_text())["shown"]["metrics"]["loss"] == loss


def noisy() -> dict[int, tuple[list[int], float]]:
    """A program as a function; returns the batch and the noise of each step."""
    w, drawn, saves = np.zeros(2), {}, everstep.Checkpoints(everstep.Every(steps=4))
    data = everstep.data.arrays(np.arange(24), batch_size=2, shuffle=True)
    arguments: dict[str, Any] = {"seed": 1, "max_step": 12, "services": [saves], "default_services": False}
    with everstep.Supervisor("runs/noisy", {"w": w}, **arguments) as sv:
        batches = sv.stream(data)
        while not sv.should_stop():
            (batch,) = next(batches)
            drawn[sv.step + 1] = batch.tolist(), np.random.random()
            w += batch + drawn[sv.step + 1][1]
            sv.advance(loss=float(w.sum()))
    return drawn


def test_in_python_a_program_is_left_before_the_step_with_its_random_state() -> None:
    drawn, before = noisy(), as_it_is(Path("runs/noisy"))
    with everstep.runs.replay("runs/noisy", 11) as at:
        noisy()
    assert (at.step, at.epoch, at.batch[0].tolist()) == (11, 0, drawn[11][0])
    assert np.random.random() == drawn[11][1]
    assert at.state["w"].shape == (2,)
    with pytest.raises(ReplayError, match="ended before step 40"), everstep.runs.replay("runs/noisy", 40):
        noisy()
    assert as_it_is(Path("runs/noisy")) == before
    assert not {"EVERSTEP_ROOT", "EVERSTEP_REPLAY"} & os.environ.keys()


# ------------------------------------------------------------------------------------ what is refused


@pytest.mark.campaign("long")
def test_what_cannot_be_executed_again_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path, status: int = 4) -> str:
        return " ".join(replay(*arguments, status=status).split())

    assert "has the steps 1 to 30; give steps among them" in refused(run, "--step", "32", status=2)
    assert "give one of --step N and --verify" in refused(run, status=2)
    assert "give steps as A:B" in refused(run, "--verify", "3-4", status=2)
    moved = shutil.copytree(run, tmp_path / "moved")
    assert "is to be replayed" in refused(moved, "--verify", "26:27")
    assert "verified" in replay(moved, "--verify", "26:27", "--opened-as", run)
    shutil.rmtree(moved / "checkpoints")
    facts = json.loads((moved / "run.json").read_text()) | {"seed_given": False}
    facts.pop("checksum", None)
    (moved / "run.json").write_bytes(_encode(facts))
    assert "no whole checkpoint up to step 25 (there is none at all)" in refused(moved, "--step", "26")


def recorded_otherwise(run: Path, to: Path, **facts: Any) -> Path:
    """A copy whose newest start has recorded something else."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "journal")
    Journal.open(to, 1, None, {**RunJournal(run).facts(), **facts}).close()
    return to


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"ranks": 4}, "was trained by 4 ranks"),
        ({"argv": ["/x/ipykernel_launcher.py", "-f", "k.json"]}, "in a notebook"),
        ({"argv": ["-c"]}, "in a notebook or an interpreter"),
        ({"argv": ["train.py", "--token", "***"]}, "has a credential"),
        ({"argv": ["/gone/train.py"]}, "/gone/train.py does not exist"),
    ],
)
def test_a_record_without_a_program_is_refused(
    run: Path, tmp_path: Path, facts: dict[str, Any], why: str
) -> None:
    other = recorded_otherwise(run, tmp_path / "other", **facts)
    with pytest.raises(ReplayError, match=re.escape(why)):
        program_of(other, 1)


@pytest.mark.campaign("long")
def test_another_ones_command_line_is_started_only_with_trust(run: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'told')!r}, 'w')\n")
    other = recorded_otherwise(run, tmp_path / "other", argv=[str(evil)])
    assert "does not count as yours" in " ".join(replay(other, "--verify", ":", status=1).split())
    assert not (tmp_path / "told").exists()
    assert "did not open the run" in replay(other, "--verify", ":", "--trust", status=4)
    assert (tmp_path / "told").exists()


@pytest.mark.campaign("long")
def test_a_file_that_has_changed_since_is_named() -> None:
    shutil.copytree(SCRIPTS, "code")
    git = ["git", "-C", "code", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    start("code/everything.py")
    assert "has changed" not in replay("runs/tiny", "--verify", "29:30")
    with open("code/tiny.py", "a") as file:
        file.write("# another line\n")
    assert "of the run: git has another commit" in " ".join(replay("runs/tiny", "--verify", "29:30").split())
