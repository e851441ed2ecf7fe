"""Execution of steps again: the program of a run is started in a copy of the run, and follows a plan.

A program in this process is left before a step, and all that the step would use stays at hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords, integer
from everstep.checkpoint import CheckpointName, Store
from everstep.drill.processes import owned_folder
from everstep.drill.program import INDEX, Program, StepDigests, read_lines
from everstep.errors import CheckpointError, ReplayError
from everstep.record import Difference, RunDir, RunJournal, user_path
from everstep.record.rundir import ROOT
from everstep.replaying.recorded_program import RecordedProgram, resumed_from
from everstep.services.replayed import VARIABLE, ReplayLeft, ReplayPlan
from everstep.state import restore


def folder_for(keep: Path | None) -> AbstractContextManager[Path]:
    """Make a folder for copies, deleted after the block unless it is kept."""
    return owned_folder("everstep-replay-", keep)


class RunCopy:
    """Copy of a run, which itself is only read, as it was at its newest whole checkpoint up to a step.

    Files of checkpoints are copied and verified, not linked: a program that writes into its own run directory
    cannot reach the run through a link.

    Args:
        folder: a folder for the copy; `root` inside is the value of EVERSTEP_ROOT.
        step: the checkpoint's step is at most this.
        anew: begin from nothing, as a run with a given seed can.

    Attributes:
        checkpoint, step: where the program continues; None and 0 where it begins from nothing.
    """

    def __init__(
        self, run_dir: Path, folder: Path, step: int, opened_as: Path | None = None, *, anew: bool = False
    ) -> None:
        self.run_dir, self.folder, self.root = run_dir, folder, folder / "root"
        self.place = self.root.joinpath(*Path(os.path.abspath(opened_as or run_dir)).parts[1:])
        self.checkpoint: CheckpointName | None = None
        self.notes: list[str] = []
        (self.place / "journal").mkdir(parents=True)
        for pattern in ("run.json", "journal/*"):
            for file in run_dir.glob(pattern):
                shutil.copyfile(file, self.place / file.relative_to(run_dir))
        store = Store(run_dir)
        names = [facts.name for facts in store.facts()]
        for name in reversed([] if anew else [name for name in names if name.step <= step]):
            try:
                store.copy(name, self.place / "checkpoints")
            except CheckpointError as error:  # it is damaged, or a training has deleted it meanwhile
                self.notes.append(f"{error}; an older checkpoint is taken")
            else:
                self.checkpoint = name
                break
        if self.checkpoint is None and not can_begin_anew(run_dir):
            there = f"the oldest is {names[0]}" if names else "there is none at all"
            raise ReplayError(
                f"{run_dir} has no whole checkpoint up to step {step} ({there}), and begins otherwise at "
                "each start: it was made without seed=, or from another run's checkpoint. Give a later step; "
                "keep more checkpoints: Checkpoints(keep_every=Every(...))"
            )
        self.step = 0 if self.checkpoint is None else self.checkpoint.step
        self.origin = "the start of the run" if self.checkpoint is None else str(self.checkpoint)


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


class Executed(NamedTuple):
    """What an execution has left: the copy with its journal, the lines of the plan's file, and digests of the
    steps, where they were asked for.
    """

    copy: RunCopy
    lines: list[dict[str, Any]]
    witnessed: list[StepDigests]

    def last(self, at: str) -> dict[str, Any]:
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
    """Start a program, and wait until it leaves behind a step."""
    env, out = _write_plan(copy, last, **plan)
    command = (*program.command, *([str(copy.place)] if program.takes_run else []))
    start = Program(command, copy.folder, env=env, cwd=program.folder).start(witness=witness)
    executed = Executed(copy, read_lines(out), [record._replace(run="") for record in start.witnessed])
    if not executed.last("left"):
        shown, ended = " ".join(program.command[1:]), executed.last("ended")
        if not executed.last("opened"):
            raise ReplayError(f"{shown} did not open the run (exit status {start.status}):\n{start.tail}")
        where = f"after step {ended['step']} ({ended['reason']})" if ended else f"with status {start.status}"
        raise ReplayError(f"{shown} ended {where}, before step {last + 1}:\n{start.tail}")
    return executed


@dataclass
class Replay:
    """Step of `replay`; all but `step` is there after the block.

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


@checked_keywords
@contextmanager
def replay(
    run: str | os.PathLike[str], step: int, *, opened_as: str | os.PathLike[str] | None = None
) -> Iterator[Replay]:
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
    run_dir, at = user_path(run, "run"), Replay(integer("step", step))
    path = None if opened_as is None else user_path(opened_as, "opened_as")
    with folder_for(None) as folder:
        variables, _ = _write_plan(RunCopy(run_dir, folder, at.step - 1, path), at.step - 1, in_process=True)
        before = {name: os.environ.pop(name) for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            yield at
        except ReplayLeft as left:
            vars(at).update(vars(left.step))
        else:
            raise ReplayError(
                f"the program in the block ended before step {at.step}; call the program that trains "
                f"{run_dir}, with its arguments"
            )
        finally:
            for name in variables:
                os.environ.pop(name, None)
            os.environ.update(before)
    restore(at.random)
