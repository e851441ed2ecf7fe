"""Audit of a run: was each sample used once in each pass, over all crashes, and which resumes were verified?

What is read is the record alone: the ledger and the links in the journal, and the newest checkpoint's account
of the data.  Nothing is written, imported or called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.checkpoint import Checkpoint, CheckpointName, Store, read_checkpoint
from everstep.errors import CheckpointError
from everstep.proof.audited_stream import AuditedStream, Finding, Verdict
from everstep.record import (
    CHOSEN,
    DIVERGED,
    OTHER_DATA,
    Event,
    Position,
    RunDir,
    RunJournal,
)
from everstep.record.badges import Badge, badge_of, badges_in
from everstep.record.ledger_format import Place, unpack_place

_LONGEST = 100
"""Problems that are listed; a damaged journal may have any number."""


class Resume(NamedTuple):
    """A start that continued from a checkpoint.

    Attributes:
        start: its number.
        checkpoint: the checkpoint's name.
        verification: "verified", "not verified", "nothing to verify", or "diverged at N".
        by: what was compared, in words.
        data: where its data goes on, "" where no entry says so.
        stands: whether steps of this start are part of the run's history.
    """

    start: int
    checkpoint: str
    verification: str
    by: str
    data: str
    stands: bool


class Audit(NamedTuple):
    """What the record of a run proves.

    Attributes:
        run: id of the run.
        verdict: "wrong" if anything is; else "not provable" if something is not; else "proven".
        finished: whether the run came to its end.
        step: its last complete step, as the journal has it.
        starts: number of its starts.
        passes: what is known of the passes over each stream.
        resumes: how the resume of each start was verified.
        problems: where the record is not what was written.
        notes: what else is to be known.
    """

    run: str
    verdict: Verdict
    finished: bool
    step: int
    starts: int
    passes: list[Finding]
    resumes: list[Resume]
    problems: list[str]
    notes: list[str]


def audit(run_dir: str | Path) -> Audit:
    """Audit a run: was each sample used once in each pass, and which resumes were verified?

    Args:
        run_dir: directory of the run, which may train meanwhile; it is only read.

    Raises:
        RunDirError: the path is not a run directory.
        JournalError: a newer everstep wrote the journal.
    """
    return _Auditor(RunDir.open(run_dir, create=False)).audit()


class _Auditor:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._streams: dict[str, AuditedStream] = {}
        self._problems: list[str] = []
        self._notes: list[str] = []
        # before the journal: a run that trains meanwhile writes there first what its next checkpoint needs
        self._newest = self._newest_checkpoint()
        self._journal = RunJournal(run.path)
        self._quarantined: dict[str, dict[tuple[int, int], int]] = {}
        for rollback in self._journal.rollbacks():
            for batch in rollback.batches:
                places = self._quarantined.setdefault(batch.stream, {})
                places.setdefault((batch.pass_index, batch.batch_index), rollback.number)

    def audit(self) -> Audit:
        """Read everything, in its order."""
        status = self._journal.status()
        self._check_files()
        stands = {number for number, _ in self._journal.parts()}
        self._read_ledger(stands)
        findings = self._findings(status.step)
        resumes = list(self._resumes(stands))
        verdicts = {finding.verdict for finding in findings}
        verdict: Verdict = "proven"
        if self._problems or "wrong" in verdicts:
            verdict = "wrong"
        elif "not provable" in verdicts or not findings:
            verdict = "not provable"
        started = sum(segment.started for segment in self._journal.segments())
        return Audit(
            self._run.id,
            verdict,
            status.ended is not None,
            status.step,
            started,
            findings,
            resumes,
            _short(self._problems),
            _short(self._notes),
        )

    # ---------------------------------------------------------------------------------- the files

    def _check_files(self) -> None:
        """Take what the reader says of the files; a torn end, or rows that a full disk cost, are no fault."""
        torn = [segment.torn for segment in self._journal.segments() if segment.torn]
        self._problems += [problem for problem in self._journal.problems if problem not in torn]
        self._notes += torn
        for gap in self._journal.events("gap", valid=False):
            if rows := gap.data.get("rows"):
                self._notes.append(f"start {gap.segment}: a full disk has cost {rows} rows")

    # --------------------------------------------------------------------------------- the ledger

    def _read_ledger(self, stands: set[int]) -> None:
        position, accounts = self._newest or (None, {})
        lost = None if position is None else self._journal.lacks(position)
        if lost:
            self._problems.append(f"the newest checkpoint: {lost}")
        chosen = {
            event.segment
            for event in self._journal.events("decision")
            if event.data.get("what") == CHOSEN and event.data.get("why") == OTHER_DATA
        }
        compared = position is None or position.segment not in stands
        for event in self._events():
            if not compared and position is not None and (event.segment, event.offset) >= tuple(position):
                compared = True
                self._compare(accounts, position)
            self._take(event, chosen=event.segment in chosen)
        if not compared and position is not None:
            self._compare(accounts, position)
        for stream in self._streams.values():
            stream.end()

    def _events(self) -> Iterator[Event]:
        """Yield the entries of the ledger that stand, oldest first."""
        for _, items in self._journal.parts():
            for item in items:
                if isinstance(item, Event) and item.kind == "progress" and "ledger" in item.data:
                    yield item

    def _take(self, event: Event, *, chosen: bool) -> None:
        streams = event.data["ledger"]
        for name, told in streams.items() if isinstance(streams, dict) else ():
            if name not in self._streams:
                own = self._quarantined.get(name, {})
                self._streams[name] = AuditedStream(name, own)
            try:
                if not isinstance(told, Mapping):
                    raise ValueError(f"stream {name!r:.60} has {told!r:.60}")
                self._streams[name].event(told, event.segment, earlier=self._earlier(), chosen=chosen)
            except ValueError as error:
                self._problems.append(
                    f"segment {event.segment}: the ledger's entry at {event.offset} cannot be read: {error}"
                )

    def _earlier(self) -> str:
        """Say where the entries before the first one may be."""
        parent = self._run.facts.get("parent")
        if isinstance(parent, Mapping):
            return f"in the journal of {str(parent.get('run'))[:80]}, of which this run is a fork"
        return "no entry of it is in this journal"

    def _findings(self, step: int) -> list[Finding]:
        findings = [finding for stream in self._streams.values() for finding in stream.findings]
        if findings:
            return findings
        if step:
            self._notes.append("no ledger: no step has drawn a batch from a stream of the run")
        else:
            self._notes.append("no ledger: no step is recorded")
        return []

    # ----------------------------------------------------------------------------- the checkpoint

    def _newest_checkpoint(self) -> tuple[Position, dict[str, Any]] | None:
        """Return the newest checkpoint's place in the journal, and its account of each stream."""
        store = Store(self._run.path)
        names = store.names()
        if not names:
            return None
        try:
            saved = read_checkpoint(store.path(names[-1]), wanted=lambda name: False)
        except CheckpointError as error:
            self._notes.append(f"the newest checkpoint is not compared with the ledger: {error}")
            return None
        place = saved.meta.get("journal") if isinstance(saved.meta, dict) else None
        if not (isinstance(place, list) and len(place) == 2 and all(type(n) is int for n in place)):
            return None  # a copy of another run's: its place is in that journal
        return Position(*place), _accounts(saved)

    def _compare(self, accounts: Mapping[str, Any], position: Position) -> None:
        """Compare the newest checkpoint's account of each stream with the entries up to its place."""
        for name, (pass_index, account) in accounts.items():
            stream = self._streams.get(name)
            place = None if stream is None else stream.place
            try:
                wanted = unpack_place(f"{pass_index} {account}")
            except ValueError as error:
                self._problems.append(f"stream {name!r}: the newest checkpoint has no account: {error}")
                continue
            if place == wanted or (place is None and wanted[:2] == (0, 0)):
                continue
            told = "no entry" if place is None else _where(place)
            other = " with other samples" if place is not None and place[:2] == wanted[:2] else ""
            self._problems.append(
                f"stream {name!r}: the newest checkpoint stands at {_where(wanted)}, and the entries of "
                f"the ledger up to it end at {told}{other}"
            )

    # -------------------------------------------------------------------------------- the resumes

    def _resumes(self, stands: set[int]) -> Iterator[Resume]:
        noted = [
            (event.segment, event.kind, event.data)
            for event in self._journal.events(valid=False)
            if event.kind in ("verified", DIVERGED)
        ]
        reported = badges_in(noted)
        reached: dict[int, int] = {}
        for event in self._journal.events(valid=False):
            reached[event.segment] = max(event.completed[0], reached.get(event.segment, 0))
        for start in self._journal.events("segment", valid=False):
            name = start.data["facts"].get("resumed_from")
            if not isinstance(name, str):
                continue
            badge = self._badge(reported.get(start.segment), name, reached.get(start.segment, 0))
            data = [
                f"{stream.name}: {stream.goes_on[start.segment]}"
                for stream in self._streams.values()
                if start.segment in stream.goes_on
            ]
            stands_here = start.segment in stands
            yield Resume(start.segment, name, str(badge), badge.report, ", ".join(data), stands_here)

    def _badge(self, reported: Badge | None, name: str, reached: int) -> Badge:
        try:
            began = CheckpointName.parse(name).step
        except (CheckpointError, ValueError):
            began = 0
        return badge_of(reported, began, reached, running=False)


def _accounts(saved: Checkpoint) -> dict[str, Any]:
    """Return (pass, account) of each stream in a checkpoint, by name."""
    structure = saved.structure if isinstance(saved.structure, dict) else {}
    streams = structure.get("streams")
    found: dict[str, Any] = {}
    for name, branch in streams.items() if isinstance(streams, dict) else ():
        if isinstance(branch, dict):
            found[name] = branch.get("pass"), branch.get("ledger")
    return found


def _where(place: Place) -> str:
    return f"batch {place.batches} of pass {place.pass_index + 1}"


def _short(told: list[str]) -> list[str]:
    """Return the first of many messages."""
    more = len(told) - _LONGEST
    return told if more <= 0 else [*told[:_LONGEST], f"and {more} more"]
