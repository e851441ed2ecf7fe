"""Execution of steps again: the program of a run is started in a copy of the run, and followed by a plan.

A program in this process is left before a step, and all that the step would use stays at hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from everstep.arguments import checked_keywords, integer
from everstep.drill.processes import kill_marked, owned_folder, with_parent
from everstep.errors import ReplayError, UsageError
from everstep.record import RunDir, user_path
from everstep.record.rundir import ROOT
from everstep.replaying.recorded_program import RecordedProgram
from everstep.replaying.run_copy import RunCopy, copy_run
from everstep.services.replayed import LEAVE, RAISE, VARIABLE, ReplayedStep, ReplayLeft, ReplayPlan
from everstep.services.witness import FILE
from everstep.state import restore
from everstep.unattended import PIPE

FOLDER = "everstep-replay-"
"""Beginning of the names of temporary folders with copies."""

_OTHERS = ("EVERSTEP_HAZARD", FILE, PIPE)
"""Variables of drills and of `everstep run`, which are not meant for a replay."""


class Executed(NamedTuple):
    """What an execution has left.

    Attributes:
        status: exit status of the program.
        found: the lines of the plan's file.
        copy: the copy, with the journal and the trail of this execution.
        log: its output, "" where that went to the terminal.
    """

    status: int
    found: list[dict[str, Any]]
    copy: RunCopy
    log: str

    def told(self, at: str) -> dict[str, Any] | None:
        """Return the last line of a kind."""
        return next((line for line in reversed(self.found) if line["at"] == at), None)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the loop, such as one of another processor."""
        path = self.copy.place / "logs" / "replay.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [line.partition("warning: ")[2] for line in lines if "warning: " in line]


@contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """Make a folder for copies, deleted after the block unless it is kept."""
    if keep is not None:
        if keep.exists():
            raise ReplayError(f"{keep} exists; give --keep a folder that can be made")
        yield keep.resolve()
        return
    with owned_folder(FOLDER) as folder:
        yield folder


def plan_for(copy: RunCopy, last: int, then: str = LEAVE, **more: Any) -> ReplayPlan:
    """Make the plan of an execution in a copy, up to its last step."""
    run = RunDir.open(copy.run_dir, create=False).id
    out = str(copy.root.parent / "found.jsonl")
    return ReplayPlan(run, str(copy.run_dir.absolute()), last, then, out, **more)


def environment(copy: RunCopy, plan: ReplayPlan) -> dict[str, str]:
    """Write a plan; return the variables by which a process follows it."""
    path = copy.root.parent / "plan.json"
    plan.write(path)
    return {ROOT: str(copy.root), VARIABLE: str(path), "EVERSTEP_INDEX": "off"}


def execute(
    program: RecordedProgram, copy: RunCopy, plan: ReplayPlan, *, interactive: bool = False
) -> Executed:
    """Start a program, and wait until it leaves.

    Args:
        interactive: whether a person is at its prompt; else its output is kept in a file.
    """
    log = copy.root.parent / "output.log"
    env = {**os.environ, **program.environment, **environment(copy, plan)}
    for name in _OTHERS:
        env.pop(name, None)
    with open(log, "wb") as output, _left_to_the_program():
        files: dict[str, Any] = (
            {} if interactive else {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        )
        try:
            command = [*program.command, *([str(copy.place)] if program.takes_run else [])]
            with_this = with_parent(signal.SIGKILL)
            process = subprocess.Popen(command, cwd=program.folder, env=env, preexec_fn=with_this, **files)
        except OSError as error:
            raise ReplayError(f"{program.command[0]} cannot be started: {error.strerror}") from error
        try:
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            # loader workers outlive a process that leaves at once
            kill_marked(os.fsencode(f"{VARIABLE}={env[VARIABLE]}"))
    found = _read(Path(plan.out))
    executed = Executed(status, found, copy, log.read_text(errors="replace"))
    _require_arrival(program, executed, plan)
    return executed


@contextmanager
def _left_to_the_program() -> Iterator[None]:
    """Leave Ctrl-C to the program, which the terminal interrupts, too."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a kill may tear the last line
            found.append(json.loads(line))
    return found


def _require_arrival(program: RecordedProgram, executed: Executed, plan: ReplayPlan) -> None:
    """Refuse an execution that did not come to the place of its plan."""
    ended = executed.told("ended")
    if executed.told("arrived") is not None or (
        plan.then == LEAVE and ended is not None and ended["finished"]
    ):
        return
    tail = "\n".join(executed.log.splitlines()[-15:])
    if executed.told("opened") is None:
        raise ReplayError(f"{_shown(program)} did not open the run (exit status {executed.status}):\n{tail}")
    where = (
        f"after step {ended['step']} ({ended['reason']})" if ended else f"with exit status {executed.status}"
    )
    raise ReplayError(f"{_shown(program)} ended {where}, before step {plan.last + 1}:\n{tail}")


def _shown(program: RecordedProgram) -> str:
    return " ".join(program.command[1:])


# ------------------------------------------------------------------------------------ in this process


@checked_keywords
def replay(
    run: str | os.PathLike[str], step: int, *, opened_as: str | os.PathLike[str] | None = None
) -> Replay:
    """Replay a run to just before a step, in this process: a context around a call of the run's program.

        with everstep.runs.replay("runs/digits", 4711) as at:
            main()                   # opens runs/digits, as it always does
        at.batch, at.state["model"]  # the loop was left before step 4711

    Inside the block the program opens a copy of the run, from its nearest checkpoint before the step.  When
    the step is reached the loop is left, and so is the block.  Nothing is saved, reported or mirrored, and
    the run itself is only read.  After the block, the random state of this process is that before the step.

    Args:
        run: the run directory.
        step: the step, from 1.
        opened_as: path under which the program opens the run, if the run has moved since.

    Raises:
        ReplayError: the run has no checkpoint before the step and no given seed; at the block's end, the
            program did not come to the step.
    """
    path = None if opened_as is None else user_path(opened_as, "opened_as")
    return Replay(user_path(run, "run"), integer("step", step), path)


class Replay:
    """Context of `replay`.

    Attributes:
        step, epoch: numbers of the step and its epoch.
        batch: the batch that the step would be handed; None without data.
        state: the live objects of the state, by name.
        random: the random state, as `everstep.state.capture` returns it.
    """

    def __init__(self, run_dir: Path, step: int, opened_as: Path | None) -> None:
        self._run_dir, self.step, self._opened_as = run_dir, step, opened_as
        self._found: ReplayedStep | None = None
        self._before: dict[str, str | None] = {}

    @property
    def epoch(self) -> int:
        return self._at.epoch

    @property
    def batch(self) -> Any:
        return self._at.batch

    @property
    def state(self) -> Mapping[str, Any]:
        return self._at.state

    @property
    def random(self) -> Any:
        return self._at.random

    @property
    def _at(self) -> ReplayedStep:
        if self._found is None:
            raise UsageError(
                "what is at hand before the step is known after the block; ask behind the with statement"
            )
        return self._found

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(owned_folder(FOLDER))
            copy = copy_run(self._run_dir, folder, self.step - 1, self._opened_as)
            variables = environment(copy, plan_for(copy, self.step - 1, RAISE))
            self._held = stack.pop_all()
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._held.close()
        if isinstance(error, ReplayLeft):
            self._found = error.step
            restore(self._found.random)
            return True
        if error is None:
            raise ReplayError(
                f"the program in the block ended before step {self.step}; call the program that trains "
                f"{self._run_dir}, with its arguments"
            )
        return False
