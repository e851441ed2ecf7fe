"""A named stream of a run: the pass that the stream is in, the position in it, the ledger of its batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import describe
from everstep.data.order import pass_key
from everstep.errors import DataError, DivergenceError, NotResumableError, RestoreError
from everstep.record import batch_digest, data_digest, ledger_format
from everstep.record.ledger_format import LEFT_OUT, Entry, Place, link
from everstep.state import digest, encode, isolated, make_entry
from everstep.supervisor.streams.generators import HeadWatch, note_first_state, states_of
from everstep.untrusted_files import is_count

if TYPE_CHECKING:
    from everstep.supervisor.streams.all_streams import Streams


_CHANGING = 0
"""In place of a digest: the run's first pass changes what the data holds, as a cache does: not compared."""


@dataclass
class _Saved:
    """What a checkpoint has of a stream, until the data stands there again; then nothing."""

    where: object = ""
    position: Any = None
    """Position in the open pass; None between two passes."""
    generators: list[Any] | None = None
    """States of the source's generators; None: they need not be restored any more."""
    unhashed_keys: Collection[str] = ()
    by_rank: list[dict[str, Any]] | None = None
    """Places of the ranks of another number that wrote the checkpoint, until this rank has made its own."""
    generators_restored: bool = False
    """Whether the generators were restored before the head ran, because the data is declared."""
    contents: int | None = None
    """Digest of what the data held, until that is compared or a pass is open."""


class RunStream:
    """A named stream of a run: the data, once the program has bound it, and the open pass, if one is.

    A start that resumes calls `load`, `bind` and `open` in this order: what the checkpoint has is kept from
    `load` until the data stands there, at the resume point or where the pass is opened.  After that, and in
    a new run, `open` and `end_pass` take turns.  `tree` may be called at any time.
    """

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams
        self.ledger = Ledger(name, streams.share)
        self.head = HeadWatch(name, streams)
        self.per_step = [0, 0]
        """How many batches the run's first step drew, and its last one."""
        self.stream: Stream | None = None
        self.description: dict[str, Any] | None = None
        self._varies = False
        """Whether the description has changed in this run: the program gives other data from pass to pass."""
        self.pass_index = 0
        """Number of the pass that is open or comes next, from 0."""
        self.cursor: Cursor | None = None
        self._last_end: Any = None
        """End of the last pass, if the next pass depends on it; or the error in place of it."""
        self._first_contents: int | None = None
        """Digest of what the data held as the run's first pass began; None: of other data, or of nothing."""
        self._saved = _Saved()

    def load(self, tree: dict[str, Any], unhashed: dict[str, Any], where: object) -> None:
        if not is_count(tree["pass"]) or not isinstance(tree["generators"], list):
            raise ValueError(f"stream {self.name!r} has {tree!r:.300}")
        self.pass_index = tree["pass"]
        position, self._last_end = (
            {**tree[place], **unhashed[place]} if unhashed.get(place) else tree[place]
            for place in ("position", "last_end")
        )
        self._first_contents, contents = unhashed.get("contents") or (None, None)
        unhashed_keys = {key for place in ("position", "last_end") for key in unhashed.get(place) or ()}
        by_rank = tree.get("of_ranks")
        self._saved = _Saved(where, position, tree["generators"], unhashed_keys, by_rank, contents=contents)
        self.description = None if tree["data"] is None else dict(tree["data"])
        self._varies = tree["varies"]
        self.head.load(tree)
        self.ledger.load(tree["ledger"], self.pass_index)
        self.per_step[:] = tree.get("per_step", [0, 0])

    def bind(self, stream: Stream, *, override: bool = False) -> bool:
        """Read `stream` from now on; return whether other data than the checkpoint's was accepted."""
        if refusal := stream.unsaveable:
            raise NotResumableError(f"stream {self.name!r}: {refusal}")
        description = describe(stream, self._streams.seed)
        accepted = False
        if self.description is not None and description != self.description:
            inside = self._saved.position is not None
            if changes := _changes(self.description, description, inside=inside):
                if self.stream is None:  # the description is the checkpoint's
                    self._accept_changes(stream, changes, override)
                    accepted = override
                self._varies = True
            self.ledger.end_event(self.description)
        if stream is not self.stream:
            if self.stream is not None and self._first_contents != _CHANGING:
                self._first_contents = None
            note_first_state(stream)  # before the first batch is drawn: as the program gave it
        self.stream, self.description = stream, description
        self._combine_ranks(stream)
        if self.cursor is not None:  # the data of the open pass, given again: the head is over
            self.head.end(stream.generators, in_pass=True)
        return accepted

    def _accept_changes(self, stream: Stream, changes: str, override: bool) -> None:
        """Drop the positions in the checkpoint's data, or refuse the given data."""
        inside = self._saved.position is not None
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
        self._saved.position = self._last_end = None
        if inside:
            self.ledger.begin_again()
        if inside or len(self._saved.generators or ()) != len(stream.generators):
            self._saved.generators = None

    def _combine_ranks(self, stream: Stream) -> None:
        """Make this rank's place of those that the ranks of another number had; acts once after a `load`."""
        saved = self._saved
        places, saved.by_rank = saved.by_rank, None
        if places is None:
            return
        key = pass_key("ranks", self._streams.seed, self.name, self.pass_index)
        try:
            for name, place in (("position", saved.position), ("last_end", self._last_end)):
                for part in stream.rank_keys if isinstance(place, dict) else ():
                    values = _distinct([each[name][part] for each in places])
                    place[part] = stream.of_other_ranks(part, values, key)
        except DataError as error:
            raise RestoreError(
                f"stream {self.name!r}: the checkpoint {saved.where} is of another number of ranks "
                f"({len(places)}), which its place was made for: {error}; start with {len(places)}, or in "
                "another directory with init_from="
            ) from error
        # where these differ, the place tells where they stand, or else the program
        if saved.generators is not None and len(_distinct([each["generators"] for each in places])) > 1:
            saved.generators = [None] * len(saved.generators)
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
                    self._first_contents = self._digest()
                self.head.open(self.stream.generators)
                cursor = self.stream.open(self.name, self.pass_index, seed=self._streams.seed)
                self.cursor = self._streams.without_quarantined(self, cursor)
            self._last_end = self._saved.contents = None
        return self.cursor

    def go_back(self, *, at_resume_point: bool = False, at_epoch_end: bool = False) -> None:
        """Go to the saved position, or to the end of the last pass; acts once after a `load`.

        At the resume point what the program has done to the generators is undone; later a head has run.
        """
        saved = self._saved
        if saved.generators is None:
            return
        assert self.stream is not None
        generators = self._require_generators(self.stream, saved.generators)
        keep: Sequence[int] = range(len(generators)) if saved.generators_restored else ()
        if not at_resume_point and not saved.generators_restored:
            keep = self.head.set_by_head(generators, self.pass_index, in_pass=self.in_pass)
        # opening at a position may draw from the generators, so they are put right afterwards
        with self._streams.generators.restoring(generators, saved.generators, keep):
            if saved.position is not None:
                cursor = self._open_at(self.pass_index, saved.position)
                self.cursor = self._streams.without_quarantined(self, cursor)
            elif self._last_end is not None and self.stream.carries_over:
                self._open_at(self.pass_index - 1, self._last_end).close()
        self._saved = _Saved(contents=saved.contents)
        # inside a pass only the end of an epoch is followed by a head: the pass itself may draw
        if at_resume_point and (at_epoch_end or not self.in_pass):
            self.head.begin(generators)

    def restore_generators(self, stream: Stream) -> None:
        """Restore the generators of declared data, which the program has yet to bind."""
        saved = self._saved
        if not saved.generators:
            return
        generators = self._require_generators(stream, saved.generators)
        self._combine_ranks(stream)
        for generator, state in zip(generators, saved.generators, strict=True):
            if state is not None:
                make_entry("generator", generator).load(state)
        self._streams.generators.mark_restored(generators)
        self.head.begin(generators)
        saved.generators_restored = True

    def _require_generators(self, stream: Stream, saved: list[Any]) -> Sequence[Any]:
        """Return the stream's generators, as many as at the checkpoint."""
        before, now = len(saved), len(stream.generators)
        if before != now:
            raise DataError(
                f"stream {self.name!r}: its data held {before} generators at the checkpoint and "
                f"holds {now} now; give generator= as it was then"
            )
        return stream.generators

    def _open_at(self, pass_index: int, position: Any) -> Cursor:
        assert self.stream is not None
        source, drawn = self.stream.source, list[int | None]()
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
                f"checkpoint {self._saved.where} ({type(error).__name__}: {error}); fix the data if the "
                "error is its own, or resume from another checkpoint: another program or version wrote this"
            ) from error
        finally:
            source.replayed = None
        try:
            self._compare_replayed([] if cursor.may_differ else drawn, inside=pass_index == self.pass_index)
        except DivergenceError:
            cursor.close()
            raise
        if cursor.note:
            self._streams.say(f"stream {self.name!r}: {cursor.note}")
        return cursor

    def _compare_replayed(self, drawn: list[int | None], *, inside: bool) -> None:
        """Compare what was drawn again up to the place, or what the data holds, with the run's."""
        assert self.stream is not None
        is_whole = bool(drawn) and self.stream.source is self.stream
        if is_whole and not self.ledger.agrees(drawn, self._streams.quarantined_in(self)):
            words = f"one of the {len(drawn)} of pass {self.pass_index + 1} before the resume point"
            self._streams.compared(self.name, (words, "another, drawn again"), True)
        elif inside and not self._is_made_by_head():
            self._compare_contents(inside=True)

    def _is_made_by_head(self) -> bool:
        """Whether the head may have made a sampler, whose order is saved, of what the state holds by now."""
        position = self._saved.position
        has_order = isinstance(position, dict) and position.get("order") is not None
        return has_order and (self.pass_index == 0 or self._first_contents is None)

    def _digest(self) -> int | None:
        """Digest what the data holds now; rank 0 alone does, since data may split itself."""
        contents = () if self.stream is None or self._streams.share.rank else self.stream.contents
        return data_digest(contents)

    def _compare_contents(self, *, inside: bool) -> None:
        """Compare what the data holds with the checkpoint: between passes, whether changes of it are lost."""
        saved, self._saved.contents = self._saved.contents, None
        now = self._digest() if saved else None
        is_steady = self.pass_index > 1 or self.head.declared  # one pass does not tell whether it changes
        if not saved or now in (saved, None):
            return
        if inside or now == self._first_contents:
            words = f"of data with digest {saved:016x}", f"of data with digest {now:016x}"
            self._streams.compared(self.name, words, False)
        elif saved == self._first_contents and is_steady and not self._varies:
            self._streams.warn_once(
                f"stream {self.name!r} has other data than at the checkpoint and in its first pass. "
                "If no line at the head of an epoch changes it, lines before the loop do, by chance: give "
                "random_split and shuffles a generator of a fixed seed, and sort what has no order"
            )
        else:
            self._first_contents = None

    def _contents_now(self) -> int | None:
        """Return the digest for a checkpoint; note that the open first pass changes what the data holds."""
        saved, first = self._saved.contents, self._first_contents
        if saved is not None or first == _CHANGING:
            return saved
        now = self._digest()
        if self.cursor is not None and self.pass_index == 0 and now != first:
            self._first_contents, now = _CHANGING, None
        return now

    def changing_parts(self) -> list[str]:
        """Name the parts of the pass's first batch that are others each time it is drawn, if it can be.

        Drawing may move what the data counts, so this is for a run that ends.
        """
        drawn = list[Any]()
        if self.stream is None or not self.stream.source.contents:
            return []
        source, generators = self.stream.source, self.stream.source.generators
        with suppress(Exception):  # of the data's own code: then no part is named
            place, states = {**self._position(), "batches": 0, "ended": False}, states_of(generators)
            for _ in range(2):
                with isolated():
                    for generator, state in zip(generators, states, strict=True):
                        make_entry("generator", generator).load(state)
                    cursor = source.open(self.name, self.pass_index, place, seed=self._streams.seed)
                    with closing(cursor):
                        drawn.append(next(cursor))
        return list(_differing(drawn[0], drawn[1], "batch")) if len(drawn) > 1 else []

    def end_pass(self) -> None:
        if self.pass_index == 0:
            self._contents_now()  # which notes that the pass changes them
        if self.stream is not None and self.stream.carries_over:
            self._last_end = self._position()
        self.ledger.end_pass(self.cursor)
        self.close()
        self._saved.position = None
        self.pass_index += 1

    def end_epoch(self) -> None:
        """Begin to watch for a head, between two passes or two epochs."""
        if self.stream is not None and self._saved.generators is None:
            self.head.begin(self.stream.generators)
            if self._last_end is not None and self.stream.source is self.stream:
                self._last_end = self.stream.updated_end(self._last_end)

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None

    @property
    def skipped(self) -> bool:
        return self.cursor is not None and self.cursor.skipped > 0

    @property
    def in_pass(self) -> bool:
        return self.cursor is not None or self._saved.position is not None

    def _position(self) -> Any:
        return self._saved.position if self.cursor is None else self.cursor.position()

    def tree(self, *, head_may_follow: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the stream's branch of the state tree, and the parts of its position that are not hashed."""
        self.ledger.account_for(self.cursor)
        if head_may_follow and (not self.in_pass or self.head.began):
            self.end_epoch()  # what services did since the epoch's end is saved here
        saved, stream = self._saved, self.stream
        generators = () if stream is None else stream.generators
        unhashed_keys = saved.unhashed_keys if stream is None else stream.unhashed_keys
        position, unhashed = _split(self._position(), unhashed_keys)
        last_end, unhashed_end = _split(self._last_end, unhashed_keys)
        here = {
            "pass": self.pass_index,
            "position": position,
            "last_end": last_end,
            "data": self.description,
            "varies": self._varies,
            "ledger": self.ledger.account,
            "per_step": list(self.per_step),
            **self.head.tree(),
            **({} if saved.by_rank is None else {"of_ranks": saved.by_rank}),
            # until the generators stand there, what the checkpoint had of them is saved again
            "generators": states_of(generators) if saved.generators is None else saved.generators,
        }
        now = self._contents_now()
        contents = None if now is None and self._first_contents is None else [self._first_contents, now]
        return here, {"position": unhashed, "last_end": unhashed_end, "contents": contents}

    def rank_paths(self) -> list[tuple[str, ...]]:
        """List the paths in the stream's branch whose values are a rank's own, for `split`."""
        if self.stream is None:  # nobody knows them
            return [()]
        keys = self.stream.rank_keys
        places = [(place, key) for place in ("position", "last_end") for key in keys]
        # with keys of its own a rank reads through generators of its own
        return [*places, *((part,) for part in ("generators", "opened") if keys)]


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
    stored, given = ({**facts, **(facts.get("inside", {}) if inside else {})} for facts in (stored, given))
    pairs = {fact: (stored.get(fact, "absent"), given.get(fact, "absent")) for fact in {**stored, **given}}
    differ = {fact: (was, now) for fact, (was, now) in pairs.items() if was != now and fact != "inside"}
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
        """Entries since the last event; the last one grows until its pass is over."""
        self._events: list[dict[str, Any]] = []
        """Events that the journal has yet to get, of data that was read before the program gave other."""
        self._of: str | None = None
        """What the chains are of, "samples" or "digests"; None: not known."""
        self._data: tuple[dict[str, Any], str | None] | None = None
        """Description of the data in the last event of this start, and what the chains were of."""
        self._begin_pass(0)
        self._from: str | None = str(self._at)
        """Where this start continues, until its first event says so."""

    def _begin_pass(self, pass_index: int) -> None:
        self._at = Place(pass_index, 0, ledger_format.first_link(self._name, pass_index))

    @property
    def account(self) -> str:
        """Text for the state tree: the batches of the open pass, and their chain."""
        return str(self._at).partition(" ")[2]

    def account_for(self, cursor: Cursor | None) -> None:
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
        if self.entries and not self.entries[-1].over and first == place:
            left_out = [*self.entries[-1].left_out, *left_out]
            self.entries[-1] = self.entries[-1]._replace(end=end, chain=chain, left_out=tuple(left_out))
        else:
            # where the cursor says that it stands: an audit compares it with the entry before
            self.entries.append(Entry(number, first, end, chain, False, tuple(left_out)))
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
        self.account_for(cursor)
        number, place, chain = self._at
        if not self.entries or self.entries[-1].over:
            self.entries.append(Entry(number, place, place, chain))
        self.entries[-1] = self.entries[-1]._replace(over=True)
        self._begin_pass(number + 1)

    def begin_again(self) -> None:
        self._begin_pass(self._at.pass_index)
        self._from = str(self._at)

    def load(self, account: str, pass_index: int) -> None:
        self._at = ledger_format.unpack_place(f"{pass_index} {account}")
        self._from = str(self._at)

    def news(self, cursor: Cursor | None, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Account for all batches; return what the journal is to have of this stream, an event for each."""
        if self.drawn:
            self.account_for(cursor)
        self.end_event(data)
        events, self._events = self._events, []
        return events

    def end_event(self, data: dict[str, Any]) -> None:
        """Make an event of the entries so far, which are of this data; later ones may be of other data."""
        if not self.entries:
            return
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
        self._events.append(event)
