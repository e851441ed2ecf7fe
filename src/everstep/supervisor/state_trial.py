"""Whether a state entry comes back as its `state_dict` promises: tried at the first save after a step.

An object of the user's is copied where the loop is entered, as a new process would make it.  When it is first
saved, the copy is given the saved state: an attribute that training has changed and that the copy does not
have then is named.  It is a warning, no error: a cache, or a time that is only shown, may be begun anew.
What backends save by themselves (models, optimizers) needs no trial.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from everstep import backends
from everstep.contracts.state import Entry
from everstep.errors import StateError
from everstep.state import decode, encode, isolated, make_entry
from everstep.state.entries import StatefulEntry
from everstep.supervisor.trial import Verdict, comparable, copied, quiet

_DEPTH = 4
"""How deep objects inside objects are looked into."""


class StateTrial:
    """The trial of a run's state, once a start.

    Args:
        entries: by name, before anything is restored.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._found = {name: (each.obj, copied(each.obj)) for name, each in _stateful(entries.items())}
        self._others = {id(obj) for obj, _ in self._found.values()}
        self._expected = {name: each.expects() for name, each in entries.items()}

    def outgrown(self, user: Mapping[str, Any]) -> Iterator[tuple[str, Verdict]]:
        """Entries whose saved tree a resume would refuse, as they have got other parts; each once."""
        for name, expects in list(self._expected.items()):
            if name in user and any(found := expects(user[name])):
                del self._expected[name]
                others = [*found.unexpected, *found.missing, *found.reshaped]
                some = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                yield name, Verdict(False, f"its parts are not those that it had at the start: {some}")

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        """What is found out now, by the name of the entry; nothing more the next time."""
        found, self._found = self._found, {}
        for name, (obj, made) in found.items():
            if isinstance(made, str):
                yield name, Verdict(None, made)
            else:
                yield name, try_state(obj, made, self._others)


def _stateful(entries: Any) -> Iterator[tuple[str, StatefulEntry]]:
    for name, entry in entries:
        if type(entry) is StatefulEntry:
            yield str(name), entry
        yield from _stateful((f"{name}/{key}", inner) for key, inner in entry.inner())


def try_state(obj: Any, made: Any, others: Any = ()) -> Verdict:
    """Give an object's state to a copy.

    Args:
        obj: as training has changed it.
        made: a copy of it as it was made; loaded.
        others: ids of objects that are saved apart.
    """
    seen = set(others) - {id(obj)}
    with isolated(), quiet():
        before, now = _attributes(made, seen), _attributes(obj, seen)
        try:
            StatefulEntry(made).load(decode(encode(StatefulEntry(obj).save())))
        except Exception as error:
            return Verdict(False, f"its state_dict cannot be loaded ({type(error).__name__}: {error})")
        after = _attributes(made, seen)
    lost = [name for name in now if now[name] != before.get(name) and now[name] != after.get(name)]
    if lost:
        return Verdict(False, f"training changed {', '.join(lost)}, and load_state_dict did not")
    return Verdict(True, "a copy that was given its state had all that training changed")


def _attributes(obj: Any, apart: set[int]) -> dict[str, Any]:
    return {name: _comparable(value, apart, _DEPTH) for name, value in getattr(obj, "__dict__", {}).items()}


def _comparable(value: Any, apart: set[int], depth: int) -> Any:
    return comparable(value, lambda other: _inside(other, apart, depth))


def _inside(value: Any, apart: set[int], depth: int) -> Any:
    """What stands for an object; of those that are saved apart, and of functions, the type."""
    kind = type(value).__qualname__
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, value))
    if id(value) in apart or not depth or isinstance(value, type | types.ModuleType | types.FunctionType):
        return kind
    try:
        entry = make_entry("attribute", value)
    except StateError:
        entry = None
    if entry is not None and entry.is_random:
        return kind, comparable(entry.save())
    if any(backend.entry(value) is not None for backend in backends.active()):
        return kind
    inner = getattr(value, "__dict__", {}).items()
    return kind, [(name, _comparable(each, apart, depth - 1)) for name, each in inner]
