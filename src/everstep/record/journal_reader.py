"""Reader of a run's journal: which rows of its files are valid.

The valid rows are a chain, like the commits of a branch: the newest segment whole, its parent up to
the position of the checkpoint that was resumed from, the parent's parent, and so on to a segment that
started from nothing.  All other rows are superseded; they stay readable.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.arguments import checked_keywords
from everstep.contracts.metrics import Block, phases_and_names
from everstep.errors import ConfigError, RunDirError, nearest
from everstep.record import journal_format
from everstep.record.event_fields import ACCEPTED, CHOSEN, DIVERGED
from everstep.record.journal_format import Position
from everstep.record.rollback import Rollback
from everstep.record.rundir import certain_id, user_path
from everstep.record.segment_file import (
    Event,
    Item,
    Segment,
    in_order,
    read_or_miss,
    read_segment,
    segment_number,
    segment_path,
)

OTHER_CONFIGURATION, OTHER_DATA = "another configuration", "other data"
"""Reasons why a chosen checkpoint is trained differently."""
OTHER_RANKS, OTHER_LAYOUT = "another number of ranks", "another layout of the sharded state"
"""Reasons why steps are not compared with those of earlier starts."""

Key: TypeAlias = tuple[int, int, str, str, int]
"""(epoch, step, phase, name, seq): the unique key of a row in a run."""
Value: TypeAlias = tuple[int, int]
"""(bits of a value, count of the values folded into it): two rows are equal if both are."""


class Row(NamedTuple):
    """Value of a metric, with its key and the segment that holds it."""

    segment: int
    epoch: int
    step: int
    phase: str
    name: str
    seq: int
    value: float
    count: int  # type: ignore[assignment]  # the column's name matters more than tuple.count
    wall: bool


class Status(NamedTuple):
    """Summary of a run: starts of its process, the last step known to be complete, rows valid and superseded.

    `epoch` is the epoch of that step, begun or over.
    """

    segments: int
    epoch: int
    step: int
    rows: int
    superseded: int
    ended: dict[str, Any] | None


class RunJournal:
    """Whole journal of one run, as it was at the first use.

    Args:
        run_dir: the run directory; a run without a journal has an empty journal.
        saved_by: number of the newest start whose checkpoint is on disk: a later start that began from
            nothing, and saved nothing, forgets no rollback.  None: the newest start of all.

    Raises:
        RunDirError: the path is not a run; names the runs nearby.
        JournalError: (at the first use) a newer format version wrote one of the files.
    """

    @checked_keywords
    def __init__(self, run_dir: str | Path, saved_by: int | None = None) -> None:
        self.run_dir = user_path(run_dir, "run_dir")
        self._saved_by = saved_by
        _require_run(self.run_dir)

    @cached_property
    def _segments(self) -> dict[int, Segment]:
        paths = (self.run_dir / "journal").glob("segment-*.evj")
        numbers = sorted((number, path) for path in paths if (number := segment_number(path)))
        run = certain_id(self.run_dir) if numbers else None
        return {number: read_or_miss(number, path, run) for number, path in numbers}

    @cached_property
    def _chain(self) -> dict[int, int]:
        """Segment number -> the offset up to which the segment is valid, oldest first."""
        started = [segment for segment in self._segments.values() if segment.started]
        return self._chain_to(Position(started[-1].number, started[-1].end)) if started else {}

    def _chain_to(self, position: Position | None) -> dict[int, int]:
        parents = {number: segment.parent for number, segment in self._segments.items()}
        return {} if position is None else chain_to(parents, position)

    @property
    def problems(self) -> list[str]:
        """Descriptions of torn, damaged or missing places; empty for a healthy journal."""
        found = [p for s in self._segments.values() for p in (*s.problems, s.torn) if p]
        for number in self._chain:
            segment = self._segments[number]
            if segment.parent is None:
                continue
            parent = self._segments.get(segment.parent.segment)
            name = segment_path(self.run_dir, segment.parent.segment).name
            if parent is None or parent.number >= number:
                found.append(f"{segment.path.name} continues {name}, which is missing")
            elif segment.parent.offset > parent.end:
                found.append(
                    f"{segment.path.name} continues {name} from {segment.parent.offset}, but that file ends "
                    f"at {parent.end}"
                )
        return found

    def segments(self) -> list[Segment]:
        """List the files of the journal, oldest first."""
        return list(self._segments.values())

    def facts(self) -> dict[str, Any]:
        """Return the newest start's provenance (`everstep.record.facts`); empty before the first start."""
        start = self.newest_start()
        return {} if start is None else dict(start.data.get("facts", {}))

    def facts_since(self, number: int) -> list[dict[str, Any]]:
        """List the provenance of the starts from this number on, superseded starts included."""
        started = self.events("segment", valid=False)
        return [event.data.get("facts", {}) for event in started if event.segment >= number]

    def newest_start(self) -> Event | None:
        """Return the event with which the newest start began; None before the first start."""
        return next(reversed(list(self.events("segment", valid=False))), None)

    def rows(self, valid: bool = True) -> Iterator[Row]:
        """Yield the metric rows, in no order that two equal runs share: sort them by what you need.

        Args:
            valid: False to include superseded rows.
        """
        for segment, block in self._blocks(valid):
            for step, seq, value, count in zip(
                block.steps, block.seqs, block.values, block.counts, strict=True
            ):
                yield Row(segment, block.epoch, step, block.phase, block.name, seq, value, count, block.wall)

    def comparable(self, valid: bool = True) -> Iterator[tuple[Key, Value]]:
        """Yield the rows that do not depend on the clock, as key and value; see `rows`."""
        return (row for _, block in self._blocks(valid) for row in comparable_rows(block))

    def _blocks(self, valid: bool) -> Iterator[tuple[int, Block]]:
        for segment in self._segments.values():
            end = self._chain.get(segment.number, 0) if valid else segment.end
            for stored in segment.blocks:
                if stored.offset < end:
                    yield segment.number, stored.block

    def parts(self, position: Position | None = None) -> Iterator[tuple[int, list[Item]]]:
        """Yield each segment with valid rows or events, oldest first: its number, and these as written.

        Args:
            position: the place up to which the run is read; None: its end.
        """
        for number, end in (self._chain if position is None else self._chain_to(position)).items():
            yield number, [item for item in in_order(self._segments[number]) if item.offset < end]

    def events(self, kind: str | None = None, valid: bool = True) -> Iterator[Event]:
        """Yield events in the order of writing.  Decisions are always valid.

        Args:
            kind: only events of this kind.
            valid: False to include superseded events.
        """
        for segment in self._segments.values():
            end = self._chain.get(segment.number, 0) if valid else segment.end
            for event in segment.events:
                if kind in (None, event.kind) and (event.offset < end or event.kind == "decision"):
                    yield event

    @checked_keywords
    def series(self, name: str, phase: str | None = None) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric in one phase, valid rows only.

        Args:
            name: the metric's name, or "PHASE/NAME".
            phase: "step" (collected inside steps), "head" or "tail" (in an epoch, before or after its
                steps), "epoch" (means of an epoch's steps), "eval/SERVICE" (returned by a service).  None:
                the metric's only phase, or "step" if it has several.

        Raises:
            ConfigError: no row has this name and phase; names the nearest, and all that exist.
        """
        known = {(block.phase, block.name) for _, block in self._blocks(valid=True)}
        names = {called for _, called in known}
        if name not in names and phase is None:
            phase, name = next((one for one in phases_and_names(name) if one in known), (None, name))
        phases: dict[str, tuple[list[int], list[float]]] = {}
        for _, block in self._blocks(valid=True):
            if block.name == name:
                steps, values = phases.setdefault(block.phase, ([], []))
                steps += block.steps
                values += block.values
        if name not in names:
            raise ConfigError(f"the run has no metric {name!r}; {nearest(name, names)}")
        asked = phase or ("step" if len(phases) > 1 else next(iter(phases)))
        if asked not in phases:
            raise ConfigError(f"metric {name!r} has no rows in phase {asked!r}; {nearest(asked, phases)}")
        return phases[asked]

    def rollbacks(self) -> list[Rollback]:
        """List the rollbacks of the run since it began from nothing, in order."""
        decisions = [event for event in self.events("decision") if event.segment >= self._began]
        return Rollback.among((event.data, event.segment) for event in decisions)

    @cached_property
    def _began(self) -> int:
        """Number of the segment from nothing that the newest start with a checkpoint goes back to."""
        saved_by = math.inf if self._saved_by is None else self._saved_by
        newest = max(
            (s.number for s in self._segments.values() if s.started and s.number <= saved_by), default=0
        )
        first = next(iter(self._chain_to(Position(newest, 0))), 0)
        return first if first and self._segments[first].parent is None else 0

    def heads(self, step: int) -> dict[str, dict[str, Any]]:
        """Map each stream to the changes that the head of the epoch after `step` made to its generators.

        The newest execution counts, even if it is superseded.
        """
        heads = self.events("head", valid=False)
        found = [event.data for event in heads if event.segment >= self._began]
        return {data["stream"]: data for data in found if data["step"] == step}

    def superseded(self, position: Position | None) -> dict[int, dict[Key, Value]]:
        """Map each segment to the comparable rows that a start from `position` leaves behind; None: all."""
        chain = self._chain_to(position)
        return {
            number: {
                key: row
                for stored in segment.blocks
                if stored.offset >= chain.get(number, 0)
                for key, row in comparable_rows(stored.block)
            }
            for number, segment in self._segments.items()
        }

    def abandoned_starts(self, position: Position | None) -> set[int]:
        """Find the starts whose overridden configuration or data a position does not inherit."""
        chain, left = self._chain_to(position), set[int]()
        reasons = (OTHER_CONFIGURATION, OTHER_DATA)
        chose = {event.segment for event in self.events("decision") if event.data.get("why") in reasons}
        for number, segment in self._segments.items():
            inherited = segment.parent is not None and segment.parent.segment in left
            if number not in chain and (number in chose or inherited):
                left.add(number)
        return left

    def compared_until(self, segment: int, step: int, left: Collection[int]) -> tuple[float, str]:
        """Find the first step that a start from `step` does not compare with a segment's results, and why.

        From that step on the results were superseded on purpose: by a rollback (other batches take those
        steps), by a checkpoint or a configuration that a person chose, or by an accepted divergence.  Or the
        segment itself had diverged.

        Args:
            segment: number of the segment.
            step: the step that the start resumes from.
            left: starts whose choices do not count.

        Returns:
            that step, infinite if there is none; and the reason, empty if there is none.
        """
        own = [e.data["step"] for e in self.events(DIVERGED, valid=False) if e.segment == segment]
        cuts = [each[2:] for each in self._cuts if segment <= each[0] and each[1] not in left]
        cuts += [(first, f"start {segment} had diverged at step {first}") for first in own if first > step]
        return min(cuts, key=itemgetter(0), default=(math.inf, ""))

    def meets(
        self, others: Callable[[Mapping[str, Any]], bool], position: Position | None, step: int
    ) -> bool:
        """Whether a start from `position` would be compared with one of `others`."""
        left = self.abandoned_starts(position)
        return any(
            others(event.data.get("facts", {})) and self.compared_until(event.segment, step, left)[0] > step
            for event in self.events("segment", valid=False)
            if event.segment not in left
        )

    @cached_property
    def _cuts(self) -> list[tuple[int, int, int, str]]:
        """(segment, chooser, step, why): from that step on, this and earlier segments are not compared with.

        The chooser is the start that made a person's choice; 0 where it was no choice.
        """
        cuts = [
            (one.number - 1, 0, 0, f"start {one.number} began from nothing")
            for one in self._segments.values()
            if one.started and one.parent is None
        ]
        for each in self.rollbacks():
            why = f"rollback {each.number} has other batches from step {each.first} on"
            cuts.append((each.segment, 0, each.first, why))
        for at, step in self._accepted:
            cuts.append((at, 0, step, f"a divergence was accepted at step {step}"))
        for event in self.events("decision"):
            if event.data.get("what") == CHOSEN:
                at, why = event.segment, f"start {event.segment} had {event.data.get('why')}"
                cuts.append((at - 1, at, event.data["step"], why))
        return cuts

    def divergences(self, position: Position | None = None) -> list[Event]:
        """List the divergences in the run's valid events that nobody has accepted, oldest first.

        Args:
            position: the end of what counts; None: the end of the newest start.
        """
        chain = self._chain if position is None else self._chain_to(position)
        return [
            event
            for event in self.events(DIVERGED, valid=False)
            if event.offset < chain.get(event.segment, 0)
            and not is_accepted(event.segment, event.data["step"], self._accepted)
        ]

    @cached_property
    def _accepted(self) -> list[tuple[int, int]]:
        """(segment of the decision, step): a person accepts the divergence at that step."""
        decisions = [event for event in self.events("decision") if event.data.get("what") == ACCEPTED]
        return [(event.segment, event.data["step"]) for event in decisions]

    def step_metrics(self) -> set[str]:
        """Collect the names of the metrics that any step has collected."""
        heads = (
            journal_format.block_names(each.payload) for s in self._segments.values() for each in s.blocks
        )
        return {name for phase, name in heads if phase == "step"}

    def lacks(self, position: Position) -> str | None:
        """Say which rows before a checkpoint's `position` are gone; None if none are."""
        segment = self._segments.get(position.segment)
        if segment is not None and segment.end >= position.offset:
            return None
        path = segment_path(self.run_dir, position.segment)
        what = "is missing" if segment is None else f"ends at {segment.end}, before {position.offset}"
        return (
            f"{path} {what}: metrics that were recorded before the checkpoint are lost; the state is whole, "
            "and the run resumes; restore the file from a copy to have the metrics again"
        )

    def ended(self) -> dict[str, Any] | None:
        """Return the data of the "ended" event if the run's newest start came to its end, else None."""
        newest = max(self._chain, default=0)
        ends = [event.data for event in self.events("ended") if event.segment == newest]
        return ends[-1] if ends else None

    def status(self) -> Status:
        """Summarise the run."""
        epoch = step = valid = 0
        for _, block in self._blocks(valid=True):
            epoch, step = max(epoch, block.epoch), max(step, *block.steps)
            valid += len(block.steps)
        for event in self.events():
            event_step, event_epoch = event.completed
            step, epoch = max(step, event_step), max(epoch, event_epoch)
        total = sum(len(block.steps) for _, block in self._blocks(valid=False))
        return Status(len(self._segments), epoch, step, valid, total - valid, self.ended())


def chain_to(parents: Mapping[int, Position | None], position: Position) -> dict[int, int]:
    """Follow the segments' parents from a position back: number -> the offset up to which it is valid."""
    links, at = dict[int, int](), position
    while at.segment in parents:
        links[at.segment] = at.offset
        parent = parents[at.segment]
        if parent is None or parent.segment >= at.segment:  # parents are older: a forged cycle must end
            break
        at = parent
    return dict(reversed(links.items()))


def _require_run(folder: Path) -> None:
    if any((folder / name).exists() for name in ("run.json", "journal")):
        return
    runs = {str(path.parent) for near in (folder, folder.parent) for path in near.glob("*/run.json")}
    close = difflib.get_close_matches(str(folder), runs, n=3, cutoff=0.0)
    hint = f"the nearest: {', '.join(close)}" if close else "there is no run beside it"
    what = "has neither run.json nor journal/" if folder.exists() else "does not exist"
    raise RunDirError(f"{folder} is not a run: it {what}; give a run's directory ({hint})")


def is_accepted(segment: int, step: int, decisions: Iterable[tuple[int, int]]) -> bool:
    """Whether one of the decisions (its segment, step) accepts a segment's results from a step on."""
    return any(segment <= at and step >= first for at, first in decisions)


def comparable_rows(block: Block) -> Iterator[tuple[Key, Value]]:
    """Yield a block's rows as key and value; none if they depend on the clock."""
    if not block.wall:
        bits = journal_format.float_bits(block.values)
        for step, seq, value, count in zip(block.steps, block.seqs, bits, block.counts, strict=True):
            yield (block.epoch, step, block.phase, block.name, seq), (value, count)


class Follower:
    """Valid rows and events of a run, in the order of writing, while its newest segment grows."""

    def __init__(self, run_dir: Path, segment: int) -> None:
        self._run_dir, self._segment = Path(run_dir), segment
        self._size = 0
        """Bytes of the file that were read; a last frame that is still being written is read next time."""
        self._end = 0
        """The least offset that is news: a file that was copied together has no entry twice."""

    def older(self) -> Iterator[tuple[int, list[Item]]]:
        """Yield the valid parts of the earlier segments: see `RunJournal.parts`."""
        return (part for part in RunJournal(self._run_dir).parts() if part[0] != self._segment)

    def news(self) -> Iterator[Item]:
        """Yield the entries that reached the newest segment's file since the last call."""
        new = read_segment(segment_path(self._run_dir, self._segment), self._size)
        items = [item for item in in_order(new) if item.offset >= self._end]
        self._size, self._end = new.size, max(self._end, new.end)
        yield from items
