"""What the tests of the faults share: the doors, and runs of the program."""

from __future__ import annotations

import shutil
from pathlib import Path

from law_support import diary
from law_support.forkserver import ForkServer
from law_support.program import Program

from everstep.checkpoint import CheckpointName, Store

VICTIM = str(Path(__file__).with_name("faults_victim"))
SMALL = ("--batch", "16", "--epochs", "3", "--every", "3")
PER_EPOCH, STEPS, EVERY = 8, 24, 3

DOORS = ("loop", "supervisor", "trainer")

Files = dict[str, bytes]


class Run(Program):
    """A run of the program behind one door; see `faults_victim`."""

    def __init__(self, server: ForkServer, folder: Path, door: str, *options: str) -> None:
        super().__init__(server, folder, "--door", door, *SMALL, *options, script=VICTIM)
        self._begun = 0

    def once(self, *more: str, hazard: str | None = None, **environment: str) -> int:
        """One start, to its end; the exit status."""
        self._begun = len(self.said())
        return self.start(*more, hazard=hazard, **environment).wait(120)

    def dies(self, hazard: str, *more: str) -> None:
        """One start, which `hazard` kills."""
        assert self.once(*more, hazard=hazard) == -9, f"{hazard} struck nothing\n{self.said()}"

    def ends(self, status: int, *more: str, hazard: str | None = None, **environment: str) -> str:
        """One start, which ends with `status`; what it said."""
        found = self.once(*more, hazard=hazard, **environment)
        assert found == status, f"status {found}, not {status}\n{self.said()}"
        return self.last_said()

    def last_said(self) -> str:
        """What the last start printed."""
        return self.said()[self._begun :]

    def last_bodies(self) -> list[int]:
        """The steps whose bodies the last start entered."""
        return [entry.step for entry in diary.read(self._diaries[-1]) if entry.phase == "body"]

    def entries(self) -> list[diary.Entry]:
        """The diary of the last start."""
        return diary.read(self._diaries[-1])

    def names(self) -> list[CheckpointName]:
        """The committed checkpoints, oldest first."""
        return Store(self.run_dir).names()

    def newest(self) -> Path:
        """The folder of the newest checkpoint."""
        return self.run_dir / "checkpoints" / str(self.names()[-1])

    def committed(self) -> dict[str, Files]:
        """The bytes of each committed checkpoint."""
        folders = (self.run_dir / "checkpoints" / str(name) for name in self.names())
        return {
            folder.name: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders
        }

    def copied_to(self, run: Run) -> Run:
        """Another run with this one's files."""
        shutil.copytree(self.run_dir, run.run_dir)
        return run

    def require_clean(self) -> None:
        """Nothing half done is left."""
        assert not list(self.run_dir.rglob(".tmp-*")), self.said()
