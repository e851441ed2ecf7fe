"""A named stream of a run: the pass that the stream is in, the position in it, the ledger of its batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import describe
from everstep.data.order import pass_key
from everstep.errors import DataError, DivergenceError, NotResumableError, RestoreError
from everstep.record import batch_digest, data_digest, ledger_format
from everstep.record.ledger_format import LEFT_OUT, Entry, Place, link
from everstep.state import digest, encode, isolated, make_entry
from everstep.supervisor.streams.generators import HeadWatch, note_given, states_of
from everstep.untrusted_files import is_count

if TYPE_CHECKING:
    from everstep.supervisor.streams.run_streams import Streams


class RunStream:
    """A named stream of a run: the data, once the program has bound it, and the open pass, if one is."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams
        self.ledger = Ledger(name, streams.share)
        self.head = HeadWatch(name, streams)
        self.per_step = [0, 0]
        """How many batches the run's first step drew, and its last one."""
        self.stream: Stream | None = None
        self.pass_index = 0
        """Number of the pass that is open or comes next, from 0."""
        self.cursor: Cursor | None = None
        self._saved_position: Any = None
        """Position in the checkpoint, until the pass is open there."""
        self._last_end: Any = None
        """End of the last pass, if the next pass depends on it; or the error in place of it."""
        self._must_return = False
        """Whether the source must still be moved to that end."""
        self._saved_generators: list[Any] | None = None
        """States of the source's generators in the checkpoint, until the generators stand there."""
        self._saved_by_rank: list[dict[str, Any]] | None = None
        """Places of the ranks of another number that wrote the checkpoint, until the data is bound."""
        self._brought_back = False
        """Whether the generators were brought back before the head ran, because the data is declared."""
        self.description: dict[str, Any] | None = None
        self._varies = False
        """Whether the description has changed in this run: the program gives other data from pass to pass."""
        self._resuming = False
        """Whether the program has yet to bind the data of the checkpoint."""
        self._where: object = ""
        """Checkpoint that the stream was loaded from, for messages."""
        self._saved_unhashed_keys: Collection[str] = ()
        """`Stream.unhashed_keys` of the checkpoint's data."""
        self._contents: list[int | None] = [None, None]
        """Digests as the first pass began (None: other data; 0: changed inside), and at the checkpoint."""

    def bind(self, stream: Stream, *, override: bool = False) -> bool:
        """Read `stream` from now on; return whether other data than the checkpoint's was accepted."""
        if refusal := stream.unsaveable:
            raise NotResumableError(f"stream {self.name!r}: {refusal}")
        description = describe(stream, self._streams.seed)
        accepted = False
        inside = self._saved_position is not None
        changes = "" if self.description is None else _changes(self.description, description, inside=inside)
        if changes:
            if self._resuming:
                self._accept(changes, override)
                accepted = override
                # the saved states are those of other generators
                if len(self._saved_generators or ()) != len(stream.generators):
                    self._saved_generators = None
            self._varies = True
        if self.description is not None and description != self.description:
            self.ledger.give_other_data(self.description)
        if stream is not self.stream:
            self._contents[0] = self._contents[0] if self.stream is None else self._contents[0] and None
            note_given(stream)  # before the first batch is drawn: as the program gave it
        self.stream, self.description, self._resuming = stream, description, False
        self._take_share(stream)
        if self.cursor is not None:  # the data of the open pass, given again: the head is over
            self.head.end(stream.generators, in_pass=True)
        return accepted

    def _accept(self, changes: str, override: bool) -> None:
        """Drop the positions in the checkpoint's data, or refuse the given data."""
        inside = self._saved_position is not None
        # between passes, data that has varied before may vary again
        if not override and (inside or not self._varies):
            remedy = (
                'give the checkpoint\'s data, or pass on_change="override" to continue with what is given. '
                "If the data differs between epochs on purpose, give each kind its own name, as in "
                'name="train2"'
            )
            if changes.startswith("num_workers"):  # the last fact, so no other one differs
                remedy = (
                    'give the same until the pass ends, or pass on_change="override" to begin it again; '
                    "everstep.data.loader takes any number at any time"
                )
            raise DataError(f"stream {self.name!r}: {changes}; {remedy}")
        anew = "; the open pass starts from its beginning" if inside else ""
        self._streams.say(f"stream {self.name!r} is used as given: {changes}{anew}")
        self._saved_position, self._last_end, self._must_return = None, None, False
        if inside:
            self._saved_generators = None
            self.ledger.begin_again()

    def _take_share(self, stream: Stream) -> None:
        """Make this rank's place of those that the ranks of another number had; acts once after a `load`."""
        places, self._saved_by_rank = self._saved_by_rank, None
        if places is None:
            return
        key = pass_key("ranks", self._streams.seed, self.name, self.pass_index)
        try:
            for name, place in (("position", self._saved_position), ("left", self._last_end)):
                for part in stream.rank_keys if isinstance(place, dict) else ():
                    saved = _distinct([each[name][part] for each in places])
                    place[part] = stream.of_other_ranks(part, saved, key)
        except DataError as error:
            raise RestoreError(
                f"stream {self.name!r}: the checkpoint {self._where} is of another number of ranks "
                f"({len(places)}), which its place was made for: {error}; start with {len(places)}, or in "
                "another directory with init_from="
            ) from error
        self.ledger.last = None  # of the part of another rank
        # where these differ, the place tells where they stand, or else the program
        if self._saved_generators is not None and len(_distinct([each["generators"] for each in places])) > 1:
            self._saved_generators = [None] * len(self._saved_generators)
        opened = _distinct([each["opened"] for each in places])
        self.head.opened = opened[0] if len(opened) == 1 else None

    def open(self) -> Cursor:
        """Return the open pass; without one, open it where the checkpoint stood, or at its start."""
        if self.cursor is None:
            assert self.stream is not None
            # before the generators are moved: what the head did to them is noted
            self.head.end(self.stream.generators, in_pass=self.in_pass)
            self.go_back()
            if self.cursor is None:
                self._compare_contents(inside=False)
                if self.pass_index == 0:
                    self._contents[0] = self._digest(self.stream)
                self.head.open(self.stream.generators)
                cursor = self.stream.open(self.name, self.pass_index, seed=self._streams.seed)
                self.cursor = self._streams.without_quarantined(self, cursor)
            self._last_end, self._must_return, self._contents[1] = None, False, None
        return self.cursor

    def go_back(self, *, at_resume_point: bool = False, at_epoch_end: bool = False) -> None:
        """Go to the saved position, or to the end of the last pass; acts once after a `load`.

        At the resume point what the program has done to the generators is undone; later a head has run.
        """
        if self._saved_generators is None:
            return
        assert self.stream is not None
        held = self._require_held(self.stream)
        if at_resume_point or self._brought_back:
            given = [self._brought_back] * len(held)
        else:
            given = self.head.set_by_head(held, self.pass_index, in_pass=self.in_pass)
        # opening at a position may draw from the generators, so they are put right afterwards
        with self._streams.generators.returning(self.stream, self._saved_generators, given):
            if self._saved_position is not None:
                cursor = self._open_at(self.pass_index, self._saved_position)
                self.cursor, self._saved_position = self._streams.without_quarantined(self, cursor), None
            elif self._must_return:
                # the head of an epoch may have given data for this pass alone
                same_data = at_resume_point or self.head.declared
                if same_data or self.stream.carries_over:
                    self._open_at(self.pass_index - 1, self._last_end, compare=same_data).close()
        self._must_return, self._saved_generators = False, None
        # inside a pass only the end of an epoch is followed by a head: the pass itself may draw
        if at_resume_point and (at_epoch_end or not self.in_pass):
            self.head.begin(held)

    def bring_back(self, stream: Stream) -> None:
        """Bring back the generators of declared data, which the program has yet to give."""
        if not self._saved_generators:
            return
        held = self._require_held(stream)
        self._take_share(stream)
        for generator, state in zip(held, self._saved_generators, strict=True):
            if state is not None:
                make_entry("generator", generator).load(state)
        self._streams.generators.stand(held)
        self.head.begin(held)
        self._brought_back = True

    def _require_held(self, stream: Stream) -> Sequence[Any]:
        """Return the stream's generators, as many as at the checkpoint."""
        before, now = len(self._saved_generators or ()), len(stream.generators)
        if before != now:
            raise DataError(
                f"stream {self.name!r}: its data held {before} generators at the checkpoint and "
                f"holds {now} now; give generator= as it was then"
            )
        return stream.generators

    def _open_at(self, pass_index: int, position: Any, *, compare: bool = True) -> Cursor:
        assert self.stream is not None
        source, drawn = self.stream.source, list[int | None]()
        made_of = [source] if source.samples_of is None else source.samples_of
        if compare and not self._streams.generators.state_is_held_by(made_of, source.generators):
            source.replayed = lambda batch: drawn.append(batch_digest(batch, pass_index))
        try:
            with isolated():  # it may draw random numbers that an undisturbed run does not draw
                cursor = self.stream.open(self.name, pass_index, position, seed=self._streams.seed)
            if cursor.done is not None and not is_count(cursor.done):
                # it would read other batches in silence
                cursor.close()
                raise ValueError(f"there is no batch {cursor.done}")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise RestoreError(
                f"stream {self.name!r}: its data cannot be opened at the position {position!r:.200} of "
                f"checkpoint {self._where} ({type(error).__name__}: {error}); fix the data if the error is "
                "its own, or resume from another checkpoint: another program or version has written this"
            ) from error
        finally:
            source.replayed = None
        try:
            self._compare(pass_index, cursor.done, drawn)
        except DivergenceError:
            cursor.close()
            raise
        if cursor.note:
            self._streams.say(f"stream {self.name!r}: {cursor.note}")
        return cursor

    def _compare(self, pass_index: int, done: int | None, drawn: list[int | None]) -> None:
        """Compare batches that were drawn again, of which the last is batch `done`, with those of the run."""
        assert self.stream is not None
        last, of_pass = self.ledger.last, f"of pass {pass_index + 1}"
        whole = self.stream.source is self.stream and not self.stream.draws_again
        is_other = bool(drawn) and whole and not self.ledger.agrees(drawn, self._streams.left_out(self))
        equal = True
        if drawn and last is not None and last[:2] == (pass_index, done) and drawn[-1] is not None:
            equal = drawn[-1] == last[2]
            one = f"batch {done} {of_pass} with digest {last[2]:016x}"
            differing = one, f"one with digest {drawn[-1]:016x}"
            self._streams.compared(self.name, None if equal else differing, is_other)
        if is_other and equal:
            differing = f"one of the {len(drawn)} {of_pass} before the resume point", "another, drawn again"
            self._streams.compared(self.name, differing, True)
        if equal and not is_other and pass_index == self.pass_index:
            self._compare_contents(inside=True)

    def _digest(self, stream: Stream | None) -> int | None:
        """Digest what data holds now; rank 0 alone does, since data may split itself."""
        return data_digest(stream.contents) if stream is not None and self._streams.share.rank == 0 else None

    def _compare_contents(self, *, inside: bool) -> None:
        """Compare what the data holds with the checkpoint: between passes, whether changes of it are lost."""
        (first, was), self._contents[1] = self._contents, None
        now = self._digest(self.stream) if was else None
        if was and now not in (was, None) and (inside or now == first):
            words = f"of data with digest {was:016x}", f"of data with digest {now:016x}"
            self._streams.compared(self.name, words, False)

    def _held(self) -> list[int | None] | None:
        """Return `_contents` for a checkpoint; what changes in the first pass, as a cache, is left out."""
        first, was = self._contents
        now = was if was or first == 0 else self._digest(self.stream)
        if self.cursor is not None and self.pass_index == 0 and was is None and now != first:
            self._contents[0] = first = now = 0
        return None if now is None and first is None else [first, now]

    def changing_parts(self) -> list[str]:
        """Name the parts of the last batch that are others each time it is drawn, if it can be drawn again.

        Drawing may move what the data counts, so this is for a run that ends.
        """
        drawn = list[Any]()
        if self.stream is None or not self.stream.source.draws_again:
            return []
        self.stream.source.replayed = drawn.append
        try:
            with isolated(), suppress(Exception):  # of the data's own code: then no part is named
                place = self.name, self.pass_index, self._position()
                for _ in range(2):
                    self.stream.open(*place, seed=self._streams.seed).close()
        finally:
            self.stream.source.replayed = None
        return list(_differing(drawn[-2], drawn[-1], "batch")) if len(drawn) > 1 else []

    def end_pass(self) -> None:
        if self.pass_index == 0:
            self._held()
        if self.stream is not None and (self.stream.carries_over or self.stream.draws_again):
            # a pass that this process has not opened: the source does not stand at its end
            self._must_return = self.cursor is None
            self._last_end = self._position()
        self.ledger.end_pass(self.cursor)
        self.close()
        self._saved_position = None
        self.pass_index += 1

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None

    @property
    def skipped(self) -> bool:
        return self.cursor is not None and self.cursor.skipped > 0

    @property
    def in_pass(self) -> bool:
        return self.cursor is not None or self._saved_position is not None

    def tree(self, *, head_may_follow: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the stream's branch of the state tree, and the parts of its position that are not hashed."""
        self.ledger.take(self.cursor)
        if head_may_follow and (not self.in_pass or self.head.began):
            self.end_epoch()  # what services did since the epoch's end is saved here
        unhashed_keys = self._saved_unhashed_keys if self.stream is None else self.stream.unhashed_keys
        position, unhashed = _split(self._position(), unhashed_keys)
        last_end, unhashed_end = _split(self._last_end, unhashed_keys)
        here = {
            "pass": self.pass_index,
            "position": position,
            "left": last_end,
            "data": self.description,
            "varies": self._varies,
            "ledger": self.ledger.account,
            "last": None if self.ledger.last is None else list(self.ledger.last),
            "per_step": list(self.per_step),
            **self.head.tree(),
            **({} if self._saved_by_rank is None else {"of_ranks": self._saved_by_rank}),
        }
        if self._saved_generators is not None or self.stream is None:
            # the generators do not stand there yet: what the checkpoint had of them is saved again
            here["generators"] = self._saved_generators or []
        else:
            here["generators"] = states_of(self.stream.generators)
        return here, {"position": unhashed, "left": unhashed_end, "contents": self._held()}

    def rank_paths(self) -> list[tuple[str, ...]]:
        """List the paths in the stream's branch whose values are a rank's own, for `split`."""
        if self.stream is None:  # nobody knows them
            return [()]
        keys = self.stream.rank_keys
        places = [(place, key) for place in ("position", "left") for key in keys]
        # with keys of its own a rank reads through generators of its own
        return [*places, *((part,) for part in ("generators", "opened") if keys), ("last",)]

    def end_epoch(self) -> None:
        """Begin to watch for a head, between two passes or two epochs."""
        if self.stream is not None and self._saved_generators is None:
            self.head.begin(self.stream.generators)
            if self._last_end is not None and self.stream.source is self.stream:
                self._last_end = self.stream.left_now(self._last_end)

    def load(self, tree: dict[str, Any], unhashed: dict[str, Any], where: object) -> None:
        if not is_count(tree["pass"]) or not isinstance(tree["generators"], list | None):
            raise ValueError(f"stream {self.name!r} has {tree!r:.300}")
        self._where = where
        self.pass_index = tree["pass"]
        self._saved_position, self._last_end = (
            {**tree[place], **unhashed[place]} if unhashed.get(place) else tree[place]
            for place in ("position", "left")
        )
        self._contents = [*(unhashed.get("contents") or (None, None))]
        self._saved_unhashed_keys = {k for place in ("position", "left") for k in unhashed.get(place) or ()}
        self._saved_generators = tree["generators"]
        self._must_return = self._last_end is not None
        self.description = None if tree["data"] is None else dict(tree["data"])
        self._varies, self._resuming = tree["varies"], True
        self._saved_by_rank = tree.get("of_ranks")
        self.head.load(tree)
        self.ledger.load(tree["ledger"], self.pass_index)
        self.per_step[:] = tree.get("per_step", [0, 0])
        self.ledger.last = None if (last := tree.get("last")) is None else tuple(last)

    def _position(self) -> Any:
        return self._saved_position if self.cursor is None else self.cursor.position()


def _differing(one: Any, other: Any, place: str) -> Iterator[str]:
    """Yield the places of two batches at which they differ; a list of plain values is one place."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one:
            yield from _differing(one[key], other.get(key), f"{place}[{key!r}]")
    elif isinstance(one, list | tuple) and not all(isinstance(each, str | int | float) for each in one):
        for index, pair in enumerate(zip(one, other, strict=False)):
            yield from _differing(*pair, f"{place}[{index}]")
    elif batch_digest(one, 0) != batch_digest(other, 0):
        yield place


def _distinct(values: list[Any]) -> list[Any]:
    """Return the values, or the first alone where all of them have the same bits."""
    return values if len({digest(encode(value)) for value in values}) > 1 else values[:1]


def _split(position: Any, unhashed_keys: Collection[str]) -> tuple[Any, dict[str, Any]]:
    if position is None or not unhashed_keys:
        return position, {}
    held = {key: position[key] for key in unhashed_keys if position.get(key) is not None}
    return {**position, **dict.fromkeys(held)}, held


def _changes(stored: dict[str, Any], given: dict[str, Any], *, inside: bool) -> str:
    """Say how two descriptions of data differ; "" if not.  Facts "inside" count inside passes only."""
    stored, given = ({**one, **one.get("inside", {})} if inside else dict(one) for one in (stored, given))
    for one in (stored, given):
        one.pop("inside", None)
    pairs = {fact: (stored.get(fact, "absent"), given.get(fact, "absent")) for fact in {**stored, **given}}
    differ = {fact: (was, now) for fact, (was, now) in pairs.items() if was != now}
    return ", ".join(
        f"{fact} was {was!r} at the checkpoint and is {now!r} now"
        for fact, (was, now) in differ.items()
        if fact.rpartition(".")[0] not in differ  # another sampler has other settings anyway
    )


def no_batch(name: str) -> DataError:
    return DataError(
        f"stream {name!r} gave no batch in a whole pass; give it data (or is it an iterator used up?)"
    )


class Ledger:
    """Accounts for the batches of one stream that went into complete steps, for `everstep audit`.

    A step adds a number to a list, and nothing else.  Digests of parts of batches are a rank's own, so
    several ranks keep none.
    """

    def __init__(self, name: str, share: Share) -> None:
        self.drawn: list[int | None] = []
        """Digests of the batches that were handed out and not accounted for; None: nothing to digest."""
        self._name, self._share = name, share
        self.entries: list[Entry] = []
        self.last: tuple[int, int, int] | None = None
        """Pass, number from 1 and digest of the batch that was accounted for last, if it has one."""
        self._earlier: list[dict[str, Any]] = []
        """News of data that the program has read before it gave other data."""
        self._of: str | None = None
        """What the chains are of, "samples" or "digests"; None: not known."""
        self._data: tuple[dict[str, Any], str | None] | None = None
        """Description of the data in the last event of this start, and what the chains were of."""
        self._begin_pass(0)
        self._from: str | None = str(self._at)
        """Where this start continues, until its first event says so."""

    def _begin_pass(self, pass_index: int) -> None:
        self._at = Place(pass_index, 0, ledger_format.first_link(self._name, pass_index))
        self.entry: Entry | None = None

    @property
    def account(self) -> str:
        """Text for the state tree: the batches of the open pass, and their chain."""
        return str(self._at).partition(" ")[2]

    def take(self, cursor: Cursor | None) -> None:
        """Account for what the open pass has handed out; all of it is in complete steps."""
        if cursor is None:
            return
        drawn, (number, place, chain) = self.drawn, self._at
        end = place + len(drawn) if cursor.done is None else cursor.done
        if end == place and not drawn:
            return
        # each save comes here: what was passed over is asked for only where the numbers say so
        left_out = [] if end - place == len(drawn) else cursor.passed_over()
        first = end - len(drawn) - len(left_out)
        if drawn:
            # one that was left out may be the last
            self.last = None if left_out or (last := drawn[-1]) is None else (number, end, last)
        if chain is not None:
            batches, of = cursor.sample_numbers(first, end), "samples"
            if batches is None and self._share.size == 1 and None not in drawn:
                of = "digests"
                batches = [digest.to_bytes(8, "little") for digest in drawn if digest is not None]
            if batches is not None and left_out:
                # of all batches, or of the others alone
                handed = [n for n in range(first, end) if n not in left_out or len(batches) == end - first]
                known = dict(zip(handed, batches, strict=True))
                batches = [LEFT_OUT if n in left_out else known[n] for n in range(first, end)]
            if batches is not None:
                self._of = of
                for batch in batches:
                    chain = link(batch, chain)
            chain = None if batches is None else chain
        self._at = Place(number, end, chain)
        if self.entry is not None and first == place:
            left_out = [*self.entry.left_out, *left_out]
            self.entry = self.entry._replace(end=end, chain=chain, left_out=tuple(left_out))
        else:
            # where the cursor says that it stands: an audit compares it with the entry before
            self.entries += [] if self.entry is None else [self.entry]
            self.entry = Entry(number, first, end, chain, False, tuple(left_out))
        drawn.clear()  # the same list: the verifier adds to it

    def agrees(self, drawn: Sequence[int | None], left_out: Collection[int]) -> bool:
        """Whether batches `drawn` again from the start of the pass are the open one's, if these are known."""
        number_of_pass, place, expected = self._at
        # on several ranks a chain of digests is of whole batches, read by one process before
        if expected is None or self._share.size > 1 or len(drawn) != place or None in drawn:
            return True
        chain = ledger_format.first_link(self._name, number_of_pass)
        for number, batch in enumerate(drawn):
            assert batch is not None
            chain = link(LEFT_OUT if number in left_out else batch.to_bytes(8, "little"), chain)
        return chain == expected

    def end_pass(self, cursor: Cursor | None) -> None:
        """End the account of a pass, which has come to its end or was left."""
        self.take(cursor)
        number, place, chain = self._at
        entry = self.entry or Entry(number, place, place, chain)
        self.entries.append(entry._replace(over=True))
        self._begin_pass(number + 1)

    def begin_again(self) -> None:
        self.last = None
        self._begin_pass(self._at.pass_index)
        self._from = str(self._at)

    def load(self, account: str, pass_index: int) -> None:
        self._at, self.entry = ledger_format.unpack_place(f"{pass_index} {account}"), None
        self._from = str(self._at)

    def give_other_data(self, before: dict[str, Any]) -> None:
        """Keep the entries so far together with the description of their data: later entries have another."""
        if self.entry is not None or self.entries:
            self._earlier.append(self._event(before))

    def news(self, cursor: Cursor | None, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Account for all batches; return what the journal is to have of this stream, an event for each."""
        if self.drawn:
            self.take(cursor)
        events, self._earlier = self._earlier, []
        if self.entry is not None or self.entries:
            events.append(self._event(data))
        return events

    def _event(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.entry is not None:
            self.entries.append(self.entry)
            self.entry = None
        event: dict[str, Any] = {"entries": ";".join(map(str, self.entries))}
        self.entries.clear()
        if self._from is not None:
            event["from"], self._from = self._from, None
        if (data, self._of) != self._data:
            self._data, event["data"] = (data, self._of), data
            if self._of is not None:
                event["of"] = self._of
            if self._share.size > 1:
                event["share"] = [self._share.size, self._share.uneven]
        return event
