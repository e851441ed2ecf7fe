"""Live line of a notebook's cell: one output of the cell, which is replaced at each redraw.

The output stands where the loop was entered, and printed lines follow below it.  It stays with its last
content when the loop ends, so that the saved notebook says where the run stood.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

from everstep.services.live_line import write

_COLUMNS = 110
"""Characters in a line; a cell of a notebook does not tell its width."""


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel, whose cells can show a live line."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and "ipykernel" in sys.modules else None
    return hasattr(shell, "kernel")


class NotebookLine:
    """Live line, or lines, of a cell; see `LiveLine`, whose methods it has."""

    def __init__(self, lines: Callable[[int, bool], list[str]]) -> None:
        self.stream: TextIO = sys.stdout
        self._lines = lines
        self._output: Any = None

    def open(self) -> None:
        """Draw nothing: the first draw makes the output."""

    def close(self) -> None:
        """Leave the last content in the cell."""

    def draw(self) -> None:
        display: Any = import_module("IPython.display").display
        # plain text: no markup, and every viewer of notebooks shows this
        content = {"text/plain": "\n".join(self._lines(_COLUMNS, False))}
        if self._output is None:
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)

    def print(self, text: str) -> None:
        write(self.stream, text + "\n")
