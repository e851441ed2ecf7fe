"""Store of the checkpoints in one run directory: commit, find, set aside, retain.

checkpoint              the name to resume from, and a checksum by which an edit is noticed
checkpoints/NAME/       the checkpoints
damaged/, superseded/   NAME.segment-N: set aside by the run's N-th start, never resumed from
pins.json               names that retention never deletes
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint import files, format, pointer
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.commit import (
    CommittedCheckpoint,
    is_equal,
    place,
    place_apart,
    require_finite,
    writing,
)
from everstep.checkpoint.exchange import WriterExchange
from everstep.checkpoint.format import Checkpoint, Phase
from everstep.checkpoint.manifest import MANIFEST, check_sizes, read_body
from everstep.checkpoint.pointer import PointerKind
from everstep.checkpoint.rank_store import leading
from everstep.checkpoint.retention import Facts, Retention, expendable, kept_best
from everstep.contracts.state import HostArray, Json
from everstep.durable import TMP, remedy, require_no_link
from everstep.errors import (
    CheckpointError,
    CheckpointVersionError,
    ConfigError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    nearest,
)
from everstep.state import Encoded
from everstep.untrusted_files import read_note


class Store:
    """Checkpoints of the run in `run_dir`, each whole or absent at any instant.

    Its user holds the run's lock.  Methods may run on a worker thread, one at a time.  Nothing is
    created before the first commit.

    Args:
        run_dir: the run directory, which exists.
        segment: number of this start, for manifests and for the names in damaged/ and superseded/; 0 to read.
        say: takes sentences for the user; by default nobody reads them.
        run: the run's id, which each checkpoint must have; None reads checkpoints of any run.
        require_newest: raises if a later start has taken over the run; called before each rename of a commit.
    """

    def __init__(
        self,
        run_dir: Path,
        segment: int = 0,
        say: Callable[[str], None] = lambda text: None,
        run: str | None = None,
        require_newest: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.segment = segment
        self.run = run
        self._say, self._require_newest = say, require_newest
        self._folder = self.run_dir / "checkpoints"
        self._pointer = self.run_dir / "checkpoint"
        self._pins = self.run_dir / "pins.json"
        self._damaged: set[CheckpointName] = set()
        self._facts: dict[CheckpointName, Facts] = {}
        self._said_edit = ""
        self._chosen: Checkpoint | None = None
        self._left: frozenset[CheckpointName] = frozenset()
        """Checkpoints on disk that this start does not continue from, and has not set aside yet."""

    def path(self, name: CheckpointName) -> Path:
        """Folder of a checkpoint, whether it exists or not."""
        return self._folder / str(name)

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

    def names(self) -> list[CheckpointName]:
        """List the names on disk, whole or not, oldest first, without those that `continue_from` leaves."""
        return [name for name in self._on_disk() if name not in self._left]

    def _on_disk(self) -> list[CheckpointName]:
        try:
            entries = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(CheckpointName.parse(entry) for entry in entries if CheckpointName.matches(entry))

    def clean(self) -> None:
        """Delete unfinished files of dead processes; to be called before the first commit."""
        apart = [
            path.parent
            for top in ("best", "exports", "dumps")
            for path in (self.run_dir / top).rglob(f"{TMP}*")
        ]
        for folder in (
            self.run_dir,
            self._folder,
            self.run_dir / "superseded",
            self.run_dir / "best",
            *apart,
        ):
            require_no_link(folder, self.run_dir)
            files.discard_leftovers(folder)

    # ------------------------------------------------------------------------------------ commit

    def commit(
        self,
        name: CheckpointName,
        structure: Json,
        arrays: Mapping[str, HostArray],
        *,
        digest: str,
        epoch: int,
        phase: Phase,
        partial: bool = False,
        meta: Json = None,
        guarded: Collection[str] = (),
        own: Encoded | None = None,
        replicated: Mapping[str, str] | None = None,
        ranks: WriterExchange | None = None,
    ) -> CommittedCheckpoint:
        """Write a checkpoint, durable and whole, or leave the directory as it was.

        A whole checkpoint of that name with the same digest is kept; with another digest it moves to
        `superseded/`; a damaged one moves to `damaged/`.

        Args:
            digest: of the whole state, by which equal checkpoints are recognised.
            epoch, phase, partial: as in `Checkpoint`.
            meta: JSON without NaN.  `keep_best` reads `meta["metrics"]` ({name: value}), without values of
                other steps by `meta["metric_steps"]` ({name: step}).
            guarded: names of arrays that must be finite.
            own: the tree that this rank has alone, see `format`; the other one is the common tree.
            replicated: digest of each thing that must be the same on all ranks, by name.
            ranks: on several ranks, the writer's exchange, inside its `save`; None on one process.

        Raises:
            RunLockedError: a later start has taken over the run.
            NonFiniteError: a guarded array has NaN or infinity; nothing was written.
            CheckpointError: the values cannot be written in this format.
            OSError: the disk failed; nothing of this checkpoint is left.
        """
        mine = own or Encoded({})
        # first: a bad state leaves the directory as it was
        require_finite(name, {**arrays, **mine.arrays}, guarded)
        facts: dict[str, Json] = {"epoch": epoch, "phase": phase, "partial": partial, "digest": digest}
        facts |= {"segment": self.segment, "meta": meta}
        common = Encoded(structure, dict(arrays))
        held = self._held(name)
        if ranks is None:
            size = self._put(name, held, digest, writing(name, facts, common, mine))
            return CommittedCheckpoint(name, self.path(name), size, size == 0, digest)
        write = leading(ranks, name, facts, common, mine, replicated or {}, held)
        # a rank that was stopped must find no folder of a later save under the name that it has heard
        size = self._put(name, held, None, write, token=secrets.token_hex(4))
        return CommittedCheckpoint(name, self.path(name), size, size == 0, ranks.digest)

    def _put(
        self,
        name: CheckpointName,
        held: Checkpoint | None,
        digest: str | None,
        write: Callable[[Path], int],
        token: str = "",
    ) -> int:
        """Let `write` fill the folder of a checkpoint, unless `held`, which has the name, is an equal one.

        Returns:
            Number of bytes written; 0 if the equal one was kept.
        """
        moved: Path | None = None

        def make_room() -> Path | None:
            nonlocal moved
            # as late as possible: a process that was stopped may wake up at any instruction
            self._require_newest()
            if self.path(name).exists():
                moved = self._set_aside(name, "damaged" if held is None else "superseded")
            return moved

        size = 0
        if held is None or held.digest != digest:
            files.make_dir(self._folder)
            size = place(self.path(name), write, make_room, token)
            self._forget(name)
        # after the folder is in place: the pointer names what is there; a kill may have come in between
        self._point_to(name)
        if moved is not None and held is not None and _is_open(held):
            with contextlib.suppress(OSError):
                # the new checkpoint is of the same boundary, run to its end
                files.retire(moved, top=self.run_dir)
        return size

    def _held(self, name: CheckpointName) -> Checkpoint | None:
        """Read the checkpoint that has a name; None if there is none that is whole."""
        require_no_link(self.path(name), self.run_dir)
        return self._whole(name)

    def adopt(self, checkpoint: Checkpoint, **facts: Json) -> dict[str, Json]:
        """Commit a copy of another run's checkpoint, with the best weights that it names.

        Args:
            facts: values that replace those of the same name in its `meta`.

        Returns:
            `meta` of the copy.

        Raises:
            CheckpointError, OSError: as `commit`.
        """
        foreign: Any = checkpoint.meta
        meta: dict[str, Json] = {**foreign, **facts, "run": self.run}
        # weights first: after a kill in between, no checkpoint here names weights that are missing
        self._adopt_best(checkpoint)
        told: dict[str, Json] = {"epoch": checkpoint.epoch, "phase": checkpoint.phase}
        told |= {"partial": checkpoint.partial, "digest": checkpoint.digest}
        told |= {"segment": self.segment, "meta": meta}
        others = checkpoint.path if checkpoint.ranks > 1 else None
        write = writing(checkpoint.name, told, checkpoint.common, checkpoint.own, others)
        self._put(checkpoint.name, self._held(checkpoint.name), checkpoint.digest, write)
        return meta

    def _adopt_best(self, checkpoint: Checkpoint) -> None:
        """Copy the best weights that another run's checkpoint names, if they are there and whole."""
        top = checkpoint.path.parent.parent
        for metric, names in kept_best(checkpoint.meta).items():
            for name in names:
                source, target = best_folder(top, metric) / name, self.best_folder(metric) / name
                if not source.exists():
                    continue
                try:
                    best = format.read(source)
                except CheckpointError as error:
                    self._say(f"best weights by {metric} are not copied: {error}")
                    continue
                if is_equal(target, best.digest):
                    continue
                if target.exists():
                    aside = f"best.{target.parent.name}.{name}.segment-{self.segment}"
                    files.move(target, self.run_dir / "superseded", aside, top=self.run_dir)
                about: Any = best.meta
                facts: dict[str, Json] = {"epoch": best.epoch, "phase": best.phase, "partial": best.partial}
                facts |= {"digest": best.digest, "segment": best.segment, "meta": {**about, "run": self.run}}
                place_apart(target, writing(best.name, facts, best.common, best.own), top=self.run_dir)

    def _whole(self, name: CheckpointName) -> Checkpoint | None:
        """Read the checkpoint of a name; None if it is missing, damaged or another run's."""
        if not self.path(name).exists():
            return None
        try:
            return self.read(name)
        except (DamagedCheckpointError, ForeignCheckpointError) as error:
            self._say(f"{error}; the folder moves to damaged/")
            return None

    def _point_to(self, name: CheckpointName) -> None:
        """Write the newest name into the `checkpoint` file; an edit by a person stays for the next start."""
        found = self._pointed()
        if found.kind is PointerKind.EDITED:
            if found.text != self._said_edit:  # said once for each edit, not at each save
                self._said_edit = found.text
                self._say(f"{self._pointer} was edited: the next start resumes from {found.text}")
            return
        if found.kind is PointerKind.DAMAGED:
            self._say(f"{self._pointer} was damaged ({found.stands!r}); it now names {name}")
        try:
            pointer.write(self._pointer, name)
        except OSError as error:  # the commit stands: a start finds the newest whole checkpoint anyway
            self._say(
                f"{self._pointer} could not be written ({error.strerror}); {name} is committed nevertheless"
            )

    def _set_aside(self, name: CheckpointName, where: str) -> Path:
        moved = files.move(
            self.path(name), self.run_dir / where, f"{name}.segment-{self.segment}", top=self.run_dir
        )
        self._forget(name)
        return moved

    def set_aside_best(self, path: Path) -> str:
        """Move a folder of damaged best weights to `damaged/`; returns a clause that says where it is now."""
        name = f"best.{path.parent.name}.{path.name}.segment-{self.segment}"
        try:
            return f"the folder is now {files.move(path, self.run_dir / 'damaged', name, top=self.run_dir)}"
        except OSError as error:
            return f"the folder cannot be moved to damaged/ ({error.strerror})"

    def check_best(self) -> list[str]:
        """Read every byte of the best weights.

        Damaged ones and those of another run move to `damaged/`, each with a sentence.
        """
        problems = []
        for path in self.best_folders():
            try:
                format.verify(path)
                self._require_own(read_body(path)["meta"], path)
            except (DamagedCheckpointError, ForeignCheckpointError) as error:
                problems.append(f"best weights in {path.parent.name}: {error}; {self.set_aside_best(path)}")
            except CheckpointVersionError as error:
                problems.append(f"best weights in {path.parent.name}: {error}")
        return problems

    def _forget(self, name: CheckpointName) -> None:
        self._facts.pop(name, None)
        self._damaged.discard(name)

    # ------------------------------------------------------------------------------------ reading

    def read(self, name: CheckpointName, rank: int = 0) -> Checkpoint:
        """Read and verify one checkpoint, as `rank` resumes from it; rank 0 verifies every byte of all ranks.

        Raises:
            NoCheckpointError: no checkpoint has the name; names the nearest.
            DamagedCheckpointError: says which file is damaged, and how.
            CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
            ForeignCheckpointError: another run wrote the checkpoint.
        """
        self._require(name)
        found = format.read(self.path(name), rank)
        if found.name != name:
            raise DamagedCheckpointError(
                f"checkpoint {name} is damaged: {self.path(name) / MANIFEST} belongs to {found.name}"
            )
        self._require_own(found.meta, found.path)
        return found

    def _require_own(self, meta: Json, path: Path) -> None:
        """Refuse a checkpoint that was copied from another run: its rows are in another journal."""
        run = meta.get("run") if isinstance(meta, dict) else None
        if self.run is not None and run is not None and run != self.run:
            raise ForeignCheckpointError(
                f"{path} belongs to the run {run}, not to {self.run} in {self.run_dir}: move it away; to "
                "continue from it here, give resume= its new path, or init_from= for its weights alone"
            )

    def facts(self) -> list[Facts]:
        """List the facts of all whole manifests, oldest first; each manifest is read once."""
        return [facts for name in self.names() if (facts := self._facts_of(name)) is not None]

    def find(
        self, which: bool | int | str | Path, *, mend: bool = True, interim: bool = True
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the checkpoint to resume from; returns it with notes on the choice, for the user.

        After a resume from it, call `continue_from`: a later checkpoint must not win at the next start.

        Args:
            which: True for the newest whole checkpoint, or for the name in an edited `checkpoint` file; a
                step (of two at one step, the checkpoint after the epoch); a name; or the path of a
                checkpoint's folder anywhere.
            mend: repair what a kill left unfinished; False for a run of another process.
            interim: with `which=True`, whether the checkpoint may be an interim one.

        Returns:
            None for the checkpoint only if the run never had one.

        Raises:
            NoCheckpointError: no checkpoint has that step, name or path; names the nearest.
            DamagedCheckpointError: the chosen checkpoint is damaged.
            CheckpointError: all checkpoints are damaged; says how, for each.
            CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
            ForeignCheckpointError: another run wrote the checkpoint.
        """
        if which is False:
            raise ConfigError("which=False finds nothing: give True, a step, a name or a path")
        if which is True:
            return self._find_by_itself(mend, interim)
        if isinstance(which, Path):
            return _read_elsewhere(which), []
        return self._read_chosen(self.at_step(which) if isinstance(which, int) else self.named(which)), []

    def _read_chosen(self, name: CheckpointName) -> Checkpoint:
        """Read the checkpoint that a person chose; an error lists the others, and none takes its place."""
        try:
            return self.read(name)
        except DamagedCheckpointError as error:
            others = ", ".join(str(other) for other in self.names() if other != name)
            raise DamagedCheckpointError(
                f"{error}; choose another one: {others or 'there is no other'}"
            ) from error

    def _find_by_itself(self, mend: bool, interim: bool) -> tuple[Checkpoint | None, list[str]]:
        there, found = self.names(), self._pointed()
        # where there is no other, an interim checkpoint is better than none
        names = [name for name in there if interim or not self._is_interim(name)] or there
        if found.kind is PointerKind.EDITED:
            return self._edited(found.text, there)
        notes: list[str] = []
        if not names and found.kind is PointerKind.ABSENT:
            return None, []
        if not names:
            held = self._held_back(found.text)
            if not mend:
                return format.read(held), []
            names = [self._bring_back(held, found.text, notes)]
        newest = self._newest_whole(names, notes)
        if found.kind is PointerKind.OURS and CheckpointName.parse(found.text) > max([*there, *names]):
            notes.append(
                f"checkpoint {found.text}, the last that was saved, is gone; resuming from {newest.name}"
            )
        if found.kind is PointerKind.DAMAGED and mend:
            notes.append(f"{self._pointer} was damaged ({found.stands!r}); it now names {newest.name} again")
            pointer.write(self._pointer, newest.name)
        return newest, notes

    def _pointed(self) -> pointer.Pointer:
        """Read the `checkpoint` file."""
        return pointer.read(self._pointer, [str(name) for name in self._on_disk()])

    def _name_in(self, text: str) -> str:
        """Return the name in a line of the `checkpoint` file; a person may have written a folder's path."""
        folder, name = os.path.split(text.rstrip("/"))
        here = not folder or (self.run_dir / folder).resolve() == self._folder.resolve()
        return name if here else text

    def _edited(self, text: str, names: list[CheckpointName]) -> tuple[Checkpoint, list[str]]:
        text = self._name_in(text)
        if text not in map(str, names):
            hint = nearest(text[:100], map(str, names))
            raise NoCheckpointError(
                f"{self._pointer} was edited to name {text!r:.1000}, which is not in {self._folder}: name "
                f"another one in its first line, or delete the file for the newest ({hint})"
            )
        note = f"{self._pointer} was edited: resuming from {text} (the newest is {names[-1]})"
        return self._read_chosen(CheckpointName.parse(text)), [note]

    def _held_back(self, last: str) -> Path:
        """Find the run's only checkpoint in superseded/, where a kill during its replacement left it.

        Raises:
            CheckpointError: the checkpoint is nowhere; a person decides whether to start from nothing.
        """
        held = list((self.run_dir / "superseded").glob(f"{last}.segment-*")) if last else []
        if not held:
            raise CheckpointError(
                f"{self._pointer} names {last!r}, but there is no checkpoint in {self._folder}: bring that "
                f"checkpoint back, or delete {self._pointer} to start from nothing"
            )
        return max(held, key=lambda path: path.stat().st_ctime_ns)  # a rename sets ctime: the last one moved

    def _bring_back(self, held: Path, last: str, notes: list[str]) -> CheckpointName:
        name = CheckpointName.parse(last)
        for each in (held, self.path(name)):
            require_no_link(each, self.run_dir)
        files.rename(held, self.path(name))
        files.fsync_folder(self._folder)
        notes.append(
            f"checkpoint {last} was about to be replaced when the run was killed; its folder is back"
        )
        return name

    def _newest_whole(self, names: list[CheckpointName], notes: list[str]) -> Checkpoint:
        wrong: list[str] = []
        for name in reversed(names):
            try:
                newest = self.read(name)
            except DamagedCheckpointError as error:
                self._damaged.add(name)  # supersede_after moves it to damaged/, not to superseded/
                wrong.append(str(error))
                continue
            notes += [f"{problem}; passed over" for problem in wrong]
            return newest
        raise CheckpointError(
            f"all {len(names)} checkpoints in {self._folder} are damaged: restore them from a copy, or move "
            f"them away together with {self._pointer} to start from nothing\n  " + "\n  ".join(wrong)
        )

    def newest(self) -> CheckpointName:
        """Name of the newest checkpoint with a whole manifest, interim checkpoints left out.

        Raises:
            NoCheckpointError: the run has no such checkpoint.
        """
        whole = [facts for facts in self.facts() if not facts.interim]
        if not whole:
            raise NoCheckpointError(f"{self._folder} has no whole checkpoint; train first")
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
                f"no checkpoint of step {step} in {self._folder}: {hint}; "
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
            raise NoCheckpointError(f"no checkpoint {text!r} in {self._folder}: {nearest(text, known)}")
        return known[text]

    def _require(self, name: CheckpointName) -> None:
        if not self.path(name).exists():
            self.named(str(name))

    # ------------------------------------------------------------------------------------ setting aside

    def continue_from(self, checkpoint: Checkpoint | None) -> None:
        """Leave later checkpoints, or all for None: they do not count any more, and `settle` moves them.

        A start that is refused before `settle` leaves the directory as it was.

        Args:
            checkpoint: a checkpoint of this run; or of another run, which `settle` copies here.
        """
        there, self._chosen = self._on_disk(), checkpoint
        if checkpoint is not None:
            taken = checkpoint.path != self.path(checkpoint.name)
            there = [n for n in there if n > checkpoint.name or (taken and n == checkpoint.name)]
        self._left = frozenset(there)

    @property
    def settled(self) -> bool:
        """Whether the next start finds exactly the checkpoints that this start continues from."""
        return self._chosen is None and not self._left

    def settle(self) -> None:
        """Make the choice of `continue_from` durable for later starts; called before the first save.

        Raises:
            OSError, CheckpointError: the disk failed; a second call tries again.
        """
        if self.settled:
            return
        chosen = self._chosen
        if chosen is None:
            self.supersede_all()
        else:
            if chosen.path != self.path(chosen.name):
                self.adopt(chosen, journal=None, rollbacks=[])
            self.supersede_after(chosen.name)
        self._chosen, self._left = None, frozenset()

    def supersede_after(self, name: CheckpointName) -> None:
        """Let later starts continue from `name`: later checkpoints go to superseded/, or damaged/.

        After a kill in the middle, the next start still resumes from `name`: until all have moved, the
        `checkpoint` file counts as edited.
        """
        self._require(name)
        later = [other for other in self._on_disk() if other > name]
        if later:
            pointer.write(self._pointer, name, as_edit=True)
        for other in reversed(later):
            self._set_aside(other, "damaged" if other in self._damaged else "superseded")
        # last: until all have moved, the edited pointer makes every start choose `name`
        if self._pointed()[:2] != (PointerKind.OURS, str(name)):
            pointer.write(self._pointer, name)

    def abandon(self, step: int, segment: int) -> None:
        """Set aside the checkpoints of `step` and later steps that starts up to `segment` saved.

        After a kill in the middle it is called again.

        Raises:
            CheckpointError: no other checkpoint would be left.
        """
        gone = [one.name for one in self.facts() if one.name.step >= step and one.segment <= segment]
        if not gone:
            return
        rest = [name for name in self.names() if name not in gone]
        if not rest:
            raise CheckpointError(
                f"the run goes back to before step {step}, and {self._folder} has no checkpoint of that "
                f"time: bring one back, or start over with resume=False"
            )
        found = self._pointed()
        # before the moves: a pointer to a checkpoint that has moved would be reported as a loss
        if found.kind is PointerKind.OURS and found.text in map(str, gone):
            pointer.write(self._pointer, rest[-1])
        for name in reversed(gone):
            self._set_aside(name, "superseded")

    def supersede_all(self) -> None:
        """Set every checkpoint aside, so that the next start begins from nothing.

        The pointer goes first: after a kill in the middle, the next start takes the newest that is left.
        """
        if self._pointer.exists():
            files.unlink(self._pointer)
            files.fsync_folder(self.run_dir)
        for name in reversed(self._on_disk()):
            self._set_aside(name, "superseded")

    # ------------------------------------------------------------------------------------ retention

    def retain(self, policy: Retention) -> list[CheckpointName]:
        """Delete the checkpoints that `policy` does not keep; reads manifests only; called after a commit.

        The newest whole checkpoint stays, and so do the name in the `checkpoint` file, pinned and damaged
        checkpoints.  An error of the disk is a sentence for the user, because the commit stands.

        Returns:
            Names of the deleted checkpoints, oldest first.
        """
        deleted = []
        for name in self.expendable(policy):
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
        try:
            pinned = self.pins()
        except CheckpointError as error:
            self._say(f"no old checkpoint is deleted: {error}")
            return []  # without the pins nobody knows which checkpoints must stay
        present = self.facts()
        # a checkpoint that a person named must be there when the next start follows the edit
        named = self._name_in(self._pointed().text)
        pointed = {facts.name for facts in present if str(facts.name) == named}
        return expendable(policy, present, pinned | pointed)

    def _facts_of(self, name: CheckpointName) -> Facts | None:
        """Read the facts from the manifest, once; None where the manifest or sizes are damaged."""
        if name not in self._facts and name not in self._damaged:
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

    def _is_interim(self, name: CheckpointName) -> bool:
        facts = self._facts_of(name)
        return facts is not None and facts.interim

    def pins(self) -> set[CheckpointName]:
        """Return the pinned names.

        Raises:
            CheckpointError: the file of pins is not a list of names.
        """
        try:
            return {CheckpointName.parse(text) for text in read_note(self._pins)}
        except FileNotFoundError:
            return set()
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{self._pins} is not a JSON list of checkpoint names ({error}): correct or delete it"
            ) from error

    def pin(self, name: CheckpointName) -> None:
        """Keep a checkpoint, whatever retention says."""
        self._require(name)
        self._write_pins(self.pins() | {name})

    def unpin(self, name: CheckpointName) -> None:
        """Let retention decide about a checkpoint again.

        Raises:
            NoCheckpointError: the checkpoint is not pinned.
        """
        pinned = self.pins()
        if name not in pinned:
            raise NoCheckpointError(
                f"checkpoint {name} is not pinned: {nearest(str(name), map(str, pinned))}"
            )
        self._write_pins(pinned - {name})

    def _write_pins(self, names: Collection[CheckpointName]) -> None:
        files.write_whole(self._pins, json.dumps(sorted(map(str, names)), indent=1).encode() + b"\n")


def best_folder(run_dir: Path, metric: str) -> Path:
    """Folder of a run's best weights by `metric`."""
    return run_dir / "best" / metric.replace("/", ".")


def _is_open(checkpoint: Checkpoint) -> bool:
    """Whether an interruption left its boundary inside an evaluation."""
    return isinstance(checkpoint.meta, dict) and bool(checkpoint.meta.get("open"))


def _read_elsewhere(path: Path) -> Checkpoint:
    if not (path / MANIFEST).exists():
        around = [path.parent, path, path / "checkpoints"]
        known = [other.parent for folder in around for other in folder.glob(f"*/{MANIFEST}")]
        raise NoCheckpointError(
            f"no checkpoint in {path} (it has no {MANIFEST}): {nearest(str(path), map(str, known))}"
        )
    return format.read(path)
