"""The run's streams: which pass each is in, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from everstep.contracts.data import Cursor, Stream
from everstep.contracts.services import Clock
from everstep.data.adapt import as_stream, describe
from everstep.errors import ConfigError, DataError, NotResumableError, UsageError, nearest
from everstep.record import Batch
from everstep.state import isolated, make_entry
from everstep.supervisor import reused_data
from everstep.supervisor.generators import Generators, HeadWatch, states_of
from everstep.supervisor.quarantine import Sieve
from everstep.supervisor.trial import KNOWN, SLOWEST, Verdict, pristine, try_stream


class StreamSlot:
    """One named stream of a run.

    Attributes:
        name: the key of its state.
        stream: what to open; None until the program binds it.
        pass_index: the pass that is open or comes next, from 0.
        cursor: the open pass.
        head: what lines at the head of epochs do to the generators of its data.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        say: Callable[[str], None],
        generators: Generators,
        sieve: Callable[[StreamSlot, Cursor], Cursor],
        head: HeadWatch,
    ) -> None:
        self.name = name
        self.stream: Stream | None = None
        self.pass_index = 0
        self.cursor: Cursor | None = None
        self._saved: Any = None
        self._left: Any = None
        """Where the pass before ended, if the next one depends on it; or why that cannot be told."""
        self._must_return = False
        """Whether the source still has to be brought there."""
        self._states: list[Any] | None = None
        """Of the source's generators, as the checkpoint has them, until they stand there."""
        self._brought_back = False
        """Whether they were brought back before the head ran, as the data is declared."""
        self._generators, self.head = generators, head
        self._seed, self._say, self._sieve = seed, say, sieve
        self._what: dict[str, Any] | None = None
        """What the data is: `data.describe`."""
        self._varies = False
        """Whether that has changed during the run: the program gives other data from pass to pass."""
        self._resuming = False
        """Whether the program has yet to bind what the checkpoint read."""
        self._untried: Any = None
        """A copy of what is taken at its word, or why there is none, until it is tried."""
        self._refusal: str | None = None
        """Why no position inside a pass can be saved."""
        self._saved_words: Collection[str] = ()
        """As `Stream.place_words`, of the checkpoint's data."""

    def bind(self, stream: Stream, *, override: bool = False) -> bool:
        """Read `stream` from now on.

        Args:
            override: go on with it though it is not what the checkpoint read.

        Returns:
            Whether that is so.

        Raises:
            NotResumableError: no checkpoint could be made while it is read.
            DataError: it is not; has the stored and the given value of each difference.
        """
        if refusal := stream.unsaveable:
            raise NotResumableError(f"stream {self.name!r}: {refusal}")
        what = describe(stream, self._seed)
        accepted = False
        changes = "" if self._what is None else _changes(self._what, what, inside=self._saved is not None)
        if changes:
            if self._resuming:
                self._accept(changes, override)
                accepted = override
                if self._states is not None and len(self._states) != len(stream.generators):
                    self._states = None
            self._varies = True
        if stream is not self.stream:
            reused_data.enter(stream)
            self._untried = pristine(stream) if stream.on_word else None
        self.stream, self._what, self._resuming = stream, what, False
        return accepted

    def _accept(self, changes: str, override: bool) -> None:
        """Let go of what belongs to the data of the checkpoint, or refuse."""
        inside = self._saved is not None
        if not override and (inside or not self._varies):
            raise DataError(
                f"stream {self.name!r}: {changes}; give the data of that time back, or pass "
                'on_change="override" to go on with what is given. Data that differs from epoch to epoch '
                'on purpose: give each kind a name of its own, as in name="train2"'
            )
        anew = "; the pass that was open begins anew" if inside else ""
        self._say(f"stream {self.name!r} is used as given: {changes}{anew}")
        self._saved, self._left, self._must_return = None, None, False
        if inside:
            self._states = None

    def open(self) -> Cursor:
        """The open pass; else opens one: where the checkpoint stood, or at its start.

        Going to a saved position may draw random numbers that the undisturbed run did not draw
        there, so it is isolated; a fresh pass draws what the undisturbed run draws.
        """
        if self.cursor is None:
            assert self.stream is not None
            self.head.end(self.stream.generators, in_pass=self.in_pass)
            self.go_back()
            if self.cursor is None:
                self.head.open(self.stream.generators)
                cursor = self.stream.open(self.name, self.pass_index, seed=self._seed)
                self.cursor = self._sieve(self, cursor)
            self._left, self._must_return = None, False
        return self.cursor

    def go_back(self, *, at_resume_point: bool = False) -> None:
        """To the saved position, or to where the pass before left the source; once after a `load`.

        Args:
            at_resume_point: nothing that the program has done to the generators yet is to stay.  Else the
                head of an epoch has run since.
        """
        if self._states is None:
            return
        assert self.stream is not None
        self._require_held(self.stream)
        held = self.stream.generators
        if at_resume_point or self._brought_back:
            given = [self._brought_back] * len(held)
        else:
            given = self.head.told(held, self.pass_index, in_pass=self.in_pass)
        with self._generators.returning(self.stream, self._states, given):
            if self._saved is not None:
                cursor = self._open_at(self.pass_index, self._saved)
                self.cursor, self._saved = self._sieve(self, cursor), None
            elif self._must_return:
                self._open_at(self.pass_index - 1, self._left).close()
        self._must_return, self._states = False, None
        if at_resume_point:
            self.head.begin(held)

    def bring_back(self, stream: Stream) -> None:
        """At the resume point: the generators of declared data, which the program has yet to give."""
        if not self._states:
            return
        self._require_held(stream)
        for generator, state in zip(stream.generators, self._states, strict=True):
            make_entry("generator", generator).load(state)
        self._generators.stand(stream.generators)
        self.head.begin(stream.generators)
        self._brought_back = True

    def _require_held(self, stream: Stream) -> None:
        held, holds = len(self._states or ()), len(stream.generators)
        if held != holds:
            raise DataError(
                f"stream {self.name!r}: its data held {held} generators at the checkpoint and "
                f"holds {holds} now; give generator= as it was then"
            )

    def _open_at(self, pass_index: int, position: Any) -> Cursor:
        assert self.stream is not None
        with isolated():
            cursor = self.stream.open(self.name, pass_index, position, seed=self._seed)
        if cursor.note:
            self._say(f"stream {self.name!r}: {cursor.note}")
        return cursor

    def end_pass(self) -> None:
        """This pass is over; the next `open` begins the next one."""
        if self.stream is not None and self.stream.carries_over:
            self._must_return = self.cursor is None
            try:
                self._left = self._position()
            except NotResumableError as error:
                self._left = error
        self.close()
        self._saved = None
        self.pass_index += 1

    def close(self) -> None:
        """Stop the open pass's workers; its position is gone."""
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None

    @property
    def skipped(self) -> bool:
        """Whether batches of the open pass were passed over, because they are quarantined."""
        return self.cursor is not None and self.cursor.skipped > 0

    @property
    def in_pass(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self.cursor is not None or self._saved is not None

    def tree(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its branch of the state tree, after the batches handed out so far, and what of it is no place.

        Two runs that stand at one place have equal branches, however they came there.
        """
        if isinstance(self._left, NotResumableError):
            raise self._left
        position, words = _split(self._position(), self._place_words)
        left, left_words = _split(self._left, self._place_words)
        return self._tree(position, left), {"position": words, "left": left_words}

    def _tree(self, position: Any, left: Any) -> dict[str, Any]:
        here = {
            "pass": self.pass_index,
            "position": position,
            "left": left,
            "data": self._what,
            "varies": self._varies,
            **self.head.tree(),
        }
        if self._states is not None or self.stream is None:
            return {**here, "generators": self._states or []}
        if not self.in_pass or self.head.began:  # what services did since the epoch's end is saved here
            self.end_epoch()
        return {**here, "generators": states_of(self.stream.generators)}

    def end_epoch(self) -> None:
        """Between two passes, or two epochs: a head may begin."""
        if self.stream is not None and self._states is None:
            self.head.begin(self.stream.generators)

    def bound_again(self) -> None:
        """The program gives the data of the open pass again: the head is over."""
        if self.stream is not None and self.cursor is not None:
            self.head.end(self.stream.generators, in_pass=True)

    @property
    def _place_words(self) -> Collection[str]:
        return self._saved_words if self.stream is None else self.stream.place_words

    def load(self, tree: dict[str, Any], words: dict[str, Any]) -> None:
        """The inverse of `tree`; takes effect at the next `open`."""
        self.pass_index = tree["pass"]
        self._saved = _joined(tree["position"], words.get("position"))
        self._left = _joined(tree["left"], words.get("left"))
        self._saved_words = {key for each in words.values() for key in each}
        self._states = tree["generators"]
        self._must_return = self._left is not None
        self._what = None if tree["data"] is None else dict(tree["data"])
        self._varies, self._resuming = tree["varies"], True
        self.head.load(tree)

    def try_word(self) -> Verdict | None:
        """Try what is taken at its word, once it has given a batch; None where there is nothing to try."""
        if self._untried is None or self.cursor is None or self.cursor.done == 0:
            return None
        untried, self._untried = self._untried, None
        if not self.cursor.on_word:
            return None
        assert self.stream is not None
        verdict = self._tried(untried)
        if verdict.kept is False and verdict.replays:
            self.stream.source.resumes = "replay"
        elif verdict.kept is False:
            self._refusal = (
                f"stream {self.name!r}: {verdict}; use everstep.data.arrays or everstep.data.loader, mend "
                "its state_dict (everstep check tries it), or wrap it as everstep.data.replay(...) if every "
                "iteration gives the same batches"
            )
        return verdict

    def _tried(self, untried: Any) -> Verdict:
        assert self.stream is not None and self.cursor is not None
        took = self.cursor.first_took or 0.0
        if self.stream.resumes == "replay":
            return KNOWN
        if isinstance(untried, str):
            return Verdict(None, untried)
        if took > SLOWEST:
            return Verdict(None, f"its first batch took {took:.1f} s")
        return try_stream(untried, self.name, self._seed)

    def _position(self) -> Any:
        cursor = self.cursor
        if cursor is None:
            return self._saved
        inside = cursor.done != 0 and not cursor.ended
        if inside and self._refusal:
            raise NotResumableError(self._refusal)
        return cursor.position()


def _split(position: Any, words: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """A position without the values of some keys, and those values."""
    if position is None or not words:
        return position, {}
    held = {key: position[key] for key in words if position[key] is not None}
    return {**position, **dict.fromkeys(held)}, held


def _joined(position: Any, words: dict[str, Any] | None) -> Any:
    return {**position, **words} if words else position


def _changes(stored: dict[str, Any], given: dict[str, Any], *, inside: bool) -> str:
    """How two descriptions of data differ, in words; "" if they do not, between or inside passes."""
    stored, given = ({**one, **one.get("inside", {})} if inside else dict(one) for one in (stored, given))
    for one in (stored, given):
        one.pop("inside", None)
    pairs = {fact: (stored.get(fact, "absent"), given.get(fact, "absent")) for fact in {**stored, **given}}
    differ = {fact: (was, now) for fact, (was, now) in pairs.items() if was != now}
    return ", ".join(
        f"{fact} was {was!r} at the checkpoint and is {now!r} now"
        for fact, (was, now) in differ.items()
        if fact.rpartition(".")[0] not in differ  # of another sampler, its settings go without saying
    )


class Streams:
    """All streams of a run, by name.

    Args:
        seed: the run's.
        say: takes sentences for the user.
        override: go on with the data that is given where it is not what the checkpoint read.
        quarantined: batches that are not handed out.

    Attributes:
        drew: called with the stream, pass and index of each batch that is handed out, if set.
        noticed: called with a stream's name, and what the head of an epoch did to its generators.
        changed: called when a person has chosen to go on with other data.
    """

    def __init__(
        self,
        seed: int,
        say: Callable[[str], None],
        *,
        override: bool = False,
        quarantined: Iterable[Batch] = (),
    ) -> None:
        self.drew: Callable[[str, int, int], None] | None = None
        self.noticed: Callable[[str, dict[str, Any]], None] = lambda name, head: None
        self.changed: Callable[[], None] = lambda: None
        self._quarantined = [(batch.stream, batch.pass_index, batch.batch_index) for batch in quarantined]
        self._slots: dict[str, StreamSlot] = {}
        self._sources: dict[str, Any] = {}
        self._declared: dict[str, Any] = {}
        self._seed, self._say, self._override = seed, say, override
        self._generators = Generators()

    def stand(self, objects: Iterable[Any]) -> None:
        """Objects that the checkpoint's state has restored already."""
        self._generators.keep(objects)

    def declare(self, declared: Mapping[str, Any]) -> None:
        """The data that the program is going to give, by name."""
        self._declared = dict(declared)

    def bind(self, data: Any, name: str) -> StreamSlot:
        """The slot of `name`, now reading `data`.

        Raises:
            ConfigError: the name is empty, or another object holds it.
            DataError: this is not the data that the checkpoint read.
        """
        if not name or "/" in name:
            raise ConfigError(f"stream name {name!r}: give a name without '/', not empty")
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._new(name)
        stream = slot.stream
        if stream is None or self._sources.get(name) is not data:
            if slot.cursor is not None:
                raise ConfigError(
                    f"stream {name!r} is in the middle of a pass over another object; give this "
                    'data a name of its own, as in name="train2"'
                )
            stream = as_stream(data)
        if slot.bind(stream, override=self._override):
            self.changed()
        self._sources[name] = data
        slot.head.declared = name in self._declared
        slot.bound_again()
        return slot

    def _new(self, name: str) -> StreamSlot:
        head = HeadWatch(name, self._generators, self._say, lambda name, head: self.noticed(name, head))
        return StreamSlot(name, self._seed, self._say, self._generators, self._sieve, head)

    def _sieve(self, slot: StreamSlot, cursor: Cursor) -> Cursor:
        """What hands out the batches of a pass: the cursor, unless some are to be noted or left out."""
        place = (slot.name, slot.pass_index)
        out = {batch for *where, batch in self._quarantined if (*where,) == place}
        if self.drew is None and not out:
            return cursor
        if cursor.done is None:
            cursor.close()
            otherwise = "" if self._quarantined else ", or leave out Recovery"
            raise ConfigError(
                f"stream {slot.name!r}: a {type(cursor).__name__} does not tell how many batches of its pass "
                "it has handed out, so none can be quarantined; give the cursor of your data the attribute "
                "done, counted from the start of the pass also where it is opened at a "
                f"position{otherwise}"
            )
        drew = _unnoted if self.drew is None else partial(self.drew, *place)
        return Sieve(cursor, out, drew)

    def try_words(self) -> list[tuple[str, Verdict]]:
        """What was tried now, by the name of the stream."""
        found = [(name, slot.try_word()) for name, slot in self._slots.items()]
        return [(name, verdict) for name, verdict in found if verdict is not None]

    def sample_ids(self, name: str, pass_index: int, index: int) -> list[int] | None:
        """The numbers of the samples in a batch; None where the stream cannot tell them."""
        stream = self._slots[name].stream if name in self._slots else None
        return None if stream is None else stream.sample_ids(name, pass_index, index, seed=self._seed)

    def no_way_back(self) -> str:
        """Why this process cannot read all streams from an earlier place, and the remedy; "" if it can."""
        for name, slot in self._slots.items():
            if slot.stream is not None and slot.stream.spent:
                return (
                    f"stream {name!r} is an iterator, which cannot be gone back in; give a list, or an "
                    "object whose __iter__ starts anew"
                )
        return ""

    def bound(self, name: str) -> bool:
        """Whether the program has bound a stream of this name."""
        return name in self._sources

    def end_epoch(self) -> None:
        """The epoch is over: the head of the next one may do something to generators of the data."""
        for slot in self._slots.values():
            slot.end_epoch()

    def end_passes(self) -> None:
        """Close every pass that is open (the epoch that held it was left)."""
        for slot in self._slots.values():
            if slot.in_pass:
                slot.end_pass()

    def tree(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The `streams/` branch, and what is saved beside it and decides no batch."""
        trees = {name: slot.tree() for name, slot in self._slots.items()}
        return {name: tree for name, (tree, _) in trees.items()}, {
            name: words for name, (_, words) in trees.items() if any(words.values())
        }

    def load(self, tree: dict[str, Any], words: dict[str, Any], heads: Mapping[str, dict[str, Any]]) -> None:
        """The inverse of `tree`; streams are bound later, by the program.

        Args:
            words: what is saved beside them.
            heads: by stream, what the head that comes next did when it ran before; nothing if it did not.
        """
        for name, saved in tree.items():
            slot = self._slots.setdefault(name, self._new(name))
            slot.load(saved, words.get(name, {}))
            slot.head.recorded = heads.get(name)

    def open_bound(self) -> None:
        """Bring every bound stream to where the checkpoint had it, and open those inside a pass.

        Of data that is declared, and not bound yet, the generators.
        """
        for name, slot in self._slots.items():
            if self.bound(name):
                slot.go_back(at_resume_point=True)
            elif name in self._declared:
                slot.bring_back(as_stream(self._declared[name]))

    def require_bound(self) -> None:
        """Refuse to go on while a stream of the checkpoint has no data.

        Raises:
            UsageError: names the stream and the nearest bound name.
        """
        for name, slot in self._slots.items():
            if slot.in_pass and not self.bound(name):
                raise UsageError(
                    f"the checkpoint stands inside a pass over stream {name!r}, but the program has "
                    f"bound no stream of that name; {nearest(name, self._sources)}"
                )

    def close(self) -> None:
        """Stop every worker and thread."""
        for slot in self._slots.values():
            slot.close()
            if slot.stream is not None:
                reused_data.leave(slot.stream)


def _unnoted(index: int) -> None:
    """Of batches that nobody asks for."""


class Endless:
    """Batches of a stream, pass after pass, for `Supervisor.stream`.

    Args:
        slot: the stream.
        passes: after so many passes it ends; None: never.
        may_draw: raises where drawing a batch is an error.
        ended: called once when the passes are used up.
        clock: monotonic seconds.
        handed_out: called with the stream and each batch.
        pass_ended: called with each pass that has given its last batch.
        failed: called with the stream when fetching raised, before the error goes on.
    """

    def __init__(
        self,
        slot: StreamSlot,
        passes: int | None,
        may_draw: Callable[[], None],
        ended: Callable[[], None],
        clock: Clock,
        handed_out: Callable[[StreamSlot, Any], None],
        pass_ended: Callable[[int], None],
        failed: Callable[[StreamSlot], None],
    ) -> None:
        self._slot, self._passes = slot, passes
        self._may_draw, self._ended, self._clock = may_draw, ended, clock
        self._handed_out, self._pass_ended, self._failed = handed_out, pass_ended, failed
        self.drawn = 0
        self.waited = 0.0
        """Seconds waited for batches."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def look_ahead(self) -> None:
        """If the last pass is known to be used up, say so without drawing from it."""
        if self._passes is None or self._slot.pass_index < self._passes - 1:
            return
        cursor = self._slot.cursor
        if self._slot.pass_index >= self._passes or (cursor is not None and cursor.remaining() == 0):
            self._ended()

    def __next__(self) -> Any:
        self._may_draw()
        began = self._clock()
        ended = 0
        while ended < 2:
            if self._passes is not None and self._slot.pass_index >= self._passes:
                self._ended()
                raise StopIteration
            try:
                batch = next(self._slot.open())
            except StopIteration:
                ended += not self._slot.skipped
                self._pass_ended(self._slot.pass_index)
                self._slot.end_pass()
                continue
            except Exception:
                self._failed(self._slot)
                raise
            self.drawn += 1
            self.waited += self._clock() - began
            self._handed_out(self._slot, batch)
            return batch
        raise DataError(f"stream {self._slot.name!r} gave no batch in a whole pass; give it data")
