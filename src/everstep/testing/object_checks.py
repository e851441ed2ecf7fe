"""`check`: a trial, as each start makes it, of whether an object comes back from what it saves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep import backends
from everstep.contracts.data import Stream
from everstep.contracts.state import Entry, Stateful
from everstep.data import as_stream
from everstep.data.adapt import is_stream
from everstep.data.adapters import IterableStream, is_stateful
from everstep.errors import DataError, StateError
from everstep.state import capture, decode, digest, encode, isolated, make_entry, restore
from everstep.state.entries import StatefulEntry
from everstep.testing.stream_trial import Verdict, comparable, pristine, quiet, try_stream

_CHANGES = 3
"""Number of changes to a state before it is saved, and again after."""


@dataclass(frozen=True)
class Checked:
    """Result of a check.

    Attributes:
        kind: "data" or "state".
        word: whether the object's own `state_dict` brings it back; None if it has none.
        run: whether a run of everstep brings the object back.
    """

    kind: str
    word: Verdict | None
    run: Verdict

    def __str__(self) -> str:
        word = "it has no state_dict" if self.word is None else _said(self.word)
        return f"its own word: {word}\nin a run of everstep: {_said(self.run)}"


def _said(verdict: Verdict) -> str:
    held = {True: "kept", False: "not kept", None: "not tried"}[verdict.kept]
    return f"{held}: {verdict.why}"


def check(obj: Any, change: Callable[[Any], Any] | None = None) -> Checked:
    """Try whether an object comes back from what it saves; copies are tried, and the object stays as it is.

    Data (from which a loop can take batches; no dictionary, array or module) is read: batches, a position,
    two more batches; a second copy, opened at that position, must give the same two.  Any other object is
    state: a copy is changed and saved; another copy, which is given what was saved, must do the same as the
    first copy from then on.

    Args:
        obj: the object as a program makes it, not yet used.
        change: what training does to a state, such as `lambda scheduler: scheduler.step()`; its result is
            compared, too.  If given, `obj` is checked as state.  Without it, an object that is not data is
            only saved and loaded.

    Returns:
        The verdicts; `str` makes lines of them for people.
    """
    if change is None and (hasattr(obj, "__iter__") or is_stream(obj)) and not _is_state(obj):
        return _check_data(obj)
    return _check_state(obj, change)


def _is_state(obj: Any) -> bool:
    """Whether an object that can be iterated over gives no batches: a dictionary, an array, a module."""
    return isinstance(obj, Mapping) or any(each.entry(obj) is not None for each in backends.active())


def _check_data(data: Any) -> Checked:
    word = _try(IterableStream(data, "state")) if is_stateful(data) else None
    try:
        stream = as_stream(data)
    except DataError as error:
        return Checked("data", word, Verdict(False, f"refused: {error}"))
    if refusal := stream.unsaveable:
        return Checked("data", word, Verdict(False, f"refused: {refusal}"))
    verdict = _try(stream)
    if verdict.kept and stream.source.resumes == "replay":
        verdict = verdict._replace(why="a resume draws the batches before it again and discards them")
    return Checked("data", word, verdict)


def _try(stream: Stream) -> Verdict:
    copied = pristine(stream)
    return Verdict(None, copied) if isinstance(copied, str) else try_stream(copied)


def _check_state(obj: Any, change: Callable[[Any], Any] | None) -> Checked:
    word = _try_state(obj, change, StatefulEntry) if isinstance(obj, Stateful) else None
    return Checked("state", word, _try_state(obj, change, lambda each: make_entry("state", each)))


def _try_state(obj: Any, change: Callable[[Any], Any] | None, entry_of: Callable[[Any], Entry]) -> Verdict:
    with isolated(), quiet():
        try:
            one, other = copy.deepcopy(obj), copy.deepcopy(obj)
        except Exception as error:
            return Verdict(None, f"it cannot be copied ({type(error).__name__}: {error})")
        try:
            return _brought_back(one, other, change or (lambda each: None), entry_of)
        except StateError as error:
            return Verdict(False, f"refused: {error}")
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {error}")


def _brought_back(
    one: Any, other: Any, change: Callable[[Any], Any], entry_of: Callable[[Any], Entry]
) -> Verdict:
    first, second = entry_of(one), entry_of(other)
    # Both note what is given before the first is changed, as at the start of a loop.
    for entry in (first, second):
        entry.enter()
    for _ in range(_CHANGES):
        change(one)
    saved = encode(first.save())
    second.load(decode(saved))
    if digest(encode(second.save())) != digest(saved):
        return Verdict(False, "a copy that was given its state saves another one")
    for _ in range(_CHANGES):
        state = capture()
        expected = comparable(change(one)), digest(encode(first.save()))
        restore(state)
        if expected != (comparable(change(other)), digest(encode(second.save()))):
            return Verdict(False, "a copy that was given its state goes another way")
    return Verdict(True, "a copy that was given its state does the same")
