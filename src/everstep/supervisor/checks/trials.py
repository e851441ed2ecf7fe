"""Trials at each start: does an object, or the data, come back from what it saves?

A user's object is copied when the loop is entered, as a new process would make it.  At its first save the
copy gets the saved state, and a warning names each attribute that training has changed and the copy lacks.
A warning and not an error: a cache, or a time for display, may begin anew.  Objects that backends save
(models, optimizers) need no trial.  Data is tried by `stream_trial`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from everstep import backends
from everstep.contracts.state import Entry
from everstep.errors import StateError
from everstep.record import Journal
from everstep.state import decode, encode, isolated, make_entry
from everstep.state.entries import StatefulEntry
from everstep.supervisor.checks.stream_trial import Verdict, comparable, copied, quiet
from everstep.supervisor.voice import Voice

if TYPE_CHECKING:
    from everstep.supervisor.streams.run_streams import Streams


class Trials:
    """Makes the trials of one start.

    Args:
        voice: tells the user.
    """

    def __init__(
        self,
        streams: Streams,
        state: StateTrial,
        journal: Journal,
        voice: Voice,
    ) -> None:
        self._streams, self._state, self._journal = streams, state, journal
        self._voice = voice

    def try_streams(self) -> None:
        """Try each stream that has given its first batch."""
        for name, verdict in self._streams.try_words():
            self._note("stream", name, verdict)
            if verdict.kept is False:
                say = self._voice.say if verdict.replays else self._voice.warn
                say(f"stream {name!r}: {verdict}")

    def try_state(self) -> None:
        """Try the state, at its first save after a step."""
        for name, verdict in self._state.verdicts():
            self._note("state", name, verdict)
            if verdict.kept is False:
                self._voice.warn(
                    f"state entry {name!r}: {verdict.told}; a resume resets that; save it in "
                    "state_dict, unless no later step reads it"
                )

    def try_parts(self, user: Mapping[str, Any]) -> None:
        """Look for entries that have grown, in a saved `user` branch."""
        for name, verdict in self._state.outgrown(user):
            self._note("state", name, verdict)
            self._voice.warn(
                f"state entry {name!r}: {verdict.told}; a resume makes the object without them and is "
                f"refused: make them before the loop opens, or leave {name!r} out of state"
            )

    def _note(self, kind: str, name: str, verdict: Verdict) -> None:
        self._journal.event("tried", {kind: name, **verdict._asdict()}, wall=True)


_DEPTH = 4
"""Levels of objects inside objects that are looked into."""
_NAMED = 5
"""Most places that a verdict names."""


class StateTrial:
    """Trial of a run's state, made once per start.

    Args:
        entries: entries by name, before anything is restored.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._found = {name: (each.obj, copied(each.obj)) for name, each in _stateful(entries.items())}
        self._others = {id(obj) for obj, _ in self._found.values()}
        self._expected = {name: each.expects() for name, each in entries.items()}

    def outgrown(self, user: Mapping[str, Any]) -> Iterator[tuple[str, Verdict]]:
        """Find entries with other parts than at the start, so that a resume would refuse them; each once."""
        for name, expects in list(self._expected.items()):
            if name in user and any(found := expects(user[name])):
                del self._expected[name]
                others = [*found.unexpected, *found.missing, *found.reshaped]
                some = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                yield name, Verdict(False, f"its parts are not those that it had at the start: {some}")

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        """Try each entry, and yield verdicts by its name; a second call yields nothing."""
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
        obj: the object as training has changed it.
        made: a copy of the object as it was made; the state is loaded into it.
        others: ids of objects that are saved on their own.
    """
    seen = set(others) - {id(obj)}
    with isolated(), quiet():
        before, now = _attributes(made, seen), _attributes(obj, seen)
        try:
            StatefulEntry(made).load(decode(encode(StatefulEntry(obj).save())))
        except Exception as error:
            return Verdict(False, f"its state_dict cannot be loaded ({type(error).__name__}: {error})")
        after = _attributes(made, seen)
    lost = [path for name in now for path in _lost(name, before.get(name), now[name], after.get(name))]
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return Verdict(
            False, f"training changed {', '.join(lost[:_NAMED])}{more}, and load_state_dict did not"
        )
    return Verdict(True, "a copy that was given its state had all that training changed")


def _lost(path: str, before: Any, now: Any, after: Any) -> list[str]:
    """List the innermost places below `path` that training has changed, and that the copy has not got."""
    if now in (before, after):
        return []
    (known, parts, loaded) = map(_parts, (before, now, after))
    if not known.keys() == parts.keys() == loaded.keys():
        return [path]
    inner = [_lost(f"{path}{key}", known[key], part, loaded[key]) for key, part in parts.items()]
    return [place for places in inner for place in places] or [path]


def _parts(stand_in: Any) -> dict[str, Any]:
    """Return the parts of what `comparable` made of an object or a container, by how Python writes them."""
    match stand_in:
        case (str(), dict() as attributes):
            return {f".{name}": part for name, part in attributes.items()}
        case (str(), list() as items):
            return {f"[{index}]": part for index, part in enumerate(items)}
        case list() as pairs:
            return {f"[{key!r}]": part for key, part in pairs}
        case _:
            return {}


def _attributes(obj: Any, apart: set[int]) -> dict[str, Any]:
    return {name: _comparable(value, apart, _DEPTH) for name, value in getattr(obj, "__dict__", {}).items()}


def _comparable(value: Any, apart: set[int], depth: int) -> Any:
    return comparable(value, lambda other: _inside(other, apart, depth))


def _inside(value: Any, apart: set[int], depth: int) -> Any:
    """Make the stand-in for an object; functions and objects saved on their own give only their type."""
    kind = type(value).__qualname__
    if isinstance(value, set | frozenset):
        return kind, tuple(sorted(map(repr, value)))
    if id(value) in apart or not depth or isinstance(value, type | types.ModuleType | types.FunctionType):
        return kind
    try:
        entry = make_entry("attribute", value)
    except StateError:
        entry = None
    if entry is not None and entry.is_random:
        return kind, "random", comparable(entry.save())
    if any(backend.entry(value) is not None for backend in backends.active()):
        return kind
    inner = getattr(value, "__dict__", {}).items()
    return kind, {name: _comparable(each, apart, depth - 1) for name, each in inner}
