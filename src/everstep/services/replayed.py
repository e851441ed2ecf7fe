"""Replay of a run: steps of a plan are executed again, in a copy of the run.

`everstep replay` starts a program with EVERSTEP_REPLAY=FILE, which has a `ReplayPlan` as JSON, and with
EVERSTEP_ROOT, below which the copy lies.  In such a process nothing is saved or mirrored, and no service
reports.
"""

from __future__ import annotations

import code
import importlib
import json
import os
import pdb
import pkgutil
import signal
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import xxhash

from everstep.checkpoint import CheckpointName, read_checkpoint
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.drilled import append_line
from everstep.errors import CheckpointError, StateError, UsageError
from everstep.record.rundir import ROOT
from everstep.schedule import Every
from everstep.services.witness import kind_of
from everstep.state import Encoded, capture, encode, isolated, leaves
from everstep.state.digests import last_places

VARIABLE = "EVERSTEP_REPLAY"
"""Environment variable that names the file with the plan."""

SHELL, DEBUGGER, RAISE, LEAVE = "shell", "debugger", "raise", "leave"
_COMPARED = ("progress", "user", "gradients", "streams", "rng")
"""Branches of the state tree that are compared with those of checkpoints."""
_FORWARDS = 4
"""Number of forward passes of a model in a step that are told apart; later ones are left out."""


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
    """

    run: str
    run_dir: str
    last: int
    then: str
    out: str
    states: list[str] = field(default_factory=list)
    parts: int = 0

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

    def require(self, run: str, run_dir: Path) -> None:
        """Refuse another run than that of the plan, which would be trained from its beginning."""
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
        # Ctrl-C interrupts what a person does, as in any prompt: the loop takes it for a wish to save
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if then == DEBUGGER:
            _Debugger(self._leave).set_trace(sys._getframe())
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
        differences = list(differing_leaves(Encoded(saved.structure, saved.arrays), here))
        tell(self.plan.out, "state", name=name, step=boundary.step, differing=differences)


def tell(out: str, at: str, **facts: Any) -> None:
    """Append a line to a plan's file."""
    append_line(out, json.dumps({"at": at, **facts}).encode())


def differing_leaves(was: Encoded, now: Encoded) -> Iterator[tuple[str, int | None]]:
    """Yield the path of each leaf that differs, and by how many units in the last place."""
    old, new = (dict(_compared_leaves(tree)) for tree in (was, now))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            array, other = was.arrays.get(path), now.arrays.get(path)
            alike = array is not None and other is not None and array.dtype == other.dtype
            far = last_places(old[path], new[path], array.dtype) if alike and array is not None else None
            yield path, far


def _compared_leaves(tree: Encoded) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the bytes of each leaf of a state that another execution has to find again."""
    for path, data in leaves(tree):
        parts = path.split("/")
        # a limit that was raised later is no other training
        if parts[0].removesuffix("#") in _COMPARED and parts[:2] != ["progress", "stop"]:
            yield path, bytes(data)


def _interact(at: ReplayedStep) -> int:
    fixed = {"at": at, "step": at.step, "epoch": at.epoch, "batch": at.batch, "state": at.state}
    names = {**at.state, **fixed, "random_state": at.random, "loop": at.loop}
    listed = ", ".join(names)
    banner = f"before step {at.step}; at hand: {listed}\nCtrl-D leaves; nothing that you do here is saved"
    code.interact(banner=banner, local=names, exitmsg="")
    return 0


def _called(where: str, at: ReplayedStep) -> int:
    """Call the function that "MODULE:FUNCTION" names with the step; return the exit status."""
    try:
        function = pkgutil.resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        # said here: an error of a service that reports would be passed over
        print(f"--call {where}: {error}; give MODULE:FUNCTION, as Python finds it", file=sys.stderr)
        return 1
    try:
        function(at)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


class _Debugger(pdb.Pdb):
    """Debugger that stops in the user's own code: not in everstep, Python's modules and installed packages.

    Args:
        leave: ends the process; called by the command `quit`.
    """

    def __init__(self, leave: Callable[[], object]) -> None:
        # any pattern makes bdb ask `is_skipped_module`; this one matches no module
        super().__init__(skip=["-"], nosigint=True)
        self._leave = leave

    def is_skipped_module(self, module_name: str | None) -> bool:
        return _is_library(getattr(sys.modules.get(module_name or ""), "__file__", None))

    def set_quit(self) -> None:
        self._leave()


@cache  # asked at each call and line until the debugger stops
def _is_library(file: str | None) -> bool:
    """Whether a module's file is not the user's; modules without a file are Python's."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(os.path.dirname(os.path.dirname(__file__)))
    real = os.path.realpath(file or "")
    return file is None or any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders)


class StepParts(Service):
    """Tells the parts of the plan's steps: digests of what goes into a step, and of what comes out.

    Before a step: the entries of the state, gradients that wait for an update, the batch, random state.  In
    the step, where torch is used: what models are given, their weights, gradients and the optimizer just
    before an update, in the order in which they happen.  Its metrics.  After it: random state, the entries
    of the state, gradients that wait for an update.

    Args:
        plan: the plan.
        objects: the live objects of the state, by name.
        save: returns the branches `user` (the entries of the state as trees, by name) and `gradients`.
    """

    moments = frozenset({Moment.BEFORE_STEP, Moment.METRICS_COLLECTED, Moment.AFTER_STEP})
    window = "none"
    every_rank = True

    def __init__(
        self, plan: ReplayPlan, objects: Mapping[str, Any], save: Callable[[], Mapping[str, Any]]
    ) -> None:
        super().__init__("replay parts", Every(steps=1))
        self._plan, self._objects, self._save = plan, objects, save
        self._open_step = 0
        self._times: Counter[str] = Counter()
        self._parts: dict[str, str] = {}
        self._hooks: Any = None

    def open(self, run: RunView) -> None:
        if "torch" in sys.modules:
            hooks = importlib.import_module("everstep.backends.torch.step_hooks")
            self._hooks = hooks.TorchStepHooks(self._objects, self._inside)

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.BEFORE_STEP:
            if boundary.step + 1 >= self._plan.parts:
                self._open_step = boundary.step + 1
                self._parts, self._times = {}, Counter()
                self._state("before")
                self._take("data", {"batch": boundary.payload})
                self._take("random before", capture())
        elif boundary.moment is Moment.METRICS_COLLECTED:
            for name, value in boundary.payload.items() if self._open_step else ():
                self._take("loss", {name: np.array([value]) if isinstance(value, float) else value})
        elif self._open_step:
            self._take("random after", capture())
            self._state("after")
            tell(self._plan.out, "parts", step=self._open_step, parts=self._parts)
            self._open_step = 0

    def _inside(self, kind: str, name: str, tree: Any) -> None:
        """Take a part that a hook has seen; of several of a kind each has its number."""
        if not self._open_step:
            return
        self._times[f"{kind}/{name}"] += 1
        time = self._times[f"{kind}/{name}"]
        if time <= _FORWARDS:
            self._take(f"{kind} inside", {str(time): {name: tree}})

    def _state(self, when: str) -> None:
        saved = self._save()
        for name, tree in saved["user"].items():
            self._take(f"{kind_of(tree)} {when}", {name: tree})
        for backend, tree in saved["gradients"].items():
            self._take(f"gradient {when}", {backend: tree.get("grad", {})})

    def _take(self, place: str, tree: dict[str, Any]) -> None:
        """Take the leaves of a tree; what cannot be encoded counts by its type alone."""
        try:
            encoded = encode(tree)
        except StateError:
            for name, part in tree.items():
                self._parts[f"{place}/{name}"] = type(part).__qualname__
            return
        for path, data in leaves(encoded):
            self._parts[f"{place}/{path}"] = f"{xxhash.xxh3_64_intdigest(data):016x}"
