"""Audit of a run: was each sample used once in each pass, over all crashes?

What is read is the record alone: the ledger and the links in the journal, and the newest checkpoint's place
in it.  Nothing is written, imported or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from everstep.checkpoint import Store, read_checkpoint
from everstep.contracts.data import Share
from everstep.data.order import Plan, Sampling
from everstep.errors import CheckpointError
from everstep.record import CHOSEN, OTHER_DATA, Position, RunDir, RunJournal
from everstep.record.ledger_format import LEFT_OUT, Entry, Place, first_link, link, unpack, unpack_place

Verdict: TypeAlias = Literal["proven", "not provable", "wrong"]

LARGEST = 1 << 26
"""Limit of the samples of a pass whose order is computed again: a record may claim any number."""
_LONGEST = 100
"""Problems that are listed; a damaged journal may have any number."""


class Finding(NamedTuple):
    """What is known of passes over a stream, from number `first` (from 1) to `last`; `found`: in words."""

    stream: str
    first: int
    last: int
    verdict: Verdict
    found: str

    @property
    def passes(self) -> str:
        """The passes in words."""
        return f"pass {self.first}" if self.first == self.last else f"passes {self.first} to {self.last}"


class Audit(NamedTuple):
    """What the record of a run proves.

    Attributes:
        run: id of the run.
        verdict: "wrong" if anything is; else "not provable" if something is not; else "proven".
        finished: whether the run came to its end.
        step, starts: its last complete step, as the journal has it, and the number of its starts.
        passes: what is known of the passes over each stream.
        problems: where the record is not what was written.
        notes: what else is to be known.
    """

    run: str
    verdict: Verdict
    finished: bool
    step: int
    starts: int
    passes: list[Finding]
    problems: list[str]
    notes: list[str]


def audit(run_dir: str | Path) -> Audit:
    """Audit a run, which is only read, and may train meanwhile: was each sample used once in each pass?"""
    run = RunDir.open(run_dir, create=False)
    notes: list[str] = []
    # before the journal: a run that trains meanwhile writes there first what its next checkpoint needs
    position = _newest_checkpoint(run, notes)
    journal = RunJournal(run.path)
    status, segments = journal.status(), journal.segments()
    # a torn end, or rows that a full disk cost, are no fault
    torn = [segment.torn for segment in segments if segment.torn]
    problems = [problem for problem in journal.problems if problem not in torn]
    notes += torn
    for gap in journal.events("gap", valid=False):
        if rows := gap.data.get("rows"):
            notes.append(f"start {gap.segment}: a full disk has cost {rows} rows")
    if position is not None and (loss := journal.lacks(position)):
        problems.append(f"the newest checkpoint: {loss}")
    passes = _read_ledger(run, journal, problems)
    if not passes:
        none = "step has drawn a batch from a stream of the run" if status.step else "step is recorded"
        notes.append(f"no ledger: no {none}")
    verdicts = {finding.verdict for finding in passes}
    verdict: Verdict = "proven" if verdicts == {"proven"} else "not provable"
    if problems or "wrong" in verdicts:
        verdict = "wrong"
    place = status.ended is not None, status.step, sum(segment.started for segment in segments)
    return Audit(run.id, verdict, *place, passes, problems[:_LONGEST], notes[:_LONGEST])


def _newest_checkpoint(run: RunDir, notes: list[str]) -> Position | None:
    """Return the newest checkpoint's place in the journal; None if it has none there."""
    store = Store(run.path)
    if not (names := store.names()):
        return None
    try:
        meta: Any = read_checkpoint(store.path(names[-1]), select=lambda name: False).meta
    except CheckpointError as error:
        notes.append(f"the newest checkpoint is not compared with the journal: {error}")
        return None
    place = meta.get("journal")  # None in a copy of another run's: its place is in that journal
    return None if place is None else Position(*place)


def _read_ledger(run: RunDir, journal: RunJournal, problems: list[str]) -> list[Finding]:
    """Check the entries of the ledger that stand, oldest first."""
    parent = run.facts.get("parent")
    earlier = "no entry of it is in this journal"
    if isinstance(parent, Mapping):
        earlier = f"in the journal of {str(parent.get('run'))[:80]}, of which this run is a fork"
    why_out = {
        (batch.stream, batch.pass_index, batch.batch_index): f"rollback {rollback.number}"
        for rollback in reversed(journal.rollbacks())
        for batch in rollback.batches
    }
    overridden = {
        event.segment
        for event in journal.events("decision")
        if event.data.get("what") == CHOSEN and event.data.get("why") == OTHER_DATA
    }
    streams: dict[str, _Stream] = {}
    for event in journal.events("progress"):
        ledger = event.data.get("ledger", {})
        for name, facts in ledger.items() if isinstance(ledger, dict) else ():
            stream = streams.setdefault(name, _Stream(name, why_out, earlier))
            try:
                stream.read_event(facts, event.segment, is_override=event.segment in overridden)
            except (ValueError, TypeError, AttributeError) as error:  # odd values
                at = f"segment {event.segment}: the ledger's entry at {event.offset}"
                problems.append(f"{at} cannot be read: {error}")
    for stream in streams.values():
        stream.close("so far")
    return [finding for stream in streams.values() for finding in stream.findings]


@dataclass
class _Pass:
    """Account of one pass, from the entries so far, up to the batch `place`.

    Its plan is computed again, or says why it cannot be; of the batches `before` there is no entry, and no
    chain; `unknown` says why nothing is known of the contents of the batches.
    """

    number: int
    plan: Plan | str
    chain: int | None
    place: int = 0
    before: int = 0
    unknown: str = ""
    sizes: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, end: int, left_out: Collection[int] = ()) -> int | None:
        """Go on to a batch; return the chain of the samples up to it, None where they are not known."""
        chain, first, self.place = self.chain, self.place, end
        if isinstance(self.plan, str) or end > len(self.plan):
            return None
        for batch in range(first, end):
            samples = self.plan.used(batch)  # by the ranks of this start
            self.sizes.append(len(samples))
            if chain is not None:
                chain = link(LEFT_OUT if batch in left_out else samples, chain)
        return chain


class _Stream:
    """A stream whose entries are read in the order of the steps that stand."""

    def __init__(self, name: str, why_out: Mapping[tuple[str, int, int], str], earlier: str) -> None:
        self.name, self._why_out, self._earlier = name, why_out, earlier
        self.findings: list[Finding] = []
        self._described: tuple[Any, Any, Share] = ({}, None, Share())
        """The data, what its chains are of, and the share of each rank."""
        self._pass: _Pass | None = None
        """The open pass, or the one that follows; None before the first entry."""

    def read_event(self, facts: Mapping[str, Any], start: int, *, is_override: bool) -> None:
        """Take what an event of a start says of this stream."""
        entries, own = list(unpack(facts.get("entries"))), self._pass
        place = unpack_place(facts["from"]) if "from" in facts else None
        if is_override and place and own and own.place and place[:2] == (own.number, 0):
            self.close("left for other data, as a person chose")
            self._open(own.number)
        if "data" in facts:
            self._describe(facts)
        if place is not None:
            self._go_to(place, f"start {start} continues")
        for entry in entries:
            self._add(entry, start)

    def _describe(self, facts: Mapping[str, Any]) -> None:
        size, rule = facts.get("share", [1, None])
        previous = self._described
        self._described = dict(facts["data"]), facts.get("of"), Share(0, size, rule)
        if self._described != previous and self._pass is not None:
            self._pass.plan = self._plan(self._pass.number)

    def _plan(self, pass_index: int) -> Plan | str:
        """Compute the order of a pass again, or say why it cannot be computed."""
        data, basis, share = self._described
        kind, length, size = data.get("kind"), data.get("length"), data.get("batch_size")
        # a stream of the user's may have the name of our kind: then the entries have digests
        if kind not in ("arrays", "loader") or basis not in (None, "samples"):
            return f"data of kind {str(kind)!r:.40} does not tell the numbers of its samples"
        try:
            if not 0 < length <= LARGEST or size < 1:
                return "its description is not that of everstep's own data, or has too many samples"
            shuffle, drop_last = bool(data.get("shuffle")), bool(data.get("drop_last"))
            sampling = Sampling(kind, length, size, shuffle, data.get("seed"), drop_last, share=share)
            return sampling.plan(self.name, pass_index, 0)
        except Exception as error:  # whatever odd values do: the run's own start would have refused them
            return f"its order cannot be computed again ({error})"

    def _open(self, number: int) -> _Pass:
        self._pass = own = _Pass(number, self._plan(number), first_link(self.name, number))
        return own

    def _go_to(self, to: Place, origin: str) -> _Pass:
        """Go on at a place; note batches that come twice, or are missing, before it."""
        own, at = self._pass, f"{origin} at batch {to.batches + 1} of pass {to.pass_index + 1}"
        if own is None:  # the first entry that there is
            if to.pass_index:
                self._note(0, to.pass_index - 1, "not provable", self._earlier)
            own = self._open(to.pass_index)
            chain = own.add(to.batches)
            if to.chain is None or (to.batches and chain != to.chain):
                own.before, own.unknown = to.batches, self._earlier
        elif to.pass_index != own.number:
            own.faults.append(f"from batch {own.place + 1} on nothing follows ({at})")
            self.close("")
            own = self._open(to.pass_index)
        elif (to.batches, to.chain) == (own.place, own.chain):
            return own
        elif to.batches == own.place:
            own.faults.append(f"{at}, after other samples than those recorded before")
        if own.place != to.batches:
            first, end = sorted((own.place, to.batches))
            problem = "are missing" if own.place < to.batches else "were used twice"
            sample = f"batch {first + 1}"
            if not isinstance(own.plan, str) and first < len(own.plan):
                sample = f"sample {int(own.plan.used(first)[0])}"
            own.faults.append(f"{_batches(first, end)} {problem} ({at}); the first: {sample}")
        own.place, own.chain = to.batches, to.chain
        return own

    def _add(self, entry: Entry, start: int) -> None:
        inside = all(entry.first <= each < entry.end for each in entry.left_out)
        if not (inside and entry.first <= entry.end):
            raise ValueError(f"an entry is {str(entry)!r:.60}")
        own = self._pass
        if own is None or entry[:2] != (own.number, own.place):
            place = Place(entry.pass_index, entry.first, None)
            own = self._go_to(place, f"an entry of start {start} begins")
        batches, chain = _batches(own.place, entry.end), own.add(entry.end, {*entry.left_out})
        if not isinstance(own.plan, str) and entry.end > len(own.plan):
            own.faults.append(f"start {start} used batches up to {entry.end} of {len(own.plan)}")
        elif isinstance(own.plan, str) and entry.chain is None:
            own.unknown = "their contents are not digested (several ranks, or nothing to digest)"
        elif chain not in (None, entry.chain) and not own.faults:
            own.faults.append(f"the chain differs in {batches} (start {start}): not the samples of the pass")
        own.chain = entry.chain
        own.left_out += entry.left_out
        if entry.over:
            self.close("")
            self._open(own.number + 1)

    def close(self, reason: str) -> None:
        """Note what is known of the open pass; `reason`: why it is not whole, where that is no choice."""
        own = self._pass
        if own is None or (reason == "so far" and not (own.place or own.faults)):
            return
        verdict: Verdict = "not provable"
        first = f"batches {own.before + 1} to {own.place}" if own.before else f"{own.place:,} batches"
        if own.faults:
            verdict, finding = "wrong", "; ".join(own.faults)
        elif isinstance(own.plan, str):
            basis = own.unknown or f"by one chain of their digests; {own.plan}"
            finding = " ".join(filter(None, [reason, f"{first}, each once, {basis}"]))
        elif own.unknown:
            finding = f"{first}, each once; {own.unknown}"
        elif not np.array_equal(np.sort(own.plan.order), np.arange(len(own.plan.order))):
            verdict, finding = "wrong", "its order does not have each sample once"
        else:
            verdict, finding = "proven", self._samples(own, own.plan, reason)
        self._note(own.number, own.number, verdict, finding)

    def _samples(self, own: _Pass, plan: Plan, how: str) -> str:
        """Say what is known of a pass whose samples are known."""
        places = [(self.name, own.number, each) for each in own.left_out]
        why = {at: self._why_out.get(at, "by everstep.data.checked") for at in places[:8]}
        reasons = [f"batch {at[2] + 1} ({reason})" for at, reason in why.items()]
        reasons += [f"{len(places) - 8} more"] * (len(places) > 8)
        out = f"; left out: {', '.join(reasons)}" if reasons else ""
        batches, length = own.place - len(places), len(plan.order)
        total = sum(own.sizes) - sum(own.sizes[batch] for batch in own.left_out)
        used = f"{total:,} of {length:,} samples"
        if own.place < len(plan):
            return f"{how or 'left early'}: {used}, each once, in {batches:,} of {len(plan):,} batches{out}"
        if total == length:
            return f"each sample of {length:,} exactly once, in {batches:,} batches{out}"
        rule = "drop_last" if self._described[0].get("drop_last") else 'uneven="drop"'
        fewer = length - sum(own.sizes)
        by_rule = f", {fewer:,} left out by {rule}" if fewer else ""
        return f"{used}, each exactly once, in {batches:,} batches{by_rule}{out}"

    def _note(self, first: int, last: int, verdict: Verdict, text: str) -> None:
        """Note a finding, together with the passes before of which the same is known."""
        previous = self.findings[-1] if self.findings else None
        if previous is not None and previous[2:] == (first, verdict, text):
            self.findings[-1] = previous._replace(last=last + 1)
        else:
            self.findings.append(Finding(self.name, first + 1, last + 1, verdict, text))


def _batches(first: int, end: int) -> str:
    return f"batch {first + 1}" if end == first + 1 else f"batches {first + 1} to {end}"
