"""From a complete step to the point in the page: a slow training on this machine.

Each row of the training has the time at which the step was complete, so the delay of a point is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_server import Page, running_page

import everstep
import warm
from everstep.record.lock import is_watched
from everstep.record.segment_file import segment_path
from everstep.ui.followed_index import followed

pytestmark = pytest.mark.campaign("timed")

SECONDS = 2.0
"""From the end of a step to its point."""

CHECKPOINT = 10
"""Steps between two checkpoints."""

PROGRAM = """
import sys, time
import numpy, everstep
data = everstep.data.arrays(numpy.arange(400.0), batch_size=2, shuffle=True)
w = numpy.zeros(1)
services = [everstep.Console(sink=lambda line: None), everstep.Checkpoints(everstep.Every(steps=10))]
loop = everstep.TrainLoop(sys.argv[1], {"w": w}, seed=1, max_step=int(sys.argv[2]), services=services)
with loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            time.sleep(0.2)
            w += batch.mean()
            loop.collect_metrics(loss=float(w.sum()), end_time=time.time())
"""


def train(run_dir: Path, steps: int) -> Any:
    """Start a training of 0.2 s a step."""
    return warm.Popen(
        [sys.executable, "-c", PROGRAM, str(run_dir), str(steps)],
        env={**os.environ, "EVERSTEP_INDEX": "off"},
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Page, Any, str]]:
    """A page, how to start a training that it shows, and the id of the run, which is at its first steps."""
    begun: list[Any] = []

    def start(steps: int) -> Any:
        begun.append(train(tmp_path / "slow", steps))
        return begun[-1]

    start(200)
    while not (tmp_path / "slow" / "run.json").exists():
        time.sleep(0.05)
    with running_page(tmp_path) as page:
        (row,) = page.wait_for(lambda: page.get("/api/runs").json["rows"])
        try:
            yield page, start, row["id"]
        finally:
            for training in begun:
                training.kill()
                training.communicate()


def points(page: Page, run: str, metric: str, **asked: Any) -> dict[str, Any]:
    (found,) = page.get("/api/series", runs=run, stream="step", metric=metric, **asked).json["series"]
    return dict(found)


@pytest.mark.timeout(60)
def test_a_point_of_a_slow_training_is_there_within_two_seconds(live: tuple[Page, Any, str]) -> None:
    page, _, run = live
    delays: dict[int, float] = {}
    begun = time.time() + 1.5
    with closing(page.events(f"/api/live?runs={run}")) as events:
        while len(delays) < 15:
            name, told = next(events)
            if name == "points":
                assert told["run"] == run
                found = points(page, run, "end_time")
                for step, ended in zip(found["x"], found["last"], strict=True):
                    if ended > begun:
                        delays.setdefault(step, time.time() - ended)
    late = [seconds for seconds in delays.values() if seconds > SECONDS]
    assert len(late) <= len(delays) / 10, delays  # not all, where other processes take the machine


@pytest.mark.timeout(90)
def test_what_was_seen_early_is_superseded_after_a_kill(live: tuple[Page, Any, str]) -> None:
    """No step is there twice, and none that was seen is lost."""
    page, train_on, run = live
    steps: list[int] = []
    with closing(page.events(f"/api/live?runs={run}")) as events:
        while len(steps) < 12 or steps[-1] % CHECKPOINT < 3:  # none is saved for a while
            if next(events)[0] == "points":
                seen = points(page, run, "loss")
                steps = seen["x"]
    place = Path(page.get(f"/api/runs/{run}").json["directory"])
    os.kill(json.loads((place / "lock.json").read_text())["pid"], signal.SIGKILL)
    end = steps[-1] + 15
    assert train_on(end).wait(timeout=60) == 0
    page.wait_for(lambda: page.get(f"/api/runs/{run}").json["status"] == "finished")
    after = points(page, run, "loss", superseded=1)
    assert after["x"] == [*range(1, end + 1)]
    assert seen["last"] == after["last"][: len(steps)] and steps == after["x"][: len(steps)]
    assert steps[-1] in dict(after["superseded"])
    assert all(after["last"][step - 1] == value for step, value in after["superseded"])
    starts = page.get(f"/api/runs/{run}").json["starts"]
    assert [start["badge"] for start in starts] == ["first", "verified"]


def test_only_runs_that_train_are_watched(tmp_path: Path) -> None:
    """A chart may have a thousand runs, and each lock takes a descriptor of the page."""
    for name in ("over", "now"):
        with everstep.TrainLoop(tmp_path / name, seed=1, max_step=1) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(everstep.data.arrays(np.zeros(1), batch_size=1)):
                    if name == "now":
                        assert waited_for(tmp_path) == {"now"}
                    loop.collect_metrics(loss=step)


def waited_for(folder: Path) -> set[str]:
    """Let somebody look at all runs of a folder; return those whose journal is locked then."""
    with followed(str(folder)) as index:
        ids = {str(run["name"]): Path(run["path"]) for run in index.table.runs()}
        leave = index.subscribe(lambda news: None, frozenset(ids))
        end, found = time.monotonic() + 20, set[str]()
        while not found and time.monotonic() < end:
            time.sleep(0.1)
            found = {path.name for path in ids.values() if is_locked(segment_path(path, 1))}
        leave()
        assert len(ids) == 2
        return found


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        return is_watched(file.fileno())
