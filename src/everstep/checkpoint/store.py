"""Store of the checkpoints in one run directory: choice, names, facts, content; commit, set aside, retain.

checkpoints/NAME/       the checkpoints; the newest whole one wins
checkpoint              a person's choice of another one, followed once; see `supersede_after`
damaged/, superseded/   NAME.segment-N: set aside by the run's N-th start, never resumed from
best/METRIC/NAME/       the best weights
pins.json               names that retention never deletes
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from everstep.checkpoint import files, format, retention
from everstep.checkpoint.commit import (
    CommittedCheckpoint,
    Draft,
    copying,
    filler,
    is_equal,
    place,
    place_apart,
    require_finite,
)
from everstep.checkpoint.exchange import Exchange
from everstep.checkpoint.format import MANIFEST, Checkpoint, check_sizes, read_body
from everstep.checkpoint.retention import CheckpointName, Facts, Retention, expendable, kept_best
from everstep.contracts.state import Json, Regions
from everstep.durable import TMP, remedy, require_no_link
from everstep.errors import (
    CheckpointError,
    CheckpointVersionError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    nearest,
)
from everstep.untrusted_files import open_regular, read_note

_LONGEST = 4096  # bytes of the file `checkpoint` that are read: more than the longest path
_REPLACED = ".replaced"


class Store:
    """Checkpoints of a run, each whole or absent at any instant.

    Who changes them holds the run's lock.  Methods may run on a worker thread, one at a time.  Nothing is
    created before the first commit.

    Args:
        segment: number of this start, for manifests and for the names in damaged/ and superseded/; 0 to read.
        say: takes sentences for the user.
        run: the run's id, which each checkpoint must have; None reads checkpoints of any run.
        require_newest: raises if a later start has taken over the run; called before each rename of a commit.
        select: whether an array of a checkpoint is read, by its name; see `format.read`.

    Attributes:
        regions: which part of each array is kept in memory; see `format.read`.
        damaged: names that were found damaged, and have not moved to damaged/ yet.
    """

    regions: Regions | None = None

    def __init__(
        self,
        run_dir: Path,
        segment: int = 0,
        say: Callable[[str], None] = lambda text: None,
        run: str | None = None,
        require_newest: Callable[[], None] = lambda: None,
        select: Callable[[str], bool] = format.every,
    ) -> None:
        self.run_dir, self.run, self.segment, self.select = Path(run_dir), run, segment, select
        self._say, self._require_newest = say, require_newest
        self.folder = self.run_dir / "checkpoints"
        self.choice_file = self.run_dir / "checkpoint"
        self.pins_file = self.run_dir / "pins.json"
        self.damaged: set[CheckpointName] = set()
        self._facts: dict[CheckpointName, Facts] = {}
        self._chosen: Checkpoint | None = None
        self._abandoned: frozenset[CheckpointName] = frozenset()
        """Checkpoints on disk that this start does not continue from, and has not set aside yet."""

    def path(self, name: CheckpointName) -> Path:
        return self.folder / str(name)

    def names(self) -> list[CheckpointName]:
        """List the names on disk, whole or not, oldest first, without those that this start leaves."""
        return [name for name in self._on_disk() if name not in self._abandoned]

    def _on_disk(self) -> list[CheckpointName]:
        try:
            entries = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            message = f"{self.folder} cannot be read ({error.strerror}); move it away or restore it"
            raise CheckpointError(message) from error
        return sorted(CheckpointName.parse(entry) for entry in entries if CheckpointName.matches(entry))

    def find(
        self, which: bool | int | str | Path, *, interim: bool = True
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the checkpoint to resume from, and notes on the choice; None only if there is none.

        Args:
            which: True for the newest whole checkpoint, or the one that the file `checkpoint` names; a step
                (of two at one step, the checkpoint after the epoch); a name; or the path of a checkpoint's
                folder anywhere.
            interim: with `which=True`, whether the checkpoint may be an interim one.
        """
        if self.segment:
            self._finish_replacements()
        if isinstance(which, Path):
            return self._read_path(which), []
        if which is not True:
            return self._read_named(self.at_step(which) if isinstance(which, int) else self.parse(which)), []
        choice, names = self.chosen_by_hand(), self.names()
        if not choice:
            return self._newest_whole(interim)
        if choice not in map(str, names):
            raise NoCheckpointError(
                f"{self.choice_file} names {choice!r:.1000}, which is not in {self.folder}: name another one "
                f"in its first line, or delete the file for the newest "
                f"({nearest(choice[:100], map(str, names))})"
            )
        note = f"resuming from {choice}, as {self.choice_file} says (the newest is {names[-1]})"
        return self._read_named(CheckpointName.parse(choice)), [note]

    def _read_path(self, path: Path) -> Checkpoint:
        if not (path / MANIFEST).exists():
            around = [path.parent, path, path / "checkpoints"]
            known = [other.parent for folder in around for other in folder.glob(f"*/{MANIFEST}")]
            raise NoCheckpointError(
                f"no checkpoint in {path} (it has no {MANIFEST}): {nearest(str(path), map(str, known))}"
            )
        return format.read(path, regions=self.regions)

    def _read_named(self, name: CheckpointName) -> Checkpoint:
        try:
            return self.read(name)
        except DamagedCheckpointError as error:
            others = ", ".join(str(other) for other in self.names() if other != name) or "there is no other"
            raise DamagedCheckpointError(f"{error}; choose another one: {others}") from error

    def _newest_whole(self, interim: bool) -> tuple[Checkpoint | None, list[str]]:
        on_disk = self.names()
        left_out = set() if interim else {facts.name for facts in self.facts() if facts.interim}
        # where there is no other, an interim checkpoint is better than none
        names = [name for name in on_disk if name not in left_out] or on_disk
        problems: list[str] = []
        for name in reversed(names):
            try:
                return self.read(name), [f"{problem}; passed over" for problem in problems]
            except DamagedCheckpointError as error:
                self.damaged.add(name)  # supersede_after moves it to damaged/, not to superseded/
                problems.append(str(error))
        if not problems:
            return None, []
        raise CheckpointError(
            f"all {len(names)} checkpoints in {self.folder} are damaged: restore them from a copy, or move "
            "them away to start from nothing\n  " + "\n  ".join(problems)
        )

    def read(self, name: CheckpointName, rank: int = 0) -> Checkpoint:
        """Read and verify a checkpoint, as `rank` resumes from it; rank 0 verifies the bytes of all ranks."""
        self._require(name)
        checkpoint = format.read(self.path(name), rank, self.select, self.regions)
        if checkpoint.name != name:
            raise DamagedCheckpointError(
                f"checkpoint {name} is damaged: {self.path(name) / MANIFEST} belongs to {checkpoint.name}"
            )
        self._require_own(checkpoint.meta, checkpoint.path)
        return checkpoint

    def _require_own(self, meta: Json, path: Path) -> None:
        """Refuse a checkpoint that was copied from another run: its rows are in another journal."""
        run = meta.get("run") if isinstance(meta, dict) else None
        if self.run is not None and run is not None and run != self.run:
            raise ForeignCheckpointError(
                f"{path} belongs to the run {run}, not to {self.run} in {self.run_dir}: move it away; to "
                "continue from it here, give resume= its new path, or init_from= for its weights alone"
            )

    def _require(self, name: CheckpointName) -> None:
        if not self.path(name).exists():
            self.parse(str(name))  # raises, with the nearest name

    def newest(self) -> CheckpointName:
        """Name of the newest checkpoint with a whole manifest, interim checkpoints left out."""
        whole = [facts for facts in self.facts() if not facts.interim]
        if not whole:
            raise NoCheckpointError(f"{self.folder} has no whole checkpoint; train first")
        return whole[-1].name

    def at_step(self, step: int) -> CheckpointName:
        """Name of the checkpoint of a step; of two at one step, that after the epoch."""
        names = self.names()
        near = max(names, key=lambda name: (-abs(name.step - step), name), default=None)
        if near is None or near.step != step:
            hint = "there is no checkpoint at all" if near is None else f"the nearest is {near}"
            raise NoCheckpointError(
                f"no checkpoint of step {step} in {self.folder}: {hint}; "
                f"known: {', '.join(map(str, names)) or 'none'}"
            )
        return near

    def parse(self, text: str) -> CheckpointName:
        """Parse the name of a checkpoint on disk."""
        known = {str(name): name for name in self.names()}
        if text not in known:
            raise NoCheckpointError(f"no checkpoint {text!r} in {self.folder}: {nearest(text, known)}")
        return known[text]

    def facts(self) -> list[Facts]:
        """List the facts of all whole manifests, oldest first; each manifest is read once."""
        return [facts for name in self.names() if (facts := self._facts_of(name)) is not None]

    def _facts_of(self, name: CheckpointName) -> Facts | None:
        if name not in self._facts and name not in self.damaged:
            try:
                body = read_body(self.path(name))
                check_sizes(self.path(name), body)
            except CheckpointError:
                return None
            self._facts[name] = Facts.of(name, body)
        return self._facts.get(name)

    def pins(self) -> set[CheckpointName]:
        try:
            return {CheckpointName.parse(text) for text in read_note(self.pins_file)}
        except FileNotFoundError:
            return set()
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{self.pins_file} is not a JSON list of checkpoint names ({error}): correct or delete it"
            ) from error

    def chosen_by_hand(self) -> str:
        """Return the name in the first line of the file `checkpoint`, which may be a path; "" for none."""
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

    def best_folder(self, metric: str) -> Path:
        return self.run_dir / "best" / metric.replace("/", ".")

    def best(self) -> dict[str, Path]:
        """Return the folder of the best weights by metric, as the newest checkpoint names them."""
        return {m: paths[0] for m, paths in self._named_best().items() if paths and paths[0].exists()}

    def kept_best(self) -> dict[str, list[Path]]:
        """Return the folders of all kept best weights by metric, the best first."""
        return {m: [path for path in paths if path.exists()] for m, paths in self._named_best().items()}

    def _named_best(self) -> dict[str, list[Path]]:
        newest = self.facts()[-1:]
        best = newest[0].kept if newest else {}
        return {metric: [self.best_folder(metric) / name for name in names] for metric, names in best.items()}

    def best_folders(self) -> list[Path]:
        """All folders of best weights, also of those that only an older checkpoint names."""
        folders = (self.run_dir / "best").glob("*/*")
        return sorted(path for path in folders if CheckpointName.matches(path.name))

    def set_best_aside(self, path: Path) -> str:
        """Move a folder of damaged best weights to `damaged/`; returns a clause that says where it is now."""
        try:
            return f"the folder is now {self._move(path, 'damaged', self._best_aside(path))}"
        except OSError as error:
            return f"the folder cannot be moved to damaged/ ({error.strerror})"

    def _best_aside(self, path: Path) -> str:
        return f"best.{path.parent.name}.{path.name}.segment-{self.segment}"

    def has_best(self, metric: str, name: str, value: float) -> bool:
        """Whether the weights of a value are there; a name may have those of an earlier timeline."""
        try:
            meta = read_body(self.best_folder(metric) / name)["meta"]
        except CheckpointError:
            return False
        return isinstance(meta, dict) and meta.get("value") == value

    def check_best(self) -> list[str]:
        """Read all best weights; damaged ones and another run's move away, each with a sentence."""
        problems = []
        for path in self.best_folders():
            try:
                format.verify(path)
                self._require_own(read_body(path)["meta"], path)
            except (DamagedCheckpointError, ForeignCheckpointError) as error:
                problems.append(f"best weights in {path.parent.name}: {error}; {self.set_best_aside(path)}")
            except CheckpointVersionError as error:
                problems.append(f"best weights in {path.parent.name}: {error}")
        return problems

    def _adopt_best(self, checkpoint: Checkpoint) -> None:
        """Copy the best weights that another run's checkpoint names, if they are there and whole."""
        source_store = Store(checkpoint.path.parent.parent)
        named_best = kept_best(checkpoint.meta).items()
        for metric, name in ((metric, name) for metric, names in named_best for name in names):
            source, target = source_store.best_folder(metric) / name, self.best_folder(metric) / name
            if not source.exists():
                continue
            try:
                best = format.read(source, regions=self.regions)
            except CheckpointError as error:
                self._say(f"best weights by {metric} are not copied: {error}")
                continue
            about: Any = best.meta
            meta = {**about, "run": self.run}
            if not is_equal(target, best.digest, meta):
                if target.exists():
                    self._move(target, "superseded", self._best_aside(target))
                place_apart(target, copying(best, best.segment, meta), top=self.run_dir)

    def _finish_replacements(self) -> None:
        """Give checkpoints their names back that a kill caught while they were replaced, see `_put`."""
        for old in sorted(self.folder.glob(f"*{_REPLACED}*")):
            text = old.name.partition(_REPLACED)[0]
            if not CheckpointName.matches(text):
                continue
            name = CheckpointName.parse(text)
            if self.path(name).exists():
                self._set_aside(name, "superseded", old)
            else:
                require_no_link(old, self.run_dir)
                files.rename(old, self.path(name))
                files.fsync_folder(self.folder)

    def clean(self) -> None:
        """Delete unfinished files of dead processes; to be called before the first commit."""
        tops = [self.run_dir / name for name in ("best", "exports", "dumps")]
        apart = [path.parent for top in tops for path in top.rglob(f"{TMP}*")]
        for folder in (self.run_dir, self.folder, self.run_dir / "superseded", tops[0], *apart):
            require_no_link(folder, self.run_dir)
            files.discard_leftovers(folder)

    def commit(self, draft: Draft, ranks: Exchange | None = None) -> CommittedCheckpoint:
        """Write a checkpoint, durable and whole, or leave the directory as it was.

        A whole checkpoint of that name with the same digest is kept; with another digest it moves to
        `superseded/`; a damaged one to `damaged/`.  `ranks` is the writer's exchange, inside its `save`.
        """
        name, digest = draft.name, draft.digest
        # first: a bad state leaves the directory as it was
        require_finite(name, {**draft.common.arrays, **draft.own.arrays}, draft.guarded)
        existing = self._read_existing(name)
        if ranks is not None:
            # a rank that was stopped must find no folder of a later save under the name that it has heard
            write = ranks.filler(draft, self.segment, existing)
            self._put(name, existing, None, write, token=secrets.token_hex(4))
            return ranks.committed(draft, self.folder)
        size = self._put(name, existing, digest, filler(draft, self.segment))
        return CommittedCheckpoint(name, self.path(name), size, size == 0, digest)

    def _put(
        self,
        name: CheckpointName,
        existing: Checkpoint | None,
        digest: str | None,
        write: Callable[[Path], int],
        token: str = "",
    ) -> int:
        """Let `write` fill the folder of a checkpoint, unless `existing` has the name and is equal."""

        def make_room() -> Path | None:
            # as late as possible: a process that was stopped may wake up at any instruction
            self._require_newest()
            if existing is not None:
                # a kill here leaves it where the next start finds it: it may be the only checkpoint
                return self._move(self.path(name), self.folder.name, f"{name}{_REPLACED}")
            if self.path(name).exists():
                self._set_aside(name, "damaged")
            return None

        if existing is not None and existing.digest == digest:
            return 0
        files.make_dir(self.folder)
        size, moved = place(self.path(name), write, make_room, token)
        self._forget(name)
        if moved is not None and existing is not None:
            about: Any = existing.meta
            with contextlib.suppress(OSError):  # the commit is done; the next start tries again
                if about and about.get("open"):  # the new one is of the same boundary, run to its end
                    files.retire(moved, top=self.run_dir)
                else:
                    self._set_aside(name, "superseded", moved)
        return size

    def _read_existing(self, name: CheckpointName) -> Checkpoint | None:
        """Read the checkpoint that has a name; None if it is missing, damaged or another run's."""
        require_no_link(self.path(name), self.run_dir)
        if not self.path(name).exists():
            return None
        try:
            return self.read(name)
        except (DamagedCheckpointError, ForeignCheckpointError) as error:
            self._say(f"{error}; the folder moves to damaged/")
            return None

    def adopt(self, checkpoint: Checkpoint, **facts: Json) -> dict[str, Json]:
        """Commit a copy of another run's checkpoint and its best weights; returns `meta` of the copy."""
        foreign: Any = checkpoint.meta
        meta: dict[str, Json] = {**foreign, **facts, "run": self.run}
        # weights first: after a kill in between, no checkpoint here names weights that are missing
        self._adopt_best(checkpoint)
        write = copying(checkpoint, self.segment, meta)
        self._put(checkpoint.name, self._read_existing(checkpoint.name), checkpoint.digest, write)
        return meta

    def copy(self, name: CheckpointName, folder: Path) -> Path:
        """Copy a checkpoint out of the run, to `folder/NAME`; returns that new folder."""
        self._require(name)
        target = folder.absolute() / str(name)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists already: choose another folder, or move it away")
        place_apart(target, lambda new: format.copy(self.path(name), new), top=folder.absolute())
        return target

    def _set_aside(self, name: CheckpointName, where: str, folder: Path | None = None) -> None:
        self._move(folder or self.path(name), where, f"{name}.segment-{self.segment}")
        self._forget(name)

    def _move(self, folder: Path, where: str, name: str) -> Path:
        return files.move(folder, self.run_dir / where, name, top=self.run_dir)

    def _forget(self, name: CheckpointName) -> None:
        self._facts.pop(name, None)
        self.damaged.discard(name)

    def continue_from(self, checkpoint: Checkpoint | None) -> None:
        """Leave later checkpoints, or all for None: they do not count any more.

        `apply_choice` moves them, and copies a checkpoint of another run.  A start that is refused before
        that leaves the directory as it was.
        """
        self._chosen, abandoned = checkpoint, self._on_disk()
        if checkpoint is not None:
            name, is_foreign = checkpoint.name, checkpoint.path != self.path(checkpoint.name)
            abandoned = [each for each in abandoned if each > name or (is_foreign and each == name)]
        self._abandoned = frozenset(abandoned)

    @property
    def is_unchanged(self) -> bool:
        """Whether the next start finds exactly the checkpoints that this start continues from."""
        return self._chosen is None and not self._abandoned

    @property
    def will_set_aside(self) -> bool:
        """Whether checkpoints are on disk that `apply_choice` will set aside."""
        return bool(self._abandoned)

    def apply_choice(self) -> None:
        """Make the choice of `continue_from` durable for later starts; called before the first save."""
        chosen = self._chosen
        if chosen is not None:
            if chosen.path != self.path(chosen.name):
                self.adopt(chosen, journal=None, rollbacks=[])
            self.supersede_after(chosen.name)
        elif self._abandoned:
            self.supersede_all()
        self._chosen, self._abandoned = None, frozenset()

    def inside_epoch(self, closed: Checkpoint, rank: int = 0) -> tuple[Checkpoint | None, object]:
        """Read the checkpoint, of whatever run, inside the epoch that `closed` cut short; or say why not."""
        why: object = "there is no checkpoint inside it"
        for name in retention.names_inside(closed.name) if closed.partial else ():
            path = closed.path.with_name(str(name))
            try:
                if path.exists():
                    return format.read(path, rank, regions=self.regions), ""
            except DamagedCheckpointError as error:
                why = error
        return None, why

    def supersede_after(self, name: CheckpointName) -> None:
        """Let later starts continue from `name`: later checkpoints go to superseded/, or damaged/.

        The file `checkpoint` names it until all have moved, so that a start after a kill in between still
        resumes from `name`; then the file goes, as it was followed.
        """
        self._require(name)
        later = [other for other in self._on_disk() if other > name]
        if later:
            files.write_whole(self.choice_file, f"{name}\n".encode())
        for other in reversed(later):
            self._set_aside(other, "damaged" if other in self.damaged else "superseded")
        self._forget_choice()

    def _forget_choice(self) -> None:
        if os.path.lexists(self.choice_file):
            files.unlink(self.choice_file)
            files.fsync_folder(self.run_dir)

    def abandon(self, step: int, segment: int) -> None:
        """Set aside what starts up to `segment` saved at `step` and later; called again after a kill."""
        names = [facts.name for facts in self.facts() if facts.name.step >= step and facts.segment <= segment]
        if not names:
            return
        if not set(self.names()) - set(names):
            raise CheckpointError(
                f"the run goes back to before step {step}, and {self.folder} has no checkpoint of that "
                f"time: bring one back, or start over with resume=False"
            )
        for name in reversed(names):
            self._set_aside(name, "superseded")

    def supersede_all(self) -> None:
        """Set every checkpoint aside, so that the next start begins from nothing.

        After a kill in the middle, the next start takes the newest that is left.
        """
        self._forget_choice()
        for name in reversed(self._on_disk()):
            self._set_aside(name, "superseded")

    def retain(self, policy: Retention, needed: Collection[CheckpointName] = ()) -> list[CheckpointName]:
        """Delete the checkpoints that `policy` does not keep, and return their names, oldest first.

        The newest whole one stays, and so do the name in the `checkpoint` file, pinned, damaged and `needed`
        ones.  An error of the disk is a sentence for the user, because the commit is done.
        """
        deleted = []
        for name in (name for name in self.expendable(policy) if name not in needed):
            try:
                files.retire(self.path(name), top=self.run_dir)
            except OSError as error:
                why = f"{error.strerror}; {remedy(error)}"
                self._say(f"old checkpoint {self.path(name)} could not be deleted ({why})")
                break
            self._forget(name)
            deleted.append(name)
        return deleted

    def expendable(self, policy: Retention) -> list[CheckpointName]:
        """List the names that `retain` would delete now, oldest first."""
        present = self.facts()
        try:
            # a checkpoint that a person named must be there when the next start follows the choice
            chosen = self.chosen_by_hand()
            protected = self.pins() | {facts.name for facts in present if str(facts.name) == chosen}
        except CheckpointError as error:
            self._say(f"no old checkpoint is deleted: {error}")
            return []  # without the pins nobody knows which checkpoints must stay
        return expendable(policy, present, protected)

    def pin(self, name: CheckpointName) -> None:
        """Keep a checkpoint, whatever retention says."""
        self._require(name)
        self._write_pins({*self.pins(), name})

    def unpin(self, name: CheckpointName) -> None:
        """Let retention decide about a checkpoint again."""
        pinned = self.pins()
        if name not in pinned:
            raise NoCheckpointError(
                f"checkpoint {name} is not pinned: {nearest(str(name), map(str, pinned))}"
            )
        self._write_pins(pinned - {name})

    def _write_pins(self, names: Collection[CheckpointName]) -> None:
        text = json.dumps(sorted(map(str, names)), indent=1)
        files.write_whole(self.pins_file, text.encode() + b"\n")


def find_checkpoint(
    path: Path,
    say: Callable[[str], None],
    *,
    interim: bool = True,
    select: Callable[[str], bool] = format.every,
) -> Checkpoint | None:
    """Read the checkpoint that `path` means, without changing anything there; None if there is none."""
    if not path.is_dir():  # perhaps RUN/best/valid/loss, whose folder is RUN/best/valid.loss
        run_dir, best, metric = path.as_posix().rpartition("/best/")
        path = Path(f"{run_dir}{best}{metric.replace('/', '.')}") if best else path
    if not path.is_dir():
        return None
    if not (path / MANIFEST).exists() and path.absolute().parent.name == "best":
        path = _best_in(path.absolute())
    if (path / MANIFEST).exists():
        return format.read(path, select=select)
    checkpoint, notes = Store(path, select=select).find(True, interim=interim)
    for note in notes:
        say(note)
    return checkpoint


def _best_in(folder: Path) -> Path:
    """Find the weights in `RUN/best/METRIC` that the run's newest checkpoint names as the best."""
    run_dir = folder.parent.parent
    for path in Store(run_dir).best().values():
        if path.parent == folder:
            return path
    folders = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
    raise NoCheckpointError(
        f"the newest checkpoint of the run in {run_dir} names the best of the weights in {folder}, and none "
        f"of those that it names is there; give the folder of the weights that you want: "
        f"{', '.join(folders) or 'the folder has none'}"
    )
