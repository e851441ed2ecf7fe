"""What steps find: to the journal and the trail, and compared when steps run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import xxhash

from everstep import backends
from everstep.contracts.metrics import Block
from everstep.data.adapt import IterableStream
from everstep.errors import DivergenceError
from everstep.metrics.collector import Collector
from everstep.record import (
    CHOSEN,
    DIVERGED,
    OTHER_DATA,
    Difference,
    Journal,
    Position,
    StepComparison,
    Trail,
    array_digest,
    batch_digest,
)
from everstep.record.step_comparison import in_words
from everstep.schedule import NEVER
from everstep.services.console import Voice
from everstep.state import Encoded
from everstep.supervisor.streams.run_stream import RunStream

if TYPE_CHECKING:
    from everstep.supervisor.board import ServiceBoard
    from everstep.supervisor.opening.open_run import ResumePoint
    from everstep.supervisor.saving.state_tree import Progress
    from everstep.supervisor.streams.all_streams import Streams

OnDivergence: TypeAlias = Literal["stop", "warn"] | None


class Verifier:
    """Keeps the findings of one start's steps, and compares them with earlier executions.

    Where a divergence is to stop the run, DivergenceError leaves `note_batch`, `pass_ended` or `boundary`.

    Args:
        streams: by name; their ledgers take the digest of each batch.
        update: digests the last update, for steps that leave no batch and no value; None: it cannot.
        warn_once: warns, unless a start of this run has done so.
        last: the last step that some rank compares; 0 if none does.
    """

    def __init__(
        self,
        trail: Trail,
        comparison: StepComparison,
        on_divergence: OnDivergence,
        collector: Collector,
        journal: Journal,
        voice: Voice,
        streams: Mapping[str, RunStream],
        update: Callable[[], int | None],
        warn_once: Callable[[str], None],
        last: int = 0,
    ) -> None:
        self._streams, self._update, self._last = streams, update, last or -1
        self._warn_once, self._only_warned = warn_once, 0
        """Warning, and number of streams whose data differs and was warned of alone."""
        self._started = False
        """Whether this start has completed a step."""
        self._trail, self._comparison, self._on_divergence = trail, comparison, on_divergence
        self._collector, self._journal, self._voice = collector, journal, voice
        self.digests_update = False
        """Whether a digest of each update is noted: that of a step whose loss is computed before it."""
        self.batches_digest: int | None = None
        """Digest of all batches so far, where other ranks are handed the same; None: nobody asks."""
        self.places: dict[str, int] = {}
        """Number of batches that the open step has drawn, by stream."""
        self._first_difference: Difference | None = None
        self._last_difference: Difference | None = None
        self._has_stopped = self._is_reported = False
        self._error: DivergenceError | None = None
        trail.compare = None if comparison.done else comparison.note

    def note_batch(self, step: int, stream: str, pass_index: int, batch: Any) -> None:
        """Note a batch that is handed out for `step`; nobody has changed it yet."""
        places = self.places
        place = places.get(stream, 0)
        places[stream] = place + 1
        digest = batch_digest(batch, pass_index)
        self._streams[stream].ledger.drawn.append(digest)
        if self.batches_digest is not None:
            self.batches_digest = batch_digest([digest or 0, step, place], self.batches_digest)
        self._trail.note(step, "batch", stream, digest, pass_index, place)
        if self._trail.compare is not None:
            self._notice()
            self.require_agreement()

    def note_other_data(self, stream: str, words: tuple[str, str], is_read_on: bool) -> None:
        """Note that data is not what the run was handed before the resume point: what was, and what is now.

        Where the run does not read on with what was drawn again, it is only a warning by default: lines that
        have not run yet may set what the data holds.  Each start records and says it; the warning with the
        causes comes once in a run, because such a program differs at each start.
        """
        if self._comparison.other_data(stream, words):
            self._notice(only_warns=not is_read_on)
            self.require_agreement()
            if not is_read_on:
                self._only_warned += 1
                self._warn_once(_OTHER_CONTENTS.format(stream))
            if self._is_reported:
                self.report()

    def pass_ended(self, step: int, stream: str, pass_index: int) -> None:
        """Note the end of a pass; `step` is the last complete one, the open one may have drawn from it."""
        self._trail.note(step + (stream in self.places), "pass", stream, epoch=pass_index)
        self._notice()
        self.require_agreement()

    def step_done(self, step: int, epoch: int) -> None:
        if not self._started:
            self._started = True
            self._first_step_done(step)
        pending, open_rows = self._collector.pending, self._collector.open_rows
        is_empty = not self.places and not (pending and pending[-1][0] == step)
        is_empty = is_empty and all(at != step for at, *_ in open_rows.values())
        if self.digests_update or self._trail.compare is not None or is_empty:
            digest = self._update()
            if digest is not None:
                self._trail.note(step, "copy", "update/parameters", digest)
        if self.places:
            for stream, count in self.places.items():
                self._streams[stream].per_step[1] = count
            self.places.clear()
        self._trail.step(step, epoch, pending, open_rows)
        if self._trail.compare is not None:
            self._comparison.step_done(step)
            self._notice()

    def _first_step_done(self, step: int) -> None:
        """Warn of batches that are drawn ahead: then the first step of each start draws more than others."""
        for stream, count in self.places.items():
            per_step = self._streams[stream].per_step
            first, last = per_step
            if step == 1:
                per_step[0] = count
            elif count == first > last > 0:
                self._voice.warn(
                    f"step {step}, the first of this start, drew {count} batches of stream {stream!r}, as "
                    f"the run's first did, and the step before it {last}: if the program draws a batch "
                    "ahead, the stop has lost the one that waited; draw it in the step that trains on it"
                )

    def rows(self, block: Block) -> None:
        self._trail.rows(block)
        self._notice()

    def snapshot(self, step: int, phase: str, encoded: Encoded) -> None:
        """Note the digests of a state that was copied, to be saved."""
        self._trail.copied(step)
        for part, digest in _digests(encoded):
            self._trail.note(step, "copy", f"{phase}/{part}", digest)
        self._notice()

    def committed(self, step: int) -> None:
        self._trail.committed(step)

    def boundary(self, step: int) -> None:
        """Note a boundary, at which everything so far is read."""
        if not self._comparison.done:
            self._comparison.reached(step)
            if self._comparison.done:
                self.report()
        self.require_agreement()

    def next_due(self, step: int) -> int:
        """Return the step after which the comparison may be over, on whichever rank it is the longest."""
        # rows of an epoch's tail belong to its last step, so the comparison may end a step later
        return next((due for due in (self._last, self._last + 1) if step < due), NEVER)

    def stop_comparing(self) -> None:
        """End the comparison with earlier executions: a person has chosen to continue with other data."""
        self._journal.event("decision", {"what": CHOSEN, "why": OTHER_DATA, "step": self._comparison.first})
        self._journal.flush()
        self._comparison.done, self._trail.compare = True, None

    def end(self) -> None:
        """End the comparison with the loop, and say what was compared, if that is not said yet."""
        if not self._comparison.done:
            self._comparison.end()
            self.report()

    def report(self) -> None:
        """Tell the user and the journal the result of the comparison."""
        self._notice()
        self._trail.compare, self._is_reported = None, True
        comparison = self._comparison
        report = comparison.report()
        self._journal.event("verified", {"report": report, "steps": comparison.steps}, wall=True)
        self._journal.flush()  # before the line: a kill right after it must not leave a start "not verified"
        if comparison.differing == self._only_warned:
            self._voice.say(report)
        else:
            self._voice.warn(f"{report}\n{_ADVICE}")

    @property
    def diverged(self) -> int | None:
        """The first step that this start found otherwise than an earlier execution."""
        return None if self._first_difference is None else self._first_difference.step

    def require_agreement(self) -> None:
        """Raise the DivergenceError that is to stop the run: once, as the way out of the loop asks again."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _notice(self, *, only_warns: bool = False) -> None:
        """Record a divergence at once in the journal's file, because a kill may follow.

        Args:
            only_warns: whether data that differs stops nothing by default.
        """
        new, latest = self._comparison.difference, self._comparison.latest
        if new is None or latest is None or latest is self._last_difference:
            return
        self._last_difference = latest
        if new != self._first_difference:
            self._first_difference = new
            values = {"component": new.name, "old": new.expected, "new": new.actual}
            self._journal.event(DIVERGED, {"step": new.step, **values, "in_data": new.component == "samples"})
            self._journal.flush()
        in_data = latest.component == "samples"  # also behind a difference that only warned
        stops = self._on_divergence is None and in_data and not only_warns
        if not self._has_stopped and (self._on_divergence == "stop" or stops):
            self._has_stopped = True
            cause = _CAUSES[in_data]
            stream = self._streams.get(latest.name.removeprefix("batch of ")) if in_data else None
            source = None if stream is None or stream.stream is None else stream.stream.source
            if isinstance(source, IterableStream) and source.generator:
                cause = _GENERATOR.format(source.generator)
            if stream is not None and (parts := stream.changing_parts()):
                cause = _CHANGES.format(", ".join(parts[:3]))
            self._error = DivergenceError(
                f"resume differs: {in_words(latest)}; {cause}. If the change is intended, run "
                f"everstep accept RUN --divergence {new.step}, and start again; or continue with "
                'on_divergence="warn"',
                step=new.step,
            )


class Recording:
    """Takes the rows that the collector has finished.

    `last_values` has the newest value of each metric outside steps, or without epochs; `last_steps` its step.
    """

    def __init__(
        self,
        journal: Journal,
        verifier: Verifier,
        progress: Progress,
        recovered: ResumePoint,
        streams: Streams,
        board: ServiceBoard,
    ) -> None:
        self._journal, self._verifier, self._progress = journal, verifier, progress
        self._streams, self._board = streams, board
        self._best: dict[str, dict[str, Any]] = {}
        """Metric -> what this start has recorded of its `Best`."""
        self.last_values: dict[str, float] = dict(recovered.meta.get("metrics", {}))
        self.last_steps: dict[str, int] = dict(recovered.meta.get("metric_steps", {}))
        self._flushed = (0, 0)
        """Step and epoch of the last "progress" event."""

    def add(self, block: Block) -> None:
        """Record rows; rows of a step that runs again are compared with its earlier rows."""
        if block.phase != "step" or not block.epoch:
            self.last_values[block.name] = block.values[-1]
            self.last_steps[block.name] = block.steps[-1]
        self._journal.append(block)
        self._verifier.rows(block)

    def flush(self) -> Position:
        """Hand every row and event so far, the run's progress and its ledger to the journal's file."""
        current = self._progress.step, self._progress.epoch
        # batches of an open step belong to no step that a resume would count
        ledgers = [] if self._verifier.places else self._streams.account()
        if not ledgers and current != self._flushed:
            ledgers = [{}]
        self._flushed = current
        for ledger in ledgers:
            data: dict[str, Any] = {"step": current[0], "epoch": current[1]}
            if ledger:
                data["ledger"] = ledger
            # a description may have the names of the user's classes
            is_described = any("data" in each for each in ledger.values())
            self._journal.event("progress", data, wall=True, plain=not is_described)
        for service in self._board.bests:
            for place in service.places[:1]:
                best = {"metric": service.metric, "value": place.value, "step": place.step}
                if self._best.get(service.metric) != best:
                    self._best[service.metric] = best
                    self._journal.event("best", best, wall=True)  # the clock decides how many there are
        return self._journal.flush()


def _digests(encoded: Encoded) -> Iterator[tuple[str, int]]:
    """Digest the random state and each entry of the user's state; of large arrays only parts count."""
    structure: Any = encoded.structure
    key = next(name for name in structure["rng"] if name.startswith("rank"))
    parts = {f"rng/{key}": ("random state", structure["rng"][key])}
    parts |= {f"user/{name}": (name, entry) for name, entry in structure["user"].items()}
    totals = dict.fromkeys(parts, 0)
    for path, array in sorted(encoded.arrays.items()):  # the order of a dict makes no difference
        place = "/".join(path.split("/", 2)[:2])
        if place in totals:
            # folded into one number: of a long list only the first and last items count in `batch_digest`
            totals[place] = array_digest(array.data, totals[place]) or 0
    for place, (part, entry) in parts.items():
        text = json.dumps(entry, sort_keys=True, default=repr)
        yield part, batch_digest([xxhash.xxh3_64_intdigest(text.encode()), totals[place]], 0) or 0


_ADVICE = (
    "the same steps gave other numbers: they read a value that is not in state= (an environment, a "
    "counter, a learning rate or an average in a variable, a generator of your own, a batch drawn "
    "ahead), the clock (a metric whose name ends in time is not compared) or the order of a set, or "
    "a kernel is not deterministic. `everstep drill SCRIPT` names the component"
)
_REMEDY = (
    "give random_split and shuffles a generator of a fixed seed, sort what has no order, and change no batch "
    "in place; data of your own needs set_epoch(epoch), or state_dict and load_state_dict; labels or samples "
    "that follow from the model belong into arrays of state=, written to in place (docs/guide/exactness.md)"
)
_CAUSES = {
    True: "the data gives other batches than before the stop: its order or its contents depend on something "
    "that is not restored (a source without a saved position, a generator of its own, a set, the clock), or "
    f"padding is memory without values (np.empty, torch.empty; use zeros): {_REMEDY}",
    False: "`everstep drill SCRIPT` names the component",
}
_GENERATOR = (
    "drawn again from its start, generator {} gives other batches: what it draws at random after its first "
    "batch, as each new pass over a shuffling DataLoader does, follows from what the training has drawn by "
    "then. In a new run give what it reads, such as the DataLoader itself, or an object with __iter__, "
    "state_dict and load_state_dict"
)
_CHANGES = (
    "drawn twice in this process, the batch differs in {}: a value of the moment (the time, a uuid), or a "
    "count or a generator of the data's own; leave it out of the batch, make it a function of the sample's "
    "index, or draw from the global generators (the order may differ, too)"
)
_OTHER_CONTENTS = (
    "stream {!r}: an array or a list that the data holds is not the one that was trained on, or is not yet: "
    "that is harmless if lines inside your loop set it before it is read, or in a cache that fills. If not, "
    f"{_REMEDY}. `everstep drill SCRIPT` tells which; later starts only say that it differs"
)


def incomparable(same_numbers: bool) -> str:
    """Explain why equal steps may give unequal numbers here; "" if they may not."""
    if not same_numbers:
        return "they were computed on another machine, or under other settings of it"
    if not all(backend.is_deterministic() for backend in backends.active()):
        return "kernels are not deterministic here"
    return ""
