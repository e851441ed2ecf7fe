"""Variables of the program that its loop changes and its state does not save: a best value, a patience.

And what its services keep without a state_dict(), and objects in the state's modules and task.

After a resume they begin anew, and where no step reads them a comparison of steps notices nothing.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import linecache
import os
import random
import re
import sys
import sysconfig
import textwrap
import time
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from inspect import CO_OPTIMIZED
from itertools import islice, pairwise
from numbers import Number
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Literal

import numpy

from everstep import backends
from everstep.contracts.data import Stream
from everstep.contracts.services import Service
from everstep.data.adapt import UserStream
from everstep.data.ring_buffer import RingBuffer
from everstep.errors import some
from everstep.first_use import LOOPS, FirstUse
from everstep.record import batch_digest
from everstep.services.judges import FunctionService
from everstep.services.sink import RemoteSink, Sink
from everstep.state import Slot, make_entry
from everstep.supervisor.saving.user_state import UserState

_MOST_KEYS = 100
"""Keys of a dictionary above which only their number counts."""
_ENDS = 32
"""Items at either end of a queue that count."""
_TEXT = 4096
"""Characters at either end of a string that count."""
_DEPTH = 13
"""Depth at which the digest of a value begins: of lists in lists in lists it sees the lengths."""
_LIBRARIES = (
    "<frozen ",
    *(os.path.join(place, "") for place in (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"))),
)
"""Beginnings of the names of files that are not the user's."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_TIMERS = ("time", "timer")
_RESETS = re.compile(r"(?!zero_grad|reset_noise|reset_parameters)(clear|reset|zero)\w*|set_epoch")
"""Methods that give all attributes of their object other values."""
_SERVICES, _HELD = "<services>", "<state>"
"""In place of the name of a function, for attributes of services and of objects in modules of the state."""
_CLASS = "@"
"""Beginning of the mark of a value of which only the class, or the name of a function, counts."""
_STATE = "#state "
"""Beginning of the mark of a variable that holds an entry of the state."""
_NUMBER = "number"
_WARNINGS = {
    _NUMBER: "your loop changes this variable, which is not in the state: unless your program sets it again, "
    "a resume begins with its first value; put it into the state, as in state={..., 'best': "
    "everstep.Slot(0.0)}, or into a state_dict() of your data (docs/guide/exactness.md)",
    _SERVICES: "a service of yours, or an object that it calls, changes this attribute and does not save it: "
    "a resume begins with its first value; give the service state_dict() and load_state_dict(), or put the "
    "object into the state; a state_dict() that returns {} says that nothing is lost "
    "(docs/guide/extending.md)",
    _STATE: "this was an object of the state, and your loop gave the name to another one, while a resume "
    "finds the first: change the object in place, as in x.copy_(...) or x[:] = ..., or hold the value in "
    "everstep.Slot (docs/guide/exactness.md)",
}
"""Warnings of variables that the loop changes, by kind."""
_CONTAINERS = (list, tuple, dict, Counter, defaultdict, OrderedDict)
_HELD_KINDS = (dict, Slot, RingBuffer)
"""Kinds of items of a list or dictionary of the state that are looked up here; dicts as of `vars(object)`."""
_NUMBERS = (bool, int, float, numpy.number)
_SCALARS = (bool, int, float, str, numpy.generic, type(None))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_READERS = {"locals", "globals", "eval", "exec"}
"""Functions that may read any variable."""
Variable = tuple[str, str]
"""Name of a function, or of a module in brackets, and of a variable in it."""


class _Entry(str):
    """Name of an entry of the state, in place of its object, which is saved."""


class ProgramVariables:
    """Looks at the variables of the functions on the stack, up to the one that opened the run.

    A variable counts as changed by the loop if it existed when the first steps began, and has another value
    at a save than when the steps of that epoch began.  Left out is what the loop sets before it reads it.

    Attributes:
        report: warns of numbers in objects that modules and the task hold, by their paths.
    """

    report: Callable[[list[str]], None]

    def __init__(self, user: UserState, services: Iterable[Service], warn: Callable[[str], None]) -> None:
        self._user, self._services, self._warn = user, services, warn
        self._opener: CodeType | None = None
        """Code of the function that opened the run: its frame would keep all its variables alive."""
        self._clocks_began = [clock() for clock in _CLOCKS]
        self._clocks_now = self._clocks_began
        self._first_names: Collection[Variable] | None = None
        """The variables that existed when the first steps of this start began."""
        self._epoch_marks: dict[Variable, str] = {}
        """Marks of the variables when the steps of this epoch began, or of the one before it."""
        self._begun: tuple[object, dict[Variable, str]] = (None, {})
        """Loop over epochs in which steps began last, and the marks then."""
        self._changed: set[Variable] = set()
        self._unrestored: dict[Variable, str] = {}
        """Marks of generators not in their saved state when an epoch began; data may still bring it back."""
        self._lines: dict[str, tuple[str, int]] = {}
        """File and line of each function on the stack at its last look, by its name, inner ones first."""

    def find_opener(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        self._opener = None if frame is None else frame.f_code

    def steps_begin(self, loop: object = None) -> None:
        """Look at the variables before the first step of an epoch, or of a loop without epochs.

        `loop`: number of the loop over epochs; None where other steps of the epoch come before.
        """
        read = self._read_marks()
        marks = {name: mark for name, (mark, _) in read.items()}
        last_loop, last_marks = self._begun
        self._epoch_marks = dict(marks)
        for name, last_mark in last_marks.items() if loop is not None and loop == last_loop else ():
            is_other = last_mark != marks.get(name, last_mark) and name[0] in self._lines
            # a dictionary of which the head of an epoch sets an item may be its configuration
            is_other = is_other and not isinstance(read[name][1], dict | set)
            if is_other and _goes_on(*self._lines[name[0]], name[1]):
                self._epoch_marks[name] = last_mark
        if loop is not None:
            self._begun = loop, marks
        lost = [name[1] for name, mark in self._unrestored.items() if marks.get(name) == mark]
        self._unrestored = {}
        if lost:
            self._warn(
                f"{some(sorted(set(lost)), 8)}: this generator of your program is not as it was at the "
                "checkpoint, and the data of these steps does not bring it back; put it into the state, as "
                "in state={..., 'generator': generator} (docs/guide/exactness.md)"
            )
        if self._first_names is None:
            self._first_names = self._epoch_marks.keys()

    def saved(self) -> dict[str, str]:
        """Return the marks of the variables that the loop has changed; warn of those that are new."""
        marks, new = self._read_marks(), defaultdict[str, set[str]](set)
        for name in self._epoch_marks.keys() & marks.keys() & set(self._first_names or ()):
            if name not in self._changed and marks[name][0] != self._epoch_marks[name]:
                self._changed.add(name)
                new[self._kind_of(name, marks[name][1])].add(name[1])
        for kind, text in _WARNINGS.items():
            if kind in new:
                self._warn(f"{some(sorted(new[kind]), 8)}: {text}")
        if _HELD in new:
            self.report(sorted(new[_HELD]))
        # from here on the loop may set it before it reads it: after an epoch's end, say, and not inside it
        return {
            ".".join(name): marks[name][0]
            for name in sorted(self._changed & marks.keys())
            if not self._is_set_first(name)
        }

    def _kind_of(self, name: Variable, value: Any) -> str:
        """Return the kind of a changed variable, by which it is warned about; "" for no warning."""
        if name[0] in (_SERVICES, _HELD):
            return name[0]
        is_entry = self._epoch_marks[name].startswith(_STATE)
        if self._is_set_first(name) or not (is_entry or isinstance(value, _SCALARS)):
            return ""
        return _STATE if is_entry else _NUMBER

    def _is_set_first(self, name: Variable) -> bool:
        """Whether the loops around a line set a variable before they read it: its old value is of no use."""
        function, variable = name
        if function in (_SERVICES, _HELD):
            return False
        is_own = function in self._lines
        lines = [self._lines[function]] if is_own else [*self._lines.values()]
        return _is_set_in(tuple(lines), variable, is_own)

    def lost(self, saved: Any, *, at_epoch_end: bool) -> dict[str, str]:
        """Describe, by name, the variables that have another value at the resume point than at the save.

        At the end of an epoch the data is still to come, and may bring a generator back that it holds.
        """
        lost: dict[str, str] = {}
        marks = saved if isinstance(saved, dict) else {}  # None: no variable had changed
        for name, (mark, _) in self._read_marks().items():
            old = str(marks.get(".".join(name), mark))
            if old != mark and at_epoch_end and mark.startswith("~"):
                self._unrestored[name] = mark
            elif old != mark and not _is_made_late(old, mark):
                is_digest = {"#", "~", _CLASS} & {old[:1], mark[:1]}
                lost[name[1]] = "another value" if is_digest else f"{mark}, was {old}"
        return lost

    def _read_marks(self) -> dict[Variable, tuple[str, Any]]:
        self._clocks_now = [clock() for clock in _CLOCKS]
        objects = self._user.objects
        in_state: dict[int, str] = {id(each): name for name, each in objects.items()}
        lists = [each for each in objects.values() if type(each) in (list, dict)]
        items_of = [part for each in lists for part in (each if isinstance(each, list) else [*each.values()])]
        in_state |= {id(part): "" for part in items_of if type(part) in _HELD_KINDS}
        # what an entry of the program's own class holds, it saves, too: not warned about, and yet compared
        held_ids: set[int] = set()
        with suppress(Exception):  # of what a class of the program's own does when it is looked at
            parts = [each for entry in objects.values() for each in (_vars(entry) or {}).values()]
            # numbers left out: a small one is the same object everywhere
            held_ids = {id(each) for each in parts if not isinstance(each, _SCALARS)}
        elsewhere = dict.fromkeys(held_ids, "") | in_state
        marks = {} if self._opener is None else self._marks_on_stack(in_state, held_ids, elsewhere)
        numbers: list[tuple[Variable, Any]] = []
        for service in self._services:
            with suppress(Exception):
                numbers += [((_SERVICES, path), n) for path, n in _numbers_of(service, elsewhere)]
        with suppress(Exception):  # of a property of the program's own
            held = [each.outside.numbers() for each in self._user.counters.values()]
            numbers += [((_HELD, path), n) for each in held for path, n in each.items()]
        uses = Counter[Variable]()
        for (home, path), number in numbers:
            uses[home, path] += 1  # several objects may be of one class
            if (mark := self._mark(number)) is not None:
                marks[home, f"{path} #{uses[home, path]}" if uses[home, path] > 1 else path] = mark, number
        return marks

    def _marks_on_stack(
        self, in_state: dict[int, str], held_ids: set[int], elsewhere: dict[int, str]
    ) -> dict[Variable, tuple[str, Any]]:
        """Mark variables of functions on the stack; add the identities of their objects to `elsewhere`."""
        marks: dict[Variable, tuple[str, Any]] = {}
        lines: dict[str, tuple[str, int]] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is self._opener or not _is_library(code.co_filename):
                lines.setdefault(code.co_qualname, (code.co_filename, frame.f_lineno or 0))
                self._lines |= lines
                # before Python 3.13 a function's `f_locals` is one dictionary: to read it would change what
                # `locals()` has given to the program, and to leave it filled would keep tensors alive
                is_copy = sys.version_info < (3, 13) and bool(code.co_flags & CO_OPTIMIZED)
                values = {} if is_copy and _has_its_locals(code) else frame.f_locals
                read = {name: _data_of(value) for name, value in values.items()}
                items: list[tuple[str, str, Any]] = []
                with suppress(Exception):  # another thread may add a variable of a module
                    items = [(code.co_qualname, *each) for each in read.items()] + _changed_globals(frame)
                    skip = dict.fromkeys(_restored_ids(read), "") | in_state
                elsewhere |= {id(each): "" for _, _, each in items if _vars(each) is not None}
                for home, name, value in items:
                    # of what else it runs into: a look must not end a run that trains well without it
                    with suppress(Exception):
                        for path, part, owners in () if name.startswith("_") else _parts(name, value, skip):
                            if (mark := self._mark(part)) is not None:
                                is_held = not held_ids.isdisjoint(owners)
                                marks.setdefault((home, path), (mark, () if is_held else part))
                items, value, read = [], None, {}
                if is_copy:
                    values.clear()
            if code is self._opener:
                return marks
            frame = frame.f_back
        return {}  # the run was opened in another thread, or by a function that has returned

    def _mark(self, value: Any) -> str | None:
        """Mark a value: a number as it is, a generator by "~", others by "#"; None: by the clock."""
        if isinstance(value, _Entry):
            return f"{_STATE}{value}"
        if isinstance(value, numpy.generic):
            value = value.item()
        if isinstance(value, float):
            clocks = zip(self._clocks_began, self._clocks_now, strict=True)
            return None if any(began <= value <= now for began, now in clocks) else repr(float(value))
        if isinstance(value, bool | int | None):
            return repr(value)
        content: Any
        if _is_generator(value):
            return f"~{batch_digest(make_entry('generator', value).save(), 0)}"
        if isinstance(value, str):
            content = [len(value), value[:_TEXT], value[-_TEXT:]]
        elif hasattr(type(value), "_next_data"):  # an iterator of a DataLoader, drawn from by hand
            content = value._num_yielded
        elif isinstance(value, deque):
            content = [len(value), *islice(value, _ENDS), *islice(reversed(value), _ENDS)]
        elif isinstance(value, set):
            content = len(value)
        elif isinstance(value, dict) and dict.__len__(value) > _MOST_KEYS:
            items = dict.items(value)  # not the methods of a class of its own, which may count what they do
            content = [len(items), *islice(items, _ENDS), *islice(reversed(items), _ENDS)]
        elif isinstance(value, Number | Enum | PurePath | itertools.count | range | slice):
            return repr(value)
        elif type(value) in (bytes, bytearray, array):
            content = [len(value), bytes(value[:_TEXT]), bytes(value[-_TEXT:])]
        elif type(value) in _CONTAINERS or hasattr(type(value), "_fields") or backends.of(value) is not None:
            content = value
        elif isinstance(value, dict):  # a configuration of a class of its own
            content = dict(dict.items(value))
        else:
            return f"{_CLASS}{_name_of(value)}"
        if (mark := batch_digest(content, 0, depth=_DEPTH)) is None:  # with objects of other kinds in it
            parts = [*content.values()] if isinstance(content, dict) else [*islice(content, _ENDS)]
            return f"#{len(content)} {list(map(_name_of, parts))}"
        return f"#{mark:x}"


def _numbers_of(service: Service, elsewhere: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield numbers of a user's service that saves no state, and of a user's objects that a service calls.

    Of a sink none: what it counts concerns the lines that it has written.

    Args:
        elsewhere: as `skip` of `_parts`; the objects are added, so that each is looked at once.
    """
    kinds = type(service).__mro__[: type(service).__mro__.index(Service)]
    is_own = not any(kind.__module__.startswith("everstep.") for kind in kinds)
    is_saved = is_own and type(service).state_dict != Service.state_dict
    attributes = {} if is_saved or isinstance(service, Sink | RemoteSink) else vars(service)
    for name, value in [*attributes.items()]:
        for each in value if isinstance(value, list | tuple) and not is_own else [value]:
            owner = each.__self__ if isinstance(each, MethodType) else each
            is_object = _vars(owner) is not None
            # `loop.on` numbers its services in the order of the calls, which may be another at a resume
            label = "" if isinstance(service, FunctionService) else f"{service.name}: "
            path = f"{service.name}.{name}" if is_own else f"{label}{type(owner).__name__}"
            parts = _parts(path, owner, elsewhere) if is_own or is_object else ()
            yield from ((p, part) for p, part, _ in parts if isinstance(part, _NUMBERS) and "._" not in p)
            elsewhere |= {id(owner): ""} if is_object else {}


def _is_made_late(old: str, mark: str) -> bool:
    """Whether one mark is that of None, and the other that of a file or the like: made when it is used."""
    return "None" in (old, mark) and _CLASS in (old[:1], mark[:1])


def _name_of(value: Any) -> str:
    """Return the name of a class or function, and the name of the class of anything else."""
    function = value.func if isinstance(value, partial) else value
    is_named = isinstance(function, type | FunctionType | MethodType | BuiltinFunctionType)
    named: Any = function if is_named else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _data_of(value: Any) -> Any:
    """Return the data that a stream of ours reads, as of `prefetch(data)`; any other value as it is."""
    source = value.source if isinstance(value, Stream) else value
    return source.data if isinstance(source, UserStream) else value


def _parts(path: str, value: Any, skip: dict[int, str], owners: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a value by its name, and the attributes of an object of the program's own by theirs.

    Third come `owners`: the identities of the objects around each, and its own.
    Of data, which has an `__iter__`, what this sets anew is left out, and all if the data has a state;
    generators that it holds, also in loaders, are there as their states: nobody brings them back.
    `skip` has identities of objects that are brought back, with the names of those that are entries.
    """
    owners += (id(value),)
    if entry := skip.get(id(value)):
        yield path, _Entry(entry), owners
    is_state = type(value) is dict and value and all(id(each) in skip for each in value.values())
    if is_state or isinstance(value, ModuleType) or id(value) in skip or id(_vars(value)) in skip:
        return
    if isinstance(value, Slot | RingBuffer):  # left out of the state
        name = "value" if isinstance(value, Slot) else "appended"
        path, value = f"{path}.{name}", getattr(value, name)
    if (attributes := _vars(value)) is None:
        if not path.endswith(_TIMERS):
            yield path, value, owners
    elif len(owners) <= 2:
        kind: Any = type(value)
        is_data = hasattr(kind, "__iter__")
        anew = attributes if is_data and hasattr(kind, "load_state_dict") else _set_by_iter(kind)
        skip = dict.fromkeys(_restored_ids(attributes), "") | skip
        for name, each in [*attributes.items()]:
            values = [each, *_data_attributes(each if isinstance(each, list | tuple) else [each])]
            if is_data and (generators := [part for part in values if _is_generator(part)]):
                each = [make_entry("generator", part).save() for part in generators]
            if name not in anew:
                yield from _parts(f"{path}.{name}", each, skip, owners)


def _restored_ids(values: Mapping[str, Any]) -> set[int]:
    """Return the identities of generators and samplers that a library's data among the values holds."""
    parts = _data_attributes(values.values())
    return {
        id(each) for each in parts if _is_generator(each) or hasattr(_vars(each) and type(each), "__iter__")
    }


def _data_attributes(values: Iterable[Any]) -> list[Any]:
    """List the attributes of a library's data among the values."""
    data = [each for each in values if hasattr(type(each), "__iter__") and _vars(each) is None]
    return [part for each in data if getattr(type(each), "__dictoffset__", 0) for part in vars(each).values()]


def _is_generator(value: Any) -> bool:
    of_torch = (type(value).__module__, type(value).__name__) == ("torch._C", "Generator")
    return of_torch or isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState)


def _vars(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of the program's own; None for others."""
    kind: Any = type(value)
    return vars(value) if _is_own(kind) or kind in (Namespace, SimpleNamespace) else None


@lru_cache(maxsize=1024)
def _set_by_iter(kind: type) -> set[str]:
    """Return the attributes that a class's `__iter__` sets before it reads them."""
    try:
        method: Any = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__iter__"]))).body[0]
    except (OSError, TypeError, ValueError, KeyError, SyntaxError):  # without a source, or inherited
        return set()
    names = {each.attr for each in ast.walk(method) if isinstance(each, ast.Attribute)}
    uses = {name: _FirstUse(f"self.{name}") for name in names}
    set_first = {name for name, use in uses.items() if use.is_set(use.run(method.body, set()))}
    return {name for name in set_first if uses[name].assigned and not uses[name].read}


def _changed_globals(frame: FrameType) -> list[tuple[str, str, Any]]:
    """List module, name and value of what functions of a function's module change by `global`."""
    variables = frame.f_globals
    codes = [each.__code__ for each in [*variables.values()] if isinstance(each, FunctionType)]
    names = {name for code in (frame.f_code, *codes) for name in _stores_global(code)}
    home = f"<{variables.get('__name__')}>"
    return [(home, name, variables[name]) for name in sorted(names) if name in variables]


@lru_cache(maxsize=1024)
def _stores_global(code: CodeType) -> Collection[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}


@lru_cache(maxsize=1024)
def _has_its_locals(code: CodeType) -> bool:
    """Whether a function gets its variables as a dictionary; `vars(x)` and `model.eval()` do not."""
    for one, two in pairwise(dis.get_instructions(code)):
        is_empty_call = two.opname in ("PRECALL", "CALL") and not two.arg
        of_function = ("locals", "exec", "eval", *(("vars", "dir") if is_empty_call else ()))
        if one.argval == "f_locals" or (one.opname == "LOAD_GLOBAL" and one.argval in of_function):
            return True
    return False


@lru_cache(maxsize=1024)
def _is_own(kind: type) -> bool:
    """Whether a class and its bases are all the program's: others have their own ways to be saved."""
    modules = [base.__module__ for base in kind.__mro__[:-1] if base.__module__ not in ("abc", "typing")]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return kind.__dictoffset__ != 0 and all(
        name == "__main__" or (file is not None and not _is_library(file))
        for name, file in zip(modules, files, strict=True)
    )


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path


@lru_cache(maxsize=8)
def _parents(path: str) -> dict[ast.AST, ast.AST]:
    """Return each node of a source file with the one around it; none without a source."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):  # a cell of a notebook with commands of its own
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _loops_around(path: str, line: int) -> list[Any]:
    """List the loops around a line, inner ones first."""
    loops: list[Any] = [each for each in _parents(path) if isinstance(each, LOOPS)]
    around = [each for each in loops if each.lineno <= line <= (each.end_lineno or line)]
    return sorted(around, key=lambda each: -each.lineno)


@lru_cache(maxsize=1024)
def _goes_on(path: str, line: int, name: str) -> bool:
    """Whether the loop over epochs around a line reads a variable before it sets it: `rate *= 0.5`."""
    for loop in _loops_around(path, line):
        if isinstance(loop, ast.For) and "iter_epochs" in ast.unparse(loop.iter):
            first = _FirstUse(name, _parents(path), loop)
            first.loop(loop)
            return bool(first.read)
    return False


@lru_cache(maxsize=1024)
def _is_set_in(lines: tuple[tuple[str, int], ...], name: str, is_own: bool) -> bool:
    """Whether the loops around lines of functions, inner ones first, set a variable before they read it.

    What a round sets only in some cases is left out if nothing reads it before it is set again; of variables
    of other functions than that of the one line (`is_own`) this is not known.
    """
    for path, line in lines:
        parents = _parents(path)
        for loop in _loops_around(path, line):
            first = _FirstUse(name, parents, loop if is_own else None)
            if first.is_set(first.loop(loop)) or first.read:
                return not first.read
            if first.assigned:
                return first.is_local and not first.is_read_after(loop)
    return False


class _FirstUse(FirstUse[str]):
    """How statements may first use one variable; what they do in other ways than those known here is a read.

    Args:
        name: of the variable, or "variable.attribute".
        parents: each node of the source with the one around it.
        loop: a loop of the function that has the variable; None: it is of another one.

    Attributes:
        is_local: whether no function reads the variable that is not seen to be called.
    """

    def __init__(self, name: str, parents: Mapping[ast.AST, ast.AST] | None = None, loop: Any = None) -> None:
        super().__init__()
        self._name, self._root, self._parents = name, name.partition(".")[0], parents or {}
        self._names = {self._root, *_READERS}
        """With those of functions that read the variable: a call of one is a read."""
        self.is_local = loop is not None and name == self._root
        scope = loop
        while scope in self._parents and not isinstance(scope, _SCOPES):
            scope = self._parents[scope]
        inside = [*ast.walk(scope)] if scope is not None else []
        inner: list[Any] = [each for each in inside if isinstance(each, _SCOPES) and each is not scope]
        while readers := [each for each in inner if self._names & _free_names(each)]:
            self._names |= {getattr(each, "name", "") for each in readers}
            inner = [each for each in inner if each not in readers]
            for each in readers:
                in_class = isinstance(self._parents[each], ast.ClassDef)
                self.is_local &= not (in_class or getattr(each, "decorator_list", [each]))
        for each in inside:  # a function that is not called there may be called anywhere
            if isinstance(each, ast.Name) and each.id in self._names - {self._root}:
                self.is_local &= getattr(self._parents[each], "func", None) is each
            self.is_local &= not (isinstance(each, ast.Nonlocal) and self._root in each.names)

    def is_set(self, sure: set[str] | None) -> bool:
        """Whether each way that goes on has set the variable."""
        return sure is None or self._name in sure

    def loop(self, loop: ast.For | ast.While) -> set[str] | None:
        """Follow a round of a loop, with its head."""
        self.use(loop.iter if isinstance(loop, ast.For) else loop.test, set())
        return self.round(loop, set())

    def is_read_after(self, node: Any) -> bool:
        """Whether lines after a loop, or further rounds of those around it, read the variable."""
        while (above := self._parents.get(node)) is not None and not isinstance(node, _SCOPES):
            blocks = [part for _, part in ast.iter_fields(above) if isinstance(part, list) and node in part]
            rest = [each for block in blocks for each in block[block.index(node) + 1 :]]
            after = self.run_as_round([*(node.orelse if isinstance(node, LOOPS) else []), *rest], set())
            if isinstance(above, LOOPS):
                self.loop(above)
            elif isinstance(above, ast.Try):  # its other blocks may follow each of its lines
                after = set()
                for each in ast.iter_child_nodes(above):
                    self.run([each], set())
            if self.read or self.is_set(after):
                return bool(self.read)
            node = above
        return False

    def use(self, node: Any, sure: set[str]) -> set[str]:
        first, variable = next(self._uses(node), None), {self._name}
        self.read |= variable - sure if first == "read" else set()
        self.assigned |= variable if first == "set" else set()
        return variable if first == "set" else set()

    def _uses(self, node: Any) -> Iterator[Literal["read", "set"]]:
        """Yield in turn how an expression or a simple statement uses the variable."""
        if not any(isinstance(each, ast.Name) and each.id in self._names for each in ast.walk(node)):
            return
        is_attribute, parts = self._name != self._root, [*ast.iter_child_nodes(node)]
        match node:
            case ast.Name() | ast.Attribute() if ast.unparse(node) == self._name:
                yield "set" if isinstance(node.ctx, ast.Store) else "read"
            case ast.Attribute(ast.Name(), ctx=ast.Store()) if is_attribute:
                parts = []  # another attribute of the same object; to get one may call a property
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(id=owner), method))) if _RESETS.fullmatch(method):
                yield "set" if owner == self._root else "read"
            case ast.Name() | ast.NamedExpr() | ast.AsyncFor() | ast.Match() | ast.ClassDef():
                yield "read"
            case _ if isinstance(node, _SCOPES + _COMPREHENSIONS):
                if self._names & _free_names(node):
                    yield "read"
                if isinstance(node, _SCOPES):  # its body runs later
                    parts = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each]
                else:
                    parts = [node.generators[0].iter]
            case ast.Call(ast.Attribute()) if is_attribute:
                yield "read"
            case ast.AugAssign(target) if ast.unparse(target) == self._name:
                yield "read"
            case ast.Assign(targets, value):
                parts = [value, *targets]
            case ast.AnnAssign(target, value=value):
                parts = [] if value is None else [value, target]
        for part in parts:
            yield from self._uses(part)


def _free_names(scope: ast.AST) -> set[str]:
    """Return the names that a function or comprehension uses and does not bind itself."""
    parts, own, free = [*ast.iter_child_nodes(scope)], list[Any](), set[str]()
    while parts:
        part: Any = parts.pop()
        own.append(part)
        if isinstance(part, _SCOPES + _COMPREHENSIONS):
            free |= _free_names(part)  # what an inner one binds again is read out here
            parts += [part.generators[0].iter] if isinstance(part, _COMPREHENSIONS) else []
        else:
            parts += ast.iter_child_nodes(part)
    names = [each for each in own if isinstance(each, ast.Name)]
    bound = {each.arg for each in own if isinstance(each, ast.arg)}
    bound |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    declared = {name for each in own if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
    return free.union(each.id for each in names) - (bound - declared)
