"""Pickles read as data: nothing in them is imported, made or called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """Name of a class or function, as in "torch.Size"."""

    name: str


@dataclass(eq=False)
class Made:
    """Description of an object: what unpickling would call, its arguments, and the state it would set."""

    kind: Name
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes) -> Any:
    """Return the value of a pickle, with a `Made` in place of each object and a `Name` of each class.

    Raises:
        ValueError: the bytes are not a pickle, or a pickle of other values than these.
    """
    reader = _Reader()
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return reader.stack.pop()
            _OPERATIONS[opcode.name](reader, arg)
    except KeyError as error:
        raise ValueError(f"it has {error}, which is not read") from None
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    raise ValueError("it has no end")


class _Reader:
    """Stack machine of the pickle format, for data alone."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        at = self.marks.pop()
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def top(self, count: int) -> tuple[Any, ...]:
        """Take the topmost values."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return tuple(taken)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise TypeError("items of what is not a dictionary")
        target.update(zip(items[::2], items[1::2], strict=True))

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError("items of what is not a list")
        self.stack[-1].extend(items)

    def make(self) -> None:
        kind, args = self.top(2)
        if not isinstance(kind, Name) or type(args) is not tuple:
            raise TypeError("an object without a class")
        self.push(Made(kind, args))

    def build(self) -> None:
        (state,) = self.top(1)
        if not isinstance(self.stack[-1], Made):
            raise TypeError("a state of what is not an object")
        self.stack[-1].state = state

    def global_name(self) -> None:
        module, name = self.top(2)
        self.push(Name(f"{module}.{name}"))


def _value(reader: _Reader, arg: Any) -> None:
    reader.push(arg)


def _nothing(reader: _Reader, arg: Any) -> None:
    """Skip what only helps other readers."""


_Operation = Callable[[_Reader, Any], None]
_OPERATIONS: dict[str, _Operation] = {
    "PROTO": _nothing,
    "FRAME": _nothing,
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _value),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"), _value),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.pop_mark())),
    "TUPLE1": lambda reader, _: reader.push(reader.top(1)),
    "TUPLE2": lambda reader, _: reader.push(reader.top(2)),
    "TUPLE3": lambda reader, _: reader.push(reader.top(3)),
    "MARK": lambda reader, _: reader.marks.append(len(reader.stack)),
    "APPEND": lambda reader, _: reader.append([*reader.top(1)]),
    "APPENDS": lambda reader, _: reader.append(reader.pop_mark()),
    "SETITEM": lambda reader, _: reader.set_items([*reader.top(2)]),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_mark()),
    "MEMOIZE": lambda reader, _: reader.memo.__setitem__(len(reader.memo), reader.stack[-1]),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"), lambda reader, at: reader.memo.__setitem__(at, reader.stack[-1])
    ),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, at: reader.push(reader.memo[at])),
    "GLOBAL": lambda reader, arg: reader.push(Name(arg.replace(" ", ".", 1))),
    "STACK_GLOBAL": lambda reader, _: reader.global_name(),
    "NEWOBJ": lambda reader, _: reader.make(),
    "REDUCE": lambda reader, _: reader.make(),
    "BUILD": lambda reader, _: reader.build(),
}
