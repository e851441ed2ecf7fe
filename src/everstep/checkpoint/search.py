"""Search for the checkpoint to resume from, among whole and damaged ones and what kills left behind."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint import files, pointer, reading, shared
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.manifest import MANIFEST
from everstep.checkpoint.pointer import PointerKind
from everstep.checkpoint.saved_checkpoints import SavedCheckpoints
from everstep.durable import require_no_link
from everstep.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    NoCheckpointError,
    nearest,
)


class Search:
    """Search among the checkpoints of one run.

    Args:
        saved: the checkpoints.
        mend: repair what a kill left unfinished; False for a run of another process.
    """

    def __init__(self, saved: SavedCheckpoints, *, mend: bool) -> None:
        self._saved, self._mend = saved, mend
        self._folder, self._pointer = saved.folder, saved.pointer_file

    def find(
        self, which: bool | int | str | Path, *, interim: bool = True
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the checkpoint to resume from; returns it with notes on the choice, for the user.

        After a resume from it, call `continue_from`: a later checkpoint must not win at the next start.

        Args:
            which: True for the newest whole checkpoint, or for the name in an edited `checkpoint` file; a
                step (of two at one step, the checkpoint after the epoch); a name; or the path of a
                checkpoint's folder anywhere.
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
            found, notes = self._by_itself(interim)
        elif isinstance(which, Path):
            found, notes = self._elsewhere(which), []
        else:
            name = self._saved.at_step(which) if isinstance(which, int) else self._saved.named(which)
            found, notes = self._read_chosen(name), []
        flaws = () if found is None else found.flaws
        # the files of another run are left as they are
        mend = self._mend and not isinstance(which, Path)
        return found, [*notes, *(shared.heal(flaw) if mend else flaw.how for flaw in flaws)]

    def _elsewhere(self, path: Path) -> Checkpoint:
        if not (path / MANIFEST).exists():
            around = [path.parent, path, path / "checkpoints"]
            known = [other.parent for folder in around for other in folder.glob(f"*/{MANIFEST}")]
            raise NoCheckpointError(
                f"no checkpoint in {path} (it has no {MANIFEST}): {nearest(str(path), map(str, known))}"
            )
        return reading.read(path, regions=self._saved.regions)

    def _read_chosen(self, name: CheckpointName) -> Checkpoint:
        """Read the checkpoint that a person chose; an error lists the others, and none takes its place."""
        try:
            return self._saved.read(name)
        except DamagedCheckpointError as error:
            others = ", ".join(str(other) for other in self._saved.names() if other != name)
            raise DamagedCheckpointError(
                f"{error}; choose another one: {others or 'there is no other'}"
            ) from error

    def _by_itself(self, interim: bool) -> tuple[Checkpoint | None, list[str]]:
        there, found = self._saved.names(), self._saved.pointed()
        # where there is no other, an interim checkpoint is better than none
        names = [name for name in there if interim or not self._saved.is_interim(name)] or there
        if found.kind is PointerKind.EDITED:
            return self._edited(found.text, there)
        notes: list[str] = []
        if not names and found.kind is PointerKind.ABSENT:
            return None, []
        if not names:
            held = self._held_back(found.text)
            if not self._mend:
                return reading.read(held, wanted=self._saved.wanted, regions=self._saved.regions), []
            names = [self._bring_back(held, found.text, notes)]
        newest = self._newest_whole(names, notes)
        if found.kind is PointerKind.OURS and CheckpointName.parse(found.text) > max([*there, *names]):
            notes.append(
                f"checkpoint {found.text}, the last that was saved, is gone; resuming from {newest.name}"
            )
        if found.kind is PointerKind.DAMAGED and self._mend:
            notes.append(f"{self._pointer} was damaged ({found.stands!r}); it now names {newest.name} again")
            pointer.write(self._pointer, newest.name)
        return newest, notes

    def _edited(self, text: str, names: list[CheckpointName]) -> tuple[Checkpoint, list[str]]:
        text = self._saved.name_in(text)
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
        held = list((self._saved.run_dir / "superseded").glob(f"{last}.segment-*")) if last else []
        if not held:
            raise CheckpointError(
                f"{self._pointer} names {last!r}, but there is no checkpoint in {self._folder}: bring that "
                f"checkpoint back, or delete {self._pointer} to start from nothing"
            )
        return max(held, key=lambda path: path.stat().st_ctime_ns)  # a rename sets ctime: the last one moved

    def _bring_back(self, held: Path, last: str, notes: list[str]) -> CheckpointName:
        name = CheckpointName.parse(last)
        for each in (held, self._saved.path(name)):
            require_no_link(each, self._saved.run_dir)
        files.rename(held, self._saved.path(name))
        files.fsync_folder(self._folder)
        notes.append(
            f"checkpoint {last} was about to be replaced when the run was killed; its folder is back"
        )
        return name

    def _newest_whole(self, names: list[CheckpointName], notes: list[str]) -> Checkpoint:
        wrong: list[str] = []
        for name in reversed(names):
            try:
                newest = self._saved.read(name)
            except DamagedCheckpointError as error:
                self._saved.damaged.add(name)  # supersede_after moves it to damaged/, not to superseded/
                wrong.append(str(error))
                continue
            notes += [f"{problem}; passed over" for problem in wrong]
            return newest
        raise CheckpointError(
            f"all {len(names)} checkpoints in {self._folder} are damaged: restore them from a copy, or move "
            f"them away together with {self._pointer} to start from nothing\n  " + "\n  ".join(wrong)
        )
