"""Victims, each a process and a session of its own: most start warm, in milliseconds (see `warm`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import warm

HERE = Path(__file__).resolve().parent
Victim = subprocess.Popen  # of a running script


class ForkServer:
    """Starts victims, warm or cold; `close` ends those that still run."""

    def __init__(self) -> None:
        self._victims: list[Victim[bytes]] = []

    def start(
        self,
        script: str,
        arguments: list[str],
        log: Path,
        *,
        hazard: str | None = None,
        cold: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Victim[bytes]:
        """Run `script` (in this folder, or a path) in a new session; its output is appended to `log`."""
        kind = subprocess.Popen if cold else warm.Popen
        armed = {"EVERSTEP_HAZARD": hazard} if hazard else {}
        with open(log, "a") as output:
            victim = kind(
                [sys.executable, str(HERE / f"{script}.py"), *arguments],
                env={**os.environ, **warm.ONE_THREAD, **armed, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._victims.append(victim)
        return victim

    def run(self, script: str, arguments: list[str], log: Path, *, hazard: str | None = None) -> int:
        """Run a script to its end; its exit status."""
        return self.start(script, arguments, log, hazard=hazard).wait(120)

    def close(self) -> None:
        """End every victim that still runs."""
        for victim in self._victims:
            victim.kill()  # its workers end when they see that
            victim.wait()  # or a test that failed would leave a process to the tests after it
