"""What services refuse, made or given to a loop: the call, and words of the error with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import EarlyStop, Every, Save
from everstep.errors import ConfigError
from tiny_runs import Tiny, quiet, serviced

services: Any = everstep.services
LOWER = services.SetValue("optimizer.lr", times=0.5)
NAN = float("nan")
OWN = ["", ".", "run.json", "logs", "logs/run.log", "logs/media/x", "/tmp/x", "../x", "logs/../x", "best/x/y"]
URLS = ["https://exa mple.org/x", "https://[x", "http://:80/"]
A: Any = "an argument of another type"

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: EarlyStop("loss"), "no reason to stop: give patience=, patience_steps= or threshold="),
    (lambda: EarlyStop("loss", patience=0), "patience=0: give an integer, 1 or more"),
    (lambda: EarlyStop("loss", patience_steps=0), "patience_steps=0"),
    (lambda: EarlyStop("a/b", patience=1, name="a/b"), "without '/'"),
    (lambda: services.OnBest("score"), "whether a smaller or a larger"),
    (lambda: services.Plateau("loss", then=A), "give SetValue"),
    (lambda: services.Plateau("loss", then=LOWER, long=5, short=5), "give a larger long="),
    (lambda: services.Plateau("loss", then=LOWER, cooldown=-1), "cooldown=-1"),
    (lambda: services.Require("loss", 0.5), "give step= or epoch="),
    (lambda: services.Require("loss", 0.5, step=1, epoch=1), "give step= or epoch="),
    (lambda: services.Require("loss", 0.5, step=0), "step=0: give an integer"),
    (lambda: services.LossBound(), "has no bound: give bound= or times="),
    (lambda: services.LossBound(times=0.5), "give more than 1"),
    (lambda: services.LossBound(times=2, last=0), "last=0"),
    (lambda: services.LossBound(bound=1, policy=A), 'give "raise" or "stop"'),
    (lambda: services.Annealing(1.0, 0.5, every=0), "every=0: give an integer, 1 or more"),
    (lambda: services.Annealing(1.0, 0.5, least=0.5, most=0.1), r"initial=1\.0.*give bounds between"),
    (lambda: services.Annealing(1.0, 0.5, least=2.0), "give bounds"),
    (lambda: services.Annealing(1.0, 0.5, most=0.5), "give bounds"),
    (lambda: services.Annealing(1.0, 0.5, least=NAN), "least=nan: give a number"),
    (lambda: services.Annealing(A, 0.5), "initial='an argument.*: give a number"),
    (lambda: EarlyStop("loss", patience=1, baseline=NAN), "baseline=nan: give a number, or None for none"),
    (lambda: EarlyStop("loss", threshold=A), "threshold='an argument"),
    (lambda: EarlyStop(3, patience=1), "metric=3: give the name of a metric"),  # type: ignore[arg-type]
    (lambda: services.Require("loss", A, step=1), "value='an argument"),
    (lambda: services.LossBound(bound=A), "bound='an argument"),
    (lambda: services.CSV(metrics=[1]), "1 is not the name of a metric"),
    (lambda: services.Scheduled("settings.rate", A), "give a function of the step"),
    (lambda: services.When(Every(steps=1), ["save"]), "'save' is not an action; give Save"),
    (lambda: services.When(Every(steps=1), Save), "is not an action"),
    (lambda: services.When(A, Save()), "is not a condition; give a schedule"),
    (lambda: services.Export(Every(epochs=1), every=Every(steps=1)), "leave out every="),
    (lambda: services.Export(every=Every(steps=1)), "give it as when="),
    (
        lambda: services.Export(services.OnBest("loss"), every=Every(seconds=9)),
        "a schedule of steps or epochs",
    ),
    (lambda: services.Export(format="safetensor"), "did you mean 'safetensors'"),
    (lambda: services.Export(format="torch.export"), "give inputs="),
    (lambda: services.Export(inputs=(1,)), "only there"),
    (lambda: services.Export(keep=0), "keep=0"),
    (lambda: services.Export(name=".."), "without a leading"),
    (lambda: services.Dump([]), "names of values that eval_step returns"),
    (lambda: services.Dump("id", format=A), "known: csv, jsonl"),
    (lambda: services.LogVariables(formatter="%.3f"), r"give an everstep.metrics.MetricFormatter"),
    (lambda: services.LogVariables("loss"), r"give a list of names, \['loss'\]"),
    (lambda: services.CSV(metrics="loss"), r"CSV\(metrics='loss'\): give a list of names, \['loss'\]"),
    (
        lambda: services.CSV(variables=["loss"]),
        r"CSV\(\) has no argument 'variables'; did you mean 'metrics'",
    ),
    (lambda: everstep.LogVariables, r"'LogVariables'; it is everstep\.services\.LogVariables$"),
    (lambda: services.Evaluate, r"'Evaluate'; it is everstep\.Evaluate$"),
    (lambda: services.Plateu, r"'Plateu'; did you mean 'Plateau'\? known: Annealing, "),
    (lambda: services.SetValue("optimizer.lr"), "one of value= and times="),
    (lambda: services.SetValue("optimizer.lr", 1.0, times=0.5), "one of value= and times="),
    (lambda: services.SetValue("optimizer.lr", NAN), r"SetValue\(.*give a finite number"),
    (lambda: services.SetValue("optimizer.lr", times=float("inf")), "give a finite number"),
    (lambda: services.SetValue("optimizer.lr", A), "give a finite number"),
    (lambda: services.Throughput(0), "samples=0"),
    (lambda: services.Profile(keep=0), "keep=0: give an integer, 1 or more, or None for all"),
    (lambda: services.Profile(steps=0), "steps=0"),
    (lambda: everstep.Best("loss", keep=0), "keep=0: give an integer, 1 or more"),
    (lambda: services.Recovery(0), "max_rollbacks=0"),
    (lambda: services.Recovery(reset_after=0), "reset_after=0"),
    (lambda: services.Retry(["ConnectionError"]), "give classes of exceptions"),
    (lambda: services.Retry([KeyboardInterrupt]), "give classes of exceptions"),
    (lambda: services.Retry(times=0), "times=0"),
    (lambda: services.GlobalStepWaiter("other", 0), "step=0"),
    (lambda: services.GlobalStepWaiter("other", 1, poll=0), "poll=0"),
    (lambda: services.GlobalStepWaiter("other", 1, timeout=A), "timeout="),
    (lambda: services.WandB("project"), "pip install .wandb"),
    (lambda: services.MLflow("project"), "pip install .mlflow"),
    (lambda: services.Trackio("project"), "pip install .trackio"),
    (lambda: services.Notify(), "give one of command"),
    (lambda: services.Notify(command=["true"], url="http://a/b"), "give one of command"),
    (lambda: services.Notify(command="mail me"), "give a list of strings"),
    (lambda: services.Notify(url="ftp://example.org/x"), "http or https"),
    (lambda: services.Notify(command=["true"], on=["fail"]), "did you mean 'failed'"),
    (lambda: services.Notify(command=["true"], timeout=A), "timeout="),
]

EACH: list[tuple[Callable[[Any], object], str, Sequence[Any]]] = [
    (lambda d: services.CSV(delimiter=d), r"CSV\(delimiter=.*give one character", ("", ", ", "\n", '"', A)),
    (services.JSONLines, r"folder logs; give another path, as in \"logs/mine\"", OWN),
    (lambda t: services.TensorBoard(throttle=t), "1 or more", (0, -1, 1.5, True, {"loss": 0})),
    (lambda s: services.Console(plain_seconds=s), "a positive number", (0, -1.0, NAN, A, None, True)),
    (lambda u: services.Notify(url=u), "an address with http or https", (*URLS, A)),
]

PATIENT = EarlyStop("loss", patience=1)
BY_TORCH = services.Export(entry="w", format="torch.export", inputs=(1,))
IN_A_LOOP: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: Tiny(run, services=[PATIENT, PATIENT]), r"two services are named 'early stop loss'.*name="),
    (lambda run: Tiny(run, services=[EarlyStop]), "is not a Service; pass an instance"),
    (lambda run: Tiny(run, services=[print]), "is not a Service; pass an instance"),
    (lambda run: quiet(run, services=[PATIENT]), r"is due Every\(epochs=1\), and a Supervisor .*steps="),
    (
        lambda run: serviced(run, [services.Export()], max_epoch=1),
        "no state entry is named 'model'; known: m",
    ),
    (lambda run: serviced(run, [BY_TORCH], max_epoch=1), "'w' is a ndarray, which torch"),
    (lambda run: on(run, "AFTER_STEPS"), "no moment 'AFTER_STEPS'; did you mean 'AFTER_STEP'"),
    (lambda run: on(run, 3), "no moment 3"),
    (lambda run: on(run, "BEFORE_EPOCH", 2), "leave out every=2"),
    (lambda run: on(run, "METRICS_COLLECTED", Every(steps=2)), "leave out every="),
    (lambda run: on(run, "AFTER_STEP", 0), "steps=0: give an integer, 1 or more"),
]


def on(run: Path, moment: Any, every: Any = None) -> None:
    everstep.TrainLoop(run).on(moment, print, every=every)


def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path) -> None:
    each = [(partial(make, value), words) for make, words, values in EACH for value in values]
    each += [(partial(make, tmp_path / str(n)), words) for n, (make, words) in enumerate(IN_A_LOOP)]
    for call, words in [*REFUSED, *each]:
        with pytest.raises((ConfigError, AttributeError), match=words):
            call()
