"""Reader of a run's journal: which rows of its files are valid.

The valid rows are a chain, like the commits of a branch: the newest segment whole, its parent up to
the position of the checkpoint that was resumed from, the parent's parent, and so on to a segment that
started from nothing.  All other rows are superseded; they stay readable.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.arguments import checked_keywords
from everstep.contracts.metrics import Block, phases_and_names
from everstep.errors import ConfigError, RunDirError, nearest
from everstep.record.event_fields import ACCEPTED, CHOSEN, DIVERGED, Rollback
from everstep.record.journal_format import (
    Event,
    Item,
    Position,
    Segment,
    float_bits,
    in_order,
    read_or_miss,
    read_segment,
    segment_number,
    segment_path,
)
from everstep.record.rundir import certain_id, user_path

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
    """Summary of a run: its starts, the last step known to be complete and its epoch, counts of rows."""

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
    """

    @checked_keywords
    def __init__(self, run_dir: str | Path, saved_by: int | None = None) -> None:
        self.run_dir = folder = user_path(run_dir, "run_dir")
        self._saved_by = saved_by
        self._chains: dict[Position, dict[int, int]] = {}
        if not any((folder / name).exists() for name in ("run.json", "journal")):
            runs = {str(path.parent) for top in (folder, folder.parent) for path in top.glob("*/run.json")}
            problem = "has neither run.json nor journal/" if folder.exists() else "does not exist"
            raise RunDirError(f"{folder} is not a run: it {problem}; {nearest(str(folder), runs)}")

    @cached_property
    def _segments(self) -> dict[int, Segment]:
        paths = (self.run_dir / "journal").glob("segment-*.evj")
        numbers = sorted((number, path) for path in paths if (number := segment_number(path)))
        run = certain_id(self.run_dir) if numbers else None
        return {number: read_or_miss(number, path, run) for number, path in numbers}

    @cached_property
    def _chain(self) -> dict[int, int]:
        """Segment number -> the offset up to which the segment is valid, oldest first."""
        starts = [segment for segment in self._segments.values() if segment.started]
        return self._chain_to(Position(starts[-1].number, starts[-1].end)) if starts else {}

    def _chain_to(self, position: Position | None) -> dict[int, int]:
        if position is None:
            return {}
        if position not in self._chains:  # asked for each start
            parents = {number: segment.parent for number, segment in self._segments.items()}
            self._chains[position] = chain_to(parents, position)
        return self._chains[position]

    def _valid_ends(self, valid: bool) -> Iterator[tuple[Segment, int]]:
        for number, segment in self._segments.items():
            yield segment, self._chain.get(number, 0) if valid else segment.end

    @property
    def problems(self) -> list[str]:
        """Descriptions of torn, damaged or missing places; empty for a healthy journal."""
        problems = [p for s in self._segments.values() for p in (*s.problems, s.torn) if p]
        for segment in map(self._segments.__getitem__, self._chain):
            if (at := segment.parent) is None:
                continue
            parent = self._segments.get(at.segment)
            continues = f"{segment.path.name} continues {segment_path(self.run_dir, at.segment).name}"
            if parent is None or parent.number >= segment.number:
                problems.append(f"{continues}, which is missing")
            elif at.offset > parent.end:
                problems.append(f"{continues} from {at.offset}, but that file ends at {parent.end}")
        return problems

    def lacks(self, position: Position) -> str | None:
        """Say which rows before a checkpoint's `position` are gone; None if none are."""
        segment = self._segments.get(position.segment)
        if segment is not None and segment.end >= position.offset:
            return None
        path = segment_path(self.run_dir, position.segment)
        state = "is missing" if segment is None else f"ends at {segment.end}, before {position.offset}"
        return (
            f"{path} {state}: metrics that were recorded before the checkpoint are lost; the state is whole, "
            "and the run resumes; restore the file from a copy to have the metrics again"
        )

    def segments(self) -> list[Segment]:
        """List the files of the journal, oldest first."""
        return list(self._segments.values())

    def parts(self, position: Position | None = None) -> Iterator[tuple[int, list[Item]]]:
        """Yield each segment up to a position (None: the end), oldest first: number and valid entries."""
        for number, end in (self._chain if position is None else self._chain_to(position)).items():
            yield number, [item for item in in_order(self._segments[number]) if item.offset < end]

    def events(self, kind: str | None = None, valid: bool = True) -> Iterator[Event]:
        """Yield events in the order of writing; if not `valid`, superseded ones too.  Decisions are valid."""
        for segment, end in self._valid_ends(valid):
            for event in segment.events:
                if kind in (None, event.kind) and (event.offset < end or event.kind == "decision"):
                    yield event

    def _blocks(self, valid: bool) -> Iterator[tuple[int, Block]]:
        for segment, end in self._valid_ends(valid):
            for entry in segment.blocks:
                if entry.offset < end:
                    yield segment.number, entry.block

    def rows(self, valid: bool = True) -> Iterator[Row]:
        """Yield the metric rows, in no order that equal runs share; if not `valid`, superseded ones too."""
        for segment, block in self._blocks(valid):
            columns = zip(block.steps, block.seqs, block.values, block.counts, strict=True)
            for step, seq, value, count in columns:
                yield Row(segment, block.epoch, step, block.phase, block.name, seq, value, count, block.wall)

    def comparable(self, valid: bool = True) -> Iterator[tuple[Key, Value]]:
        """Yield the rows that do not depend on the clock, as key and value; see `rows`."""
        return (row for _, block in self._blocks(valid) for row in comparable_rows(block))

    @checked_keywords
    def series(self, name: str, phase: str | None = None) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric in one phase, valid rows only.

        Args:
            name: the metric's name, or "PHASE/NAME".
            phase: "step" (collected inside steps), "head" or "tail" (in an epoch, before or after its
                steps), "epoch" (means of an epoch's steps), "eval/SERVICE" (returned by a service).  None:
                the metric's only phase, or "step" if it has several.
        """
        known = {(block.phase, block.name) for _, block in self._blocks(valid=True)}
        names = {each for _, each in known}
        if name not in names and phase is None:
            phase, name = next((each for each in phases_and_names(name) if each in known), (None, name))
        if name not in names:
            raise ConfigError(f"the run has no metric {name!r}; {nearest(name, names)}")
        phases = [each_phase for each_phase, each in known if each == name]
        phase = phase or ("step" if len(phases) > 1 else phases[0])
        if phase not in phases:
            raise ConfigError(f"metric {name!r} has no rows in phase {phase!r}; {nearest(phase, phases)}")
        blocks = [each for _, each in self._blocks(valid=True) if (each.phase, each.name) == (phase, name)]
        steps = [step for block in blocks for step in block.steps]
        return steps, [value for block in blocks for value in block.values]

    def newest_start(self) -> Event | None:
        """Return the event with which the newest start began; None before the first start."""
        return max(self.events("segment", valid=False), key=attrgetter("segment"), default=None)

    def facts(self) -> dict[str, Any]:
        """Return the newest start's provenance (`everstep.record.facts`); empty before the first start."""
        start = self.newest_start()
        return {} if start is None else start.data["facts"]

    def facts_since(self, number: int) -> list[dict[str, Any]]:
        """List the provenance of the starts from this number on, superseded starts included."""
        return [each.data["facts"] for each in self.events("segment", valid=False) if each.segment >= number]

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
        for at, its_epoch in (event.completed for event in self.events()):
            step, epoch = max(step, at), max(epoch, its_epoch)
        total = sum(len(block.steps) for _, block in self._blocks(valid=False))
        return Status(len(self._segments), epoch, step, valid, total - valid, self.ended())

    @cached_property
    def _origin(self) -> int:
        """Number of the segment from nothing that the newest start with a checkpoint goes back to."""
        saved_by = math.inf if self._saved_by is None else self._saved_by
        numbers = (segment.number for segment in self._segments.values() if segment.started)
        newest = max((number for number in numbers if number <= saved_by), default=0)
        first = next(iter(self._chain_to(Position(newest, 0))), 0)
        return first if first and self._segments[first].parent is None else 0

    def rollbacks(self) -> list[Rollback]:
        """List the rollbacks of the run since it began from nothing, in order."""
        decisions = [event for event in self.events("decision") if event.segment >= self._origin]
        return Rollback.among((event.data, event.segment) for event in decisions)

    def heads(self, step: int) -> dict[str, dict[str, Any]]:
        """Map each stream to what the head of the epoch after `step` last changed in its generators."""
        heads = [event.data for event in self.events("head", valid=False) if event.segment >= self._origin]
        return {head["stream"]: head for head in heads if head["step"] == step}

    def superseded(self, position: Position | None, number: int) -> Iterator[Block]:
        """Yield each block of a segment that a start from `position` leaves behind."""
        begin = self._chain_to(position).get(number, 0)
        for entry in self._segments[number].blocks:
            if entry.offset >= begin:
                yield entry.block

    def abandoned_starts(self, position: Position | None) -> set[int]:
        """Find the starts whose overridden configuration or data a position does not inherit."""
        chain, abandoned = self._chain_to(position), set[int]()
        reasons = (OTHER_CONFIGURATION, OTHER_DATA)
        overriding = {event.segment for event in self.events("decision") if event.data.get("why") in reasons}
        for number, segment in self._segments.items():
            inherited = segment.parent is not None and segment.parent.segment in abandoned
            if number not in chain and (number in overriding or inherited):
                abandoned.add(number)
        return abandoned

    def compared_until(self, segment: int, step: int, abandoned: Collection[int]) -> tuple[float, str]:
        """Find the first step that a start from `step` does not compare with a segment's results, and why.

        From that step on, infinite if there is none, the results were superseded on purpose (by a rollback,
        a person's choice or an accepted divergence), or the segment itself had diverged.  Choices of the
        starts in `abandoned` do not count.
        """
        if (index := bisect_right(self._from_nothing, segment)) < len(self._from_nothing):
            return 0, f"start {self._from_nothing[index]} began from nothing"
        events = self._segments[segment].events if segment in self._segments else []
        steps = [each.data["step"] for each in events if each.kind == DIVERGED]
        cuts = [each[2:] for each in self._cuts if segment <= each[0] and each[1] not in abandoned]
        cuts += [(first, f"start {segment} had diverged at step {first}") for first in steps if first > step]
        return min(cuts, key=itemgetter(0), default=(math.inf, ""))

    @cached_property
    def _from_nothing(self) -> list[int]:
        return [each.number for each in self._segments.values() if each.started and each.parent is None]

    @cached_property
    def _cuts(self) -> list[tuple[int, int, int, str]]:
        """(segment, chooser, step, why): from that step on, this and earlier segments are not compared with.

        The chooser is the start that made a person's choice; 0 where it was no choice.
        """
        cuts = list[tuple[int, int, int, str]]()
        for each in self.rollbacks():
            reason = f"rollback {each.number} has other batches from step {each.first} on"
            cuts.append((each.segment, 0, each.first, reason))
        for at, step in self._accepted:
            cuts.append((at, 0, step, f"a divergence was accepted at step {step}"))
        for event in self._decisions(CHOSEN):
            reason = f"start {event.segment} had {event.data.get('why')}"
            cuts.append((event.segment - 1, event.segment, event.data["step"], reason))
        return cuts

    def meets(
        self, condition: Callable[[Mapping[str, Any]], bool], position: Position | None, step: int
    ) -> bool:
        """Whether a start from `position` would be compared with one whose facts meet `condition`."""
        abandoned = self.abandoned_starts(position)
        return any(
            condition(event.data["facts"]) and self.compared_until(event.segment, step, abandoned)[0] > step
            for event in self.events("segment", valid=False)
            if event.segment not in abandoned
        )

    def divergences(self, position: Position | None = None) -> list[Event]:
        """List the divergences up to a position (None: the end) that nobody has accepted, oldest first."""
        chain = self._chain if position is None else self._chain_to(position)
        return [
            event
            for event in self.events(DIVERGED, valid=False)
            if event.offset < chain.get(event.segment, 0)
            and not is_accepted(event.segment, event.data["step"], self._accepted)
        ]

    @property
    def _accepted(self) -> list[tuple[int, int]]:
        return [(event.segment, event.data["step"]) for event in self._decisions(ACCEPTED)]

    def _decisions(self, decision: str) -> list[Event]:
        return [event for event in self.events("decision") if event.data.get("what") == decision]


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


def is_accepted(segment: int, step: int, decisions: Iterable[tuple[int, int]]) -> bool:
    """Whether one of the decisions (its segment, step) accepts a segment's results from a step on."""
    return any(segment <= at and step >= first for at, first in decisions)


def comparable_rows(block: Block) -> Iterator[tuple[Key, Value]]:
    """Yield a block's rows as key and value; none if they depend on the clock."""
    if not block.wall:
        columns = zip(block.steps, block.seqs, float_bits(block.values), block.counts, strict=True)
        for step, seq, value, count in columns:
            yield (block.epoch, step, block.phase, block.name, seq), (value, count)


class Follower:
    """Valid rows and events of a run, in the order of writing, while its newest segment grows."""

    def __init__(self, run_dir: Path, segment: int) -> None:
        self._run_dir, self._segment = Path(run_dir), segment
        # bytes of the file that were read (a last frame that is still being written is read next time), and
        # the least offset that is news (a file that was copied together has no entry twice)
        self._size = self._end = 0

    def older(self) -> Iterator[tuple[int, list[Item]]]:
        """Yield the valid parts of the earlier segments: see `RunJournal.parts`."""
        return (each for each in RunJournal(self._run_dir).parts() if each[0] != self._segment)

    def news(self) -> Iterator[Item]:
        """Yield the entries that reached the newest segment's file since the last call."""
        segment = read_segment(segment_path(self._run_dir, self._segment), self._size)
        items = [item for item in in_order(segment) if item.offset >= self._end]
        self._size, self._end = segment.size, max(self._end, segment.end)
        yield from items
