"""Short training runs under strace: recorded, struck at one call after another, started again, compared."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import strace_record
from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer
from law_support.points import OPTIONS
from power_cut_model import Disk
from strace_log import Call
from strace_record import Ended

HERE = Path(__file__).parent
START = "kill:checkpoint.fsync:14"
"""How the first start ends where the second one is struck."""


class Kind(NamedTuple):
    """Options of the victim, and whether the second start is struck, after a kill inside a save."""

    options: tuple[str, ...] = ()
    again: bool = False


KINDS = {
    "first start": Kind(),
    "recovery": Kind(again=True),
    "rollback": Kind(("--bad", "33")),
}
"""Ten steps with saves, best weights, retention and shared content: begun, resumed, rolled back."""


class Runs:
    """Starts of one kind in `folder`, each of which can be struck; `undisturbed` is never struck."""

    def __init__(self, server: ForkServer, folder: Path, kind: str, victim: str = "victim") -> None:
        self._server, self.folder, self._kind, self._victim = server, folder, KINDS[kind], victim
        self.undisturbed, self.run_dir = folder / "undisturbed", folder / "runs" / "struck"
        self._prepared = folder / "prepared"
        self.log = folder / "log"
        self.run_dir.parent.mkdir()
        (self._prepared / "runs").mkdir(parents=True)
        assert self.start(self.undisturbed) == 0, self.log.read_text()
        if self._kind.again:
            assert self.start(self.run_dir, START) == -9, self.log.read_text()
            self._move(self.run_dir.parent, self._prepared / "runs")

    def start(self, run_dir: Path, hazard: str | None = None) -> int:
        """One start, undisturbed by strace; its exit status."""
        self.log.unlink(missing_ok=True)
        return self._server.run(self._victim, self._arguments(run_dir), self.log, hazard=hazard)

    def _arguments(self, run_dir: Path) -> list[str]:
        return [str(run_dir), "--diary", str(self._diary), *OPTIONS, *self._kind.options]

    @property
    def _diary(self) -> Path:
        return self.folder / "diary"

    @property
    def _command(self) -> list[str]:
        self._diary.unlink(missing_ok=True)
        return [str(HERE / f"{self._victim}.py"), *self._arguments(self.run_dir)]

    def fresh(self) -> None:
        """The folder of the run as the struck start finds it."""
        self._move(self._prepared / "runs", self.run_dir.parent)

    @staticmethod
    def _move(source: Path, target: Path) -> None:
        shutil.rmtree(target)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)  # with hard links

    def record(self, **environment: str) -> list[Call]:
        """The calls of the struck start below `runs`; `self.disk` is the disk before them."""
        self.fresh()
        self.disk = Disk(self.run_dir.parent)
        ended = strace_record.record(self._command, self.run_dir.parent, self.folder / "strace", environment)
        assert ended.status == 0, ended.output
        self.require_exact("recorded")
        return ended.calls

    def strike(self, call: Call, way: str) -> Call | None:
        """Strike, start again where it ended; returns what was struck, None where nothing was.

        Raises:
            AssertionError: the run is not the undisturbed one, or something half done is left.
        """
        self.fresh()
        ended, hit = strace_record.struck(
            self._command, self.run_dir.parent, self.folder / "strace", call, way
        )
        where = f"{way} at {call}, status {ended.status}"
        if hit is not None:
            where += f", struck {hit}"
        if ended.status > 0 and hit is not None:  # else a file of the program's own was refused
            self._require_words(ended, where)
        if ended.status:
            assert self.start(self.run_dir) == 0, f"{where}\n{self.log.read_text()}"
            assert "resume differs" not in self.log.read_text(), f"{where}\n{self.log.read_text()}"
        self.require_exact(f"{where}\n{ended.output}")
        if ended.status == -9:
            left = list(self.run_dir.rglob(".tmp-*"))
            assert not left, f"{where}: {left}"
        return hit

    def _require_words(self, ended: Ended, where: str) -> None:
        """A run that was refused has said so before its second step, or ended with what to do.

        After a rollback, too, the run is opened: a directory that cannot be used is told with its remedy.
        """
        steps = sum(entry.phase == "body" for entry in diary.read(self._diary))
        words = "RunDirError" in ended.output or "the trial save" in ended.output
        last = ended.output.splitlines()[-1]
        assert (steps <= 1 and words) or "start again" in last or "RunDirError" in last, (
            f"{where}, after {steps} steps\n{ended.output}"
        )

    def require_exact(self, where: str) -> None:
        """The struck run is the undisturbed one."""
        different = compare_runs(self.undisturbed, self.run_dir)
        assert not different, f"{where}: {different[:10]}"
