"""Checkpoints in one run directory as they are read: choice, names, facts, content.  Nothing changes here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import reading
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.manifest import MANIFEST, check_sizes, read_body
from everstep.checkpoint.retention import Facts
from everstep.contracts.state import Json, Regions
from everstep.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    nearest,
)
from everstep.untrusted_files import open_regular, read_note

_LONGEST = 4096  # bytes of the file `checkpoint` that are read: more than the longest path


class SavedCheckpoints:
    """Checkpoints in `run_dir`, each whole or absent at any instant.

    Args:
        run_dir: the run directory, which exists.
        run: the run's id, which each checkpoint must have; None reads checkpoints of any run.
        wanted: whether an array of a checkpoint is read, by its name; see `reading.read`.

    Attributes:
        folder: the folder of the checkpoints.
        choice_file: the file `checkpoint`, in which a person names the checkpoint to resume from.
        pins_file: the file of the pinned names.
        regions: which part of each array is kept in memory; see `reading.read`.
        damaged: names that were found damaged, and have not moved to damaged/ yet.
    """

    regions: Regions | None = None

    def __init__(
        self, run_dir: Path, run: str | None = None, wanted: Callable[[str], bool] = reading.every
    ) -> None:
        self.run_dir, self.run, self.wanted = Path(run_dir), run, wanted
        self.folder = self.run_dir / "checkpoints"
        self.choice_file = self.run_dir / "checkpoint"
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

    # ------------------------------------------------------------------------------ where to resume from

    def find(
        self, which: bool | int | str | Path, *, interim: bool = True
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the checkpoint to resume from; returns it with notes on the choice, for the user.

        Args:
            which: True for the newest whole checkpoint, or the one that the file `checkpoint` names; a step
                (of two at one step, the checkpoint after the epoch); a name; or the path of a checkpoint's
                folder anywhere.
            interim: with `which=True`, whether the checkpoint may be an interim one.

        Returns:
            None for the checkpoint only if the run has none.

        Raises:
            NoCheckpointError: no checkpoint has that step, name or path; names the nearest.
            DamagedCheckpointError: the chosen checkpoint is damaged.
            CheckpointError: all checkpoints are damaged; says how, for each.
            CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
            ForeignCheckpointError: another run wrote the checkpoint.
        """
        if which is False:
            raise ConfigError("which=False finds nothing: give True, a step, a name or a path")
        notes: list[str] = []
        found: Checkpoint | None
        if isinstance(which, Path):
            found = self._elsewhere(which)
        elif which is not True:
            found = self._read_chosen(self.at_step(which) if isinstance(which, int) else self.named(which))
        elif chosen := self.chosen_by_hand():
            found = self._by_hand(chosen, notes)
        else:
            found = self._newest_whole(interim, notes)
        return found, notes

    def _elsewhere(self, path: Path) -> Checkpoint:
        if not (path / MANIFEST).exists():
            around = [path.parent, path, path / "checkpoints"]
            known = [other.parent for folder in around for other in folder.glob(f"*/{MANIFEST}")]
            raise NoCheckpointError(
                f"no checkpoint in {path} (it has no {MANIFEST}): {nearest(str(path), map(str, known))}"
            )
        return reading.read(path, regions=self.regions)

    def _read_chosen(self, name: CheckpointName) -> Checkpoint:
        """Read the checkpoint that a person chose; an error lists the others, and none takes its place."""
        try:
            return self.read(name)
        except DamagedCheckpointError as error:
            others = ", ".join(str(other) for other in self.names() if other != name)
            raise DamagedCheckpointError(
                f"{error}; choose another one: {others or 'there is no other'}"
            ) from error

    def _by_hand(self, chosen: str, notes: list[str]) -> Checkpoint:
        names = self.names()
        if chosen not in map(str, names):
            raise NoCheckpointError(
                f"{self.choice_file} names {chosen!r:.1000}, which is not in {self.folder}: name another one "
                f"in its first line, or delete the file for the newest "
                f"({nearest(chosen[:100], map(str, names))})"
            )
        notes.append(f"resuming from {chosen}, as {self.choice_file} says (the newest is {names[-1]})")
        return self._read_chosen(CheckpointName.parse(chosen))

    def _newest_whole(self, interim: bool, notes: list[str]) -> Checkpoint | None:
        there = self.names()
        # where there is no other, an interim checkpoint is better than none
        names = [name for name in there if interim or not self.is_interim(name)] or there
        wrong: list[str] = []
        for name in reversed(names):
            try:
                newest = self.read(name)
            except DamagedCheckpointError as error:
                self.damaged.add(name)  # supersede_after moves it to damaged/, not to superseded/
                wrong.append(str(error))
                continue
            notes += [f"{problem}; passed over" for problem in wrong]
            return newest
        if not wrong:
            return None
        raise CheckpointError(
            f"all {len(names)} checkpoints in {self.folder} are damaged: restore them from a copy, or move "
            "them away to start from nothing\n  " + "\n  ".join(wrong)
        )

    def read(self, name: CheckpointName, rank: int = 0) -> Checkpoint:
        """Read and verify a checkpoint, as `rank` resumes from it; rank 0 verifies the bytes of all ranks."""
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
        """Name of the newest checkpoint with a whole manifest, interim checkpoints left out."""
        whole = [facts for facts in self.facts() if not facts.interim]
        if not whole:
            raise NoCheckpointError(f"{self.folder} has no whole checkpoint; train first")
        return whole[-1].name

    def at_step(self, step: int) -> CheckpointName:
        """Name of the checkpoint of a step; of two at one step, that after the epoch."""
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
        """Parse the name of a checkpoint on disk."""
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
        """Return the pinned names."""
        try:
            return {CheckpointName.parse(text) for text in read_note(self.pins_file)}
        except FileNotFoundError:
            return set()
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{self.pins_file} is not a JSON list of checkpoint names ({error}): correct or delete it"
            ) from error

    def chosen_by_hand(self) -> str:
        """Return the name in the first line of the file `checkpoint`; "" without a file or a line.

        Who wrote the path of a checkpoint's folder there means its name.
        """
        try:
            with open_regular(self.choice_file) as file:
                raw = file.read(_LONGEST).removeprefix(b"\xef\xbb\xbf")  # some editors put this mark first
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise CheckpointError(
                f"{self.choice_file} cannot be read ({error.strerror}): delete it, or name a checkpoint there"
            ) from error
        text = raw.split(b"\n")[0].decode("utf-8", "replace").strip()
        folder, name = os.path.split(text.rstrip("/"))
        here = not folder or (
            "\0" not in folder and (self.run_dir / folder).resolve() == self.folder.resolve()
        )
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
    """
    if not path.is_dir():
        path = _of_metric(path)
    if not path.is_dir():
        return None
    if not (path / MANIFEST).exists() and path.absolute().parent.name == "best":
        path = _best_in(path.absolute())
    if (path / MANIFEST).exists():
        return reading.read(path, wanted=wanted)
    found, notes = SavedCheckpoints(path, wanted=wanted).find(True, interim=interim)
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
