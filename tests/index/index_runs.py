"""Runs for the tests of the index and the commands: trained, killed, stopped, failed, each in a process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import warm
from everstep.index.database import Database
from everstep.index.filters import parse
from everstep.index.location import Location
from everstep.index.query import ask
from everstep.index.run_queries import RunColumns, find_run
from everstep.index.shipping import sync
from everstep.record import Block, Journal, RunDir, RunJournal
from everstep.testing import ManualClock

HERE = Path(__file__).parent
VICTIM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny_runs import Tiny, boom_at
import everstep.index.shipping_thread
everstep.index.shipping_thread.SECONDS = float(os.environ.get("TEST_SECONDS", "30"))
everstep.index.shipping_thread.PATIENCE = 60  # eight at once, on a machine that is busy otherwise

run_dir, epochs, at, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def say(line):  # whole, whatever another thread says meanwhile
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()

def inside(loop, step):
    if step == at and what == "raise":
        raise ValueError("at the step")
    if step == at and what == "wait":
        loop.make_checkpoint()
    if step == at + 1 and what == "wait":
        say("waiting")
        sys.stdin.read()
    if step >= at and what == "ask":
        loop.make_checkpoint()
        say(f"asks at {{step}}")
        sys.stdin.readline()
    if step == at and what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))

def tail(loop, epoch):
    loop.collect_metrics(valid_loss=1 / epoch)

config = {{"optimizer": {{"lr": 0.1, "betas": [0.9, 0.99]}}}}
Tiny(run_dir, max_epoch=epochs, config=config, say=say).train(inside, tail)
"""


def start(run_dir: Path, epochs: int = 2, at: int = 0, what: str = "run", **environment: str) -> Any:
    """Start a program of 4 steps an epoch that at step `at` does `what`: run, raise, wait, or a signal.

    With `ask` it waits for a line at `at` and at each step after it.
    """
    program, environment = VICTIM.format(tests=str(HERE.parent)), {"EVERSTEP_INDEX": "", **environment}
    command = [sys.executable, "-c", program, *map(str, (run_dir, epochs, at)), what]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return warm.Popen(command, env={**os.environ, **environment}, text=True, **pipes)


def train(run_dir: Path, epochs: int = 2, at: int = 0, what: str = "run", **environment: str) -> int:
    """`start` and wait; the exit status."""
    victim = start(run_dir, epochs, at, what, **environment)
    victim.communicate()
    return int(victim.returncode)


def make_runs(root: Path) -> None:
    """good (2 epochs), long (4, killed once on the way), killed, failed, stopped."""
    started = [
        start(root / "good"), start(root / "killed", 4, 6, "SIGKILL"),
        start(root / "failed", 4, 6, "raise"), start(root / "stopped", 4, 6, "SIGTERM"),
        start(root / "long", 4, 11, "SIGKILL"),
    ]  # fmt: skip
    for victim in started:
        victim.communicate()
    assert [victim.returncode for victim in started] == [0, -signal.SIGKILL, 1, 143, -signal.SIGKILL]
    assert train(root / "long", 4) == 0


def written(run_dir: Path, *, id: str | None = None, steps: int = 3, **facts: Any) -> Path:
    """A run that nobody trained: a journal with a metric, finished."""
    run = RunDir.open(run_dir, seed=1, about={"id": id} if id else None)
    facts = {"host": platform.node(), "lock": False, **facts}
    journal = Journal.open(run.path, run.next_segment(), None, facts)
    ones = [1] * steps
    journal.append(Block(1, "step", "loss", False, [*range(1, steps + 1)], [0.5] * steps, ones, [0] * steps))
    journal.event("ended", {"reason": "done", "step": steps, "epoch": 1})
    journal.close()
    return run.path


def alive(run_dir: Path, *spans: tuple[float, float]) -> Path:
    """A run that nobody trained, with a start for each (begin, seconds): all killed but the last."""
    run, clock = RunDir.open(run_dir, seed=1), ManualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everstep.record.journal.time", SimpleNamespace(time=clock))
        for number, (begin, seconds) in enumerate(spans, 1):
            clock.now = begin
            journal = Journal.open(run.path, number, None, {"lock": False})
            clock.advance(seconds)
            journal.append(Block(1, "step", "loss", False, [number], [0.5], [1], [0]))
            if number == len(spans):
                journal.event("closed", {"status": "finished", "reason": "done", "step": number})
            journal.close()
    return run.path


def indexed(folder: Path) -> Path:
    """A folder with one run, and its index."""
    written(folder / "run")
    sync(Database(folder / "everstep.db"), [folder])
    return folder


def all_runs(database: Database, wanted: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every run, the newest start last, with the first values of some names."""
    columns = RunColumns(database)
    runs = columns.find(parse({}), wanted)
    columns.add(runs, wanted)
    return runs


def index_rows(database: Database, run: str) -> list[tuple[Any, ...]]:
    """Every valid row of a run as the index has it, with the bits of its value."""
    with database.read() as connection:
        name = find_run(connection, run)["name"]
    fields = ("segment", "epoch", "step", "phase", "name", "seq", "value", "count", "wall")
    rows = ask(database, "metrics", parse({"run": name}), fields=fields)
    return sorted(tuple({**row, "value": row["value"].hex()}.values()) for row in rows)


def journal_rows(run_dir: Path) -> list[tuple[Any, ...]]:
    """Every valid row of a run as its journal has it, in the form of `index_rows`."""
    return sorted(
        (r.segment, r.epoch, r.step, r.phase, r.name, r.seq, r.value.hex(), r.count, r.wall)
        for r in RunJournal(run_dir).rows()
    )


def everything(place: Location) -> dict[str, list[tuple[Any, ...]]]:
    """All that is in an index, but for the numbers that it gave to runs and series."""
    series = "JOIN series s ON s.id = x.series JOIN runs r ON r.id = s.run"
    run = "JOIN runs r ON r.id = x.run"
    columns = {
        "runs x": "name, path, created, seed, status, reason, started, step, epoch, host, kills, verified",
        "evaluations x": "*",
        f"facts x {run}": "r.name, x.name, x.value",
        f"segments x {run}": "r.name, number, parent, parent_offset, valid_to, size, x.step, badge, torn",
        f"events x {run}": "r.name, segment, x.offset, kind, time, wall, data",
        f"metrics x {series}": "r.name, phase, s.name, segment, x.offset, x.row, x.epoch, x.step, seq, value",
        f"blocks x {series}": "r.name, phase, s.name, segment, x.offset, sketch, packed",
    }
    with Database(place).read() as connection:
        return {
            source: sorted(map(tuple, connection.exec_driver_sql(f"SELECT {names} FROM {source}")), key=repr)
            for source, names in columns.items()
        }
