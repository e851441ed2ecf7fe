"""Streams of a run, by name: bound, opened, kept out of quarantined batches, saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from everstep.arguments import valid_name
from everstep.contracts.data import Cursor, Share, Stream, Uneven
from everstep.contracts.group import Group
from everstep.data.adapt import IterableStream, as_stream
from everstep.data.cursor import CursorWrapper
from everstep.errors import ConfigError, UsageError, nearest
from everstep.record import Batch
from everstep.supervisor.data_ranks import require_same_samples
from everstep.supervisor.streams.generators import Generators, note_last_state
from everstep.supervisor.streams.run_stream import RunStream


class QuarantineCursor(CursorWrapper):
    """Cursor that tells `drew` the index of each batch, and leaves quarantined batches out."""

    skipped = 0

    def __init__(self, cursor: Cursor, quarantined: Collection[int], drew: Callable[[int], None]) -> None:
        super().__init__(cursor)
        self._quarantined, self._drew = quarantined, drew

    @property
    def _index(self) -> int:
        assert self.cursor.done is not None
        return self.cursor.done

    def __next__(self) -> Any:
        while (index := self._index) in self._quarantined:
            next(self.cursor)
            self.skipped += 1
            # not `index`: a cursor below may have passed over batches, too
            self.left_out.append(self._index - 1)
        batch = next(self.cursor)
        self._drew(index)
        return batch

    def remaining(self) -> int | None:
        left, index = self.cursor.remaining(), self._index
        return (
            None if left is None else left - sum(index <= each < index + left for each in self._quarantined)
        )


class Streams:
    """All streams of a run, by name.

    Attributes:
        drew: called with the stream, pass and index of each batch that is handed out, if set.
        noticed: called with a stream's name, and what the head of an epoch did to its generators.
        compared: called where data is not what the run was handed before, as `Verifier.note_other_data`.
        changed: called when a person has chosen to continue with other data.
        warn_once: called with a warning about data that cannot be resumed everywhere.
    """

    def __init__(
        self,
        seed: int,
        say: Callable[[str], None],
        *,
        declared: Mapping[str, Any] | None = None,
        override: bool = False,
        quarantined: Iterable[Batch] = (),
        same_data: bool = False,
        group: Group | None = None,
        uneven: Uneven | None = None,
    ) -> None:
        self._group = group = group or Group()
        self.share = Share(group.data_rank, group.data.size, uneven)
        self.drew: Callable[[str, int, int], None] | None = None
        self.noticed: Callable[[str, dict[str, Any]], None] = lambda name, head: None
        self.compared: Callable[[str, tuple[str, str], bool], None] = lambda *_: None
        self.changed: Callable[[], None] = lambda: None
        self.warn_once: Callable[[str], None] = lambda message: None
        self._quarantined = [(batch.stream, batch.pass_index, batch.batch_index) for batch in quarantined]
        self.by_name: dict[str, RunStream] = {}
        self._sources: dict[str, Any] = {}
        """What the program has bound, by name."""
        self.declared = dict(declared or {})
        self.seed, self.say, self._override, self._same_data = seed, say, override, same_data
        self.generators = Generators()

    def bind(self, data: Any, name: str) -> RunStream:
        run_stream = self.by_name.setdefault(valid_name("stream", name), RunStream(name, self))
        stream = run_stream.stream
        if stream is None or self._sources.get(name) is not data:
            if run_stream.cursor is not None:
                raise ConfigError(
                    f"stream {name!r} is in the middle of a pass over another object; give this "
                    'data a name of its own, as in name="train2"'
                )
            stream = self._part_of_rank(data)
            if self._group.size > 1:
                self._group.agree(stream.describe(self.seed), f"the data of stream {name!r}")
                require_same_samples(self._group, stream, name)
        if run_stream.bind(stream, override=self._override):
            self.changed()
        if self._sources.get(name) is not data:
            self._sources[name] = data
            if isinstance(stream.source, IterableStream) and stream.source.shuffled:
                self.warn_once(
                    f"stream {name!r} is a generator, {stream.source.generator}, that reads a shuffling "
                    "DataLoader. If it begins the DataLoader again (while True: yield from loader), the "
                    "order of that pass follows from what training has drawn by then, and a stop in it "
                    "cannot be resumed: give the DataLoader itself, which everstep begins again"
                )
        return run_stream

    def _part_of_rank(self, data: Any) -> Stream:
        stream = as_stream(data)
        return stream if self._group.size == 1 else stream.split(self.share)

    def quarantined_in(self, run_stream: RunStream) -> set[int]:
        """Return the numbers of the quarantined batches of a stream's open pass."""
        place = (run_stream.name, run_stream.pass_index)
        return {batch for *where, batch in self._quarantined if (*where,) == place}

    def without_quarantined(self, run_stream: RunStream, cursor: Cursor) -> Cursor:
        """Wrap the cursor, if batches of its pass are to be noted or left out."""
        out = self.quarantined_in(run_stream)
        # the usual case: nothing stands between the program and its batches
        if self.drew is None and not out:
            return cursor
        if cursor.done is None:
            cursor.close()
            otherwise = "" if self._quarantined else ", or leave out Recovery"
            raise ConfigError(
                f"stream {run_stream.name!r}: a {type(cursor).__name__} does not tell how many batches of "
                "its pass it has handed out, so none can be quarantined; give the cursor of your data the "
                "attribute done, counted from the start of the pass also where it is opened at a "
                f"position{otherwise}"
            )
        place = (run_stream.name, run_stream.pass_index)
        drew = (lambda index: None) if self.drew is None else partial(self.drew, *place)
        return QuarantineCursor(cursor, out, drew)

    def sample_ids(self, name: str, pass_index: int, index: int) -> list[int] | None:
        """Return the numbers of the samples in a batch; None where the stream cannot tell them."""
        stream = self.by_name[name].stream if name in self.by_name else None
        return None if stream is None else stream.sample_ids(name, pass_index, index, seed=self.seed)

    def no_way_back(self) -> str:
        """Explain why this process cannot read a stream again, with a remedy; "" if it can."""
        if not self._same_data:
            return ""
        for name, run_stream in self.by_name.items():
            if run_stream.stream is not None and run_stream.stream.spent:
                return (
                    f"stream {name!r} is an iterator, which cannot be read again; give a list, or an "
                    "object whose __iter__ starts from the beginning"
                )
        return ""

    @property
    def weight(self) -> float:
        """Weight of this rank's part of the step's batch; see `Cursor.weight`.

        Of several streams that the step draws from, the weight of the one whose batch is uneven.
        """
        cursors = [each.cursor for each in self.by_name.values() if each.cursor is not None]
        return next((cursor.weight for cursor in cursors if cursor.weight != 1.0), 1.0)

    def bound(self, name: str) -> bool:
        return name in self._sources

    def end_epoch(self) -> None:
        """End the epoch: the head of the next epoch may change generators of the data."""
        for run_stream in self.by_name.values():
            run_stream.end_epoch()

    def end_passes(self) -> None:
        for run_stream in self.by_name.values():
            if run_stream.in_pass:
                run_stream.end_pass()

    def tree(self, *, head_may_follow: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the `streams/` branch, and values beside it that decide no batch."""
        trees = {name: each.tree(head_may_follow=head_may_follow) for name, each in self.by_name.items()}
        # of each stream on all ranks, though rank 0 alone has digests of what the data holds
        return {name: tree for name, (tree, _) in trees.items()}, {
            name: unhashed for name, (_, unhashed) in trees.items()
        }

    def account(self) -> list[dict[str, Any]]:
        """Return what the ledgers have to tell the journal; all batches so far are in complete steps."""
        streams = self.by_name.items()
        news = {name: each.ledger.news(each.cursor, each.description or {}) for name, each in streams}
        count = max(map(len, news.values()), default=0)
        return [{name: events[n] for name, events in news.items() if n < len(events)} for n in range(count)]

    def rank_paths(self) -> list[tuple[str, ...]]:
        """List the paths in the state tree whose values are a rank's own, for `split`."""
        return [("streams", name, *path) for name, each in self.by_name.items() for path in each.rank_paths()]

    def load(
        self, tree: dict[str, Any], unhashed: dict[str, Any], heads: Mapping[str, Any], where: object
    ) -> None:
        """Load what `tree` returned; `heads`: by stream, what the next head did when it ran before."""
        for name, saved in tree.items():
            run_stream = self.by_name[name] = RunStream(name, self)
            run_stream.load(saved, unhashed.get(name, {}), where)
            run_stream.head.recorded = heads.get(name)

    def open_bound(self, *, at_epoch_end: bool) -> None:
        """Bring bound streams to where the checkpoint had them, and back the generators of declared data."""
        for name, run_stream in self.by_name.items():
            if self.bound(name):
                run_stream.go_back(at_resume_point=True, at_epoch_end=at_epoch_end)
            elif name in self.declared:
                run_stream.restore_generators(self._part_of_rank(self.declared[name]))

    def require_bound(self) -> None:
        """Refuse to continue while a stream of the checkpoint has no data."""
        for name, run_stream in self.by_name.items():
            if run_stream.in_pass and not self.bound(name):
                raise UsageError(
                    f"the checkpoint is inside a pass over stream {name!r}, but the program has bound no "
                    "stream of that name: give it with sv.stream(...) before the loop, also where the loop "
                    f"has gone on to other data; {nearest(name, self._sources)}"
                )

    def close(self) -> None:
        for run_stream in self.by_name.values():
            run_stream.close()
            if run_stream.stream is not None:
                # after the close: no worker draws from the data any more
                note_last_state(run_stream.stream)
