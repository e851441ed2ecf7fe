"""What services refuse when they are made: the call, and words of the error with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import everstep
from everstep import EarlyStop, Every, Save
from everstep.errors import ConfigError
from everstep.services import (
    CSV,
    Annealing,
    Dump,
    Export,
    GlobalStepWaiter,
    JSONLines,
    LogVariables,
    LossBound,
    Notify,
    OnBest,
    Plateau,
    Profile,
    Require,
    Retry,
    Scheduled,
    SetValue,
    TensorBoard,
    Throughput,
    When,
)

LOWER = SetValue("optimizer.lr", times=0.5)
NAN = float("nan")
OWN = ["", ".", "run.json", "logs", "logs/run.log", "logs/media/x", "/tmp/x", "../x", "logs/../x", "best/x/y"]
A: Any = "an argument of another type"

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: EarlyStop("loss"), "no reason to stop: give patience=, patience_steps= or threshold="),
    (lambda: EarlyStop("loss", patience=0), "patience=0: give an integer, 1 or more"),
    (lambda: EarlyStop("loss", patience_steps=0), "patience_steps=0"),
    (lambda: EarlyStop("a/b", patience=1, name="a/b"), "without '/'"),
    (lambda: OnBest("score"), "whether a smaller or a larger"),
    (lambda: Plateau("loss", then=A), "give SetValue"),
    (lambda: Plateau("loss", then=LOWER, long=5, short=5), "give a larger long="),
    (lambda: Plateau("loss", then=LOWER, cooldown=-1), "cooldown=-1"),
    (lambda: Require("loss", 0.5), "give step= or epoch="),
    (lambda: Require("loss", 0.5, step=1, epoch=1), "give step= or epoch="),
    (lambda: Require("loss", 0.5, step=0), "step=0: give an integer"),
    (lambda: LossBound(), "has no bound: give bound= or times="),
    (lambda: LossBound(times=0.5), "give more than 1"),
    (lambda: LossBound(times=2, last=0), "last=0"),
    (lambda: LossBound(bound=1, policy=A), 'give "raise" or "stop"'),
    (lambda: Annealing(1.0, 0.5, every=0), "every=0: give an integer, 1 or more"),
    (lambda: Annealing(1.0, 0.5, least=0.5, most=0.1), r"initial=1\.0.*give bounds between"),
    (lambda: Annealing(1.0, 0.5, least=2.0), "give bounds"),
    (lambda: Annealing(1.0, 0.5, most=0.5), "give bounds"),
    (lambda: Annealing(1.0, 0.5, least=NAN), "least=nan: give a number"),
    (lambda: Annealing(A, 0.5), "initial='an argument.*: give a number"),
    (lambda: EarlyStop("loss", patience=1, baseline=NAN), "baseline=nan: give a number, or None for none"),
    (lambda: EarlyStop("loss", threshold=A), "threshold='an argument"),
    (lambda: EarlyStop(3, patience=1), "metric=3: give the name of a metric"),  # type: ignore[arg-type]
    (lambda: Require("loss", A, step=1), "value='an argument"),
    (lambda: LossBound(bound=A), "bound='an argument"),
    (lambda: CSV(metrics=[1]), "1 is not the name of a metric"),  # type: ignore[list-item]
    (lambda: Scheduled("settings.rate", A), "give a function of the step"),
    (lambda: When(Every(steps=1), ["save"]), "'save' is not an action; give Save"),  # type: ignore[list-item]
    (lambda: When(Every(steps=1), Save), "is not an action"),  # type: ignore[arg-type]
    (lambda: When(A, Save()), "is not a condition; give a schedule"),
    (lambda: Export(Every(epochs=1), every=Every(steps=1)), "leave out every="),
    (lambda: Export(every=Every(steps=1)), "give it as when="),
    (lambda: Export(OnBest("loss"), every=Every(seconds=9)), "a schedule of steps or epochs"),
    (lambda: Export(format="safetensor"), "did you mean 'safetensors'"),
    (lambda: Export(format="torch.export"), "give inputs="),
    (lambda: Export(inputs=(1,)), "only there"),
    (lambda: Export(keep=0), "keep=0"),
    (lambda: Export(name=".."), "without a leading"),
    (lambda: Dump([]), "names of values that eval_step returns"),
    (lambda: Dump("id", format=A), "known: csv, jsonl"),
    (lambda: LogVariables(formatter="%.3f"), r"give an everstep.metrics.MetricFormatter"),  # type: ignore[arg-type]
    (lambda: LogVariables("loss"), r"give a list of names, \['loss'\]"),
    (lambda: CSV(metrics="loss"), r"CSV\(metrics='loss'\): give a list of names, \['loss'\]"),
    (lambda: CSV(variables=["loss"]), r"CSV\(\) has no argument 'variables'; did you mean 'metrics'"),
    *(
        (lambda d=d: CSV(delimiter=d), r"CSV\(delimiter=.*give one character")
        for d in ("", ", ", "\n", '"', A)
    ),
    *((lambda p=p: JSONLines(p), r"folder logs; give another path, as in \"logs/mine\"") for p in OWN),
    *((lambda t=t: TensorBoard(throttle=t), "1 or more") for t in (0, -1, 1.5, True, {"loss": 0})),
    (lambda: everstep.LogVariables, r"'LogVariables'; it is everstep\.services\.LogVariables$"),
    (lambda: everstep.services.Evaluate, r"'Evaluate'; it is everstep\.Evaluate$"),
    (lambda: everstep.services.Plateu, r"'Plateu'; did you mean 'Plateau'\? known: Annealing, "),
    (lambda: SetValue("optimizer.lr"), "one of value= and times="),
    (lambda: SetValue("optimizer.lr", 1.0, times=0.5), "one of value= and times="),
    (lambda: SetValue("optimizer.lr", NAN), r"SetValue\(.*give a finite number"),
    (lambda: SetValue("optimizer.lr", times=float("inf")), "give a finite number"),
    (lambda: SetValue("optimizer.lr", A), "give a finite number"),
    (lambda: Throughput(0), "samples=0"),
    (lambda: Profile(keep=0), "keep=0: give an integer, 1 or more, or None for all"),
    (lambda: Profile(steps=0), "steps=0"),
    (lambda: everstep.Best("loss", keep=0), "keep=0: give an integer, 1 or more"),
    (lambda: everstep.services.Recovery(0), "max_rollbacks=0"),
    (lambda: everstep.services.Recovery(reset_after=0), "reset_after=0"),
    (lambda: Retry(["ConnectionError"]), "give classes of exceptions"),  # type: ignore[list-item]
    (lambda: Retry([KeyboardInterrupt]), "give classes of exceptions"),  # type: ignore[list-item]
    (lambda: Retry(times=0), "times=0"),
    (lambda: GlobalStepWaiter("other", 0), "step=0"),
    (lambda: GlobalStepWaiter("other", 1, poll=0), "poll=0"),
    (lambda: GlobalStepWaiter("other", 1, timeout=A), "timeout="),
    *(
        (lambda s=s: everstep.services.Console(plain_seconds=s), "a positive number")
        for s in (0, -1.0, NAN, A, None, True)
    ),
    (lambda: Notify(), "give one of command"),
    (lambda: Notify(command=["true"], url="http://a/b"), "give one of command"),
    (lambda: Notify(command="mail me"), "give a list of strings"),
    (lambda: Notify(url="ftp://example.org/x"), "http or https"),
    *(
        (lambda u=u: Notify(url=u), "an address with http or https")
        for u in ("https://exa mple.org/x", "https://[x", "http://:80/", A)
    ),
    (lambda: Notify(command=["true"], on=["fail"]), "did you mean 'failed'"),
    (lambda: Notify(command=["true"], timeout=A), "timeout="),
]


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    for call, words in REFUSED:
        with pytest.raises((ConfigError, AttributeError), match=words):
            call()
