"""Copy of a run, in which steps are executed again: the run itself is only read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from everstep.checkpoint import CheckpointName, Store
from everstep.errors import DamagedCheckpointError, NoCheckpointError, ReplayError
from everstep.record import Event, RunDir, RunJournal


class RunCopy(NamedTuple):
    """Copy of a run, as a program finds it that starts with EVERSTEP_ROOT.

    Attributes:
        run_dir: the run itself.
        root: the value of EVERSTEP_ROOT.
        place: the copy, below the root.
        checkpoint: the checkpoint from which the program continues; None: it begins from nothing.
        notes: sentences about checkpoints that were passed over.
    """

    run_dir: Path
    root: Path
    place: Path
    checkpoint: CheckpointName | None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Step of the checkpoint; 0 where the program begins from nothing."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def origin(self) -> str:
        """Where the program begins, in words."""
        return "the start of the run" if self.checkpoint is None else str(self.checkpoint)


def copy_run(
    run_dir: Path,
    folder: Path,
    step: int,
    opened_as: Path | None = None,
    *,
    anew: bool = False,
) -> RunCopy:
    """Copy a run as it was at its newest checkpoint up to a step.

    Files of checkpoints are copied and verified, not linked: a program that writes into its own run directory
    cannot reach the run through a link.

    Args:
        folder: a folder for the copy; made if it is missing.
        step: the checkpoint's step is at most this.
        opened_as: path under which the program opens the run; None: the run's own.
        anew: begin from nothing, as a run with a given seed can.
    """
    root = folder / "root"
    path = Path(os.path.abspath(run_dir if opened_as is None else opened_as))
    place = root.joinpath(*path.parts[1:])
    (place / "journal").mkdir(parents=True)
    journal = [*(run_dir / "journal").glob("*.evj"), *(run_dir / "journal").glob("*.trail")]
    for file in (run_dir / "run.json", *journal):
        if file.exists():
            shutil.copyfile(file, place / file.relative_to(run_dir))
    chosen, notes = (None, []) if anew else _newest(run_dir, place, step)
    if chosen is None:
        _require_seed(run_dir, step)
    return RunCopy(run_dir, root, place, chosen, tuple(notes))


def _newest(run_dir: Path, place: Path, step: int) -> tuple[CheckpointName | None, list[str]]:
    """Copy the newest whole checkpoint up to a step; also return what was passed over."""
    store, notes = Store(run_dir), []
    for facts in reversed(store.facts()):
        if facts.name.step > step:
            continue
        try:
            store.copy(facts.name, place / "checkpoints")
        except (DamagedCheckpointError, NoCheckpointError) as error:  # a training may delete while we read
            notes.append(f"{error}; an older checkpoint is taken")
        else:
            return facts.name, notes
    return None, notes


def _require_seed(run_dir: Path, step: int) -> None:
    """Refuse a run that cannot begin from nothing and be the same run."""
    if can_begin_anew(run_dir):
        return
    names = [facts.name for facts in Store(run_dir).facts()]
    there = f"the oldest is {names[0]}" if names else "there is none at all"
    raise ReplayError(
        f"{run_dir} has no whole checkpoint up to step {step} ({there}), and begins otherwise at each start: "
        "it was made without seed=, or from another run's checkpoint. Give a later step; keep more "
        "checkpoints: Checkpoints(keep_every=Every(...))"
    )


def can_begin_anew(run_dir: Path) -> bool:
    """Whether an execution from nothing is the run again: its seed was given, and it is not a fork."""
    return bool(RunDir.open(run_dir, create=False).facts.get("seed_given")) and not origin(run_dir)


def origin(run_dir: Path) -> str:
    """Return the checkpoint of another run with which a run began; "" if it began from nothing."""
    began = next(iter(RunJournal(run_dir).events("segment")), None)
    return "" if began is None else resumed_from(began)


def resumed_from(start: Event) -> str:
    """Return the checkpoint from which a start continued; "" if it began from nothing."""
    return str((start.data.get("facts") or {}).get("resumed_from") or "")


def last_step(run_dir: Path) -> int:
    """Return the last step that a run is known to have completed."""
    steps = [facts.name.step for facts in Store(run_dir).facts()]
    return max(RunJournal(run_dir).status().step, *steps, 0)
