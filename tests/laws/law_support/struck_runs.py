"""Short training runs, recorded by strace."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from everstep.proof.compare import compare_runs
from law_support.forkserver import ForkServer
from law_support.points import OPTIONS
from power_cut_model import Disk
from strace_record import Call, record

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
    """Starts of one kind in `folder`; `undisturbed` is never struck."""

    def __init__(self, server: ForkServer, folder: Path, kind: str) -> None:
        self._server, self.folder, self._kind = server, folder, KINDS[kind]
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
        return self._server.run("victim", self._arguments(run_dir), self.log, hazard=hazard)

    def _arguments(self, run_dir: Path) -> list[str]:
        return [str(run_dir), *OPTIONS, *self._kind.options]

    @staticmethod
    def _move(source: Path, target: Path) -> None:
        shutil.rmtree(target)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)  # with hard links

    def record(self, **environment: str) -> list[Call]:
        """The calls of the struck start below `runs`; `self.disk` is the disk before them."""
        self._move(self._prepared / "runs", self.run_dir.parent)
        self.disk = Disk(self.run_dir.parent)
        command = [str(HERE / "victim.py"), *self._arguments(self.run_dir)]
        calls = record(command, self.run_dir.parent, self.folder / "strace", **environment)
        self.require_exact("recorded")
        return calls

    def require_exact(self, where: str) -> None:
        """The struck run is the undisturbed one."""
        different = compare_runs(self.undisturbed, self.run_dir)
        assert not different, f"{where}: {different[:10]}"
