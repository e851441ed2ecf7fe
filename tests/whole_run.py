"""A run with everything in it that everstep writes into a run directory, killed and not finished."""

from __future__ import annotations

import fnmatch
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Every
from everstep.checkpoint import Store
from everstep.labels import add_tags, set_note
from everstep.record.pages import Evaluation, record_evaluation
from tiny_runs import Boom, LoopHook, Tiny, boom_at

KINDS = {
    "best/*/manifest.json": "manifest of best weights",
    "best/*": "best weights",
    "checkpoints/*/manifest.json": "manifest",
    "checkpoints/*/*.safetensors": "arrays",
    "damaged/*": "damaged checkpoint",
    "evaluations/*.json": "evaluation",
    "exports/*": "export",
    "failures/*.json": "failure page",
    "journal/*.evj": "journal segment",
    "journal/*.trail": "trail",
    "labels.json": "labels.json",
    ".labels.lock": "lock of the labels",
    "lock": "lock",
    "lock.json": "lock.json",
    "logs/*": "log",
    "pins.json": "pins.json",
    "run.json": "run.json",
    "superseded/*": "superseded checkpoint",
}
"""Pattern of a file -> what it is, the first that fits; a file that none fits fails the tests."""


def kind_of(place: Path) -> str:
    """What a file of a run is.

    Raises:
        AssertionError: nobody has thought of it.
    """
    for pattern, kind in KINDS.items():
        if fnmatch.fnmatchcase(place.as_posix(), pattern):
            return kind
    raise AssertionError(f"a run has {place}, which no pattern of tests/whole_run.py finds: add one")


def files_of(run: Path) -> list[Path]:
    """Every file of a run, relative; each kind of `KINDS` must be among them."""
    found = [path.relative_to(run) for path in sorted(run.rglob("*")) if not path.is_dir()]
    lacking = set(KINDS.values()) - {kind_of(place) for place in found}
    assert not lacking, f"the run has no {lacking}"
    return found


def make(run: Path, **more: Any) -> Tiny:
    """One start of the program."""
    services = [
        everstep.Checkpoints(Every(steps=1), keep_last=3),
        everstep.Best("valid_loss", restore_at_end=True),
        everstep.services.CSV(),
        everstep.services.JSONLines(),
        everstep.services.Export(Every(epochs=1), entry="w"),
    ]
    return Tiny(run, services=services, **{"max_epoch": 3, **more})


def train(program: Tiny, inside: LoopHook = lambda loop, step: None) -> Tiny:
    """Train to the end, with a value for the best weights after each epoch."""
    return program.train(inside, lambda loop, epoch: loop.collect_metrics(valid_loss=abs(epoch - 1.5)))


def killed_at(at: int, run: Path, **more: Any) -> None:
    """A start in another process, which SIGKILL ends at a step."""

    def kill(loop: Any, step: int) -> None:
        if step == at:
            # else what lies there would depend on the thread that writes
            loop._engine.saver._writer.wait_idle()
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        try:
            train(make(run, say=lambda line: None, **more), kill)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def make_whole(run: Path) -> Path:
    """A run that was killed, has failed, has lost a checkpoint, went back, and was killed again."""
    killed_at(4, run)
    add_tags(run, ["paper"])
    set_note(run, "with the old data")
    with pytest.raises(Boom):
        train(make(run), boom_at(7))
    newest = Store(run).names()[-1]
    raw = (run / "checkpoints" / str(newest) / "arrays.safetensors").read_bytes()
    (run / "checkpoints" / str(newest) / "arrays.safetensors").write_bytes(raw[:-1])
    killed_at(9, run)
    before = Store(run).names()[-2]
    killed_at(11, run, resume=str(before))
    store = Store(run, 0, print)
    store.pin(store.names()[-1])
    found = Evaluation("test", str(store.names()[-1]), "d", 3, 1, -1, {"test/loss": 0.5}, 1.7e9)
    record_evaluation(run, found, {"argv": ["evaluate.py"]}, {"test/seconds": 1.0})
    files_of(run)
    return run
