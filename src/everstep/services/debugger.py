"""Debugger that stops at the next line of the user's own code, behind everstep and all libraries."""

from __future__ import annotations

import os
import pdb
import sys
import sysconfig
from collections.abc import Callable
from functools import cache

_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")


class _Debugger(pdb.Pdb):
    """Debugger that does not stop in everstep, Python's own modules and installed packages.

    Args:
        leave: ends the process; called by the command `quit`.
    """

    def __init__(self, leave: Callable[[], object]) -> None:
        # any pattern makes bdb ask `is_skipped_module`; this one matches no module
        super().__init__(skip=["-"], nosigint=True)
        self._leave = leave

    def is_skipped_module(self, module_name: str | None) -> bool:
        return _is_library(getattr(sys.modules.get(module_name or ""), "__file__", None))

    def set_quit(self) -> None:
        self._leave()


@cache  # asked at each call and line until the debugger stops
def _is_library(file: str | None) -> bool:
    """Whether a module's file is not the user's; modules without a file are Python's."""
    folders = [sysconfig.get_path(name) for name in _PLACES] + [os.path.dirname(os.path.dirname(__file__))]
    real = os.path.realpath(file or "")
    return file is None or any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders)


def debug(leave: Callable[[], object]) -> None:
    """Stop at the next line of the user's code that runs: of a loop's body, or of a task's step."""
    _Debugger(leave).set_trace(sys._getframe())
