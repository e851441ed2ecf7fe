"""Arrays of another program's weights: compared with the state's unread, and read when they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep import backends
from everstep.contracts.state import Unread


def kinds(theirs: Any, ours: Any) -> tuple[str, str]:
    """Return shape and element type of both arrays; all values that are not arrays are of one kind."""
    if isinstance(theirs, Unread):
        backend = backends.of(ours)
        live = "no array" if backend is None else f"{tuple(ours.shape)} {backend.facts(ours).dtype}"
        return f"{theirs.shape} {theirs.dtype}", live
    return _kind(theirs), _kind(ours)


def _kind(value: Any) -> str:
    if not hasattr(value, "shape"):
        return "no array"
    return f"{tuple(value.shape)} {value.dtype}"


def untied(missing: list[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the missing names without those whose array is stored under another name (tied weights)."""
    stored = {
        _place(ours[path]) for path, value in theirs.items() if path in ours and isinstance(value, Unread)
    }
    stored.discard(None)
    return [path for path in missing if not stored or _place(ours[path]) not in stored]


def _place(value: Any) -> Any:
    backend = backends.of(value)
    return None if backend is None else backend.facts(value).place


def taken(theirs: Any, ours: Any, copies: bool) -> Any:
    """Return a value to be loaded in place of ours.

    Args:
        copies: whether who loads the value only copies its elements.
    """
    if isinstance(theirs, Unread):
        backend = backends.of(ours)
        assert backend is not None  # `kinds` tells it from ours
        return backend.late(theirs) if copies else backend.from_host(theirs.read())
    return _read(theirs)


def _read(tree: Any) -> Any:
    """Return a tree with each unread array in the memory of the framework that wrote it."""
    if isinstance(tree, Unread):
        host = tree.read()
        return backends.get(host.backend).from_host(host)
    if isinstance(tree, dict):
        return type(tree)((key, _read(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_read(value) for value in tree)
    return tree
