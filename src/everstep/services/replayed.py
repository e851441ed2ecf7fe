"""Replay of a run: steps of a plan are executed again, in a copy of the run.

`everstep replay` starts a program with EVERSTEP_REPLAY=FILE, which has a `ReplayPlan` as JSON, and with
EVERSTEP_ROOT, below which the copy lies.  In such a process nothing is saved or mirrored, and no service
reports; the steps are compared with their earlier executions, as at any resume.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from everstep.checkpoint import CheckpointName, read_checkpoint
from everstep.contracts.services import Boundary, BuiltIn, Moment, RunView
from everstep.errors import CheckpointError, UsageError
from everstep.record import StepComparison
from everstep.record.rundir import ROOT
from everstep.schedule import Every
from everstep.state import Encoded, capture, isolated, leaves
from everstep.unattended import append_line

VARIABLE = "EVERSTEP_REPLAY"
"""Environment variable that names the file with the plan."""

_COMPARED = ("progress", "user", "gradients", "streams", "rng")
"""Branches of the state tree that are compared with those of checkpoints."""


@dataclass(frozen=True)
class ReplayPlan:
    """What a process does that replays the run with id `run` in `run_dir`, of which it opens a copy."""

    run: str
    run_dir: str
    last: int
    """The last step that is executed; before the next one the program is left."""
    out: str
    """File for what is found, as JSON lines."""
    states: list[str] = field(default_factory=list)
    """Names of the checkpoints of the run with which the state is compared."""
    shown: int = 0
    """Step whose batch is shown; 0: none."""
    start: int = 0
    """Start of the run with whose config the copy is opened; 0: the newest that has saved."""
    in_process: bool = False
    """Whether `ReplayLeft` leaves the program; else the process ends."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def plan_of_process() -> ReplayPlan | None:
    path = os.environ.get(VARIABLE)
    return ReplayPlan(**json.loads(Path(path).read_bytes())) if path else None


@dataclass
class Replay:
    """Step of `everstep.runs.replay`; all but `step` is there after the block.

    Attributes:
        step, epoch: numbers of the step and its epoch.
        batch: the batch that the step would be handed; None without data.
        state: the live objects of the state, by name.
        random: the random state, as `everstep.state.capture` returns it.
    """

    step: int
    epoch: int = 0
    batch: Any = None
    state: Mapping[str, Any] = field(default_factory=dict)
    random: Any = None


class ReplayLeft(BaseException):
    """Leaves a program in this process before a step; not an error."""

    def __init__(self, step: Replay) -> None:
        super().__init__(f"left before step {step.step}, as the replay asks")
        self.step = step


class Replayed(BuiltIn):
    """Follows the plan of this process in the run that is replayed.

    `tree` encodes the whole state as a checkpoint has it, `comparison` is that with earlier executions.
    """

    moments = frozenset({Moment.BEFORE_STEP, Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP})
    every_rank = True

    def __init__(
        self,
        plan: ReplayPlan,
        objects: Mapping[str, Any],
        tree: Callable[[Literal["step", "epoch"]], Encoded],
        comparison: Callable[[], StepComparison],
    ) -> None:
        super().__init__("replay", Every(steps=1) | Every(epochs=1))
        self.plan, self._objects, self._tree, self._comparison = plan, objects, tree, comparison

    def require(self, run: str, run_dir: Path) -> None:
        """Refuse another run than that of the plan, which would be trained from its beginning."""
        if run != self.plan.run:
            root = Path(os.environ.get(ROOT, "/")).resolve()
            path = f"/{run_dir.relative_to(root)}" if run_dir.is_relative_to(root) else str(run_dir)
            raise UsageError(
                f"the program opens a run in {path}, and {self.plan.run} is to be replayed: give the "
                "arguments with which it opens that run, after --; if the run has moved: --opened-as PATH"
            )

    def open(self, run: RunView) -> None:
        self._run = run
        self._note("opened")

    def run(self, boundary: Boundary) -> None:
        plan, payload = self.plan, boundary.payload
        if boundary.moment is Moment.BEFORE_STEP:
            step = boundary.step + 1
            if step == plan.shown:
                self._note("batch", batch=repr(payload)[:10_000])
            if step > plan.last and plan.in_process:
                raise ReplayLeft(Replay(step, boundary.epoch, payload, self._objects, capture()))
            if step > plan.last:
                self._leave()
        elif boundary.moment is Moment.EXIT_LOOP:
            self._note("ended", step=boundary.step, reason=payload.reason)
            if payload.finished and not plan.in_process:
                self._leave()
        else:
            self._compare_state(boundary)

    def _leave(self) -> NoReturn:
        """End this process at once: no further line of the program runs, which might write files."""
        self._run.flush()
        comparison = self._comparison()
        comparison.end()
        first = comparison.difference
        self._note(
            "left",
            steps=comparison.steps,
            equal=comparison.equal,
            difference=None if first is None else first._asdict(),
            differing=comparison.differing,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _compare_state(self, boundary: Boundary) -> None:
        """Compare the state with that of a checkpoint of the run, if the plan names one of this boundary."""
        at_end = boundary.moment is Moment.AFTER_EPOCH
        name = str(CheckpointName(boundary.step, boundary.epoch if at_end else None))
        if name not in self.plan.states:
            return
        path = Path(self.plan.run_dir) / "checkpoints" / name
        with isolated():
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError:
                if path.exists():
                    raise
                return  # the run is being trained, and retention has deleted it meanwhile
            tree = self._tree("epoch" if at_end else "step")
        paths = differing_leaves(checkpoint.tree, tree)
        self._note("state", name=name, step=boundary.step, differing=paths)

    def _note(self, at: str, **facts: Any) -> None:
        append_line(self.plan.out, json.dumps({"at": at, **facts}).encode())


def differing_leaves(expected: Encoded, actual: Encoded) -> list[str]:
    """List the paths of the leaves of a state that another execution has to find again, and that differ."""
    old, new = (dict(_compared_leaves(tree)) for tree in (expected, actual))
    return [path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path)]


def _compared_leaves(tree: Encoded) -> Iterator[tuple[str, bytes]]:
    for path, data in leaves(tree):
        parts = path.split("/")
        # a limit that was raised later is no other training
        if parts[0].removesuffix("#") in _COMPARED and parts[:2] != ["progress", "stop"]:
            yield path, bytes(data)
