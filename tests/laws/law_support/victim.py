"""A torch training script as a user writes it, to be killed and started again: `python victim.py RUN_DIR`.

Dropout, Adam, a learning rate per step and one per epoch, an EMA, and augmentation from the three global
generators.  The options choose what else; sleeps make short phases long enough to be hit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import get_worker_info

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import everstep
from everstep import Every, hazard, services
from law_support.campaign_pace import take
from law_support.diary import Diary

SAMPLES, FEATURES, CLASSES = 128, 8, 3
KINDS = ("arrays", "loader", "plain", "stateful", "prefetch", "own")


DEFAULTS: dict[str, Any] = {
    "diary": "", "door": "loop", "data": "arrays", "workers": 0, "batch": 8, "epochs": 5, "accumulate": 1,
    "evaluate": "isolated", "seed": 3,
    "generator": False,  # the DataLoader has a generator of its own
    "every": 5,  # steps between checkpoints
    "patience": 0,  # of the early stop; 0: none
    "bad": 0,  # this sample spoils its step; Recovery undoes it
    "frozen": 0,  # steps for which a large array stays; 0: none
    "live": False,  # saves write the live arrays
    "everything": False,  # every service that there is
    "sleep": 0.0,  # seconds in each step
    "slow": "",  # PHASE:SECONDS or sample:SECONDS, where it takes its time
    "hold": 0,  # batches of worker 0 before it makes the loop wait
    "group": "",  # SIGNAL,...@POINT:N, sent there to this group of processes
}  # fmt: skip
CHOICES = {"data": KINDS, "evaluate": ("bare", "isolated", "none"), "door": ("loop", "supervisor", "trainer")}


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    for name, default in DEFAULTS.items():
        typed: Any = {"type": type(default), "choices": CHOICES.get(name)}
        typed = {"action": "store_true"} if default is False else typed
        parser.add_argument(f"--{name}", default=default, **typed)
    return parser.parse_args(arguments)


def at_hazards(act: Callable[[str], None]) -> None:
    """Call `act` at each point of `everstep.hazard`, before what is armed there."""
    armed = hazard._action

    def both(name: str) -> None:
        act(name)
        if armed is not None:
            armed(name)

    hazard._action = both


def signal_group_at(spec: str) -> None:
    """What a terminal or a scheduler does: signals reach this process and its workers, at an armed point."""
    names, _, place = spec.partition("@")
    point, _, count = place.rpartition(":")
    left = int(count)

    def act(name: str) -> None:
        nonlocal left
        left -= name == point
        if name == point and left == 0:
            for each in names.split(","):
                print(f"sent {each}", flush=True)
                os.killpg(0, signal.Signals[each])
                if each == "SIGSTOP":  # somebody has continued this process
                    os.killpg(0, signal.SIGCONT)

    at_hazards(act)


class Augmented:
    """Samples with noise from the three global generators.

    Of two workers, the first comes to the point "law.held" after `hold` of its batches, when the loop has
    begun all steps before: the loop waits for it.
    """

    begun, begins = os.pipe()
    """A byte for each step."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> None:
        self.x, self.y, self.hold = x, y, args.hold
        self.slow = float(args.slow.removeprefix("sample:")) if args.slow.startswith("sample:") else 0.0
        self.left = args.hold * args.batch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        take(self.slow)
        if self.hold and self.left == 0 and (worker := get_worker_info()) is not None and worker.id == 0:
            for _ in range(2 * self.hold):
                os.read(self.begun, 1)
            hazard.reach("law.held")
        self.left -= 1
        return augment(self.x[index]), self.y[index]


def augment(x: torch.Tensor) -> torch.Tensor:
    noise = 0.1 * torch.randn(x.shape) + random.gauss(0, 0.1) + float(np.random.normal(0, 0.1))
    return x + noise


class OwnBatches:
    """Data of the user's own, with state: each pass goes on with the generator that the last one left."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size
        self.rng, self.order, self.at = random.Random(8), [], 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self.order:
            self.order, self.at = self.rng.sample(range(SAMPLES), SAMPLES), 0
        while self.at < SAMPLES:
            chosen = self.order[self.at : self.at + self.size]
            self.at += self.size
            yield self.x[chosen], self.y[chosen]
        self.order = []

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])
        self.order, self.at = state["order"], state["at"]


def batches(args: argparse.Namespace, x: torch.Tensor, y: torch.Tensor) -> Any:
    dataset = Augmented(x, y, args)
    own: dict[str, Any] = {"generator": torch.Generator().manual_seed(9)} if args.generator else {}
    if args.data == "loader":
        return everstep.data.loader(dataset, args.batch, shuffle=True, num_workers=args.workers)
    if args.data == "plain":
        return torch.utils.data.DataLoader(dataset, args.batch, shuffle=True, num_workers=args.workers, **own)
    if args.data == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(dataset, args.batch, shuffle=True, num_workers=args.workers)
    if args.data == "own":
        return OwnBatches(x, y, args.batch)
    arrays = everstep.data.arrays(x, y, batch_size=args.batch, shuffle=True)
    return everstep.data.prefetch(arrays) if args.data == "prefetch" else arrays


class Training:
    """The user's objects and the user's step."""

    rate = 1e-2

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.args = args
        self.augment = args.data in ("arrays", "prefetch", "own")  # there the step augments, not the dataset
        first, last = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, CLASSES)
        self.model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Dropout(0.3), last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate)
        self.per_step = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)
        self.per_epoch = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.notes: dict[str, Any] = {"longest": 0.0, "seen": 0}
        if args.frozen:
            self.notes["base"] = torch.arange(10_000)  # checkpoints share it
        self.x = torch.randn(SAMPLES, FEATURES)
        self.y = self.x[:, :CLASSES].argmax(dim=1)
        if args.bad:
            self.x[args.bad, 0] = 99.0

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "per_step", "per_epoch", "ema", "notes")
        return {name: getattr(self, name) for name in names}

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        if self.args.frozen and step % self.args.frozen == 0:
            self.notes["base"] = self.notes["base"] + 1
        x = augment(x) if self.augment else x
        loss = cross_entropy(self.model(x), y) / self.args.accumulate
        if self.args.bad and float(x[:, 0].max()) > 50:
            loss = loss * float("nan")
        loss.backward()
        if step % self.args.accumulate == 0:
            self.optimizer.step()
            self.per_step.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
        self.notes["seen"] += len(x)
        self.notes["longest"] = max(self.notes["longest"], float(x.norm()))
        take(self.args.sleep)
        return {"loss": loss, "batch": x.sum()}

    def evaluate(self) -> float:
        """A loss under dropout, drawn from the global generator: it matters whether it is isolated."""
        hazard.reach("law.evaluation")
        with torch.no_grad():
            logits = self.model(self.x) + random.random() * 0.01
            return float(cross_entropy(torch.nn.functional.dropout(logits, 0.1), self.y))


def services_of(args: argparse.Namespace) -> list[everstep.Service]:
    when = everstep.Every(steps=args.every) | everstep.Every(epochs=1)
    found: list[everstep.Service] = [everstep.Checkpoints(when, copy=not args.live)]
    if args.bad:
        found.append(everstep.services.Recovery(9))
    if args.patience:
        metric = {"loop": "valid_loss", "supervisor": "loss", "trainer": "valid/loss"}[args.door]
        every = everstep.Every(steps=args.every) if args.door == "supervisor" else everstep.Every(epochs=1)
        found.append(everstep.EarlyStop(metric, patience=args.patience, min_delta=0.08, every=every))
        found.append(everstep.Best(metric, every=every))
    return [*found, *everything()] if args.everything else found


def everything() -> list[everstep.Service]:
    """What the others leave out, in a Trainer."""
    lower = services.SetValue("optimizer.lr", times=0.7, least=1e-4)
    return [
        services.CSV(), services.JSONLines(), services.TensorBoard(), services.Notify(command=["cat"]),
        services.Export(entry="ema", name="final"),
        services.Export(services.OnBest("again/loss"), keep=2, name="best"),
        services.FinalValues(lambda: {"one": 1.0}),
        services.LogVariables(["*loss"], every=Every(steps=5)),
        services.LossBound(bound=1e9, times=1e9, last=3),
        services.Plateau("loss", then=lower, long=3, short=2, cooldown=2, every=Every(steps=2)),
        services.Profile(Every(steps=8), steps=1, keep=1),
        services.Require("valid/loss", 1e9, epoch=2),
        services.Scheduled("optimizer.weight_decay", services.Annealing(0.01, 0.9, every=3)),
        services.Throughput(8, every=Every(steps=3)),
        services.When(services.OnBest("valid/loss"), services.SetValue("notes.longest", times=0.9)),
        services.StopAfter(epochs=99),
    ]  # fmt: skip


def phases(args: argparse.Namespace) -> Any:
    """Notes that a phase began, and takes the time that `--slow` gives it."""
    diary = Diary(args.diary or None)
    where, _, seconds = args.slow.partition(":")

    def begins(phase: str, step: int = 0) -> None:
        if phase == "body":
            os.write(Augmented.begins, b".")
        diary(phase, step)
        if phase == where:
            take(float(seconds))

    return begins


def linger(args: argparse.Namespace, run: everstep.Supervisor) -> None:
    """Leaving the `with` block takes its time, so that it can be hit."""
    run.on(everstep.services.Moment.EXIT_LOOP, lambda _: take(4 * args.sleep))


def shared(args: argparse.Namespace, begins: Any, *more: everstep.Service) -> dict[str, Any]:
    """Arguments of each door."""
    opening = {"local_init_fn": lambda: begins("opening")}
    return {"seed": args.seed, "services": [*services_of(args), *more], **opening}


def train_loop(args: argparse.Namespace, training: Training, begins: Any) -> None:
    data, options = batches(args, training.x, training.y), shared(args, begins)
    with everstep.TrainLoop(args.run_dir, training.state(), max_epoch=args.epochs, **options) as loop:
        linger(args, loop)
        for _ in loop.iter_epochs():
            for step, (x, y) in loop.iter_steps(data):
                begins("body", step)
                loop.collect_metrics(training.step(step, x, y))
            begins("tail", loop.step)
            training.per_epoch.step()
            if args.evaluate == "isolated":
                with loop.evaluation(), loop.timeit("valid_time"):
                    loop.collect_metrics(valid_loss=training.evaluate())
            elif args.evaluate == "bare":
                loop.collect_metrics(valid_loss=training.evaluate())
            take(5 * args.sleep)
            loop.print_logs()
        begins("shutdown", loop.step)


def supervise(args: argparse.Namespace, training: Training, begins: Any) -> None:
    with everstep.Supervisor(args.run_dir, training.state(), **shared(args, begins)) as supervisor:
        linger(args, supervisor)
        train: Iterator[Any] = supervisor.stream(batches(args, training.x, training.y), passes=args.epochs)
        while not supervisor.should_stop():
            try:
                x, y = next(train)
            except StopIteration:
                break
            begins("body", supervisor.step + 1)
            supervisor.advance(**training.step(supervisor.step + 1, x, y))
        begins("shutdown", supervisor.step)


class Task(everstep.Task):
    """The training as a task; it counts its own steps."""

    def __init__(self, args: argparse.Namespace, training: Training, begins: Any) -> None:
        self.args, self.training, self.begins = args, training, begins
        self.count = {"steps": 0}

    def state(self) -> dict[str, Any]:
        return {**self.training.state(), "count": self.count}

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.count["steps"] += 1
        self.begins("body", self.count["steps"])
        return self.training.step(self.count["steps"], *batch)

    def train_loop_end(self) -> None:
        self.begins("tail", self.count["steps"])
        self.training.per_epoch.step()
        take(5 * self.args.sleep)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        hazard.reach("law.evaluation")
        with torch.no_grad():
            return {"loss": cross_entropy(self.training.model(augment(x)), y)}


def train(args: argparse.Namespace, training: Training, begins: Any) -> None:
    valid = everstep.data.arrays(training.x[:70], training.y[:70], batch_size=32)
    streams = {"train": batches(args, training.x, training.y), "valid": valid, "again": valid}
    again = everstep.Evaluate("again", everstep.Every(steps=3), num_steps=2)
    options = shared(args, begins, everstep.Evaluate("valid", validate_first=True), again)
    task = Task(args, training, begins)
    trainer = everstep.Trainer(task, streams, args.run_dir, max_epoch=args.epochs, **options)
    with trainer.open() as loop:
        linger(args, loop)
        for _ in loop.iter_epochs():
            trainer.epoch()
        begins("shutdown", loop.step)


DOORS = {"loop": train_loop, "supervisor": supervise, "trainer": train}


def main(arguments: list[str]) -> None:
    args = options(arguments)
    begins = phases(args)
    if args.group:
        signal_group_at(args.group)
    begins("start-up")
    torch.set_num_threads(1)
    everstep.recovering(lambda: DOORS[args.door](args, Training(args), begins))
    begins("over")


if __name__ == "__main__":
    main(sys.argv[1:])
