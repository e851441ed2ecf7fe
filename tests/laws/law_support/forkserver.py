"""Victims, each a process and a session of its own: most start warm, in milliseconds (see `warm`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm

HERE = Path(__file__).resolve().parent
Victim = subprocess.Popen  # of a running script


class ForkServer:
    """Starts victims, warm or cold; `close` ends those that still run."""

    def __init__(self) -> None:
        self._victims: list[Victim[bytes]] = []

    def start(self, script: str, arguments: list[str], log: Path, *, cold: bool = False, **more: Any) -> Any:
        """Run `script` (in this folder, or a path) in a new session; its output is appended to `log`.

        `more`: a `hazard`, or further variables in an `environment`.
        """
        armed = {"EVERSTEP_HAZARD": more["hazard"]} if more.get("hazard") else {}
        environment = {**os.environ, **warm.ONE_THREAD, **armed, **more.get("environment", {})}
        command = [sys.executable, str(HERE / f"{script}.py"), *arguments]
        with open(log, "a") as out:
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            kind: Any = subprocess.Popen if cold else warm.Popen
            self._victims.append(kind(command, env=environment, start_new_session=True, **files))
        return self._victims[-1]

    def run(self, script: str, arguments: list[str], log: Path, **more: Any) -> int:
        """Run a script to its end; its exit status."""
        return int(self.start(script, arguments, log, **more).wait(120))

    def close(self) -> None:
        """End every victim that still runs."""
        for victim in self._victims:
            victim.kill()  # its workers end when they see that
            victim.wait()  # or a test that failed would leave a process to the tests after it
