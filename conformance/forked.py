"""Starts of a Python program that are forked from a process which has imported its libraries.

The import of a large library takes ten times as long as a short training. Python's own fork server imports
it once; each start is a process of its own, which runs the file as `python FILE ...` would.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence

OURS = "score"
"""Imports what each start would import of ours: multiprocessing loads the main module again in each."""

LONGEST = 75
"""Characters of a temporary folder in which the fork server's socket has a path that the system allows."""


class Forked:
    """A start, with what `subprocess.Popen` has of it.

    Args:
        command: a Python file and its arguments.
        added: variables that are added to the environment.
        log: file for what it prints; it exists.
        preload: modules that the fork server imports before its first start.
    """

    def __init__(
        self, command: Sequence[str], added: Mapping[str, str], log: str, preload: Sequence[str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([OURS, *preload])
        self._process = context.Process(target=_run, args=([*command], {**added}, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end; return the exit status."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(command: list[str], added: dict[str, str], log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(added)
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except KeyboardInterrupt:  # as the interpreter ends by it
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
