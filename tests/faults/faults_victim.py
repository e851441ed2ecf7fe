"""The program of the faults, behind each door: `python faults_victim.py RUN_DIR --door trainer`.

The objects and the step are those of the victim of the laws.  Here the program also evaluates in each epoch
at each door, keeps best weights, and at a given step does what befalls a training: `--do`.
Each phase that begins is a place of `everstep.hazard`: "faults.body", "faults.evaluation", ...
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.extend(str(Path(__file__).parent.parent / room) for room in ("", "laws", "checkpoint"))
from law_support import victim
from law_support.campaign_pace import take
from law_support.victim import at_hazards

import everstep
from everstep import Every, hazard
from everstep.index import shipping_thread

REFUSED = ("checkpoint.mkdir", "checkpoint.open", "checkpoint.write", "journal.write", "trail.write")
"""What a full disk refuses: all that needs room."""


def options(arguments: list[str]) -> argparse.Namespace:
    own = argparse.ArgumentParser(allow_abbrev=False)
    own.add_argument("--do", action="append", default=[], help="WHAT:STEP[:MORE], see `Deeds`")
    own.add_argument("--restore", action="store_true", help="the best weights are loaded at the end")
    own.add_argument("--worsens", action="store_true", help="each epoch's evaluation is worse")
    own.add_argument("--hang", type=float, default=0.0, help="seconds after which a hang ends the start")
    own.add_argument("--again", type=int, default=0, help="epochs of a second loop over the same objects")
    given, rest = own.parse_known_args(arguments)
    return argparse.Namespace(**vars(given), **vars(victim.options(rest)))


# ---------------------------------------------------------------------------------------- what befalls it


def in_writer() -> bool:
    """Whether this is the thread that writes checkpoints."""
    return threading.current_thread().name == "everstep-writer"


class Deeds:
    """What `--do` asks for; each is done as the body of its step begins."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.run_dir = Path(args.run_dir)
        self.due: dict[int, list[tuple[str, str]]] = {}
        for each in args.do:
            what, step, *more = each.split(":", 2)
            self.due.setdefault(int(step), []).append((what, "".join(more)))

    def befall(self, step: int) -> None:
        for what, more in self.due.get(step, ()):
            getattr(self, what)(more)

    def steps_of(self, deed: str) -> set[int]:
        return {step for step, deeds in self.due.items() for what, _ in deeds if what == deed}

    def service(self, more: str) -> None:
        """At the end of the step; see `Decides`."""

    def callback(self, more: str) -> None:
        """At the end of the step; see `listen`."""

    def fail(self, more: str) -> None:
        raise ZeroDivisionError("the user's own code failed")

    def wait(self, more: str) -> None:
        """It takes for ever."""
        signal.pause()

    def clock(self, seconds: str) -> None:
        """The clock on the wall is set."""
        now, shift = time.time, float(seconds)
        time.time = lambda: now() + shift

    def slow(self, seconds: str) -> None:
        """From now on the disk takes its time."""
        at_hazards(lambda name: take(float(seconds) * (name == "checkpoint.write" and in_writer())))

    def full(self, more: str) -> None:
        """From now on somebody takes each byte of the disk that becomes free."""
        self.is_full = True

        def refuse(name: str) -> None:
            if self.is_full and name in REFUSED:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        at_hazards(refuse)

    def room(self, more: str) -> None:
        """And now there is room again."""
        self.is_full = False

    def memory(self, more: str) -> None:
        """The next save finds no memory."""
        left = [1]

        def refuse(name: str) -> None:
            if name == "checkpoint.write" and in_writer() and left:
                left.clear()
                raise MemoryError

        at_hazards(refuse)


# ------------------------------------------------------------------------------------------ the program


class Training(victim.Training):
    """The user's objects and step; places between the parts of a step at which it can be struck."""

    def __init__(self, args: argparse.Namespace, begins: Any) -> None:
        super().__init__(args)
        self.begins, self.deeds = begins, Deeds(args)
        self.optimizer.register_step_post_hook(lambda *_: hazard.reach("faults.updated"))

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.begins("body", step)
        self.deeds.befall(step)
        found = super().step(step, x, y)
        hazard.reach("faults.end")
        return found

    def evaluate(self) -> float:
        self.begins("evaluation")
        return super().evaluate() + self.worse()

    def worse(self) -> float:
        """What each epoch adds to the value of its evaluation."""
        return float(self.per_epoch.last_epoch) if self.args.worsens else 0.0

    def ends(self) -> dict[str, Any]:
        """What of the live objects must belong to one step."""
        weights = b"".join(each.detach().numpy().tobytes() for each in self.model.state_dict().values())
        updates = self.optimizer.state_dict()["state"].get(0, {}).get("step", 0)
        return {
            "weights": hashlib.sha256(weights).hexdigest(),
            "updates": float(updates),
            "rate": self.optimizer.param_groups[0]["lr"],
            "epochs": self.per_epoch.last_epoch,
        }


def services_of(args: argparse.Namespace) -> list[everstep.Service]:
    metric = {"loop": "valid_loss", "supervisor": "valid_loss", "trainer": "valid/loss"}[args.door]
    per_epoch = victim.SAMPLES // args.batch
    when = Every(steps=per_epoch) if args.door == "supervisor" else Every(epochs=1)
    found: list[everstep.Service] = [
        everstep.Checkpoints(Every(steps=args.every) | Every(epochs=1)),
        everstep.Best(metric, every=when, restore_at_end=["model"] if args.restore else False),
    ]
    if args.patience:
        found.append(everstep.EarlyStop(metric, patience=args.patience, min_delta=0.5, every=when))
    if fails := Deeds(args).steps_of("service"):
        found.append(Decides(fails))
    if args.hang:
        found.append(everstep.services.HangWatch(args.hang, "stop"))
    return found


def settings(args: argparse.Namespace, begins: Any) -> dict[str, Any]:
    """Arguments of each door."""
    return {
        "seed": args.seed,
        "services": services_of(args),
        "local_init_fn": lambda: begins("opening"),
    }


class Decides(everstep.Service):
    """A service of the user's own, on whose decisions the training depends."""

    stage = everstep.services.Stage.DECIDE

    def __init__(self, fails: set[int]) -> None:
        super().__init__("the user's own", Every(steps=1))
        self.fails = fails

    def run(self, boundary: everstep.Boundary) -> None:
        if boundary.step in self.fails:
            raise ZeroDivisionError("the user's service failed")


def listen(run: everstep.Supervisor, training: Training) -> None:
    """A callback of the user's own, which only looks."""
    fails = training.deeds.steps_of("callback")

    def callback(boundary: everstep.Boundary) -> None:
        if boundary.step in fails:
            raise ZeroDivisionError("the user's callback failed")

    run.on(everstep.services.Moment.AFTER_STEP, callback)


def train_loop(args: argparse.Namespace, training: Training, begins: Any) -> None:
    data = victim.batches(args, training.x, training.y)
    loop = everstep.TrainLoop(args.run_dir, training.state(), max_epoch=args.epochs, **settings(args, begins))
    with loop:
        listen(loop, training)
        for _ in loop.iter_epochs():
            for step, (x, y) in loop.iter_steps(data):
                loop.collect_metrics(training.step(step, x, y))
            begins("tail", loop.step)
            training.per_epoch.step()
            with loop.evaluation():
                loop.collect_metrics(valid_loss=training.evaluate())
        begins("shutdown", loop.step)


def supervise(args: argparse.Namespace, training: Training, begins: Any) -> None:
    per_epoch = victim.SAMPLES // args.batch
    supervisor = everstep.Supervisor(args.run_dir, training.state(), **settings(args, begins))
    with supervisor:
        listen(supervisor, training)
        train = supervisor.stream(victim.batches(args, training.x, training.y), passes=args.epochs)
        while not supervisor.should_stop():
            try:
                x, y = next(train)
            except StopIteration:
                break
            step = supervisor.step + 1
            metrics = training.step(step, x, y)
            if step % per_epoch == 0:
                training.per_epoch.step()
                metrics["valid_loss"] = training.evaluate()
            supervisor.advance(**metrics)
        begins("shutdown", supervisor.step)


class Task(victim.Task):
    """The training as a task."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.count["steps"] += 1
        return self.training.step(self.count["steps"], *batch)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        self.begins("evaluation")
        found = super().eval_step(batch)
        return {name: value + self.training.worse() for name, value in found.items()}


def train(args: argparse.Namespace, training: Training, begins: Any) -> None:
    valid = everstep.data.arrays(training.x[:70], training.y[:70], batch_size=32)
    trainer = everstep.Trainer(
        Task(args, training, begins),
        {"train": victim.batches(args, training.x, training.y), "valid": valid},
        args.run_dir,
        max_epoch=args.epochs,
        **settings(args, begins),
    )
    with trainer.open() as loop:
        listen(loop, training)
        for _ in loop.iter_epochs():
            trainer.epoch()
        begins("shutdown", loop.step)


DOORS = {"loop": train_loop, "supervisor": supervise, "trainer": train}


def main(arguments: list[str]) -> None:
    args = options(arguments)
    notes = victim.phases(args)

    def begins(phase: str, step: int = 0) -> None:
        notes(phase, step)
        hazard.reach(f"faults.{phase}")

    def once() -> None:
        training = Training(args, begins)
        DOORS[args.door](args, training, begins)
        print("ends as", json.dumps(training.ends()))
        if args.again:
            args.epochs, args.patience = args.again, 0
            DOORS[args.door](args, training, begins)
            print("ends as", json.dumps(training.ends()))

    begins("start-up")
    shipping_thread.PATIENCE = 0.2  # seconds for a database that does not answer
    torch.set_num_threads(1)
    everstep.recovering(once)
    begins("over")


if __name__ == "__main__":
    main(sys.argv[1:])
