"""Lookup of the checkpoint that a path means: a checkpoint, the best weights by a metric, or a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import reading
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.manifest import MANIFEST
from everstep.checkpoint.saved_checkpoints import SavedCheckpoints
from everstep.checkpoint.search import Search
from everstep.errors import NoCheckpointError


def find_checkpoint(
    path: Path,
    say: Callable[[str], None],
    *,
    interim: bool = True,
    wanted: Callable[[str], bool] = reading.every,
) -> Checkpoint | None:
    """Read the checkpoint that `path` means, without changing anything there; None if there is none.

    Args:
        path: a checkpoint's folder, `RUN/best/METRIC`, or a run directory for its newest whole checkpoint.
        say: takes notes on the choice, for the user.
        interim: whether the newest checkpoint of a run may be an interim one.
        wanted: whether an array is read, by its name; see `reading.read`.

    Raises:
        NoCheckpointError: the run's newest checkpoint names none of the best weights.
        CheckpointError: as `Search.find`.
    """
    if not path.is_dir():
        path = _of_metric(path)
    if not path.is_dir():
        return None
    if not (path / MANIFEST).exists() and path.absolute().parent.name == "best":
        path = _best_in(path.absolute())
    if (path / MANIFEST).exists():
        one = reading.read(path, wanted=wanted)
        for flaw in one.flaws:
            say(flaw.how)
        return one
    found, notes = Search(SavedCheckpoints(path, wanted=wanted), mend=False).find(True, interim=interim)
    for note in notes:
        say(note)
    return found


def _of_metric(path: Path) -> Path:
    """Return the folder of best weights by their metric: `RUN/best/valid.loss` for `RUN/best/valid/loss`."""
    run_dir, best, metric = path.as_posix().rpartition("/best/")
    return Path(f"{run_dir}{best}{metric.replace('/', '.')}") if best else path


def _best_in(folder: Path) -> Path:
    """Find the weights in `RUN/best/METRIC` that the run's newest checkpoint names as the best."""
    run_dir = folder.parent.parent
    saved = SavedCheckpoints(run_dir)
    for metric, path in saved.best().items():
        if saved.best_folder(metric) == folder:
            return path
    there = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
    raise NoCheckpointError(
        f"the newest checkpoint of the run in {run_dir} names the best of the weights in {folder}, and none "
        f"of those that it names is there; give the folder of the weights that you want: "
        f"{', '.join(there) or 'the folder has none'}"
    )
