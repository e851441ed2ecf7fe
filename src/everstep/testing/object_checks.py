"""`check`: does an object come back from what it saves?"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from everstep import backends
from everstep.contracts.data import Cursor, Stream
from everstep.contracts.state import Entry, Stateful
from everstep.data import as_stream
from everstep.data.adapt import is_stream
from everstep.data.adapters import IterableStream, is_stateful
from everstep.errors import DataError, NotResumableError, StateError
from everstep.state import (
    Encoded,
    capture,
    decode,
    digest,
    encode,
    isolated,
    leaves,
    make_entry,
    restore,
)
from everstep.state.entries import StatefulEntry
from everstep.testing.stream_checks import comparable

Change: TypeAlias = Callable[[Any], Any]
"""What training does to an object; its result is compared."""

_ROUNDS = 3
"""Number of changes to a state before it is saved, and again after."""
_BEFORE, _AFTER = 128, 2
"""Most batches of data that are drawn before a position, and the number that is compared after it."""


class Verdict(NamedTuple):
    """Result of a trial.

    Attributes:
        kept: whether the data, or the object, comes back; None: it was not tried.
        why: how that is known, or why there was no trial.
    """

    kept: bool | None
    why: str


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
        word = "none" if self.word is None else _described(self.word)
        return f"its own state_dict: {word}\nin a run of everstep: {_described(self.run)}"


def _described(verdict: Verdict) -> str:
    return f"{ {True: 'kept', False: 'not kept', None: 'not tried'}[verdict.kept] }: {verdict.why}"


def check(obj: Any, change: Change | None = None) -> Checked:
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
    no_batches = isinstance(obj, Mapping) or any(each.entry(obj) is not None for each in backends.active())
    if change is None and not no_batches and (hasattr(obj, "__iter__") or is_stream(obj)):
        return _check_data(obj)
    word = _try_state(obj, change, StatefulEntry) if isinstance(obj, Stateful) else None
    return Checked("state", word, _try_state(obj, change, partial(make_entry, "state")))


def _check_data(data: Any) -> Checked:
    word = _try_unspent(IterableStream(data, "state")) if is_stateful(data) else None
    try:
        stream = as_stream(data)
        if stream.unsaveable:
            raise DataError(stream.unsaveable)
    except DataError as error:
        return Checked("data", word, Verdict(False, f"refused: {error}"))
    run = _try_unspent(stream)
    if run.kept and stream.source.resumes == "replay":
        run = run._replace(why="a resume draws the batches before it again and discards them")
    return Checked("data", word, run)


def _try_unspent(stream: Stream) -> Verdict:
    if stream.spent or isinstance(stream.keeps_place, Iterator):
        return Verdict(None, "it is an iterator, which can be read once only")
    return try_stream(stream)


def try_stream(stream: Stream) -> Verdict:
    """Try a stream on copies: opened at a position, it must give the batches that came after it.

    The position is one behind many batches: data that reads ahead in blocks tells the start of a block first.
    The pass is left there, and the next one must begin with the same batches, too: data may keep a state from
    pass to pass.
    """
    failed = Verdict(None, "it cannot be copied")
    with isolated(), _quiet():
        try:
            first, second, third, fourth = (copy.deepcopy(stream) for _ in range(4))
            failed = Verdict(None, "the trial failed")
            with _opened(first) as cursor:
                count = len(_draw(cursor, _BEFORE + _AFTER))
            if count < 2:
                return Verdict(None, "it gave one batch only" if count else "it gave no batch")
            with _opened(second) as cursor:
                if not any(_draw(cursor, max(1, count - _AFTER))):
                    return Verdict(None, "its batches hold nothing that can be compared")
                failed = Verdict(False, "its state cannot be saved")
                position = cursor.position()
                failed = Verdict(None, "the trial failed")
                random_state = capture()
                expected = _draw(cursor, _AFTER)
                left, left_state = cursor.position(), capture()
            with _opened(second, pass_index=1) as cursor:
                expected_next = _draw(cursor, _AFTER)
            failed = Verdict(False, "it cannot be opened at its position")
            with _opened(third, position) as cursor:
                failed = Verdict(None, "the trial failed")
                # opened in another random state, as by a new process; the batches are drawn in the same one
                restore(random_state)
                if _draw(cursor, _AFTER) != expected:
                    return Verdict(False, "batches drawn again from a position were others")
            if fourth.carries_over:
                with _opened(fourth, left):
                    pass
            restore(left_state)
            with _opened(fourth, pass_index=1) as cursor:
                if _draw(cursor, _AFTER) != expected_next:
                    return Verdict(False, "the pass after a resume began with other batches")
            return Verdict(True, f"{_AFTER} batches drawn again were the same")
        except NotResumableError as error:
            return Verdict(False, str(error))
        except Exception as error:
            return Verdict(failed.kept, f"{failed.why} ({type(error).__name__}: {error})")


def _opened(stream: Stream, position: Any = None, pass_index: int = 0) -> closing[Cursor]:
    return closing(stream.open("train", pass_index, position, seed=0))


def _draw(cursor: Cursor, count: int) -> list[Any]:
    """Draw batches, made comparable; None for one that holds nothing that can be compared."""
    return [comparable(batch) for batch in islice(cursor, count)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of data, which would be about the trial and not about the run."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _try_state(obj: Any, change: Change | None, entry_of: Callable[[Any], Entry]) -> Verdict:
    with isolated(), _quiet():
        try:
            one, other = copy.deepcopy(obj), copy.deepcopy(obj)
        except Exception as error:
            return Verdict(None, f"it cannot be copied ({type(error).__name__}: {error})")
        try:
            shows = _require_comes_back(one, other, change or (lambda each: None), entry_of)
        except AssertionError as broken:
            return Verdict(False, str(broken))
        except StateError as error:
            return Verdict(False, f"refused: {error}")
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {error}")
        if change is not None and not shows:
            return Verdict(None, "the change shows neither in the state nor in what it returns")
        return Verdict(True, "a copy that was given its state does the same")


def _require_comes_back(one: Any, other: Any, change: Change, entry_of: Callable[[Any], Entry]) -> bool:
    """Change and save an object; require that another one, which is given the state, does the same.

    Returns:
        Whether the changes show, in the state or in what they return.
    """
    first, second = entry_of(one), entry_of(other)
    for entry in (first, second):  # each notes what it was given before the first change, as in a loop
        entry.enter()
    before = digest(encode(first.save()))
    results = [change(one) for _ in range(_ROUNDS)]
    random_state = capture()
    saved = encode(first.save())
    _require_same(encode(first.save()), saved, "saved twice in a row, the state differs")
    assert digest(encode(capture())) == digest(encode(random_state)), "saving it draws random numbers"
    second.load(decode(saved))
    _require_same(encode(second.save()), saved, "an object that was given the state saves another one")
    for count in range(1, _ROUNDS + 1):
        random_state = capture()
        expected = comparable(change(one))
        restore(random_state)
        where = f"after {count} more changes the restored object differs"
        assert comparable(change(other)) == expected, f"{where} in what the change returns"
        _require_same(encode(second.save()), encode(first.save()), where)
    return digest(saved) != before or any(result is not None for result in results)


def _require_same(got: Encoded, expected: Encoded, broken: str) -> None:
    left, right = ({path: bytes(data) for path, data in leaves(each)} for each in (got, expected))
    different = [path for path in sorted(left.keys() | right.keys()) if left.get(path) != right.get(path)]
    assert not different, f"{broken}: {', '.join(different[:5])}"
