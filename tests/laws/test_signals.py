"""Signals at armed points: no step is lost, at most one is done again, and nothing differs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Program

from everstep.polling import wait_until

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SHORT = ("--epochs", "2", "--batch", "16", "--every", "5")
OPTIONS = {
    "arrays": (*SHORT, "--patience", "9"),
    "loader": (*SHORT, "--data", "loader", "--workers", "2"),
    "plain": (*SHORT, "--data", "plain", "--workers", "2"),
    "supervisor": (*SHORT, "--door", "supervisor", "--data", "loader"),
}
STEPS = 16


@pytest.fixture
def program(server: ForkServer, tmp_path: Path) -> Any:
    return lambda kind="arrays": Program(server, tmp_path, *OPTIONS[kind])


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run of each program, made when it is first asked for."""
    runs: dict[str, Path] = {}

    def run_of(program: str) -> Path:
        if program not in runs:
            made = Program(server, tmp_path_factory.mktemp("undisturbed"), *OPTIONS[program])
            made.finish()
            runs[program] = made.run_dir
        return runs[program]

    return run_of


PLACES = {
    "start-up": ("arrays", "law.opening:1"),
    "body": ("arrays", "law.body:6"),
    "body of a Supervisor": ("supervisor", "law.body:6"),
    "waiting for a worker": ("loader", "law.held:1"),
    "waiting for a plain worker": ("plain", "law.held:1"),
    "save": ("arrays", "checkpoint.fsync:4"),
    "tail": ("arrays", "law.tail:1"),
    "shutdown": ("arrays", "law.shutdown:1"),
}
HELD = ("--hold", "2")
"""Where a worker holds the loop up, that worker sends the signal."""


@pytest.mark.campaign("long", gate=8)
@pytest.mark.parametrize(
    ("place", "number"),
    # each fourth has another place and another signal
    [(place, SIGNALS[(at + turn) % 4]) for at, place in enumerate(PLACES) for turn in range(4)],
)
def test_a_signal_to_the_group_loses_no_step(program, undisturbed, place, number) -> None:
    kind, point = PLACES[place]
    made = program(kind)
    held = HELD if "worker" in place else ()
    assert made.run("--group", f"{number.name}@{point}", *held) == 128 + number, made.said()
    done, saved = max(made.bodies(), default=0), made.saved_step()
    assert done < STEPS or place == "shutdown"
    # one step more, if workers are left for it; after an epoch's last one the state before it was saved
    assert saved == done - 1 or (saved == done and (place in ("start-up", "shutdown") or held))
    made.finish()
    assert made.bodies() == [*range(1, done + 1), *range(saved + 1, STEPS + 1)]
    made.require_equal(undisturbed(kind))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("number", SIGNALS[:-1], ids=lambda number: number.name)  # USR1 is a notice
def test_a_second_signal_ends_it_at_once(program, undisturbed, number) -> None:
    """The first one would have ended it with the step, and another status."""
    made = program()
    assert made.run("--group", f"{number.name},{number.name}@law.body:6") == -number, made.said()
    assert made.said().count("sent ") == 2
    made.finish()
    made.require_equal(undisturbed("arrays"))


def test_a_second_signal_inside_a_save_leaves_it_whole_or_absent(program, undisturbed) -> None:
    made = program()
    for point in ("checkpoint.rename:2", "checkpoint.rename:1", "checkpoint.fsync:2"):
        status = made.run("--group", f"SIGTERM,SIGINT@{point}")
        assert status in (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)
    made.finish()
    made.require_equal(undisturbed("arrays"))


def test_sigterm_and_sigkill_before_its_save_has_ended(program, undisturbed) -> None:
    made = program()
    for body, then in (4, "checkpoint.write:1"), (3, "checkpoint.rename:1"), (2, "checkpoint.fsync:1"):
        status = made.run(hazard=f"SIGTERM:law.body:{body} then kill:{then}")
        assert status == -signal.SIGKILL, made.said()
    made.finish()
    made.require_equal(undisturbed("arrays"))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", ["loader", "arrays"])
def test_stopped_and_continued(program, undisturbed, kind) -> None:
    made = program(kind)
    victim = made.start("--group", "SIGSTOP@law.body:6")
    state = Path(f"/proc/{victim.pid}/stat")
    assert wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 120), made.said()
    victim.send_signal(signal.SIGCONT)
    assert victim.wait(120) == 0, made.said()
    assert made.bodies() == list(range(1, STEPS + 1))
    made.require_equal(undisturbed(kind))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", ["loader", "plain"])
def test_a_killed_loader_worker_is_a_clear_error(program, undisturbed, kind) -> None:
    made = program(kind)
    assert made.run(*HELD, hazard="kill:law.held:1") == 1, made.said()
    assert "a loader worker died" in made.said() and "SIGKILL" in made.said()
    assert "start the run again" in made.said()
    made.finish()
    made.require_equal(undisturbed(kind))
