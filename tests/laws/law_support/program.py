"""One victim's run from first start to end, with whatever is done to it in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import CheckpointName, Store
from everstep.polling import wait_until
from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer, Victim


class Program:
    """A run directory and the starts of one script on it.

    Args:
        folder: where the run, the log and the diaries lie.
        options: of the victim, the same at every start.
        script: the victim; in `law_support`, or a path without ".py".
    """

    def __init__(self, server: ForkServer, folder: Path, *options: str, script: str = "victim") -> None:
        self._server, self._options, self._script = server, options, script
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.run_dir, self._log = folder, folder / "run", folder / "log"
        self._diaries: list[Path] = []

    def start(self, *more: str, hazard: str | None = None, **environment: str) -> Victim:
        """Start the script, for this start with `more` options, a hazard and variables of the environment."""
        self._diaries.append(self._folder / f"{len(self._diaries) + 1}.diary")
        arguments = [str(self.run_dir), "--diary", str(self._diaries[-1]), *self._options, *more]
        return self._server.start(self._script, arguments, self._log, hazard=hazard, environment=environment)

    def run(self, *more: str, hazard: str | None = None) -> int:
        """Start the script; how it ended."""
        return self.start(*more, hazard=hazard).wait(120)

    def finish(self, *more: str) -> None:
        """Start the script and let it end well."""
        status = self.run(*more)
        assert status == 0, f"status {status}\n{self.said()}"

    def wait_for(self, victim: Victim, what: str | Callable[[], bool], step: int = 0) -> None:
        """Wait until the running start has come to a phase (at `step` or later), or `what` is true."""

        def reached() -> bool:
            entries = diary.read(self._diaries[-1])
            return any(entry.phase == what and entry.step >= step for entry in entries)

        happened = reached if isinstance(what, str) else what
        came = wait_until(lambda: happened() or victim.poll() is not None, 120)
        assert came and victim.poll() is None, f"it did not come to {what}\n{self.said()}"

    def said(self) -> str:
        """All that its starts printed."""
        return self._log.read_text() if self._log.exists() else ""

    def bodies(self) -> list[int]:
        """The steps whose bodies were entered, over all starts, in order."""
        return [entry.step for path in self._diaries for entry in diary.read(path) if entry.phase == "body"]

    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        return self._names()[-1].step

    def require_equal(self, undisturbed: Path) -> None:
        """The finished run is the undisturbed one, and each resume verified itself."""
        different = compare_runs(undisturbed, self.run_dir)
        assert not different, f"{different[:10]}\n{self.said()}"
        assert "resume differs" not in self.said(), self.said()

    def _names(self) -> list[CheckpointName]:
        return Store(self.run_dir).names()


def workers_of(pid: int) -> list[int]:
    """The child processes of `pid`."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
