"""All services at once, killed anywhere: what they write is whole or absent, and the run ends equal."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readers import points
from safetensors.numpy import load_file

import everstep
import gate
from everstep import Evaluate, Every, hazard, services
from everstep.checkpoint import Store, read_checkpoint
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import SetValue
from everstep.services.judges import FunctionService
from gate import share
from tiny_runs import rows

BAD = {(2, 5), (3, 2)}
"""(epoch, sample) of the batches that spoil their step."""


class Task(everstep.Task):
    """A noisy mean; some of its batches are bad, and in each process one step loses its connection."""

    def __init__(self) -> None:
        self.w, self.settings, self.epoch = np.zeros(3), {"rate": 1.0, "noise": 0.0}, 0
        self.calls = count(1)

    def state(self) -> Mapping[str, Any]:
        return {"w": self.w, "settings": self.settings}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        noise = np.random.standard_normal(3) + self.settings["noise"]
        self.w += 0.1 * self.settings["rate"] * (ids.mean() - self.w + noise)
        if next(self.calls) == 9:
            raise ConnectionError
        spoilt = any((self.epoch, sample) in BAD for sample in ids.tolist())
        return {"loss": float(self.w @ self.w), "spoilt_loss": float("nan") if spoilt else 0.0}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        return {"loss": float(abs(self.w.sum() - 5)), "id": ids, "each": ids * self.w[0]}


class Summaries(everstep.Service):
    """Adds a picture, a distribution and a text, each third step and after each epoch."""

    stage = everstep.services.Stage.MEASURE

    def open(self, run: Any) -> None:
        self.loop = run

    def run(self, boundary: everstep.Boundary) -> None:
        w = self.loop.live_object("w")
        seen = {"noise": services.Image(np.random.rand(4, 6, 3)), "weights": services.Histogram(w)}
        self.loop.add_summary({"seen": seen, "text": f"{boundary.moment.value} {boundary.step}"})


def program(run_dir: Path, order: int = 1) -> everstep.supervisor.Ending:
    often, task = Every(steps=3), Task()
    lower = SetValue("settings.rate", times=0.5, least=0.01)
    listed = [
        services.JSONLines(every=often),
        services.CSV(metrics=["*loss", "norm", "settings.*"], every=often),
        services.TensorBoard(skip=["*time"], every=often),
        Summaries("summaries", Every(steps=3) | Every(epochs=1)),
        services.Dump(["id", "each"]),
        services.Dump(["id"], stream="test", format="csv", keep=2),
        Evaluate("valid", Every(steps=3) | Every(epochs=1), validate_first=True),
        Evaluate("test"),
        services.Export(Every(steps=3), entry="w", keep=2, name="latest"),
        services.Export(services.OnBest("valid/loss"), entry="w", keep=2, name="best"),
        services.Export(entry="w", name="final"),
        everstep.Best("valid/loss", keep=2),
        everstep.EarlyStop("valid/loss", patience=99, patience_steps=900, threshold=-1.0, baseline=1e9),
        services.When(services.OnBest("valid/loss"), SetValue("settings.rate", times=0.9), name="calm"),
        services.When(Every(steps=7), everstep.Save()),
        services.LossBound(bound=1e9, times=1e9, last=3),
        services.Plateau("loss", then=lower, long=3, short=2, cooldown=1, every=Every(steps=2)),
        services.Require("valid/loss", 1e9, epoch=2),
        services.Scheduled("settings.noise", services.Annealing(0.1, 0.8, every=2)),
        services.LogVariables(["*loss"], every=Every(steps=5)),
        services.FinalValues(lambda: {"norm": float(np.linalg.norm(task.w))}),
        services.Notify(command=["true"]),
        everstep.services.StopAfter(epochs=6),
        everstep.services.Recovery(reset_after=100),
        services.Retry([ConnectionError], backoff=0),
        everstep.Checkpoints(Every(steps=4) | Every(epochs=1)),
        everstep.services.Console(sink=lambda line: None),
    ]

    def begin(boundary: everstep.Boundary) -> None:
        task.epoch = boundary.epoch

    # as `loop.on` does
    listed.append(FunctionService(everstep.services.Moment.BEFORE_STEP, begin, None, "epoch"))
    data = everstep.data.arrays
    streams = {"train": data(np.arange(8), batch_size=2, shuffle=True)}
    streams |= {"valid": data(np.arange(5), batch_size=2), "test": data(np.arange(3), batch_size=2)}
    door = everstep.Trainer(task, streams, run_dir, services=listed[::order], max_epoch=4, seed=3)
    return door.run_training()


def fork(run_dir: Path, spec: str | None = None) -> int:
    """The program in a process of its own; its number."""
    pid = os.fork()
    if pid == 0:
        hazard.arm(spec)
        program(run_dir)
        os._exit(0)
    return pid


def files(run_dir: Path) -> dict[str, bytes]:
    """What was written for other programs, but for what has the run's name or a time in it."""
    places = ((run_dir / folder).rglob("*") for folder in ("dumps", "exports", "logs"))
    found = [path for each in places for path in each if path.suffix in (".jsonl", ".csv", ".safetensors")]
    times = rb', "[a-z/_]*time": [^,}]+'
    return {str(path.relative_to(run_dir)): re.sub(times, b"", path.read_bytes()) for path in found}


def require_same(whole: Path, run_dir: Path, why: object) -> None:
    assert compare_runs(whole, run_dir) == [], why
    assert files(whole) == files(run_dir), why
    assert points(whole) == points(run_dir), why


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("together") / "whole"
    assert program(run_dir).rollbacks == 2
    names = {row[3] for row in rows(run_dir)}
    assert names >= {"loss", "valid/loss", "test/loss", "settings.rate", "settings.noise", "norm"}
    folders = Counter(str(Path(name).parent) for name in files(run_dir))
    assert folders["dumps/dump valid"] >= 7 and folders["dumps/dump test"] == 2
    return run_dir


def specs(folder: Path) -> list[str]:
    """Kills at each point that the program reaches, at most three of each point."""
    assert os.waitpid(fork(folder / "traced", f"trace:{folder / 'trace'}"), 0)[1] == 0
    reached = Counter((folder / "trace").read_text().split())
    return [
        f"kill:{point}:{at}"
        for point, count in sorted(reached.items())
        for at in range(1, count + 1, max(count // 2, 1))
    ]


@pytest.mark.campaign("long", gate="share")
def test_killed_anywhere_files_are_whole_or_absent_and_end_undisturbed(whole: Path, tmp_path: Path) -> None:
    expected = files(whole)
    for number, spec in share(enumerate(specs(tmp_path)), 4):
        run_dir = tmp_path / str(number)
        if os.waitpid(fork(run_dir, spec), 0)[1] != signal.SIGKILL:
            continue  # a point that is reached once more or less, by the clock
        for folder in run_dir.glob("exports/*/step-*"):
            assert sorted(p.name for p in folder.iterdir()) == ["export.json", "model.safetensors"], spec
            load_file(folder / "model.safetensors")
        for name, content in files(run_dir).items():
            assert not name.startswith("dumps") or expected.get(name, content) == content, spec
        require_no_phantom(run_dir, spec)
        program(run_dir)
        require_same(whole, run_dir, spec)


def require_no_phantom(run_dir: Path, why: str) -> None:
    """What a checkpoint names among the best is there, whole, and with its value."""
    store = Store(run_dir, 0, print)
    if store.facts():
        best = store.kept_best().get("valid/loss", [])
        assert [path.name for path in best] == store.facts()[-1].kept.get("valid/loss", []), why
        # of steps that a rollback has undone since, too
        rows = RunJournal(run_dir).rows(valid=False)
        values = {(row.step, row.value) for row in rows if row.name == "valid/loss"}
        for path in best:
            saved: Any = read_checkpoint(path)
            assert (saved.step, saved.meta["value"]) in values, why


@pytest.mark.campaign("random")
def test_killed_at_random_times(whole: Path, tmp_path: Path) -> None:
    chance = random.Random(gate.seed)
    run_dir = tmp_path / "run"
    for _ in range(6):
        pid = fork(run_dir)
        time.sleep(chance.uniform(0, 2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    program(run_dir)
    require_same(whole, run_dir, f"seed {gate.seed}")


@pytest.mark.campaign("long")
def test_their_order_is_irrelevant(whole: Path, tmp_path: Path) -> None:
    program(tmp_path / "run", order=-1)
    assert compare_runs(whole, tmp_path / "run") == []
