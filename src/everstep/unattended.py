"""What a program and the command that has started it tell each other: `everstep run`, or a drill.

A program tells `everstep run` its runs, and the error that ends it.  The words go through a named pipe, whose
path is in EVERSTEP_RUN_PIPE: one JSON object a line.  Without that variable nothing is done.  A word that
nobody hears (`everstep run` has ended, the pipe is full, the program is on another machine) is dropped.

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
PIPE = "EVERSTEP_RUN_PIPE"
"""Environment variable with the path of the pipe."""
STARTED = os.getpid(), os.getppid()
"""This process and its parent, as everstep is imported: where the parent dies, the number becomes another."""
_LONGEST = 4096
"""Bytes that a pipe takes at once, so that the words of several processes do not mix."""

S = TypeVar("S")


def tell(word: str, **told: Any) -> None:
    """Tell something; from any process and thread, without waiting."""
    path = os.environ.get(PIPE)
    if not path:
        return
    import json

    line = json.dumps({"word": word, **told}).encode() + b"\n"
    if len(line) > _LONGEST:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def tell_error(error: BaseException) -> None:
    """Tell the error that ends this program: the names of its classes, and its first characters."""
    from everstep.redaction import redacted

    kinds = [kind.__name__ for kind in type(error).__mro__]
    tell("error", kinds=kinds, what=redacted(f"{type(error).__name__}: {error}")[:400])


def tell_of_errors() -> None:
    """Tell the error of which Python prints the traceback; called where everstep is imported."""
    if not os.environ.get(PIPE):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell_error(error)
        before(kind, error, trace)

    sys.excepthook = hook


def seed_or_drilled(seed: S) -> S | int:
    """Return a `seed=` argument; where none was given the drill's, so that two programs are comparable."""
    drawn = os.environ.get(SEED)
    return int(drawn) if seed is None and drawn else seed


def append_line(path: str, line: bytes) -> None:
    """Append a line by a single write, which survives SIGKILL and which no second process can tear."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line + b"\n")
    finally:
        os.close(descriptor)
