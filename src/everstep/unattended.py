"""What a program and the command that has started it tell each other: `everstep run`, or a drill.

A program reports to `everstep run` its runs, and the error that ends it: one JSON object a line, at the end
of the file that EVERSTEP_RUN_REPORTS names.  Without that variable, or where there is no such file (`everstep
run` has ended, the program is on another machine), nothing is done.

A drill tells the processes that it starts, through their environment:

| variable | meaning |
|---|---|
| EVERSTEP_DRILL | file that a witness of each run writes, see `everstep.services.witness` |
| EVERSTEP_DRILL_SEED | seed of a run that was given none |
| EVERSTEP_DRILL_LIMIT | steps after which a run is left, see `everstep.services.witness` |
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

SEED, LIMIT = "EVERSTEP_DRILL_SEED", "EVERSTEP_DRILL_LIMIT"
REPORTS = "EVERSTEP_RUN_REPORTS"
STARTED = os.getpid(), os.getppid()
"""This process and its parent, as everstep is imported: where the parent dies, the number becomes another."""

S = TypeVar("S")


def tell(word: str, **fields: Any) -> None:
    """Report something to `everstep run`; from any process and thread."""
    if path := os.environ.get(REPORTS):
        import json

        with suppress(OSError):
            append_line(path, json.dumps({"word": word, **fields}).encode(), new=False)


def tell_error(error: BaseException) -> None:
    """Report the error that ends this program: the names of its classes, and its first characters."""
    from everstep.redaction import redacted

    kinds = [kind.__name__ for kind in type(error).__mro__]
    tell("error", kinds=kinds, what=redacted(f"{type(error).__name__}: {error}")[:400])


def tell_of_errors() -> None:
    """Report the error of which Python prints the traceback; called where everstep is imported."""
    if not os.environ.get(REPORTS):
        return
    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell_error(error)
        original(kind, error, trace)

    sys.excepthook = hook


def seed_or_drilled(seed: S) -> S | int:
    """Return a `seed=` argument; where none was given the drill's, so that two programs are comparable."""
    drill_seed = os.environ.get(SEED)
    return int(drill_seed) if seed is None and drill_seed else seed


def append_line(path: str, line: bytes, *, new: bool = True) -> None:
    """Append a line by a single write, which survives SIGKILL and which no second process can tear."""
    # O_NONBLOCK: a pipe in the file's place keeps nobody waiting
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | (os.O_CREAT if new else 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        os.write(descriptor, line + b"\n")
    finally:
        os.close(descriptor)
