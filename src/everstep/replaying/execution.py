"""Execution of steps again: the program of a run is started in a copy of the run, and follows a plan.

A program in this process is left before a step, and all that the step would use stays at hand.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords, integer
from everstep.checkpoint import CheckpointName, Store
from everstep.drill.processes import owned_folder
from everstep.drill.program import INDEX, Program, StepDigests, command, read_lines
from everstep.errors import CheckpointError, ConfigError, ReplayError, TrustError
from everstep.record import Difference, Event, RunDir, RunJournal, user_path
from everstep.record.journal_format import step_of
from everstep.record.provenance import git_facts
from everstep.record.rundir import ROOT
from everstep.record.trust import TRUST_VARIABLE, distrust
from everstep.redaction import HIDDEN
from everstep.services.replayed import VARIABLE, Replay, ReplayLeft, ReplayPlan
from everstep.state import restore


class RecordedProgram(NamedTuple):
    """Program that can be started in a working directory, with warnings; where `start` names the run's start
    whose config counts, the path of the run directory follows as the last argument.
    """

    command: tuple[str, ...]
    folder: Path
    notes: tuple[str, ...] = ()
    start: int = 0


def resumed_from(start: Event) -> str:
    """Return the checkpoint from which a start continued; "" if it began from nothing."""
    return str((start.data.get("facts") or {}).get("resumed_from") or "")


def program_of(
    run_dir: Path, step: int, given: Sequence[str] = (), *, trust: bool = False
) -> RecordedProgram:
    """Find how the program of a run was started whose execution of a step counts.

    Args:
        given: script or config with its arguments, in place of those recorded.
        trust: start what the record names, also if the run is not marked as this user's.
    """
    starts = list(RunJournal(run_dir).events("segment"))
    before = [each for each in starts if not resumed_from(each) or step_of(resumed_from(each)) < step]
    start = [*starts[:1], *before][-1]
    facts = start.data.get("facts") or {}
    if (ranks := facts.get("ranks", 1)) > 1:
        raise ReplayError(
            f"{run_dir} was trained by {ranks} ranks, and one process would have a part of the state, and "
            "other bits; give a run of one process"
        )
    if given:
        script = Path(given[0])
        if not script.is_file():
            raise ConfigError(f"{script} is not a file; give the path of the script after --")
        command_line = command(script, tuple(given[1:]))
        return RecordedProgram(command_line, Path.cwd(), _changed(start, script.resolve()))
    if _of_config(facts):
        options = ("--on-change", "override", *(["--trust"] if trust else []))
        command_line = (sys.executable, "-m", "everstep", "resume", *options)
        return RecordedProgram(command_line, Path.cwd(), _changed(start, None), start.segment)
    return _recorded(run_dir, start, facts, trust)


def _of_config(facts: Mapping[str, Any]) -> bool:
    """Whether the command `everstep` trained the run, by the config that it recorded."""
    argv, config = facts.get("argv") or [""], facts.get("config")
    by_command = Path(argv[0]).name == "everstep" or str(argv[0]).endswith("everstep/__main__.py")
    return by_command and isinstance(config, dict) and {"task", "streams"} <= config.keys()


def _recorded(run_dir: Path, start: Event, facts: Mapping[str, Any], trust: bool) -> RecordedProgram:
    """Return the recorded command line in its working directory."""
    argv, folder = [str(each) for each in facts.get("argv") or [""]], Path(facts.get("cwd") or "")
    script = folder / argv[0]
    again = (
        "name the program's script, as in: everstep replay RUN --step N -- train.py --lr 0.1, or "
        "everstep diverge A B --script-a 'train.py --lr 0.1'"
    )
    if argv[0] in ("", "-c") or script.name.startswith("ipykernel_launcher"):
        raise ReplayError(
            f"start {start.segment} of {run_dir} ran in a notebook or an interpreter, which cannot be "
            "started again: call its code there, inside `with everstep.runs.replay(run, step) as at:`"
        )
    if HIDDEN in " ".join(argv):
        raise ReplayError(f"the recorded command line has a credential, which was not recorded: {again}")
    if not script.is_file():
        raise ReplayError(f"the recorded script {script} does not exist: {again}")
    if not trust and (why := distrust(run_dir, facts)):
        raise TrustError(
            f"the record of {run_dir} names a command that would be started: {' '.join(argv)}, in {folder}. "
            f"It does not count as yours: {why}. If you trust whoever made it, pass --trust, or set "
            f"{TRUST_VARIABLE}=1 (docs/guide/trust.md); or {again}"
        )
    if script.resolve().is_relative_to(run_dir.resolve()):
        raise ReplayError(
            f"the recorded script {script} lies in the run directory, where no code is run: {again}"
        )
    return RecordedProgram((sys.executable, *_as_module(script), *argv[1:]), folder, _changed(start, script))


def _as_module(script: Path) -> tuple[str, ...]:
    """Return the arguments of Python that run a file: a module of a package by its name, which -m needs."""
    parts, folder = [script.stem], script.parent
    while (folder / "__init__.py").exists():
        parts, folder = [folder.name, *parts], folder.parent
    if len(parts) == 1:
        return (str(script),)
    name = ".".join(parts).removesuffix(".__main__")
    run = f"runpy.run_module({name!r}, None, '__main__', True)"
    return ("-c", f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); {run}")


def _changed(start: Event, script: Path | None) -> tuple[str, ...]:
    facts = start.data.get("facts") or {}
    code = [Path(each) for each in facts.get("code") or [] if isinstance(each, str)]
    folder = code[0] if code else Path.cwd() if script is None else script.parent
    recorded, now = facts.get("git") or {}, git_facts(folder) or {}
    keys = () if "problem" in {*recorded, *now} or not recorded or not now else ("commit", "diff")
    if all(str(recorded.get(key)) == str(now.get(key)) for key in keys):
        return ()
    return (
        f"the code has changed since start {start.segment} of the run: git has another commit, or other "
        "uncommitted changes; what differs may come from there",
    )


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
    env, out = _write_plan(copy, last, start=program.start, **plan)
    command_line = (*program.command, *([str(copy.place)] if program.start else []))
    start = Program(command_line, copy.folder, env=env, cwd=program.folder).start(witness=witness)
    executed = Executed(copy, read_lines(out), [record._replace(run="") for record in start.witnessed])
    if not executed.last("left"):
        shown, ended = " ".join(program.command[1:]), executed.last("ended")
        if not executed.last("opened"):
            raise ReplayError(f"{shown} did not open the run (exit status {start.status}):\n{start.tail}")
        where = f"after step {ended['step']} ({ended['reason']})" if ended else f"with status {start.status}"
        raise ReplayError(f"{shown} ended {where}, before step {last + 1}:\n{start.tail}")
    return executed


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
