"""Victims, each a process and a session of its own: most start warm, in milliseconds (see `warm`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import warm

HERE = Path(__file__).resolve().parent
Victim = subprocess.Popen  # of a running script


class ForkServer:
    """Starts victims, warm or cold; `close` ends all that is left of them."""

    def __init__(self) -> None:
        self._groups: list[int] = []

    def start(
        self, script: str, arguments: list[str], log: Path, *, hazard: str | None = None, cold: bool = False
    ) -> Victim[bytes]:
        """Run `script` (in this folder) in a new session; its output is appended to `log`."""
        kind = subprocess.Popen if cold else warm.Popen
        armed = {"EVERSTEP_HAZARD": hazard} if hazard else {}
        with open(log, "a") as output:
            victim = kind(
                [sys.executable, str(HERE / f"{script}.py"), *arguments],
                env={**os.environ, **warm.ONE_THREAD, **armed},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._groups.append(victim.pid)
        return victim

    def run(self, script: str, arguments: list[str], log: Path, *, hazard: str | None = None) -> int:
        """Run a script to its end; its exit status."""
        return self.start(script, arguments, log, hazard=hazard).wait(60)

    def close(self) -> None:
        """End every victim and loader worker that still runs."""
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
