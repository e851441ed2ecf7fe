"""Best weights of a run: checked at its start, set aside where damaged, taken over from another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.checkpoint import files, reading
from everstep.checkpoint.commit import copying, is_equal, place_apart
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.manifest import read_body
from everstep.checkpoint.retention import kept_best
from everstep.checkpoint.saved_checkpoints import SavedCheckpoints, best_folder
from everstep.errors import (
    CheckpointError,
    CheckpointVersionError,
    DamagedCheckpointError,
    ForeignCheckpointError,
)


class BestWeights:
    """Best weights in a run directory, by all metrics.

    Args:
        saved: the run's checkpoints.
        segment: number of this start, for names in damaged/ and superseded/.
        say: takes sentences for the user.
    """

    def __init__(self, saved: SavedCheckpoints, segment: int, say: Callable[[str], None]) -> None:
        self._saved, self._segment, self._say = saved, segment, say

    def set_aside(self, path: Path) -> str:
        """Move a folder of damaged best weights to `damaged/`; returns a clause that says where it is now."""
        name = f"best.{path.parent.name}.{path.name}.segment-{self._segment}"
        run_dir = self._saved.run_dir
        try:
            return f"the folder is now {files.move(path, run_dir / 'damaged', name, top=run_dir)}"
        except OSError as error:
            return f"the folder cannot be moved to damaged/ ({error.strerror})"

    def has(self, metric: str, name: str, value: float) -> bool:
        """Whether the weights of a value are there; a name may have those of an earlier timeline."""
        try:
            meta = read_body(self._saved.best_folder(metric) / name)["meta"]
        except CheckpointError:
            return False
        return isinstance(meta, dict) and meta.get("value") == value

    def check(self) -> list[str]:
        """Read every byte of the best weights.

        Damaged ones and those of another run move to `damaged/`, each with a sentence.
        """
        problems = []
        for path in self._saved.best_folders():
            try:
                reading.verify(path)
                self._saved.require_own(read_body(path)["meta"], path)
            except (DamagedCheckpointError, ForeignCheckpointError) as error:
                problems.append(f"best weights in {path.parent.name}: {error}; {self.set_aside(path)}")
            except CheckpointVersionError as error:
                problems.append(f"best weights in {path.parent.name}: {error}")
        return problems

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Copy the best weights that another run's checkpoint names, if they are there and whole."""
        top = checkpoint.path.parent.parent
        for metric, names in kept_best(checkpoint.meta).items():
            for name in names:
                source = best_folder(top, metric) / name
                if not source.exists():
                    continue
                try:
                    best = reading.read(source, regions=self._saved.regions)
                except CheckpointError as error:
                    self._say(f"best weights by {metric} are not copied: {error}")
                    continue
                self._take(best, self._saved.best_folder(metric) / name)

    def _take(self, best: Checkpoint, target: Path) -> None:
        """Copy best weights to `target`, unless their equal is there; others move to superseded/."""
        about: Any = best.meta
        meta = {**about, "run": self._saved.run}
        if is_equal(target, best.digest, meta):
            return
        run_dir = self._saved.run_dir
        if target.exists():
            aside = f"best.{target.parent.name}.{target.name}.segment-{self._segment}"
            files.move(target, run_dir / "superseded", aside, top=run_dir)
        write = copying(best, best.segment, meta)
        place_apart(target, write, top=run_dir)
