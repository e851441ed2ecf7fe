"""The points of `everstep.hazard` that a victim passes, and one start that is struck at one of them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer

OPTIONS = (
    *("--epochs", "2", "--batch", "26", "--every", "2", "--patience", "9"),
    *("--frozen", "6"),
)
"""Ten steps, a save after every second one and every epoch, best weights, content that checkpoints share, for
six steps the same, and retention at work."""


class Points:
    """A short run's starts, each of which can be struck at one hazard point.

    Args:
        folder: where everything lies; the undisturbed run in `undisturbed`.
        killed_at: None to strike the first start; else a point at which the first start is killed, to
            strike the second one.
        more: options of the victim.
    """

    def __init__(self, server: ForkServer, folder: Path, killed_at: str | None, *more: str) -> None:
        self._server, self._folder, self._more = server, folder, more
        self.log = folder / "log"
        self.undisturbed = folder / "undisturbed"
        assert self.start(self.undisturbed) == 0, self.log.read_text()
        assert any(self.undisturbed.glob("checkpoints/*/*.copy.*")), "no checkpoints share anything"
        self._prepared = None if killed_at is None else folder / "prepared"
        if self._prepared is not None:
            assert self.start(self._prepared, f"kill:{killed_at}") == -9, self.log.read_text()

    def start(self, run_dir: Path, hazard: str | None = None) -> int:
        """One start of the victim; its exit status.  `self.log` has its output alone."""
        self.log.unlink(missing_ok=True)
        self._diary(run_dir).unlink(missing_ok=True)
        arguments = [str(run_dir), "--diary", str(self._diary(run_dir)), *OPTIONS, *self._more]
        return self._server.run("victim", arguments, self.log, hazard=hazard)

    def course(self) -> list[str]:
        """The points of the library that the start reaches, in order."""
        trace = self._folder / "trace"
        assert self.start(self.fresh(), f"trace:{trace}") == 0, self.log.read_text()
        return [point for point in trace.read_text().split() if not point.startswith("law.")]

    def counts(self) -> dict[str, int]:
        """How often the start reaches each point."""
        return Counter(self.course())

    def strikes(self) -> Iterator[str]:
        """POINT:COUNT for the first, middle and last time that each point is reached."""
        for point, count in sorted(self.counts().items()):
            yield from (f"{point}:{n}" for n in sorted({1, (count + 1) // 2, count}))

    def fresh(self) -> Path:
        """A run directory as the struck start finds it."""
        run_dir = self._folder / "struck"
        shutil.rmtree(run_dir, ignore_errors=True)
        if self._prepared is not None:
            shutil.copytree(self._prepared, run_dir)
        return run_dir

    def steps(self, run_dir: Path) -> int:
        """How many steps the last start began."""
        return sum(entry.phase == "body" for entry in diary.read(self._diary(run_dir)))

    def require_exact(self, run_dir: Path, strike: str) -> None:
        """The run is the undisturbed one."""
        different = compare_runs(self.undisturbed, run_dir)
        assert not different, f"{strike}: {different[:10]}\n{self.log.read_text()}"
        assert "resume differs" not in self.log.read_text(), f"{strike}\n{self.log.read_text()}"

    def require_clean(self, run_dir: Path, strike: str) -> None:
        """Nothing half done is left in it."""
        left = list(run_dir.rglob(".tmp-*"))
        assert not left, f"{strike}: {left}"

    def _diary(self, run_dir: Path) -> Path:
        return run_dir.with_suffix(".diary")
