"""Execution of steps again: the program of a run is started in a copy of the run, and followed by a plan.

A program in this process is left before a step, and all that the step would use stays at hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from everstep.arguments import checked_keywords, integer
from everstep.drill.processes import last_lines, owned_folder, owned_process
from everstep.drill.program import WitnessLine, read_lines, read_witness
from everstep.errors import ReplayError
from everstep.record import Difference, RunDir, user_path
from everstep.record.rundir import ROOT
from everstep.replaying.recorded_program import RecordedProgram
from everstep.replaying.run_copy import RunCopy, copy_run
from everstep.services.replayed import VARIABLE, ReplayLeft, ReplayPlan
from everstep.services.witness import FILE
from everstep.state import restore
from everstep.unattended import REPORTS

FOLDER = "everstep-replay-"
"""Beginning of the names of temporary folders with copies."""


class Executed(NamedTuple):
    """What an execution has left.

    Attributes:
        copy: the copy, with the journal of this execution.
        found: the lines of the plan's file.
        witnessed: what a witness has seen of the steps, where one was asked for.
    """

    copy: RunCopy
    found: list[dict[str, Any]]
    witnessed: list[WitnessLine]

    def told(self, at: str) -> dict[str, Any]:
        """Return the last line of a kind; empty if there is none."""
        return next((line for line in reversed(self.found) if line["at"] == at), {})

    @property
    def difference(self) -> Difference | None:
        """First value of the record that was not found again."""
        first = self.told("left")["difference"]
        return None if first is None else Difference(**first)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the loop, such as one of another processor."""
        path = self.copy.place / "logs" / "replay.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        warnings = [line.partition("warning: ")[2] for line in lines if "warning: " in line]
        return [one for one in warnings if not one.startswith("resume differs")]


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


def environment(copy: RunCopy, last: int, **more: Any) -> tuple[dict[str, str], Path]:
    """Write the plan of an execution up to a step.

    Args:
        more: further attributes of the `ReplayPlan`.

    Returns:
        The variables by which a process follows it, and the file for what is found.
    """
    run = RunDir.open(copy.run_dir, create=False).id
    path, out = copy.root.parent / "plan.json", copy.root.parent / "found.jsonl"
    ReplayPlan(run, str(copy.run_dir.absolute()), last, str(out), **more).write(path)
    return {ROOT: str(copy.root), VARIABLE: str(path), "EVERSTEP_INDEX": "off"}, out


def execute(
    program: RecordedProgram, copy: RunCopy, last: int, *, witness: bool = False, **more: Any
) -> Executed:
    """Start a program, and wait until it leaves behind a step.

    Args:
        witness: whether a witness notes the parts of each step, as in a drill.
        more: further attributes of the `ReplayPlan`.
    """
    log, seen = copy.root.parent / "output.log", copy.root.parent / "witness.jsonl"
    variables, out = environment(copy, last, **more)
    env = {**os.environ, **program.environment, **variables}
    for name in ("EVERSTEP_HAZARD", FILE, REPORTS):  # of drills and of `everstep run`
        env.pop(name, None)
    if witness:
        env[FILE] = str(seen)
    command = [*program.command, *([str(copy.place)] if program.takes_run else [])]
    with owned_process(command, env, log, VARIABLE, program.folder) as process:
        status = process.wait()
    lines = [line._replace(run="") for line in read_witness(seen)]
    executed = Executed(copy, read_lines(out), lines)
    if not executed.told("left"):
        tail = last_lines(log)
        shown, ended = " ".join(program.command[1:]), executed.told("ended")
        if not executed.told("opened"):
            raise ReplayError(f"{shown} did not open the run (exit status {status}):\n{tail}")
        where = f"after step {ended['step']} ({ended['reason']})" if ended else f"with exit status {status}"
        raise ReplayError(f"{shown} ended {where}, before step {last + 1}:\n{tail}")
    return executed


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
    """Context of `replay`; all but `step` is there after the block.

    Attributes:
        step, epoch: numbers of the step and its epoch.
        batch: the batch that the step would be handed; None without data.
        state: the live objects of the state, by name.
        random: the random state, as `everstep.state.capture` returns it.
    """

    epoch: int
    batch: Any
    state: Mapping[str, Any]
    random: Any

    def __init__(self, run_dir: Path, step: int, opened_as: Path | None) -> None:
        self._run_dir, self.step, self._opened_as = run_dir, step, opened_as
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(owned_folder(FOLDER))
            copy = copy_run(self._run_dir, folder, self.step - 1, self._opened_as)
            variables, _ = environment(copy, self.step - 1, in_process=True)
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
            vars(self).update(vars(error.step))
            restore(self.random)
            return True
        if error is None:
            raise ReplayError(
                f"the program in the block ended before step {self.step}; call the program that trains "
                f"{self._run_dir}, with its arguments"
            )
        return False
