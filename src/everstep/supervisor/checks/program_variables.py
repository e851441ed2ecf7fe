"""Variables of the program that its loop changes and its state does not save: a best value, a patience.

After a resume they begin anew, and where no step reads them a comparison of steps notices nothing.
"""

from __future__ import annotations

import ast
import linecache
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import numpy

from everstep import backends
from everstep.record import batch_digest
from everstep.state import make_entry
from everstep.supervisor.saving.user_state import some

_MOST_ITEMS = 10_000
"""Items of a container above which it is not looked at."""
_DEPTH = 13
"""Depth at which the digest of a value begins: of lists in lists in lists it sees the lengths."""
_LIBRARIES = (
    "<frozen ",
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Beginnings of the names of files that are not the user's."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter, time.process_time)
_TIMERS = ("time", "timer")
Variable = tuple[str, str]
"""Name of a function, and of a variable in it."""


class ProgramVariables:
    """Looks at the variables of the functions on the stack, up to the one that opened the run.

    A variable counts as changed by the loop if it existed when the first steps began, and has another value
    at a save than when the steps of that epoch began.  Left out is what the loop sets before it reads it.
    """

    def __init__(self, objects: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._objects, self._warn = objects, warn
        self._opener: CodeType | None = None
        """Code of the function that opened the run: its frame would keep all its variables alive."""
        self._clocks = [clock() for clock in _CLOCKS]
        self._first: Collection[Variable] | None = None
        """The variables that existed when the first steps of this start began."""
        self._before: dict[Variable, str] = {}
        """Marks of the variables when the steps of this epoch began."""
        self._changed: set[Variable] = set()
        self._lines: dict[str, tuple[str, int]] = {}
        """File and line of each function that was looked at, by its name."""

    def entered(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        self._opener = None if frame is None else frame.f_code

    def steps_begin(self) -> None:
        """Look at the variables before the first step of an epoch, or of a loop without epochs."""
        self._before = {name: mark for name, (mark, _) in self._look().items()}
        if self._first is None:
            self._first = self._before.keys()

    def saved(self) -> dict[str, str]:
        """Return the marks of the variables that the loop has changed; warn of those that are new."""
        now = self._look()
        unsaved = []
        for name, before in self._before.items():
            if name in now and name in (self._first or ()) and now[name][0] != before:
                if name not in self._changed and _is_set_first(*self._lines[name[0]], name[1]):
                    continue
                if name not in self._changed and isinstance(now[name][1], bool | int | float | str | None):
                    unsaved.append(name[1])
                self._changed.add(name)
        if unsaved:
            self._warn(
                f"{some([*dict.fromkeys(unsaved)], 8)}: your loop changes this variable, and the state does "
                "not save it, so a resume begins with its first value; put what is read later into the "
                "state, as in state={..., 'best': everstep.Slot(0.0)} (docs/guide/exactness.md)"
            )
        return {".".join(name): now[name][0] for name in sorted(self._changed & now.keys())}

    def lost(self, saved: Mapping[str, str], *, at_epoch_end: bool) -> dict[str, str]:
        """Describe, by name, the variables that have another value at the resume point than at the save.

        At the end of an epoch the data is still to come, and may bring a generator back that it holds.
        """
        now = {".".join(name): (name[1], mark) for name, (mark, _) in self._look().items()}
        differing = [(*now[key], was) for key, was in saved.items() if key in now and now[key][1] != was]
        return {
            name: "another value" if {"#", "~"} & {was[0], mark[0]} else f"{mark}, was {was}"
            for name, mark, was in differing
            if not (at_epoch_end and mark.startswith("~"))
        }

    def _look(self) -> dict[Variable, tuple[str, Any]]:
        marks: dict[Variable, tuple[str, Any]] = {}
        if self._opener is None:
            return marks
        in_state = set(map(id, self._objects.values()))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is self._opener or not _is_library(code.co_filename):
                self._lines[code.co_qualname] = code.co_filename, frame.f_lineno
                values = frame.f_locals
                for name, value in values.items():
                    for path, part in () if name.startswith("_") else _parts(name, value, in_state):
                        if (mark := self._mark(part)) is not None:
                            marks.setdefault((code.co_qualname, path), (mark, part))
                if code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
                    values.clear()  # this copy would keep the function's tensors alive
            if code is self._opener:
                return marks
            frame = frame.f_back
        return {}  # the run was opened in another thread, or by a function that has returned

    def _mark(self, value: Any) -> str | None:
        """Mark a value: a number as it is, a generator by "~", others by "#"; None: of no known kind."""
        if isinstance(value, bool | int | float | None):
            number = float(value) if isinstance(value, float) else value
            return None if isinstance(number, float) and self._is_time(number) else repr(number)
        content: Any
        if _is_generator(value):
            return f"~{batch_digest(make_entry('generator', value).save(), 0)}"
        if isinstance(value, str) or backends.of(value) is not None:
            content = value
        elif _is_container(value):
            if len(value) > _MOST_ITEMS:
                return None
            content = (
                len(value) if isinstance(value, set) else [*value] if isinstance(value, deque) else value
            )
        else:
            return None
        mark = batch_digest(content, 0, depth=_DEPTH)
        return None if mark is None else f"#{mark:x}"

    def _is_time(self, number: float) -> bool:
        return any(began <= number <= clock() for began, clock in zip(self._clocks, _CLOCKS, strict=True))


def _is_container(value: Any) -> bool:
    return type(value) in (list, tuple, dict, set, deque)


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState)


def _parts(path: str, value: Any, skip: set[int], depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield a value by its name, and the attributes of an object of the program's own by theirs."""
    if id(value) in skip:
        return
    if not _is_own(value):
        if not path.endswith(_TIMERS):
            yield path, value
    elif depth:
        for name, each in [*vars(value).items()]:
            yield from _parts(f"{path}.{name}", each, skip, depth - 1)


def _is_own(value: Any) -> bool:
    """Whether all classes of an object are the program's: others have their own ways to be saved."""
    modules = [base.__module__ for base in type(value).__mro__[:-1]]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    ours = all(
        name == "__main__" or (file is not None and not _is_library(file))
        for name, file in zip(modules, files, strict=True)
    )
    return ours and hasattr(value, "__dict__") and not hasattr(type(value), "__iter__")


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES)


@lru_cache(maxsize=8)
def _loops(path: str, line: int) -> list[ast.For | ast.While]:
    """Return the loops of a source file that a line is in, the innermost first; none without a source."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:  # a cell of a notebook with commands of its own
        return []
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For | ast.While)]
    around = [each for each in loops if each.lineno <= line <= (each.end_lineno or line)]
    return sorted(around, key=lambda each: -each.lineno)


def _is_set_first(path: str, line: int, name: str) -> bool:
    """Whether the loops around a line set a variable before they read it: its old value is of no use."""
    first = (_first_use(loop, name) for loop in _loops(path, line))
    return next((use for use in first if use is not None), "read") == "set"


def _first_use(node: ast.AST, name: str) -> Literal["set", "read"] | None:
    """Return how a statement first uses a variable; what it does only in some cases counts as read."""
    if not any(isinstance(each, ast.Name) and each.id == name.partition(".")[0] for each in ast.walk(node)):
        return None
    parts: list[Any]
    match node:
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()) if ast.unparse(node) == name:
            return "set"
        case ast.Attribute() if ast.unparse(node) not in (name, name.partition(".")[0]):
            return None  # another attribute of the same object
        case ast.Assign():
            parts = [node.value, *node.targets]
        case ast.For() | ast.With():
            opening = [node.iter, node.target] if isinstance(node, ast.For) else node.items
            parts = [*opening, *node.body]
        case ast.While() | ast.Try():
            parts = [*([node.test] if isinstance(node, ast.While) else []), *node.body]
        case ast.Tuple() | ast.List():
            parts = node.elts
        case ast.withitem():
            parts = [node.context_expr, *([node.optional_vars] if node.optional_vars else [])]
        case _:
            return "read"
    return next((use for part in parts if (use := _first_use(part, name)) is not None), None)
