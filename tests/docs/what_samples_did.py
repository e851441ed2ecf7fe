"""What the samples of docs/coming-from did: counts and values, in the order in which a page has them.

A sample that only runs proves little.  Each has a function here that looks at its runs and its names; the
samples train 3 steps an epoch, on 96 samples in batches of 32.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.record import RunJournal

Names = dict[str, Any]
Look = Callable[[Names], None]


def row(run: str, name: str, phase: str = "step") -> tuple[list[int], list[float]]:
    """Steps and values of a metric; each step once, which the record itself would not promise."""
    rows = [each for each in RunJournal(run).rows() if (each.name, each.phase) == (name, phase)]
    return [each.step for each in rows], [each.value for each in rows]


def steps(run: str, name: str, phase: str = "step") -> list[int]:
    return row(run, name, phase)[0]


def trained(run: str, last: int, reason: str) -> None:
    """It did each step from 1 to the last once, and ended for this reason."""
    ended = RunJournal(run).ended()
    assert ended is not None and (ended["step"], ended["reason"]) == (last, reason)
    assert steps(run, "loss") == list(range(1, last + 1))


def evaluated(run: str, name: str, at: list[int], phase: str = "eval/valid") -> list[float]:
    """At these steps, once each."""
    found, values = row(run, name, phase)
    assert found == at
    return values


def checkpoints(run: str) -> list[str]:
    return sorted(path.name for path in Path(run, "checkpoints").glob("*-*"))


# ------------------------------------------------------------------------------------- tfsnippet


def tfsnippet_loop(names: Names) -> None:
    trained("runs/x", 30, "max_epoch 10 is reached")
    losses = evaluated("runs/x", "valid_loss", list(range(3, 31, 3)), "tail")
    assert names["loop"].best.value == min(losses)
    names["model"].eval()
    assert names["evaluate"](names["model"], names["valid"]) == pytest.approx(min(losses), rel=1e-6)


def tfsnippet_arguments(names: Names) -> None:
    scores = evaluated("runs/arguments", "valid_score", [3, 6, 9], "tail")
    assert names["loop"].best.value == max(scores)
    assert checkpoints("runs/arguments")[:2] == ["epoch-0000-step-00000000", "epoch-0002-step-00000006"]


def tfsnippet_methods(names: Names) -> None:
    assert names["loop"].step == 6
    evaluated("runs/methods", "loss_by_hand", [3, 6], "tail")
    assert "epoch-0001-step-00000003" in checkpoints("runs/methods")


def tfsnippet_events(names: Names) -> None:
    trained("runs/events", 3, "max_epoch 1 is reached")
    assert names["written"] == ["open", (0, "loss"), (1, "loss"), (2, "loss"), "a picture", "close"]


def tfsnippet_annealed(names: Names) -> None:
    trained("runs/annealed", 6, "max_epoch 2 is reached")
    assert row("runs/annealed", "temperature")[1] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    noise = dict(zip(*row("runs/annealed", "noise", "eval/schedule of noise"), strict=True))
    assert noise == {step: pytest.approx(0.5 * 0.9**step) for step in range(1, 7)}  # of the step after it
    assert names["noise"].value == pytest.approx(0.5 * 0.9**6)


# ---------------------------------------------------------------------------------------- emloop


def emloop_trainer(names: Names) -> None:
    trained("runs/digits", 9, "max_epoch 3 is reached")
    losses = evaluated("runs/digits", "valid/loss", [0, 3, 6, 9])
    assert names["ending"].best.value == min(losses)


def emloop_epochs(names: Names) -> None:
    """Each stream once an epoch, whoever evaluates it."""
    trained("runs/epochs", 6, "max_epoch 2 is reached")
    losses = evaluated("runs/epochs", "valid/loss", [3, 6], "tail")
    assert not steps("runs/epochs", "valid/loss", "eval/valid")
    (last,) = everstep.runs.evaluations("runs/epochs")
    assert last.metrics["valid/loss"] == losses[-1]


def emloop_hook(names: Names) -> None:
    trained("runs/hook", 3, "max_epoch 1 is reached")
    (mean,) = evaluated("runs/hook", "valid/loss", [3])
    assert names["biggest"].batches == 3 and names["biggest"].biggest >= mean


def emloop_hooks(names: Names) -> None:
    trained("runs/hooks", 9, "stop after 3 epochs")
    evaluated("runs/hooks", "valid/loss", [3, 6, 9])
    with open("runs/hooks/logs/metrics.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines if line["phase"] == "step"] == list(range(1, 10))


# ---------------------------------------------------------------------------------- model-garden


def model_garden_trainer(names: Names) -> None:
    trained("runs/digits", 12, "max_step 12 is reached")
    losses = evaluated("runs/digits", "valid/loss", [6, 12])
    assert names["ending"].best.value == min(losses)
    assert evaluated("runs/digits", "valid/classes", [6, 12]) == [4, 4]
    assert checkpoints("runs/digits")[1:] == ["epoch-0002-step-00000006", "epoch-0004-step-00000012"]


def model_garden_actions(names: Names) -> None:
    trained("runs/actions", 6, "max_epoch 2 is reached")
    evaluated("runs/actions", "valid/loss", [3, 6])
    assert checkpoints("runs/actions")[1:] == ["epoch-0001-step-00000003", "epoch-0002-step-00000006"]


# -------------------------------------------------------------------------------- tf-experiment


def tf_experiment(names: Names) -> None:
    trained("runs/digits", 9, "max_step 9 is reached")
    losses = evaluated("runs/digits", "valid/loss", [3, 6, 9])
    assert names["result"].metrics["valid/loss"] == losses[-1]
    exported = {path.name: len(list(path.glob("step-*"))) for path in Path("runs/digits/exports").iterdir()}
    assert exported == {"final": 1, "latest": 3, "best": 1}


def tf_experiment_watch(names: Names) -> None:
    trained("runs/two", 6, "max_step 6 is reached")
    assert not steps("runs/two", "valid/loss", "eval/valid")
    assert [one.step for one in everstep.runs.evaluations("runs/two")] == [6]


# -------------------------------------------------------------------------------- tf-supervisor


def tf_supervisor(names: Names) -> None:
    trained("runs/x", 6, "max_step 6 is reached")
    assert checkpoints("runs/x") == ["epoch-0000-step-00000000", "step-00000006"]
    assert list(Path("runs/x").rglob("events.out.tfevents.*"))


def tf_supervisor_own(names: Names) -> None:
    """A function sees each step's batch, once: 4 of 32 samples."""
    trained("runs/own", 4, "max_step 4 is reached")
    assert names["sizes"] == [32] * 4


def tf_supervisor_hooks(names: Names) -> None:
    trained("runs/hooks", 6, "max_step 6 is reached")
    assert names["saved"] == checkpoints("runs/hooks")
    (norm,) = evaluated("runs/hooks", "weight_norm", [6], "eval/final values")
    assert norm == pytest.approx(float(names["model"][0].weight.detach().norm()))
    lines = Path("runs/hooks/logs/run.log").read_text().splitlines()
    assert [step for step in (2, 4, 6) if any(f"Step {step}/6" in line for line in lines)] == [2, 4, 6]


# --------------------------------------------------------------------------------------- tfutils


def tfutils(names: Names) -> None:
    """The second of two models on one reading is the run of its own, of the same width."""
    runs = [f"runs/digits/tutorial/{name}" for name in ("basic", "both_model_0", "both_model_1")]
    for run in runs:
        trained(run, 12, "max_step 12 is reached")
        evaluated(run, "valid0/top1", [0, 6, 12], "eval/valid0")
        assert row(run, "learning_rate")[1] == [pytest.approx(rate) for rate in [0.1] * 10 + [0.05] * 2]
    assert row(runs[0], "loss") == row(runs[2], "loss") != row(runs[1], "loss")
    assert names["found"]["valid0"]["top1"] == row(runs[0], "valid0/top1", "eval/valid0")[1][-1]


# ---------------------------------------------------------------------------------- lightning-hf


def lightning(names: Names) -> None:
    trained("runs/digits", 9, "max_epoch 3 is reached")
    losses = evaluated("runs/digits", "valid/loss", [3, 6, 9])
    (best,) = everstep.runs.evaluations("runs/digits")
    assert best.metrics["valid/loss"] == pytest.approx(min(losses))
    updates = steps("runs/digits", "window_loss") + steps("runs/digits", "window_loss", "tail")
    assert sorted(updates) == [2, 3, 5, 6, 8, 9]  # of two batches, and of the one that is left over


def hugging_face(names: Names) -> None:
    trained("runs/classifier", 6, "max_epoch 2 is reached")
    accuracies = evaluated("runs/classifier", "eval/accuracy", [3, 6], "eval/eval")
    assert all(0 <= each <= 1 for each in accuracies)
    assert everstep.runs.best("runs/classifier")["eval/accuracy"].value == max(accuracies)


DID: dict[str, list[Look]] = {
    "emloop": [emloop_trainer, emloop_epochs, emloop_hook, emloop_hooks],
    "lightning-hf": [lightning, hugging_face],
    "model-garden": [model_garden_trainer, model_garden_actions],
    "tf-experiment": [tf_experiment, tf_experiment_watch],
    "tf-supervisor": [tf_supervisor, tf_supervisor_own, tf_supervisor_hooks],
    "tfsnippet": [
        *(tfsnippet_loop, tfsnippet_arguments, tfsnippet_methods, tfsnippet_events),
        tfsnippet_annealed,
    ],
    "tfutils": [tfutils],
}
"""By page: what each of its samples did."""
