"""Replay of a run: steps of a plan are executed again, in a copy of the run.

`everstep replay` starts a program with EVERSTEP_REPLAY=FILE, which has a `ReplayPlan` as JSON, and with
EVERSTEP_ROOT, below which the copy lies.  In such a process nothing is saved or mirrored, and no service
reports.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from everstep.checkpoint import CheckpointName, read_checkpoint
from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.errors import CheckpointError, ConfigError, UsageError
from everstep.record.rundir import ROOT
from everstep.schedule import Every
from everstep.services.debugger import debug
from everstep.state import Encoded, capture, isolated, leaves
from everstep.state.last_place import last_places

VARIABLE = "EVERSTEP_REPLAY"
"""Environment variable that names the file with the plan."""

SHELL, DEBUGGER, RAISE, LEAVE = "shell", "debugger", "raise", "leave"
_COMPARED = ("progress", "user", "gradients", "streams", "rng")
"""Branches of the state tree that are compared with those of checkpoints."""
_SHOWN = 8
"""Most leaves of a state that are told one by one."""


@dataclass(frozen=True)
class ReplayPlan:
    """What a process that replays a run does.

    Attributes:
        run: id of the run.
        run_dir: the run itself, whose copy is opened.
        last: the last step that is executed; then, before the next step, `then` happens.
        then: `SHELL`, `DEBUGGER`, `RAISE` (`ReplayLeft`), `LEAVE`, or "MODULE:FUNCTION", called with a
            `ReplayedStep`.
        out: file for what is found, as JSON lines.
        states: names of the checkpoints of the run with which the state is compared.
        parts: the first step of which `StepParts` are told; 0: none.
        values: a step of which their values are told, too, in the file OUT.npz; 0: none.
    """

    run: str
    run_dir: str
    last: int
    then: str
    out: str
    states: list[str] = field(default_factory=list)
    parts: int = 0
    values: int = 0

    def write(self, path: Path) -> None:
        """Write the plan, for `plan_of_process`."""
        path.write_text(json.dumps(asdict(self)))


def plan_of_process() -> ReplayPlan | None:
    """Return the plan of this process; None if it replays nothing."""
    path = os.environ.get(VARIABLE)
    return ReplayPlan(**json.loads(Path(path).read_bytes())) if path else None


class ReplayLeft(BaseException):
    """Leaves a program in this process before a step; not an error.

    Attributes:
        step: the step, with all that is at hand before it.
    """

    def __init__(self, step: ReplayedStep) -> None:
        super().__init__(f"left before step {step.step}, as the replay asks")
        self.step = step


@dataclass(frozen=True)
class ReplayedStep:
    """A step that is about to happen again.

    Attributes:
        step: number of the step, from 1.
        epoch: its epoch, from 1; 0 in a loop without epochs.
        batch: the batch that the step is handed; None without data.
        state: the live objects of the state, by name.
        random: the random state of this process, as `everstep.state.capture` returns it.
        loop: the loop, as services see it.
    """

    step: int
    epoch: int
    batch: Any
    state: Mapping[str, Any]
    random: Any
    loop: RunView


class Replayed(Service):
    """Follows the plan of this process in the run that is replayed.

    Args:
        plan: the plan.
        objects: the live objects of the state, by name.
        tree: encodes the whole state as a checkpoint of a kind ("step" or "epoch") has it.
        left_out: lists the names of the services that report, and do not run.
    """

    stage = Stage.REPORT
    moments = frozenset({Moment.BEFORE_STEP, Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP})
    window = "none"
    every_rank = True
    isolate = False

    def __init__(
        self,
        plan: ReplayPlan,
        objects: Mapping[str, Any],
        tree: Callable[[Literal["step", "epoch"]], Encoded],
        left_out: Callable[[], list[str]],
    ) -> None:
        super().__init__("replay", Every(steps=1) | Every(epochs=1))
        self.plan, self._objects, self._tree = plan, objects, tree
        self._left_out = left_out
        self._run: RunView

    def require(self, run: str, run_dir: Path) -> None:
        """Refuse another run than that of the plan, which would be trained from its beginning.

        Raises:
            UsageError: names both runs.
        """
        if run != self.plan.run:
            root = Path(os.environ.get(ROOT, "/")).resolve()
            shown = f"/{run_dir.relative_to(root)}" if run_dir.is_relative_to(root) else str(run_dir)
            raise UsageError(
                f"the program opens a run in {shown}, and {self.plan.run} is to be replayed: give "
                "the arguments with which it opens that run: everstep replay RUN --step N -- SCRIPT ARGS; "
                "if the run has moved, say under which path the program opens it: --opened-as PATH"
            )

    def open(self, run: RunView) -> None:
        self._run = run
        tell(self.plan.out, "opened", step=run.step, left_out=self._left_out())

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.BEFORE_STEP:
            if boundary.step >= self.plan.last:
                self._arrive(boundary)
        elif boundary.moment is Moment.EXIT_LOOP:
            ending = boundary.payload
            tell(self.plan.out, "ended", step=boundary.step, finished=ending.finished, reason=ending.reason)
            if ending.finished and self.plan.then != RAISE:
                self._leave()
        else:
            self._compare_state(boundary)
            if boundary.moment is Moment.AFTER_STEP and boundary.step > self.plan.last:
                self._leave()

    def _arrive(self, boundary: Boundary) -> None:
        """Do what the plan asks for before the step after its last one."""
        tell(self.plan.out, "arrived", step=boundary.step + 1)
        then = self.plan.then
        if then == LEAVE:
            self._leave()
        at = ReplayedStep(
            boundary.step + 1, boundary.epoch, boundary.payload, self._objects, capture(), self._run
        )
        if then == RAISE:
            raise ReplayLeft(at)
        _hear_ctrl_c()
        if then == DEBUGGER:
            debug(self._leave)
            return  # the step runs under the debugger, and its boundary ends the replay
        self._leave(_called(then, at) if ":" in then else _interact(at))

    def _leave(self, status: int = 0) -> NoReturn:
        """End this process at once: no further line of the program runs, which might write files."""
        self._run.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _compare_state(self, boundary: Boundary) -> None:
        """Compare the state with that of a checkpoint of the run, if the plan names one of this boundary."""
        at_end = boundary.moment is Moment.AFTER_EPOCH
        name = str(CheckpointName(boundary.step, boundary.epoch if at_end else None))
        if name not in self.plan.states:
            return
        path = Path(self.plan.run_dir) / "checkpoints" / name
        with isolated():
            try:
                saved = read_checkpoint(path)
            except CheckpointError:
                if path.exists():
                    raise
                return  # the run is being trained, and retention has deleted it meanwhile
            here = self._tree("epoch" if at_end else "step")
        differences = list(_differing(Encoded(saved.structure, saved.arrays), here))
        tell(self.plan.out, "state", name=name, step=boundary.step, differing=differences)


def parts_teller(plan: ReplayPlan) -> Callable[[int, dict[str, str], dict[str, tuple[str, bytes]]], None]:
    """Make the function to which `StepParts` tells a step."""

    def told(step: int, parts: dict[str, str], values: dict[str, tuple[str, bytes]]) -> None:
        if values:
            named: dict[str, Any] = {
                f"{dtype}:{place}": np.frombuffer(data, np.uint8) for place, (dtype, data) in values.items()
            }
            np.savez(f"{plan.out}.npz", **named)
        tell(plan.out, "parts", step=step, parts=parts)

    return told


def tell(out: str, at: str, **facts: Any) -> None:
    """Append a line to a plan's file, by a single write: a kill leaves whole lines."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, json.dumps({"at": at, **facts}).encode() + b"\n")
    finally:
        os.close(descriptor)


def _differing(was: Encoded, now: Encoded) -> Iterator[tuple[str, int | None]]:
    """Yield the path of each leaf that differs, and by how many units in the last place."""
    old, new = (dict(compared_leaves(tree)) for tree in (was, now))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            array, other = was.arrays.get(path), now.arrays.get(path)
            alike = array is not None and other is not None and array.dtype == other.dtype
            far = last_places(old[path], new[path], array.dtype) if alike and array is not None else None
            yield path, far


def compared_leaves(tree: Encoded) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the bytes of each leaf of a state that another execution has to find again."""
    for path, data in leaves(tree):
        parts = path.split("/")
        # a limit that was raised later is no other training
        if parts[0].removesuffix("#") in _COMPARED and parts[:2] != ["progress", "stop"]:
            yield path, bytes(data)


def _hear_ctrl_c() -> None:
    """Let Ctrl-C interrupt what a person does, as in any prompt: the loop takes it for a wish to save."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _names(at: ReplayedStep) -> dict[str, Any]:
    """Names at hand in a prompt: those of the state, unless another thing has the name."""
    fixed = {"at": at, "step": at.step, "epoch": at.epoch, "batch": at.batch, "state": at.state}
    return {**at.state, **fixed, "random_state": at.random, "loop": at.loop}


def _interact(at: ReplayedStep) -> int:
    import code

    names = _names(at)
    what = ", ".join(names)
    banner = f"before step {at.step}; at hand: {what}\nCtrl-D leaves; nothing that you do here is saved"
    code.interact(banner=banner, local=names, exitmsg="")
    return 0


def _called(where: str, at: ReplayedStep) -> int:
    """Call a function with the step; return the exit status."""
    try:
        function_at(where)(at)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def function_at(where: str) -> Callable[[ReplayedStep], object]:
    """Import the function that "MODULE:FUNCTION" names.

    Raises:
        ConfigError: there is no such module or function.
    """
    module, _, name = where.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--call {where}: {error}; give MODULE:FUNCTION, as Python finds it") from error
    return found  # type: ignore[return-value]
