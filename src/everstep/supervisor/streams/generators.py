"""Generators of the run's data, random state for the program's own lines, and data that was read before.

The *head* of an epoch is the program's lines before its steps.  They may seed the generator of a loader,
make the loader anew, or draw from the generator.  A resume inside an epoch comes after them.  A resume at the
end of an epoch comes before them, and the program has not given its data yet: the generators of declared data
(`streams=`) are brought back there.  For other data the record tells what the head does; where that is more
than the states of the generators can tell, the resume is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from everstep.contracts.data import Stream
from everstep.contracts.state import Entry
from everstep.errors import NotResumableError
from everstep.state import Encoded, capture, decode, digest, encode, isolated, make_entry, restore
from everstep.supervisor.saving.user_state import UserState

if TYPE_CHECKING:
    from everstep.supervisor.streams.all_streams import Streams


class Generators:
    """Generators that streams keep: each is brought back once, though several streams may hold it."""

    def __init__(self) -> None:
        self._state: list[Any] = []
        self._restored: list[Any] = []
        """Generators that stand where the checkpoint had them."""

    def keep(self, objects: Iterable[Any]) -> None:
        """Take the objects of the state, which are restored already: no stream may move them."""
        self._state = [*objects]
        self.mark_restored(self._state)

    def in_state(self, generator: Any) -> bool:
        return any(generator is each for each in _flat(self._state))

    def mark_restored(self, objects: Iterable[Any]) -> None:
        """Mark objects, and their contents, as standing where the checkpoint had them."""
        self._restored += _flat(objects)

    def is_restored(self, generator: Any) -> bool:
        return any(generator is each for each in self._restored)

    @contextmanager
    def restoring(self, generators: Sequence[Any], saved: list[Any], keep: Sequence[int]) -> Iterator[None]:
        """Set generators to their `saved` states after the block; those to `keep`, to their states before."""
        before = states_of(generators)
        yield
        for index, (generator, state) in enumerate(zip(generators, saved, strict=True)):
            if state is None:
                continue  # another on each rank of another number: it stands where the place has put it
            stays = index in keep or self.is_restored(generator)
            make_entry("generator", generator).load(before[index] if stays else state)
        self.mark_restored(generators)


def _flat(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects, with the contents of dictionaries and lists in their place."""
    for each in objects:
        if isinstance(each, dict | list):
            yield from _flat(each.values() if isinstance(each, dict) else each)
        else:
            yield each


def states_of(generators: Sequence[Any]) -> list[Any]:
    return [make_entry("generator", each).save() for each in generators]


class HeadWatch:
    """Watches what the head of each epoch does to the generators of one stream's data."""

    def __init__(self, name: str, streams: Streams) -> None:
        self._name, self._streams = name, streams
        self.declared = name in streams.declared
        self.recorded: dict[str, Any] | None = None
        """The record of the head that follows the resume point; None if there is none."""
        self.opened: list[list[Any]] | None = []
        """States of the generators when the run's first pass was opened, and when its last pass was; None:
        unknown, as ranks of another number had others."""
        self._reset: list[int] = []
        """Indices of the generators that the last head set: nothing depends on where they stood before."""
        self._touched = False
        """Whether the last head did anything else to a generator."""
        self._before_head: list[tuple[Any, Any]] | None = None
        """The generators, and their states where the next head begins."""
        self._assumed: list[int] | None = None
        """Indices that were taken as set by a head, without a record of that head."""
        self._warned = False

    def tree(self) -> dict[str, Any]:
        return {"opened": self.opened, "given": self._reset, "touched": self._touched}

    def load(self, tree: dict[str, Any]) -> None:
        self.opened, self._reset, self._touched = tree["opened"], tree["given"], tree.get("touched", False)

    def begin(self, generators: Sequence[Any]) -> None:
        """Begin a head: it is blamed for changes to the generators from here on."""
        self._before_head = list(zip(generators, states_of(generators), strict=True))

    @property
    def began(self) -> bool:
        return self._before_head is not None

    def open(self, generators: Sequence[Any]) -> None:
        """Note the states at which a pass is opened at its start."""
        now = states_of(generators)
        self.opened = [self.opened[0] if self.opened else now, now]

    def end(self, generators: Sequence[Any], *, in_pass: bool) -> None:
        """End the head, and note what it has done; `in_pass`: whether a pass continues after it."""
        before, self._before_head = self._before_head, None
        if before is None or len(before) != len(generators):
            return
        reset, touched = [], False
        known = {id(each): state for each, state in before}
        for index, (generator, (same, _)) in enumerate(zip(generators, before, strict=True)):
            entry = make_entry("generator", generator)
            unmoved = id(generator) in known and _equal(entry.save(), known[id(generator)])
            if (unmoved and generator is same) or self._streams.generators.in_state(generator):
                continue
            if self.declared and id(generator) in known and generator is not same:
                raise NotResumableError(
                    f"stream {self._name!r}: lines at the head of the epoch let generators of its data "
                    "change places, and a new process cannot tell which had which state; add them to state"
                )
            # one that only changed its place was not set: it goes on from where it stood
            if not in_pass and not unmoved and (id(generator) not in known or entry.as_seeded()):
                reset.append(index)
            else:
                touched = True
        self._touched = touched
        if not in_pass:
            self._reset = reset
        if generators:  # that a head did nothing is worth knowing, too
            self._streams.noticed(self._name, {"given": reset, "touched": touched})
        self._warn(reset, touched)

    def set_by_head(self, generators: Sequence[Any], pass_index: int, *, in_pass: bool) -> list[int]:
        """Tell which generators the head has set before a resume; refuse what else it did to them."""
        reset = self._find_reset(generators, pass_index, in_pass=in_pass)
        is_restored = self._streams.generators.is_restored
        free = [index for index, each in enumerate(generators) if not is_restored(each)]
        seen = [index for index in free if index in reset]
        recorded, self.recorded = self.recorded, None
        if recorded is None:
            touched, self._assumed = self._touched, seen
        else:
            touched = recorded["touched"] or [i for i in free if i in recorded["given"]] != seen
        if touched and free:
            raise NotResumableError(
                f"stream {self._name!r}: lines at the head of the epoch set the generator of its data or "
                f"draw from it, and the checkpoint stands before them; {self._remedy}: then it is brought "
                "back before they run"
            )
        if not in_pass and self.opened:
            self._reset = reset
        return reset

    def _find_reset(self, generators: Sequence[Any], pass_index: int, *, in_pass: bool) -> list[int]:
        """Tell which generators the head has set, as far as their states show; else by the last head."""
        if self.opened is None and not in_pass:
            last_reset: list[int] = self._reset if self.recorded is None else self.recorded["given"]
            return last_reset
        if in_pass or self.opened is None or [len(states) for states in self.opened] != [len(generators)] * 2:
            return []
        reset = []
        for index, (generator, first, last) in enumerate(zip(generators, *self.opened, strict=True)):
            entry = make_entry("generator", generator)
            now = entry.save()
            is_other = not _equal(now, first)  # a new process has it so, unless a head sets it
            if pass_index == 1:  # only one was read: another seed than it had was set on purpose
                is_set = entry.as_seeded() and is_other
            else:
                is_set = index in self._reset and (is_other or _equal(now, last))
            if is_set:
                reset.append(index)
            elif is_other and self.recorded is None and entry.as_seeded():
                self._streams.say(
                    f"warning: stream {self._name!r}: the generator of its data has another seed than when "
                    "the run began, and no earlier head of an epoch has set it. If lines at the head of this "
                    f"epoch did, its batches differ from those of an uninterrupted run: {self._remedy}"
                )
        return reset

    def _warn(self, reset: list[int], touched: bool) -> None:
        if touched and not self.declared and not self._warned:
            self._warned = True
            self._streams.say(
                f"warning: stream {self._name!r}: lines at the head of an epoch draw from its generator, so "
                f"a resume at the end of an epoch is refused; {self._remedy}, or give the lines a generator "
                "of their own"
            )
        assumed, self._assumed = self._assumed, None
        if assumed is not None and (touched or not set(reset) <= set(assumed)):
            self._streams.say(
                f"warning: stream {self._name!r}: this start continued from the end of an epoch, when it was "
                "not yet recorded that lines at the head of an epoch set its generator or draw from it: "
                "the batches since may differ from those of an uninterrupted run; "
                f"{self._remedy}, and start again from that checkpoint, with resume=NAME"
            )

    @property
    def _remedy(self) -> str:
        return (
            f"declare the data where the loop is made, streams={{{self._name!r}: data}}, or add the "
            "generator to state"
        )


def _equal(a: Any, b: Any) -> bool:
    return digest(encode(a)) == digest(encode(b))


class RngMarks:
    """Random state where lines outside steps begin: at a resume they draw the same numbers again."""

    def __init__(self, user: UserState, saved: dict[str, Any]) -> None:
        self._user, self._places = user, saved
        if saved:
            self.back_to("enter")
        else:
            self.mark("enter")

    def mark(self, place: str) -> None:
        self._places[place] = {"global": capture(), "state": self._user.random_state()}

    def back_to(self, place: str) -> None:
        if place in self._places:
            restore(self._places[place]["global"])
            self._user.set_random_state(self._places[place]["state"])

    def forget(self) -> None:
        """Forget the marks of an epoch that is over: none of its lines will run again."""
        self._places = {"enter": self._places["enter"]}

    def tree(self) -> dict[str, Any]:
        return dict(self._places)


# ------------------------------------------------ data that an earlier start of this process has read


@dataclass
class _Read:
    """An object that a run has read: its state as given, and as the last run left it (None: not left yet).

    A resume needs it as given, as a new process makes it: a checkpoint may not know the data yet.
    """

    get: Callable[[], Any]
    first: Encoded
    last: Encoded | None = None

    def is_at_last(self, entry: Entry) -> bool:
        return self.last is None or digest(self.last) == digest(_state(entry))


_read: dict[int, _Read] = {}
"""By the id of the object; an object without weak references (a generator of NumPy's) stays alive here."""


def note_first_state(stream: Stream) -> None:
    """Note the state of a stream that a run begins to read, unless the last run has left it like this."""
    for obj, entry in _keepers(stream):
        read = _read.get(id(obj))
        if read is None or not read.is_at_last(entry):
            _read[id(obj)] = _Read(_reference(obj), _state(entry))
        else:
            read.last = None


def note_last_state(stream: Stream) -> None:
    for obj, entry in _keepers(stream):
        if (read := _read.get(id(obj))) is not None:
            read.last = _state(entry)


def restore_first_states() -> None:
    """Give back the first state of data that was left in this process, and not touched since."""
    for read in list(_read.values()):
        if read.last is not None and (obj := read.get()) is not None:
            entry = make_entry("data", obj)
            if read.is_at_last(entry):
                entry.load(decode(read.first))
                read.last = _state(entry)


def _reference(obj: Any) -> Callable[[], Any]:
    key = id(obj)
    try:
        return ref(obj, lambda gone: _read.pop(key, None))
    except TypeError:
        return lambda: obj


def _keepers(stream: Stream) -> Iterator[tuple[Any, Entry]]:
    return ((obj, make_entry("data", obj)) for obj in [*stream.generators, *stream.holds_state])


def _state(entry: Entry) -> Encoded:
    with isolated():
        return encode(entry.save())
