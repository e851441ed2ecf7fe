"""Signals from outside: no step is lost, at most an epoch's last is done again, and nothing differs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Program, signal_group, workers_of

from tiny_runs import Tiny

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
EACH_SIGNAL = [pytest.param(number, id=number.name) for number in SIGNALS]
SHORT = ("--epochs", "3", "--every", "5")
OPTIONS = {
    "arrays": (*SHORT, "--patience", "9"),
    "loader": (*SHORT, "--data", "loader", "--workers", "2"),
    "plain": (*SHORT, "--data", "plain", "--workers", "2"),
    "supervisor": (*SHORT, "--door", "supervisor", "--data", "loader"),
}
STEPS, STEPS_PER_EPOCH = 48, 16


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run of each program, made when it is first asked for."""
    runs: dict[str, Path] = {}

    def run_of(program: str) -> Path:
        if program not in runs:
            made = Program(server, tmp_path_factory.mktemp("undisturbed"), *OPTIONS[program])
            made.finish("--sleep", "0")
            runs[program] = made.run_dir
        return runs[program]

    return run_of


PLACES = {
    "start-up": ("arrays", "--slow", "opening:0.2"),
    "body": ("arrays",),
    "body of a Supervisor": ("supervisor",),
    "waiting for a worker": ("loader", "--slow", "sample:0.02"),
    "waiting for a plain worker": ("plain", "--slow", "sample:0.02"),
    "save": ("arrays",),
    "tail": ("arrays", "--slow", "tail:0.2"),
    "shutdown": ("arrays", "--slow", "shutdown:0.2"),
}


def wait_until_at(place: str, program: Program, victim: Any) -> None:
    if place == "save":
        program.wait_for(victim, lambda: program.committing(victim))
    elif place.startswith(
        "waiting"
    ):  # a step takes 4 ms, the next batch 160: it waits for nearly all of them
        program.wait_for(victim, "body", step=4)
        time.sleep(0.05)
    elif place.startswith("body"):
        program.wait_for(victim, "body", step=12)
    else:
        program.wait_for(victim, "opening" if place == "start-up" else place)


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize("number", EACH_SIGNAL)
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_to_the_group_loses_no_step(
    server: ForkServer, tmp_path: Path, undisturbed: Any, place: str, number: signal.Signals
) -> None:
    kind, *slow = PLACES[place]
    program = Program(server, tmp_path, *OPTIONS[kind])
    victim = program.start(*slow)
    wait_until_at(place, program, victim)
    signal_group(victim, number)
    assert victim.wait(30) == 128 + number, program.said()
    done, saved = max(program.bodies(), default=0), program.saved_step()
    runs_again = done > 0 and done % STEPS_PER_EPOCH == 0 and saved == done - 1  # for its tail to run again
    assert runs_again or saved == done
    program.finish("--sleep", "0")
    assert program.bodies() == [*range(1, done + 1), *range(done + 1 - runs_again, STEPS + 1)]
    program.require_equal(undisturbed(kind))


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_ends_it_at_once(
    server: ForkServer, tmp_path: Path, undisturbed: Any, number: signal.Signals
) -> None:
    program = Program(server, tmp_path, *OPTIONS["arrays"])
    victim = program.start()
    program.wait_for(victim, "body", step=12)
    victim.kill()
    victim.wait(30)
    victim = program.start("--sleep", "60")  # so that the step cannot end
    program.wait_for(victim, "body")
    signal_group(victim, number)
    time.sleep(0.05)
    assert victim.poll() is None
    signal_group(victim, number)
    assert victim.wait(30) == -number
    program.finish("--sleep", "0")
    program.require_equal(undisturbed("arrays"))


def test_a_second_signal_inside_a_save_leaves_it_whole_or_absent(
    server: ForkServer, tmp_path: Path, undisturbed: Any
) -> None:
    program = Program(server, tmp_path, *OPTIONS["arrays"])
    for _ in range(4):
        victim = program.start()
        program.wait_for(victim, lambda victim=victim: program.committing(victim))
        signal_group(victim, signal.SIGTERM)
        signal_group(victim, signal.SIGINT)
        assert victim.wait(30) in (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)
    program.finish("--sleep", "0")
    program.require_equal(undisturbed("arrays"))


def test_sigterm_and_after_a_short_grace_sigkill(
    server: ForkServer, tmp_path: Path, undisturbed: Any, kill_seed: int
) -> None:
    print(f"seed {kill_seed}")
    draw = random.Random(kill_seed)
    program = Program(server, tmp_path, *OPTIONS["loader"])
    for _ in range(5):
        victim = program.start()
        program.wait_for(victim, "body")
        time.sleep(draw.uniform(0, 0.05))
        signal_group(victim, signal.SIGTERM)
        time.sleep(draw.uniform(0, 0.03))
        victim.kill()
        assert victim.wait(30) in (-signal.SIGKILL, 128 + signal.SIGTERM)
    program.finish("--sleep", "0")
    program.require_equal(undisturbed("loader"))


@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_stopped_for_a_while_and_continued(
    server: ForkServer, tmp_path: Path, undisturbed: Any, kind: str
) -> None:
    program = Program(server, tmp_path, *OPTIONS[kind])
    victim = program.start()
    for step in (6, 20):
        program.wait_for(victim, "body", step=step)
        signal_group(victim, signal.SIGSTOP)
        time.sleep(0.3)
        signal_group(victim, signal.SIGCONT)
    assert victim.wait(30) == 0, program.said()
    assert program.bodies() == list(range(1, STEPS + 1))
    program.require_equal(undisturbed(kind))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", ["loader", "plain"])
def test_a_killed_loader_worker_is_a_clear_error(
    server: ForkServer, tmp_path: Path, undisturbed: Any, kind: str
) -> None:
    program = Program(server, tmp_path, *OPTIONS[kind])
    victim = program.start("--slow", "sample:0.005")
    program.wait_for(victim, "body", step=20)
    program.wait_for(victim, lambda: bool(workers_of(victim.pid)))  # between two passes there are none
    os.kill(workers_of(victim.pid)[0], signal.SIGKILL)
    assert victim.wait(30) == 1, program.said()
    assert "a loader worker died" in program.said() and "SIGKILL" in program.said()
    assert "start the run again" in program.said()
    program.finish("--sleep", "0")
    program.require_equal(undisturbed(kind))


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_there_inside_and_as_before_outside(tmp_path: Path, fails: bool) -> None:
    def mine(number: int, frame: Any) -> None:
        raise AssertionError

    previous = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)}
    signal.signal(signal.SIGUSR1, mine)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)}
    inside = []

    def look(loop: Any, step: int) -> None:
        inside.append({number: signal.getsignal(number) for number in SIGNALS})
        if fails and step == 3:
            raise ZeroDivisionError

    try:
        tiny = Tiny(tmp_path / "run", max_epoch=2)
        if fails:
            with pytest.raises(ZeroDivisionError):
                tiny.train(look)
        else:
            tiny.train(look)
        assert all(handlers[number] != before[number] for handlers in inside for number in SIGNALS)
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        signal.signal(signal.SIGUSR1, previous[signal.SIGUSR1])
