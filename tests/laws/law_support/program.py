"""One victim's run from first start to end, with whatever is done to it in between."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from everstep.checkpoint import CheckpointName, Store
from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer, Victim


class Program:
    """A run directory and the starts of one script on it.

    The run, alone in its folder, the log and the diaries lie in `folder`; `options` are the victim's at every
    start; `script` is in `law_support`, or a path without ".py".
    """

    def __init__(self, server: ForkServer, folder: Path, *options: str, script: str = "victim") -> None:
        self._server, self._options, self._script = server, options, script
        self._folder, self.run_dir, self._log = folder, folder / "runs" / "run", folder / "log"
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._diaries: list[Path] = []

    def arguments(self) -> list[str]:
        """Those of the next start."""
        self._diaries.append(self._folder / f"{len(self._diaries) + 1}.diary")
        return [str(self.run_dir), "--diary", str(self._diaries[-1]), *self._options]

    def start(self, *more: str, hazard: str | None = None, **environment: str) -> Victim:
        """Start the script, for this start with `more` options, a hazard and variables of the environment."""
        arguments = [*self.arguments(), *more]
        return self._server.start(self._script, arguments, self._log, hazard=hazard, environment=environment)

    def run(self, *more: str, hazard: str | None = None) -> int:
        """Start the script; how it ended."""
        return self.start(*more, hazard=hazard).wait(120)

    def finish(self, *more: str, hazard: str | None = None) -> None:
        """Start the script and let it end well."""
        status = self.run(*more, hazard=hazard)
        assert status == 0, f"status {status}\n{self.said()}"

    def said(self) -> str:
        """All that its starts printed."""
        return self._log.read_text() if self._log.exists() else ""

    def bodies(self) -> list[int]:
        """The steps whose bodies were entered, over all starts, in order."""
        return [entry.step for path in self._diaries for entry in diary.read(path) if entry.phase == "body"]

    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        return self._names()[-1].step

    def require_equal(self, undisturbed: Path, where: str = "") -> None:
        """The finished run is the undisturbed one, each resume verified itself, nothing half done is left."""
        different = compare_runs(undisturbed, self.run_dir)
        assert not different, f"{where}: {different[:10]}\n{self.said()}"
        assert "resume differs" not in self.said(), f"{where}\n{self.said()}"
        left = list(self.run_dir.rglob(".tmp-*"))
        assert not left, f"{where}: {left}"

    def _names(self) -> list[CheckpointName]:
        return Store(self.run_dir).names()


OPTIONS = ("--epochs", "2", "--batch", "26", "--every", "2", "--patience", "9", "--frozen", "6")
"""Ten steps, a save after every second one and every epoch, best weights, content that checkpoints share, for
six steps the same, and retention at work."""


class Points:
    """A short run, begun again and again, whose start can be struck at any point of `everstep.hazard`.

    It is the first one; if it is `killed_at` a point, the second.  `more` are options of the victim.
    """

    def __init__(self, server: ForkServer, folder: Path, killed_at: str | None, *more: str) -> None:
        self._server, self._folder, self._more = server, folder, more
        undisturbed = Program(server, folder / "undisturbed", *OPTIONS, *more)
        undisturbed.finish()
        self.undisturbed = undisturbed.run_dir
        self._prepared: Path | None = None
        if killed_at is not None:
            prepared = Program(server, folder / "prepared", *OPTIONS, *more)
            assert prepared.run(hazard=f"kill:{killed_at}") == -9, prepared.said()
            self._prepared = prepared.run_dir

    def fresh(self) -> Program:
        """A program whose next start is the one to strike."""
        shutil.rmtree(self._folder / "struck", ignore_errors=True)
        program = Program(self._server, self._folder / "struck", *OPTIONS, *self._more)
        if self._prepared is not None:
            shutil.copytree(self._prepared, program.run_dir)
        return program

    def course(self) -> list[str]:
        """The points of the library that the start reaches, in order."""
        trace = self._folder / "trace"
        trace.unlink(missing_ok=True)
        self.fresh().finish(hazard=f"trace:{trace}")
        return [point for point in trace.read_text().split() if not point.startswith("law.")]

    def strikes(self, every_time: bool = False) -> list[str]:
        """POINT:COUNT for every time that each point is reached, or for the first, middle and last."""
        every, some = (lambda n: range(1, n + 1)), (lambda n: sorted({1, (n + 1) // 2, n}))
        counts = sorted(Counter(self.course()).items())
        return [f"{point}:{at}" for point, n in counts for at in (every if every_time else some)(n)]
