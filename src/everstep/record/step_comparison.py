"""Self-verifying resume: steps that are executed again must find the same values again.

The earlier executions are read from the journal and the trails.  If a step has several, the first counts, so
that a second start cannot hide a difference.  An execution that was superseded on purpose (by a rollback, by
a checkpoint or a configuration that a person chose, by an accepted divergence) is not compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from everstep.arguments import integer
from everstep.contracts.metrics import Block
from everstep.errors import ConfigError, RunDirError
from everstep.record.difference import Difference
from everstep.record.event_fields import ACCEPTED
from everstep.record.journal import Journal
from everstep.record.journal_format import Position, bits_float, float_bits
from everstep.record.journal_reader import Key, RunJournal, Value, comparable_rows
from everstep.record.lock import RunLock
from everstep.record.rundir import RunDir
from everstep.record.trail import ABSENT, FOLDED, Mark, TrailContent, read_trail, trail_path

Batch: TypeAlias = tuple[int, int | None]
"""(pass, digest) of a batch; the digest is None where the batch gave nothing to digest."""


@dataclass
class EarlierSteps:
    """Record of the steps after a checkpoint, as earlier executions found them.

    Attributes:
        first: the checkpoint's step.
        last: the last step that was complete; `first` if none was.
        rows: metrics by key; None where a metric was collected and its value is not known.
        batches: by step, (stream, place in the step) -> (pass, digest); the digest is None where the batch
            gave nothing to digest.
        ends: (stream, pass) -> the last step that drew from the stream when the pass ended.
        lasts: (stream, pass) -> the last step that read from the pass.
        copies: (step, "PHASE/PART") -> digest of a part of the state in a snapshot.
        traced: steps that a trail records in full, as far as values were on the host.
        names: metrics that any step of the run has collected.
        set_aside: the last step of executions that are not compared with; 0 if all are.
        accepted: whether a person has accepted a divergence at or before the checkpoint.
        why: reasons why they are not.
    """

    first: int
    last: int = 0
    rows: dict[Key, Value | None] = field(default_factory=dict)
    batches: dict[int, dict[tuple[str, int], Batch]] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    lasts: dict[tuple[str, int], int] = field(default_factory=dict)
    copies: dict[tuple[int, str], int] = field(default_factory=dict)
    traced: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    set_aside: int = 0
    accepted: bool = False
    why: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = max(self.last, self.first)

    def leave_out(self, last: int, why: str) -> None:
        """Take note that executions until a step are not compared with, and why."""
        self.set_aside = max(self.set_aside, last)
        # steps that are compared with other executions are not spoken of
        if last > self.first and why not in self.why:
            self.why.append(why)


def read_earlier_steps(
    journal: RunJournal, position: Position | None, step: int, *, tail: bool = False, rank: int = 0
) -> EarlierSteps:
    """Collect the earlier results of the steps that a start from `step` will execute again.

    Args:
        position: the end of the journal as the checkpoint knows it.
        tail: whether the start also repeats the tail of an epoch that ends with `step`.
        rank: the rank whose trails are read.
    """
    earlier = EarlierSteps(step)
    superseded = journal.superseded(position)
    left = journal.abandoned_starts(position)
    if position is not None:
        earlier.accepted = journal.compared_until(position.segment, step, left)[0] <= step
    for segment in journal.segments():
        if segment.number in left:
            continue
        end, why = journal.compared_until(segment.number, step, left)
        _add_rows(earlier, superseded.get(segment.number, {}), end, why)
        trail = read_trail(trail_path(journal.run_dir, segment.number, rank))
        if trail is not None:
            _add_trail(earlier, trail, end, why, step if tail else step + 1)
    earlier.names |= journal.step_metrics()
    return earlier


def _add_rows(found: EarlierSteps, rows: dict[Key, Value], end: float, why: str) -> None:
    for key, row in rows.items():
        _, step, phase, _, _ = key
        in_step = phase == "step"
        if found.first + in_step <= step < end and phase != "head" and not (in_step and step in found.traced):
            found.rows.setdefault(key, row)
            if in_step:
                found.last = max(found.last, step)
        elif in_step and step >= end:
            found.leave_out(step, why)


def _add_trail(found: EarlierSteps, trail: TrailContent, end: float, why: str, begin: int) -> None:
    # Steps that an older trail has are left out: the first execution counts.
    new = set(range(max(found.first, trail.whole) + 1, int(min(trail.last + 1, end)))) - found.traced
    for mark in trail.marks:
        if mark.phase == "batch" and mark.step in new:
            digest = None if mark.flags & ABSENT else mark.value
            found.batches.setdefault(mark.step, {})[mark.name, mark.seq] = (mark.epoch, digest)
            found.lasts[mark.name, mark.epoch] = max(mark.step, found.lasts.get((mark.name, mark.epoch), 0))
        elif mark.phase == "pass" and begin <= mark.step < end:
            found.ends.setdefault((mark.name, mark.epoch), mark.step)
        elif mark.phase == "copy" and found.first < mark.step < end:
            found.copies.setdefault((mark.step, mark.name), mark.value)
    for key, row in _folded(trail.marks):
        _, step, phase, name, _ = key
        if phase == "step":
            found.names.add(name)
        if step in new if phase == "step" else begin <= step < end and phase != "head":
            if row is None:
                found.rows.setdefault(key, None)
            elif found.rows.get(key) is None:
                found.rows[key] = row
    if trail.last >= end:
        found.leave_out(trail.last, why)
    found.traced |= new
    found.last = max(found.last, *new, 0)


def _folded(marks: list[Mark]) -> Iterator[tuple[Key, Value | None]]:
    """Yield the metrics among the marks; a step's values are folded as the collector folds them."""
    sums: dict[Key, tuple[float, int] | None] = {}
    rows: dict[Key, Value] = {}
    for mark in marks:
        key = (mark.epoch, mark.step, mark.phase, mark.name, mark.seq)
        if mark.phase in ("batch", "pass", "copy"):
            continue
        if mark.flags & ABSENT:
            sums[key] = None
        elif mark.phase != "step" or mark.flags & FOLDED:
            rows[key] = (mark.value, mark.count)
        elif key not in sums:
            sums[key] = (bits_float(mark.value), mark.count)
        elif (so_far := sums[key]) is not None:
            sums[key] = (so_far[0] + bits_float(mark.value), so_far[1] + mark.count)
    yield from rows.items()
    for key, folded in sums.items():
        if key not in rows:
            yield key, None if folded is None else (float_bits([folded[0] / folded[1]])[0], folded[1])


# ------------------------------------------------------------------------------------- the comparison

BATCHES, RANDOM, STATE = "batch digest", "random state", "state digest"
LAST = "last batch digest"
_KINDS = (LAST, BATCHES, RANDOM, STATE)


class StepComparison:
    """Comparison, bit for bit, of the steps that a start executes again with their earlier executions.

    Head rows are never compared: in an epoch that is entered again they are not written.

    Args:
        reference: the earlier executions.
        incomparable: called once; returns why numbers cannot be expected to be equal, "" if they can.

    Attributes:
        steps: count of the steps executed again.
        equal, uncompared: counts of the values found equal, and of the values without a comparison, by kind:
            "batch digest", "random state", "state digest", "last batch digest", and metrics by their names.
        first, last: the step that the start resumes from, and the last that is executed again.
        differing: count of the values that differ.
        difference: the difference with the lowest step; within a step, the first that was found.
        latest: the difference that was found last.
        done: True when nothing is left to compare.
    """

    def __init__(self, reference: EarlierSteps, incomparable: Callable[[], str] = lambda: "") -> None:
        self._was, self._incomparable = reference, incomparable
        self.first, self.last = reference.first, reference.last
        self._why: str | None = None
        self._seen: set[str] = set()
        """Step metrics that this execution has collected."""
        self._drawn = [0, 0]
        """Counts of the open step's batches: those that are equal, and those that are not compared."""
        self._noted: set[int] = set()
        """Steps of which something was compared, or counted as not compared."""
        self.steps = 0
        self.equal: Counter[str] = Counter()
        self.uncompared: Counter[str] = Counter()
        self.differing = 0
        self.difference: Difference | None = None
        self.latest: Difference | None = None
        self.done = reference.last == reference.first and not reference.rows

    # ----------------------------------------------------------------------------- values found now

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Compare batch `seq` of a step, which is handed out."""
        was = self._was
        self._noted.add(step)
        end = was.ends.get((stream, pass_index))
        if end is not None and end < step:
            del was.ends[stream, pass_index]
            self._differs(
                step, "samples", f"pass of {stream}", f"at its end after step {end}", "not at its end"
            )
        elif step in was.traced:
            old = was.batches.get(step, {}).pop((stream, seq), None)
            if old is not None and None in (old[1], digest) and old[0] == pass_index:
                self._drawn[1] += 1
            elif old == (pass_index, digest):
                self._drawn[0] += 1
            else:
                self._differs(step, "samples", f"batch of {stream}", *batch_words(old, (pass_index, digest)))
        elif was.first < step <= was.last:
            self._drawn[1] += 1

    def drawn_again(self, stream: str, words: tuple[str, str] | None) -> bool:
        """Compare a stream's batches before the resume point, which were drawn again.

        Args:
            words: what was and what is; None where they are equal.

        Returns:
            Whether they are equal, or a person has accepted that they are not.
        """
        if words is None:
            self.equal[LAST] += self.done  # else steps are executed again, and say more
        elif not self._was.accepted:
            self._differs(self.first, "samples", f"batch of {stream}", *words)
        return words is None or self._was.accepted

    def pass_ended(self, step: int, stream: str, pass_index: int) -> None:
        """Compare the end of a pass: the pass gave its last batch.

        Args:
            step: the last complete step, or the open step if it drew from the stream.
        """
        was = self._was
        end, last = was.ends.pop((stream, pass_index), None), was.lasts.get((stream, pass_index), 0)
        old = f"at its end after step {end}" if end is not None else f"not at its end until step {last}"
        if end not in (None, step) or (end is None and last > step):
            self._differs(step, "samples", f"pass of {stream}", old, "at its end")

    def step_done(self, step: int) -> None:
        """Count a complete step, and compare its batches that were not drawn."""
        was = self._was
        if was.first < step <= was.last:
            self.steps += 1
            equal, uncompared = self._drawn
            self.equal[BATCHES] += equal
            self.uncompared[BATCHES] += uncompared
            self._drawn = [0, 0]
            for stream, _ in was.batches.pop(step, {}):
                self._differs(step, "samples", f"batch of {stream}", "drawn", "not drawn")

    def copied(self, step: int, phase: str, part: str, digest: int) -> None:
        """Compare a part of a snapshot: "random state", or an entry of the user's state."""
        old = self._was.copies.pop((step, f"{phase}/{part}"), None)
        kind = RANDOM if part == RANDOM else STATE
        if old is None:
            return
        self._noted.add(step)
        if kind == STATE and self._why_not():
            self.uncompared[kind] += 1
        elif old == digest:
            self.equal[kind] += 1
        else:
            component, name = (RANDOM, part) if kind == RANDOM else ("state", f"state {part!r}")
            self._differs(step, component, name, f"{old:016x}", f"{digest:016x}")

    def _why_not(self) -> str:
        """Say why numbers are not compared; "" if they are."""
        if self._why is None:
            self._why = self._incomparable()
        return self._why

    def rows(self, block: Block) -> None:
        """Compare rows of metrics that were read."""
        if block.phase == "head":
            return
        self._why_not()
        in_steps = block.phase == "step"
        if in_steps:
            self._seen.add(block.name)
        was = self._was
        for key, new in comparable_rows(block):
            step = key[1]
            self._noted.add(step)
            if key in was.rows:
                self._compare(key, was.rows.pop(key), new)
            elif in_steps and was.first < step <= was.last:
                if step in was.traced and block.name in was.names and not self._why:
                    self._differs(step, "loss", block.name, *row_words(None, new))
                else:
                    self.uncompared[block.name] += 1

    def reached(self, step: int) -> None:
        """Take note of a boundary after `step`: all of the step's rows have been read."""
        was = self._was
        if step > was.last or (step == was.last and not was.rows):
            self.end()

    def end(self) -> None:
        """End the comparison, and count the rows that are missing."""
        if self.done:
            return
        self.done = True
        last = self._was.first + self.steps
        for (_, step, phase, name, _), old in self._was.rows.items():
            missing = phase == "step" and step <= last and step in self._was.traced and name in self._seen
            if missing and old is not None and not self._why:
                self._differs(step, "loss", name, *row_words(old, None))

    def _compare(self, key: Key, old: Value | None, new: Value) -> None:
        _, step, _, name, _ = key
        if old is None or self._why:
            self.uncompared[name] += 1
        elif old == new:
            self.equal[name] += 1
        else:
            self._differs(step, "loss", name, *row_words(old, new))

    def _differs(self, step: int, component: str, name: str, old: str, new: str) -> None:
        self.differing += 1
        self.latest = Difference(component, name, old, new, step)
        if self.difference is None or step < self.difference.step:
            self.difference = self.latest

    # -------------------------------------------------------------------------------------- the report

    def report(self) -> str:
        """Report the comparison in one line."""
        equal, was = _counted(self.equal), self._was
        if self.difference is not None:
            total = self.equal.total() + self.differing
            return (
                f"resume differs: {in_words(self.difference)} ({self.differing} of {total} compared differ)"
            )
        aside = self._aside()
        if not self.steps and not equal:
            return f"resume not verified: {aside or 'nothing was executed again'}"
        found = [f"{equal} equal"] if equal else []
        if uncompared := _counted(self.uncompared):
            found.append(f"{uncompared} not compared{f' ({self._why})' if self._why else ''}")
        bare = self.steps - sum(was.first < step <= was.first + self.steps for step in self._noted)
        if equal and bare:
            found.append(f"{_several(bare, 'step')} left nothing to compare")
        results = ", ".join(found) or "they left nothing to compare"
        verified = "verified" if equal else "not verified"
        if self.steps:
            report = f"resume {verified}: {_several(self.steps, 'step')} executed again: {results}"
        else:
            report = f"resume {verified}: {results}; no step was executed again, so none was compared"
        return f"{report}; {aside}" if aside else report

    def _aside(self) -> str:
        """Say which steps are not compared with earlier executions, and why; "" if there are none."""
        first, last = self._was.last + 1, self._was.set_aside
        if last < first:
            return ""
        steps = f"step {last} is" if first == last else f"steps {first} to {last} are"
        return f"{steps} not compared with earlier executions: {_listed(self._was.why)}"

    def advice(self) -> str:
        """Name possible causes of a difference, and how to find the cause."""
        return (
            "the same steps gave other numbers: they read a value that is not in state= (a counter, a "
            "learning rate or an average in a variable, a generator of your own, a batch drawn ahead), the "
            "data or a metric depends on the clock (a metric that does is named ..._time) or on the order of "
            "a set, or a kernel is not deterministic. `everstep drill SCRIPT` names the component"
        )


def batch_words(old: Batch | None, new: Batch | None) -> tuple[str, str]:
    """Describe two batches that differ: by their passes where these differ, else by their digests."""
    if old is None or new is None:
        return ("drawn" if old else "not drawn"), ("drawn" if new else "not drawn")
    if old[0] != new[0]:
        return f"of pass {old[0] + 1}", f"of pass {new[0] + 1}"
    return f"the batch with digest {old[1]:016x}", f"the batch with digest {new[1]:016x}"


def in_words(difference: Difference) -> str:
    """Describe a difference between an earlier execution and this one."""
    return (
        f"step {difference.step} {difference.name} was {difference.expected} and is {difference.actual} now"
    )


def _counted(found: Counter[str]) -> str:
    """Format counts, such as "12 batch digests and 9 values of loss"; "" if nothing was counted."""
    kinds = [_several(found[kind], kind) for kind in _KINDS if found[kind]]
    metrics = [name for name, count in found.items() if count and name not in _KINDS]
    if metrics:
        total = sum(found[name] for name in metrics)
        what = f"of {metrics[0]}" if len(metrics) == 1 else f"of {len(metrics)} metrics"
        kinds.append(f"{_several(total, 'value')} {what}")
    return _listed(kinds)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _listed(words: Iterable[str]) -> str:
    *others, last = [*words] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def row_words(old: Value | None, new: Value | None) -> tuple[str, str]:
    """Describe two rows that differ."""
    return _row_words(old, new), _row_words(new, old)


def _row_words(row: Value | None, other: Value | None) -> str:
    if row is None:
        return "missing"
    bits, count = row
    value = bits_float(bits)
    text = repr(value)
    if value != value:
        text += f" (bits {bits:016x})"
    return text if other is None or count == other[1] else f"{text} (of {count} values)"


def accept(run_dir: Path, step: int) -> None:
    """Take away the mark of a divergence, durably: the rows from `step` on are the run's own from now on.

    Later starts do not compare those steps with earlier executions.

    Raises:
        ConfigError: the run has not diverged at that step; names the steps at which it has.
        RunLockedError: a process holds the run.
        RunDirError: the decision cannot be written.
    """
    integer("step", step, 0)
    run = RunDir.open(run_dir, create=False)
    lock = RunLock(run.path)
    lock.acquire()
    try:
        journal = RunJournal(run.path)
        found = {event.data["step"] for event in journal.divergences()}
        if step not in found:
            known = f"it has at {', '.join(map(str, sorted(found)))}" if found else "it has not diverged"
            raise ConfigError(f"{run.path} has no divergence at step {step} to accept; {known}")
        newest = [segment for segment in journal.segments() if segment.started][-1]
        # The decision gets a segment of its own: no file of a journal is appended to by another process.
        parent = Position(newest.number, newest.end)
        decision = Journal.open(run.path, run.next_segment(), parent, None, warn=lambda message: None)
        try:
            decision.decide({"what": ACCEPTED, "step": step})
        except OSError as error:
            raise RunDirError(
                error.errno,
                f"the decision cannot be recorded: {error.strerror}; check the disk",
                str(run.path),
            ) from error
        finally:
            decision.close()
    finally:
        lock.release()
