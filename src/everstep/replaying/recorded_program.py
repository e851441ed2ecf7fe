"""Program of a run as its record names it, to be started again."""

from __future__ import annotations

import os
import sys
import time
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
from everstep.replaying.run_copy import resumed_from


class RecordedProgram(NamedTuple):
    """Program that can be started.

    Attributes:
        command: the command line.
        folder: the working directory.
        environment: variables that it needs beside those of this process.
        notes: warnings, such as files that have changed since the run was made.
        takes_run: whether the path of the run directory follows as the last argument.
    """

    command: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
    takes_run: bool = False


def start_of(run_dir: Path, step: int) -> Event:
    """Find the start whose execution of a step counts."""
    found = None
    for event in RunJournal(run_dir).events("segment"):
        began = resumed_from(event)
        if found is None or not began or step_of(began) < step:
            found = event
    if found is None:
        raise ReplayError(f"the journal of {run_dir} has no start; give a run that everstep has trained")
    return found


def program_of(
    run_dir: Path, step: int, given: Sequence[str] = (), *, trust: bool = False
) -> RecordedProgram:
    """Find how to start the program of a run.

    Args:
        step: the step that is to happen again: the start that recorded it counts.
        given: script or config with its arguments, in place of those recorded.
        trust: start what the record names, also if the run is not marked as this user's.
    """
    start = start_of(run_dir, step)
    facts = start.data.get("facts") or {}
    if (ranks := facts.get("ranks", 1)) > 1:
        raise ReplayError(
            f"{run_dir} was trained by {ranks} ranks, and one process would have a part of the state, and "
            "other bits; give a run of one process"
        )
    environment = _instructions(facts)
    if given:
        script = Path(given[0])
        if not script.is_file():
            raise ConfigError(f"{script} is not a file; give the path of the script after --")
        command = program.command(script, tuple(given[1:]))
        return RecordedProgram(command, Path.cwd(), environment, _changed(start, script.resolve()))
    if _of_config(facts):
        command = (sys.executable, "-m", "everstep", "resume", *(["--trust"] if trust else []))
        return RecordedProgram(command, Path.cwd(), environment, _changed(start, None), takes_run=True)
    command, folder, script = _recorded(run_dir, start.segment, facts, trust)
    return RecordedProgram(command, folder, environment, _changed(start, script))


def _of_config(facts: Mapping[str, Any]) -> bool:
    """Whether the command `everstep` trained the run, by the config that it recorded."""
    argv, config = facts.get("argv") or [""], facts.get("config")
    by_command = Path(argv[0]).name == "everstep" or str(argv[0]).endswith("everstep/__main__.py")
    return by_command and isinstance(config, dict) and {"task", "streams"} <= config.keys()


def _recorded(
    run_dir: Path, number: int, facts: Mapping[str, Any], trust: bool
) -> tuple[tuple[str, ...], Path, Path]:
    """Return the recorded command line, working directory and script."""
    argv, folder = [str(each) for each in facts.get("argv") or [""]], Path(facts.get("cwd") or "")
    script = folder / argv[0]
    again = (
        "name the program's script, as in: everstep replay RUN --step N -- train.py --lr 0.1, or "
        "everstep diverge A B --script-a 'train.py --lr 0.1'"
    )
    if argv[0] in ("", "-c") or script.name.startswith("ipykernel_launcher"):
        raise ReplayError(
            f"start {number} of {run_dir} ran in a notebook or an interpreter, which cannot be started "
            "again: call its code there, inside `with everstep.runs.replay(run, step) as at:`"
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
    return (sys.executable, *_as_module(script), *argv[1:]), folder, script


def _as_module(script: Path) -> tuple[str, ...]:
    """Return the arguments of Python that run a file: a module of a package by its name, which -m needs."""
    parts, folder = [script.stem], script.parent
    while (folder / "__init__.py").exists():
        parts, folder = [folder.name, *parts], folder.parent
    if len(parts) == 1:
        return (str(script),)
    name = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
    run = f"runpy.run_module({name!r}, None, '__main__', True)"
    return ("-c", f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); {run}")


def _instructions(facts: Mapping[str, Any]) -> dict[str, str]:
    """Variables by which torch computes with the recorded instructions, where this processor has them."""
    recorded = ((facts.get("fingerprint") or {}).get("torch") or {}).get("cpu_capability")
    if "ATEN_CPU_CAPABILITY" in os.environ or recorded not in ("DEFAULT", "AVX2"):
        return {}
    try:
        known = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    # a processor without them would be stopped by the first such instruction
    return {"ATEN_CPU_CAPABILITY": recorded.lower()} if recorded == "DEFAULT" or " avx2 " in known else {}


def _changed(start: Event, script: Path | None) -> tuple[str, ...]:
    """Warn of code that is not what the start ran: by git, else by the time of the script."""
    facts = start.data.get("facts") or {}
    code = [Path(each) for each in facts.get("code") or [] if isinstance(each, str)]
    folder = code[0] if code else (Path.cwd() if script is None else script.parent)
    recorded, now = facts.get("git"), git_facts(folder)
    if recorded:
        states = [str((git.get("commit"), git.get("diff"))) for git in (recorded, now or {})]
        changed = states[0] != states[1] and "problem" not in {*recorded, *(now or {"problem": ""})}
        what = "git has another commit, or other uncommitted changes"
    else:
        changed = script is not None and script.exists() and script.stat().st_mtime > start.time
        what = str(script)
    if not changed:
        return ()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time))
    began = f"start {start.segment} of the run ({when})"
    return (f"the code has changed since {began}: {what}; what differs may come from there",)
