"""Encoding of trees as JSON and named arrays, and back, with equal types and values.

A tree is nested dicts, lists and tuples with arrays and plain values as leaves.  Plain dicts with string
keys, lists, finite numbers, strings, booleans and None are the same in JSON; any other value becomes an
object with a key that begins with "$" and names its kind.  Nothing is ever pickled.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from everstep import backends
from everstep.contracts.state import HostArray, Json
from everstep.errors import StateError

SAVEABLE = (
    "objects with state_dict() and load_state_dict(), arrays, dicts, lists, tuples, sets, numbers, text, "
    "bytes and None"
)

_stamps: dict[int, tuple[weakref.ref[Any], object]] = {}
"""By the array's id: the array, and its stamp, an object that is compared by identity.

A stamp claims that the elements of an array have not changed since it was stamped: a snapshot copies such an
array once, and the copy keeps the stamp.  Who stamps an array owns all ways to write to it, and takes the
stamp away at each write.
"""


def stamp(array: Any) -> None:
    """Claim that the elements of an array stay as they are until `unstamp`; a stamp that it has stays."""
    key = id(array)
    if key not in _stamps:
        # it goes with the array, whose id may be another one's then
        _stamps[key] = (weakref.ref(array, lambda _: _stamps.pop(key, None)), object())


def unstamp(array: Any) -> None:
    """Take the stamp away: the elements have changed, or may have."""
    _stamps.pop(id(array), None)


def stamp_of(array: Any) -> object | None:
    _, mark = _stamps.get(id(array), (None, None))
    return mark


class Buffers:
    """Host memory of the last snapshot, into which the next snapshot is copied.

    The arrays of an `Encoded` are valid until the next `encode` with the same buffers.

    Args:
        copy: False to copy nothing: the arrays are the live ones, and valid while nobody writes to those.
    """

    def __init__(self, copy: bool = True) -> None:
        self.arrays: dict[str, HostArray] = {}
        self.copy = copy


@dataclass
class Encoded:
    """Tree as JSON with named arrays.

    Attributes:
        structure: the tree; `{"$array": name}` stands for an array.  The order of keys is that of the dicts.
        arrays: the arrays by name; a name is the path's components joined by "/".
    """

    structure: Json
    arrays: dict[str, HostArray] = field(default_factory=dict)


def encode(tree: Any, buffers: Buffers | None = None) -> Encoded:
    """Take a snapshot of a tree: arrays are copied, into the kept buffers if those fit."""
    buffers = buffers or Buffers()
    encoder = _Encoder(buffers)
    try:
        structure = encoder.node(tree, "")
    except RecursionError:
        raise StateError(
            "the state is nested too deeply, or contains itself: pass a flat dict of values"
        ) from None
    # live arrays are let go of; those with a stamp are there as long as their owner is
    encoded_arrays = encoder.arrays.items()
    buffers.arrays = {name: a for name, a in encoded_arrays if buffers.copy or a.stamp is not None}
    return Encoded(structure, encoder.arrays)


def decode(encoded: Encoded) -> Any:
    """Make the tree again, in memory of its own."""
    return _decode(encoded.structure, encoded.arrays)


_METADATA = "_metadata"
"""Attribute of an OrderedDict that a `state_dict()` has returned."""
_ROOT = "array"
"""Name of an array that is the whole tree."""


def array_name(path: Iterable[Any]) -> str:
    """Return the name of the array at the keys and indices of `path`."""
    encoder = _Encoder(Buffers())
    return "/".join(component(encoder.frozen(key, "")) for key in path) or _ROOT


def array_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to each array of a tree."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from array_paths(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from array_paths(value, (*path, index))
    elif backends.of(tree) is not None:
        yield path


def tag_of(node: Json) -> str | None:
    """Return the key by which a node names its kind; None for a node that is the same in JSON."""
    first = next(iter(node), None) if isinstance(node, dict) else None
    return first if first is not None and first.startswith("$") else None


text_of: Callable[[Json], str] = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""Text of a node, equal for equal nodes; made once, because `json.dumps` makes an encoder for each call."""
_SPECIAL = re.compile("[%/#\ud800-\udfff]")


def component(key: Json) -> str:
    """Return the path component of an (encoded) key; different strings give different components."""
    return _escaped(key if isinstance(key, str) else text_of(key))


@lru_cache(maxsize=10_000)  # the names of a state are the same at each save
def _escaped(text: str) -> str:
    if not text:
        return "%"
    return _SPECIAL.sub(
        lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), text
    )


@lru_cache(maxsize=10_000)
def part_of(key: str) -> str | None:
    """Return the path component of a string that can be a key in JSON as it is; None for another string."""
    return _escaped(key) if not key.startswith("$") and is_text(key) else None


def components(keys: Iterable[Json]) -> list[str]:
    """Return the path components of keys of mixed types, among which 0 and "0" must differ."""
    parts: dict[str, None] = {}
    for key in keys:
        part = component(key)
        while part in parts:
            part += "~"
        parts[part] = None
    return list(parts)


def inside(path: str) -> str:
    """Return the beginning of the paths of a container's items."""
    return f"{path}/" if path else ""


def is_text(value: str) -> bool:
    """Whether a string has no lone surrogates, and can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Encoder:
    """Encoder of one tree; its loops test in C whether a value is the same in JSON, as most are."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.arrays: dict[str, HostArray] = {}

    def node(self, value: Any, path: str) -> Json:
        return _ENCODERS.get(type(value), _Encoder.foreign)(self, value, path)

    def foreign(self, value: Any, path: str) -> Json:
        """Encode an array, or a value that a backend can describe."""
        home = backends.of(value)
        for backend in backends.active() if home is None else (home,):
            if (packed := backend.pack(value)) is not None:
                kind, tree = packed
                return {"$value": self.node(tree, path), "kind": kind, "backend": backend.name}
        if home is None:
            what = f"{_where(path)} is a {_name(type(value))}, which cannot be saved"
            raise StateError(f"{what}: {_remedy(value)}")
        name = path or _ROOT
        while name in self.arrays or name == "__metadata__":
            name += "~"
        buffer = self.buffers.arrays.get(name)
        reuse = buffer if buffer is not None and buffer.backend == home.name else None
        mark = stamp_of(value) if _stamps else None
        try:
            if mark is not None and reuse is not None and reuse.stamp is mark:
                self.arrays[name] = reuse
            else:
                if reuse is not None:
                    # before the copy, which may break off: neither may outlive the bytes that it is of
                    reuse.stamp = reuse.xxh3_128 = None
                host = home.to_host(value, reuse) if self.buffers.copy else home.in_place(value)
                self.arrays[name] = host
                host.stamp = mark
        except StateError as error:
            raise StateError(f"{_where(path)}: {error}") from None
        return {"$array": name}

    def frozen(self, value: Any, path: str) -> Json:
        """Encode a key or the member of a set; only plain values are allowed there."""
        count = len(self.arrays)
        node = self.node(value, path)
        if len(self.arrays) > count:
            raise StateError(
                f"{_where(path)} has an array as a key or in a set, where it is found by identity: "
                "use a list, or a dict with names as keys"
            )
        return node

    def items(self, value: Iterable[Any], path: str) -> list[Json]:
        prefix = inside(path)
        return [
            item
            if _SAME.get(type(item), _NEVER)(item)
            else _ENCODERS.get(type(item), _Encoder.foreign)(self, item, f"{prefix}{i}")
            for i, item in enumerate(value)
        ]

    def dict(self, value: Mapping[Any, Any], path: str) -> dict[str, Json]:
        """Encode as an object if every key can be a key of JSON, else as a list of pairs."""
        parts = [part_of(key) if type(key) is str else None for key in value]
        prefix = inside(path)
        if None in parts:
            keys = [key if _SAME.get(type(key), _NEVER)(key) else self.frozen(key, path) for key in value]
            items = zip(keys, components(keys), value.values(), strict=True)
            return {"$dict": [[key, self.node(item, f"{prefix}{part}")] for key, part, item in items]}
        return {
            key: item
            if _SAME.get(type(item), _NEVER)(item)
            else _ENCODERS.get(type(item), _Encoder.foreign)(self, item, f"{prefix}{part}")
            for part, (key, item) in zip(parts, value.items(), strict=True)
        }

    def mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        """Encode as an object or a list of pairs, without the name of the kind."""
        body = self.dict(value, path)
        return body.get("$dict", body)

    def ordered(self, value: OrderedDict[Any, Any], path: str) -> Json:
        node: dict[str, Json] = {"$ordered": self.mapping(value, path)}
        if _METADATA in vars(value):  # there torch has modules' versions, and tensordict its batch size
            node["metadata"] = self.node(vars(value)[_METADATA], f"{inside(path)}{_METADATA}")
        return node

    def defaultdict(self, value: defaultdict[Any, Any], path: str) -> Json:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise StateError(
                f"{_where(path)} is a defaultdict of {factory!r}, which cannot be saved: "
                f"use a plain dict, or one of the factories {', '.join(_FACTORIES)}"
            )
        name = None if factory is None else factory.__name__
        return {"$defaultdict": self.mapping(value, path), "factory": name}

    def set(self, value: Iterable[Any], path: str) -> list[Json]:
        return sorted((self.frozen(item, path) for item in value), key=text_of)


def _encode_float(encoder: _Encoder, value: float, path: str) -> Json:
    if math.isfinite(value):
        return value
    short = repr(value)
    bits = struct.pack(">d", value)
    return {"$float": short if struct.pack(">d", float(short)) == bits else bits.hex()}


_JSON_INTEGERS = range(-(2**63), 2**64)
_NEVER = ().__contains__
_SAME: dict[type, Callable[[Any], bool]] = {
    type(None): (None,).__contains__,
    bool: (False, True).__contains__,
    str: str.isascii,
    int: _JSON_INTEGERS.__contains__,
    float: math.isfinite,
}
"""Tests by exact type, all in C: a value that passes is the same in JSON, and needs no encoder."""
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}
_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Json]] = {
    type(None): lambda e, v, p: v,
    bool: lambda e, v, p: v,
    str: lambda e, v, p: v if is_text(v) else {"$str": v.encode("utf-8", "surrogatepass").hex()},
    int: lambda e, v, p: v if v in _JSON_INTEGERS else {"$int": hex(v)},
    float: _encode_float,
    complex: lambda e, v, p: {"$complex": [e.node(v.real, p), e.node(v.imag, p)]},
    bytes: lambda e, v, p: {"$bytes": base64.b64encode(v).decode()},
    bytearray: lambda e, v, p: {"$bytearray": base64.b64encode(v).decode()},
    list: _Encoder.items,
    tuple: lambda e, v, p: {"$tuple": e.items(v, p)},
    deque: lambda e, v, p: {"$deque": e.items(v, p), "maxlen": v.maxlen},
    dict: _Encoder.dict,
    OrderedDict: _Encoder.ordered,
    Counter: lambda e, v, p: {"$counter": e.mapping(v, p)},
    defaultdict: _Encoder.defaultdict,
    set: lambda e, v, p: {"$set": e.set(v, p)},
    frozenset: lambda e, v, p: {"$frozenset": e.set(v, p)},
}
"""Encoders by exact type: a subclass would come back as its base class."""
PLAIN = frozenset(_ENCODERS)
"""Types that need no backend."""


def _remedy(value: Any) -> str:
    if isinstance(value, tuple):
        return "a named tuple's class is not saved; use a plain tuple or a dict"
    if isinstance(value, (dict, list, set, frozenset, str, int, float, complex, bytes)):
        return "a subclass would come back as its base class; convert it to that"
    if hasattr(value, "state_dict"):
        return "save its state_dict(), or pass the object itself in state="
    return f"what can be saved: {SAVEABLE}"


def _decode(node: Json, arrays: Mapping[str, HostArray]) -> Any:
    if isinstance(node, list):
        return [_decode(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    tag = tag_of(node)
    if tag is None:
        return {key: _decode(item, arrays) for key, item in node.items()}
    known = _DECODERS.get(tag)
    if known is None:
        raise StateError(
            f"the saved state has a {tag!r}, which this everstep does not know: "
            "it was written by a newer version; install that one"
        )
    return known(node[tag], node, arrays)


def _decode_mapping(body: Any, arrays: Mapping[str, HostArray]) -> dict[Any, Any]:
    pairs = body.items() if isinstance(body, dict) else body
    return {_decode(key, arrays): _decode(item, arrays) for key, item in pairs}


def _decode_ordered(
    body: Any, node: dict[str, Any], arrays: Mapping[str, HostArray]
) -> OrderedDict[Any, Any]:
    tree = OrderedDict(_decode_mapping(body, arrays))
    if "metadata" in node:
        vars(tree)[_METADATA] = _decode(node["metadata"], arrays)
    return tree


_DECODERS: dict[str, Callable[[Any, dict[str, Any], Mapping[str, HostArray]], Any]] = {
    "$array": lambda body, node, a: backends.get(a[body].backend).from_host(a[body]),
    "$value": lambda body, node, a: backends.get(node["backend"]).unpack(node["kind"], _decode(body, a)),
    "$str": lambda body, node, a: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
    "$int": lambda body, node, a: int(body, 16),
    "$float": lambda body, node, a: (
        float(body) if body in ("inf", "-inf", "nan") else struct.unpack(">d", bytes.fromhex(body))[0]
    ),
    "$complex": lambda body, node, a: complex(*_decode(body, a)),
    "$bytes": lambda body, node, a: base64.b64decode(body),
    "$bytearray": lambda body, node, a: bytearray(base64.b64decode(body)),
    "$tuple": lambda body, node, a: tuple(_decode(body, a)),
    "$deque": lambda body, node, a: deque(_decode(body, a), node["maxlen"]),
    "$dict": lambda body, node, a: _decode_mapping(body, a),
    "$ordered": _decode_ordered,
    "$counter": lambda body, node, a: Counter(_decode_mapping(body, a)),
    "$defaultdict": lambda body, node, a: defaultdict(
        None if node["factory"] is None else _FACTORIES[node["factory"]], _decode_mapping(body, a)
    ),
    "$set": lambda body, node, a: set(_decode(body, a)),
    "$frozenset": lambda body, node, a: frozenset(_decode(body, a)),
}


def _where(path: str) -> str:
    return f"state entry {path!r}" if path else "the state"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
