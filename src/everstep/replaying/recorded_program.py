"""Program of a run as its record names it, to be started again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everstep.drill import program
from everstep.errors import ConfigError, ReplayError, TrustError
from everstep.record import Event, RunJournal
from everstep.record.provenance import git_facts
from everstep.record.segment_file import step_of
from everstep.record.trust import TRUST_VARIABLE, distrust
from everstep.redaction import HIDDEN


class RecordedProgram(NamedTuple):
    """Program that can be started in a working directory, with warnings; where `takes_run`, the path of the
    run directory follows as the last argument.
    """

    command: tuple[str, ...]
    folder: Path
    notes: tuple[str, ...] = ()
    takes_run: bool = False


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
    if not starts:
        raise ReplayError(f"the journal of {run_dir} has no start; give a run that everstep has trained")
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
        command = program.command(script, tuple(given[1:]))
        return RecordedProgram(command, Path.cwd(), _changed(start, script.resolve()))
    if _of_config(facts):
        command = (sys.executable, "-m", "everstep", "resume", *(["--trust"] if trust else []))
        return RecordedProgram(command, Path.cwd(), _changed(start, None), takes_run=True)
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
    """Warn of code that is not what the start ran, by git."""
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
