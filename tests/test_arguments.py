"""An unknown keyword is an error with the nearest name, at every public callable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.data import arrays, loader, prefetch, replay
from everstep.errors import ConfigError
from everstep.record import RunJournal

X = np.zeros((4, 2))

CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "arrays": (
        lambda: arrays(X, batch_size=2, shufle=True),
        "arrays.. has no argument 'shufle'; .*'shuffle'",
    ),
    "loader": (
        lambda: loader(torch.utils.data.TensorDataset(torch.zeros(4)), batchsize=2),
        "loader.. has no argument 'batchsize'; did you mean 'batch_size'",
    ),
    "prefetch": (lambda: prefetch([1], bufer=3), "prefetch.. has no argument 'bufer'; .*'buffer'"),
    "replay": (lambda: replay(iterabel=[1]), "replay.. has no argument 'iterabel'; .*'iterable'"),
    "Every": (lambda: everstep.Every(step=3), "Every.. has no argument 'step'; did you mean 'steps'"),
    "Every, private": (lambda: everstep.Every(steps=3, _last=1.0), "Every.. has no argument '_last'"),
    "At": (lambda: everstep.At(step=3), "At.. has no argument 'step'"),
    "InitFrom": (lambda: everstep.InitFrom("x", includes="a"), "InitFrom.. has no argument .*'include'"),
    "Slot": (lambda: everstep.Slot(val=1), "Slot.. has no argument 'val'; did you mean 'value'"),
    "Best": (lambda: everstep.Best("loss", modus="min"), "Best.. has no argument 'modus'; .*'mode'"),
    "TrainLoop": (lambda: everstep.TrainLoop("x", max_epochs=3), "TrainLoop.. has no argument .*'max_epoch'"),
    "Supervisor": (lambda: everstep.Supervisor("x", max_steps=3), "Supervisor.. has no .*'max_step'"),
    "callbacks": (
        lambda: everstep.TrainLoop("x", callbacks=[]),
        "TrainLoop.. has no argument 'callbacks'; did you mean 'services'. known: clock, ",
    ),
    "patience": (lambda: everstep.TrainLoop("x", patience=3), "did you mean 'services'"),
    "model": (lambda: everstep.Supervisor("x", model=None), "did you mean 'state'"),
    "monitor": (lambda: everstep.Best(monitor="loss"), "did you mean 'metric'"),
    "path, where nothing is called run_dir": (lambda: everstep.At(path=3), "At.. has no argument 'path'; k"),
    "load": (lambda: everstep.load("x", states={}), "load.. has no argument 'states'; .*'state'"),
    "series": (lambda: RunJournal.series(None, "loss", phas="tail"), "series.. has no argument .*'phase'"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_unknown_keywords_come_with_the_nearest(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_methods_of_a_supervisor(tmp_path: Path) -> None:
    calls: dict[str, Callable[[Any], object]] = {
        r"stream\(\) has no argument 'pass'; did you mean 'passes'": lambda sv: sv.stream([1], **{"pass": 1}),
        r"on\(\) has no argument 'evry'; did you mean 'every'": lambda sv: sv.on("AFTER_STEP", print, evry=2),
        r"loop\(\) has no argument 'second'": lambda sv: sv.loop(second=1, fn=print),
        r"request_stop\(\) has no argument 'reson'": lambda sv: sv.request_stop(reson="enough"),
    }
    with everstep.Supervisor(tmp_path / "run", max_step=1, default_services=False) as sv:
        for message, call in calls.items():
            with pytest.raises(ConfigError, match=message):
                call(sv)
