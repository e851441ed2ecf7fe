"""Checkpoints in one run directory as they are read: names, facts, content.  Nothing changes here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import pins, pointer, reading
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.manifest import MANIFEST, check_sizes, read_body
from everstep.checkpoint.retention import Facts
from everstep.contracts.state import Json, Regions
from everstep.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    nearest,
)


class SavedCheckpoints:
    """Checkpoints in `run_dir`, each whole or absent at any instant.

    Args:
        run_dir: the run directory, which exists.
        run: the run's id, which each checkpoint must have; None reads checkpoints of any run.
        wanted: whether an array of a checkpoint is read, by its name; see `reading.read`.

    Attributes:
        folder: the folder of the checkpoints.
        pointer_file: the file that names the checkpoint to resume from, see `pointer`.
        pins_file: the file of the pinned names, see `pins`.
        regions: which part of each array is kept in memory; see `reading.read`.
        damaged: names that were found damaged, and have not moved to damaged/ yet.
    """

    regions: Regions | None = None

    def __init__(
        self, run_dir: Path, run: str | None = None, wanted: Callable[[str], bool] = reading.every
    ) -> None:
        self.run_dir, self.run, self.wanted = Path(run_dir), run, wanted
        self.folder = self.run_dir / "checkpoints"
        self.pointer_file = self.run_dir / "checkpoint"
        self.damaged: set[CheckpointName] = set()
        self.pins_file = self.run_dir / "pins.json"
        self._facts: dict[CheckpointName, Facts] = {}
        self._left: frozenset[CheckpointName] = frozenset()
        """Checkpoints on disk that this start does not continue from, and has not set aside yet."""

    def path(self, name: CheckpointName) -> Path:
        """Folder of a checkpoint, whether it exists or not."""
        return self.folder / str(name)

    def names(self) -> list[CheckpointName]:
        """List the names on disk, whole or not, oldest first, without those that this start leaves."""
        return [name for name in self._on_disk() if name not in self._left]

    def _on_disk(self) -> list[CheckpointName]:
        try:
            entries = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            told = f"{self.folder} cannot be read ({error.strerror}); move it away or restore it"
            raise CheckpointError(told) from error
        return sorted(CheckpointName.parse(entry) for entry in entries if CheckpointName.matches(entry))

    def read(self, name: CheckpointName, rank: int = 0) -> Checkpoint:
        """Read and verify one checkpoint, as `rank` resumes from it; rank 0 verifies every byte of all ranks.

        Raises:
            NoCheckpointError: no checkpoint has the name; names the nearest.
            DamagedCheckpointError: says which file is damaged, and how.
            CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
            ForeignCheckpointError: another run wrote the checkpoint.
        """
        self._require(name)
        found = reading.read(self.path(name), rank, self.wanted, self.regions)
        if found.name != name:
            raise DamagedCheckpointError(
                f"checkpoint {name} is damaged: {self.path(name) / MANIFEST} belongs to {found.name}"
            )
        self.require_own(found.meta, found.path)
        return found

    def require_own(self, meta: Json, path: Path) -> None:
        """Refuse a checkpoint that was copied from another run: its rows are in another journal."""
        run = meta.get("run") if isinstance(meta, dict) else None
        if self.run is not None and run is not None and run != self.run:
            raise ForeignCheckpointError(
                f"{path} belongs to the run {run}, not to {self.run} in {self.run_dir}: move it away; to "
                "continue from it here, give resume= its new path, or init_from= for its weights alone"
            )

    def _require(self, name: CheckpointName) -> None:
        if not self.path(name).exists():
            self.named(str(name))

    # ---------------------------------------------------------------------------- choosing by a word

    def newest(self) -> CheckpointName:
        """Name of the newest checkpoint with a whole manifest, interim checkpoints left out.

        Raises:
            NoCheckpointError: the run has no such checkpoint.
        """
        whole = [facts for facts in self.facts() if not facts.interim]
        if not whole:
            raise NoCheckpointError(f"{self.folder} has no whole checkpoint; train first")
        return whole[-1].name

    def at_step(self, step: int) -> CheckpointName:
        """Name of the checkpoint of a step; of two at one step, that after the epoch.

        Raises:
            NoCheckpointError: no checkpoint is of this step; names the nearest.
        """
        names = self.names()
        found = [name for name in names if name.step == step]
        if not found:
            near = min(names, key=lambda name: abs(name.step - step), default=None)
            hint = "there is no checkpoint at all" if near is None else f"the nearest is {near}"
            raise NoCheckpointError(
                f"no checkpoint of step {step} in {self.folder}: {hint}; "
                f"known: {', '.join(map(str, names)) or 'none'}"
            )
        return found[-1]

    def named(self, text: str) -> CheckpointName:
        """Parse the name of a checkpoint on disk.

        Raises:
            NoCheckpointError: no checkpoint has the name; names the nearest.
        """
        known = {str(name): name for name in self.names()}
        if text not in known:
            raise NoCheckpointError(f"no checkpoint {text!r} in {self.folder}: {nearest(text, known)}")
        return known[text]

    # ------------------------------------------------------------------------- what is known of them

    def facts(self) -> list[Facts]:
        """List the facts of all whole manifests, oldest first; each manifest is read once."""
        return [facts for name in self.names() if (facts := self._facts_of(name)) is not None]

    def _facts_of(self, name: CheckpointName) -> Facts | None:
        """Read the facts from the manifest, once; None where the manifest or sizes are damaged."""
        if name not in self._facts and name not in self.damaged:
            try:
                body = read_body(self.path(name))
                check_sizes(self.path(name), body)
            except CheckpointError:
                return None
            try:
                self._facts[name] = Facts.of(name, body)
            except (TypeError, ValueError, AttributeError):  # forged: the checksum is right
                return None
        return self._facts.get(name)

    def is_interim(self, name: CheckpointName) -> bool:
        facts = self._facts_of(name)
        return facts is not None and facts.interim

    def pins(self) -> set[CheckpointName]:
        """Return the pinned names.

        Raises:
            CheckpointError: the file of pins is not a list of names.
        """
        return pins.read(self.pins_file)

    def pointed(self) -> pointer.Pointer:
        """Read the `checkpoint` file."""
        return pointer.read(self.pointer_file, [str(name) for name in self._on_disk()])

    def name_in(self, text: str) -> str:
        """Return the name in a line of the `checkpoint` file; a person may have written a folder's path."""
        folder, name = os.path.split(text.rstrip("/"))
        here = not folder or (self.run_dir / folder).resolve() == self.folder.resolve()
        return name if here else text

    # ---------------------------------------------------------------------------------- best weights

    def best_folder(self, metric: str) -> Path:
        """Folder of the best weights by `metric`."""
        return best_folder(self.run_dir, metric)

    def best(self) -> dict[str, Path]:
        """Return the folder of the best weights by metric, as the newest checkpoint names them."""
        newest = self.facts()[-1:]
        found = {m: self.best_folder(m) / name for facts in newest for m, name in facts.best.items()}
        return {metric: path for metric, path in found.items() if path.exists()}

    def kept_best(self) -> dict[str, list[Path]]:
        """Return the folders of all kept best weights by metric, the best first."""
        newest = self.facts()[-1:]
        found = {m: (self.best_folder(m), names) for facts in newest for m, names in facts.kept.items()}
        return {
            m: [folder / n for n in names if (folder / n).exists()] for m, (folder, names) in found.items()
        }

    def best_folders(self) -> list[Path]:
        """All folders of best weights, also of those that only an older checkpoint names."""
        there = (self.run_dir / "best").glob("*/*")
        return sorted(path for path in there if CheckpointName.matches(path.name))


def best_folder(run_dir: Path, metric: str) -> Path:
    """Folder of a run's best weights by `metric`."""
    return run_dir / "best" / metric.replace("/", ".")
