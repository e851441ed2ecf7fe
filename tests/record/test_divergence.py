"""A divergence is a mark of the run until a person accepts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_verified_resume import crashed, differing, start, with_other_batches

import everstep
from everstep.cli.group import commands
from everstep.errors import ConfigError, DivergenceError
from everstep.record import RunJournal, accept
from tiny_runs import Boom, Tiny, boom_at


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A finished run whose resume found other losses from step 7 on."""
    run_dir = tmp_path / "run"
    crashed(run_dir)
    differing(start(run_dir)).train()
    return run_dir


def cli(*arguments: str, folder: Path) -> str:
    done = CliRunner().invoke(commands, [*arguments, "--index", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def status(run_dir: Path) -> tuple[str, int | None]:
    """As the index has it."""
    (run,) = json.loads(cli("runs", "--json", folder=run_dir.parent))
    return run["status"], run["diverged"]


def marks(run_dir: Path) -> list[int]:
    return [event.data["step"] for event in RunJournal(run_dir).divergences()]


def test_the_lists_say_at_which_step_a_run_diverged(diverged: Path) -> None:
    folder = diverged.parent
    assert "finished, diverged at 7" in cli("runs", folder=folder)
    shown = cli("show", str(diverged), folder=folder)
    assert "finished, diverged at 7" in shown.splitlines()[0]
    assert "--divergence 7" in shown
    assert status(diverged) == ("finished", 7)
    (found,) = json.loads(cli("runs", "diverged>6", "--json", folder=folder))
    assert found["diverged"] == 7
    assert everstep.query("runs", {"diverged": 7}, index=folder)[0]["status"] == "finished"


@pytest.mark.campaign("long")
def test_the_mark_stays_over_later_starts_until_it_is_accepted(diverged: Path) -> None:
    start(diverged, max_epoch=2).train()
    assert (marks(diverged), status(diverged)) == ([7], ("finished", 7))
    said = cli("accept", str(diverged), "--divergence", "7", folder=diverged.parent)
    assert "the divergence at step 7 is accepted" in said
    assert (marks(diverged), status(diverged)) == ([], ("finished", None))
    assert "accepted" in cli("show", str(diverged), folder=diverged.parent)


def test_an_accepted_run_is_the_run_that_it_was(diverged: Path) -> None:
    assert start(diverged).train().loop.ending.diverged == 7
    with pytest.raises(ConfigError, match="no divergence at step 8 to accept; it has at 7"):
        accept(diverged, 8)
    before = sorted(RunJournal(diverged).rows())
    accept(diverged, 7)
    with pytest.raises(ConfigError, match="it has not diverged"):
        accept(diverged, 7)
    journal = RunJournal(diverged)
    assert (sorted(journal.rows()), journal.problems) == (before, []) and journal.ended() is not None
    again = start(diverged).train()
    assert again.seen == [] and again.loop.ending.finished and again.loop.ending.diverged is None
    start(diverged, max_epoch=2).train()
    assert status(diverged) == ("finished", None)


def test_a_run_that_other_batches_stopped_goes_on_once_they_are_accepted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    crashed(run_dir)
    for _ in range(2):
        with pytest.raises(DivergenceError, match="accept RUN --divergence 7"):
            with_other_batches(start(run_dir)).train()
    assert status(run_dir) == ("failed", 7)
    accept(run_dir, 7)
    tiny = with_other_batches(start(run_dir)).train()
    assert tiny.loop.ending.finished and tiny.loop.ending.warnings == ()
    assert status(run_dir) == ("finished", None)
    (said,) = [line for line in tiny.lines if line.startswith("resume ")]
    assert "not compared with earlier executions: a divergence was accepted at step 7" in said
    assert "start" not in said.partition("executions: ")[2]


@pytest.mark.campaign("long")
def test_a_choice_that_saved_nothing_and_is_taken_back_is_not_compared_with(tmp_path: Path) -> None:
    """Killed in step 8, gone on with another seed, killed again, and gone on as it was begun."""
    crashed(tmp_path)
    with pytest.raises(Boom):
        start(tmp_path, seed=8, on_change="override").train(inside=boom_at(9))
    with pytest.raises(Boom):
        start(tmp_path, seed=8, on_change="override").train(inside=boom_at(8))
    tiny = start(tmp_path).train()
    assert "resume verified: 1 step executed again: 1 batch digest and 1 value of loss equal" in tiny.lines
    assert marks(tmp_path) == []
    whole = start(tmp_path / "whole").train()
    assert tiny.w.tobytes() == whole.w.tobytes()


def test_a_step_that_failed_has_no_rows_whoever_reads_at_the_exit(tmp_path: Path) -> None:
    """Part of its values would be compared with all of them at the next start."""

    def training(fails: bool) -> Tiny:
        def inside(loop: Any, step: int) -> None:
            if step == 2 and fails:
                raise Boom
            loop.collect_metrics(loss=1e9)

        tiny = Tiny(tmp_path, max_epoch=1, services=[everstep.services.Require("loss", 1e12, step=100)])
        return tiny.train(inside=inside)

    with pytest.raises(Boom):
        training(True)
    assert {row.step for row in RunJournal(tmp_path).rows() if row.name == "loss"} == {1}
    assert training(False).loop.ending.finished
    assert marks(tmp_path) == []
