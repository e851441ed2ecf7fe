"""Execution of steps again: the program of a run is started in a copy of the run, and follows a plan.

A program in this process is left before a step, and all that the step would use stays at hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from everstep.arguments import checked_keywords, integer
from everstep.checkpoint import CheckpointName, Store
from everstep.drill.processes import owned_folder
from everstep.drill.program import INDEX, Program, StepDigests, read_lines
from everstep.errors import DamagedCheckpointError, NoCheckpointError, ReplayError
from everstep.record import Difference, RunDir, RunJournal, user_path
from everstep.record.rundir import ROOT
from everstep.replaying.recorded_program import RecordedProgram, resumed_from
from everstep.services.replayed import VARIABLE, ReplayLeft, ReplayPlan
from everstep.state import restore


def folder_for(keep: Path | None) -> AbstractContextManager[Path]:
    """Make a folder for copies, deleted after the block unless it is kept."""
    return owned_folder("everstep-replay-", keep)


# ----------------------------------------------------------------------------------------- the copy


@dataclass
class RunCopy:
    """Copy of a run, which itself is only read, as it was at its newest whole checkpoint up to a step.

    Files of checkpoints are copied and verified, not linked: a program that writes into its own run directory
    cannot reach the run through a link.

    Args:
        folder: a folder for the copy; `root` inside is the value of EVERSTEP_ROOT.
        step: the checkpoint's step is at most this; then that step, 0 without a checkpoint.
        opened_as: path under which the program opens the run; None: the run's own.
        anew: begin from nothing, as a run with a given seed can.
    """

    run_dir: Path
    folder: Path
    step: int
    opened_as: Path | None = None
    anew: bool = False
    checkpoint: CheckpointName | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = Path(os.path.abspath(self.opened_as or self.run_dir))
        self.place = self.root.joinpath(*path.parts[1:])
        (self.place / "journal").mkdir(parents=True)
        journal = [*(self.run_dir / "journal").glob("*.evj"), *(self.run_dir / "journal").glob("*.trail")]
        for file in (self.run_dir / "run.json", *journal):
            if file.exists():
                shutil.copyfile(file, self.place / file.relative_to(self.run_dir))
        store, limit = Store(self.run_dir), -1 if self.anew else self.step
        names = [facts.name for facts in store.facts()]
        for name in reversed([name for name in names if name.step <= limit]):
            try:
                store.copy(name, self.place / "checkpoints")
            except (
                DamagedCheckpointError,
                NoCheckpointError,
            ) as error:  # a training may delete while we read
                self.notes.append(f"{error}; an older checkpoint is taken")
            else:
                self.checkpoint = name
                break
        if self.checkpoint is None and not can_begin_anew(self.run_dir):
            there = f"the oldest is {names[0]}" if names else "there is none at all"
            raise ReplayError(
                f"{self.run_dir} has no whole checkpoint up to step {self.step} ({there}), and begins otherwise "
                "at each start: it was made without seed=, or from another run's checkpoint. Give a later step; "
                "keep more checkpoints: Checkpoints(keep_every=Every(...))"
            )
        self.step = 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def origin(self) -> str:
        """Where the program begins, in words."""
        return "the start of the run" if self.checkpoint is None else str(self.checkpoint)


def can_begin_anew(run_dir: Path) -> bool:
    """Whether an execution from nothing is the run again: its seed was given, and it is not a fork."""
    return bool(RunDir.open(run_dir, create=False).facts.get("seed_given")) and not origin(run_dir)


def origin(run_dir: Path) -> str:
    """Return the checkpoint of another run with which a run began; "" if it began from nothing."""
    began = next(iter(RunJournal(run_dir).events("segment")), None)
    return "" if began is None else resumed_from(began)


def last_step(run_dir: Path) -> int:
    """Return the last step that a run is known to have completed."""
    steps = [facts.name.step for facts in Store(run_dir).facts()]
    return max(RunJournal(run_dir).status().step, *steps, 0)


# ------------------------------------------------------------------------------------ the execution


class Executed(NamedTuple):
    """What an execution has left: the copy with its journal, the lines of the plan's file, and digests of the
    steps, where they were asked for.
    """

    copy: RunCopy
    lines: list[dict[str, Any]]
    witnessed: list[StepDigests]

    def last(self, at: str) -> dict[str, Any]:
        """Return the last line of a kind; empty if there is none."""
        return next((line for line in reversed(self.lines) if line["at"] == at), {})

    @property
    def difference(self) -> Difference | None:
        """First value of the record that was not found again."""
        first = self.last("left")["difference"]
        return None if first is None else Difference(**first)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the loop, such as one of another processor."""
        path = self.copy.place / "logs" / "replay.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        warnings = [line.partition("warning: ")[2] for line in lines]
        return [one for one in warnings if one and not one.startswith("resume differs")]


def _write_plan(copy: RunCopy, last: int, **plan: Any) -> tuple[dict[str, str], Path]:
    """Write the plan of an execution up to a step; the variables by which a process follows it, its file."""
    run = RunDir.open(copy.run_dir, create=False).id
    path, out = copy.folder / "plan.json", copy.folder / "found.jsonl"
    ReplayPlan(run, str(copy.run_dir.absolute()), last, str(out), **plan).write(path)
    return {ROOT: str(copy.root), VARIABLE: str(path), INDEX: "off"}, out


def execute(
    program: RecordedProgram, copy: RunCopy, last: int, *, witness: bool = False, **plan: Any
) -> Executed:
    """Start a program, and wait until it leaves behind a step.

    Args:
        witness: whether digests of each step are written, as in a drill.
        plan: further attributes of the `ReplayPlan`.
    """
    env, out = _write_plan(copy, last, **plan)
    command = (*program.command, *([str(copy.place)] if program.takes_run else []))
    start = Program(command, copy.folder, env=env, cwd=program.folder).start(witness=witness)
    executed = Executed(copy, read_lines(out), [line._replace(run="") for line in start.witnessed])
    if not executed.last("left"):
        shown, ended = " ".join(program.command[1:]), executed.last("ended")
        if not executed.last("opened"):
            raise ReplayError(f"{shown} did not open the run (exit status {start.status}):\n{start.tail}")
        where = f"after step {ended['step']} ({ended['reason']})" if ended else f"with status {start.status}"
        raise ReplayError(f"{shown} ended {where}, before step {last + 1}:\n{start.tail}")
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

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(folder_for(None))
            copy = RunCopy(self._run_dir, folder, self.step - 1, self._opened_as)
            variables, _ = _write_plan(copy, self.step - 1, in_process=True)
            stack.callback(_set_variables, {name: os.environ.get(name) for name in variables})
            _set_variables(variables)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
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


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
