"""Self-verifying resume: steps that are executed again must find the same values again.

The earlier executions are read from the journal and the trails.  If a step has several, the first counts, so
that a second start cannot hide a difference.  An execution that was superseded on purpose (by a rollback, by
a checkpoint or a configuration that a person chose, by an accepted divergence) is not compared with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from everstep.arguments import integer
from everstep.contracts.metrics import Block
from everstep.display.cells import plural
from everstep.durable import no_disk_error
from everstep.errors import ConfigError
from everstep.record.badges import REPORTS
from everstep.record.event_fields import ACCEPTED
from everstep.record.journal import Journal
from everstep.record.journal_format import Position, bits_float
from everstep.record.journal_reader import Key, RunJournal, Value, comparable_rows
from everstep.record.lock import RunLock
from everstep.record.rundir import RunDir
from everstep.record.trail import TrailContent, read_trail, trail_path

COMPONENTS = ("samples", "random state", "loss", "weights", "optimizer", "state", "service", "journal")
"""Components of a step, in the order of cause and effect."""

_WHERE = {
    "enter": "before the first step",
    "before": "as step {step} begins",
    "step": "step {step}",
    "tail": "in the tail of epoch {epoch} (step {step})",
    "epoch": "at the end of epoch {epoch} (step {step})",
    "end": "at the end of the run",
}
"""Places within a step, in their order -> words for them."""

ABSENT = "absent"

BatchDigest: TypeAlias = tuple[int, int | None]
"""(pass, digest) of a batch; the digest is None where the batch gave nothing to digest."""


class Difference(NamedTuple):
    """Value that two executions of the same steps do not have in common: of a resume, a drill, two runs.

    Attributes:
        component: member of `COMPONENTS`.
        name: name of the stream, source of random numbers, metric, state entry, service, or path of a leaf.
        expected, actual: values or digests, in a few words; `ABSENT` where there is none.
        step, epoch, place: "enter", "before", "step", "tail", "epoch" or "end"; with counters, 0 at "end".
        run, rank: the run directory, where there may be several; the rank, 0 is the writer.
        note: a cause that was seen; "" if there is none.
        path: what differs at the ends of two runs, see `everstep.proof.compare`.
    """

    component: str
    name: str
    expected: str
    actual: str
    step: int = 0
    epoch: int = 0
    place: str = "step"
    run: str = ""
    rank: int = 0
    note: str = ""
    path: str = ""

    @property
    def where(self) -> str:
        """The place in words."""
        return _WHERE[self.place].format(step=self.step, epoch=self.epoch)

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: by place, then from cause to effect, then by rank."""
        step = {"enter": -1, "end": 1 << 62}.get(self.place, self.step)
        return step, list(_WHERE).index(self.place), COMPONENTS.index(self.component), self.rank

    def __str__(self) -> str:
        on = f" on rank {self.rank}" if self.rank else ""
        return f"{self.component} ({self.name}) {self.where}{on}"


def first_difference(differences: Iterable[Difference], runs: Sequence[str] = ()) -> Difference | None:
    """Return the first of some differences, or None; of runs in this order."""

    def order(each: Difference) -> tuple[int, ...]:
        return runs.index(each.run) if each.run in runs else len(runs), *each.order

    return min(differences, key=order, default=None)


@dataclass
class EarlierSteps:
    """Record of the steps after a checkpoint, as earlier executions found them.

    Attributes:
        first, last: the checkpoint's step; the last step that was complete, `first` if none was.
        values: by step: key -> (digest or bits, count of values), None where it is not known; keys as in a
            journal, of a batch with its pass in the place of the epoch.
        ends: (stream, pass) -> the last step that drew from the stream when the pass ended.
        lasts: (stream, pass) -> the last step that read from the pass.
        traced: steps that a trail records in full, as far as values were on the host.
        names: metrics that any of the steps has collected.
        set_aside, reasons: the last step of executions that are not compared with, 0 if all are; and why.
        accepted: whether a person has accepted a divergence at or before the checkpoint.
    """

    first: int
    last: int = 0
    values: defaultdict[int, dict[Key, Value | None]] = field(default_factory=lambda: defaultdict(dict))
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    lasts: dict[tuple[str, int], int] = field(default_factory=dict)
    traced: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    set_aside: int = 0
    reasons: list[str] = field(default_factory=list)
    accepted: bool = False

    def __post_init__(self) -> None:
        self.last = max(self.last, self.first)

    @property
    def has_rows(self) -> bool:
        """Whether metrics are left that were not found again."""
        return any(key[2] not in ("batch", "copy") for values in self.values.values() for key in values)

    def add(self, trail: TrailContent, end: float, reason: str, tail: bool) -> None:
        """Add an execution, which is not compared with from step `end` on."""
        # Steps that an older trail has are left out: the first execution counts.
        new = set(range(max(self.first, trail.full_after) + 1, int(min(trail.last + 1, end)))) - self.traced
        self.names |= {mark.name for mark in trail.marks if mark.phase == "step"}
        for step, phase, name, epoch, seq, value, count in trail.marks:
            begin = self.first if tail and phase != "copy" else self.first + 1
            is_repeated = begin <= step < end and phase != "head"
            if not (step in new if phase in ("batch", "step") else is_repeated):
                continue
            if phase == "pass":
                self.ends.setdefault((name, epoch), step)
                continue
            if phase == "batch":
                self.lasts[name, epoch] = max(step, self.lasts.get((name, epoch), 0))
            key = (epoch, step, phase, name, seq)
            if self.values[step].get(key) is None:
                self.values[step][key] = None if value is None else (value, count)
        self.traced |= new
        self.last = max(self.last, *new, 0)
        self._leave_out(trail.last, end, reason)

    def add_rows(self, block: Block, end: float, reason: str) -> None:
        """Add rows of the journal, in steps that no trail has in full."""
        for key, row in comparable_rows(block):
            _, step, phase, _, _ = key
            in_step = phase == "step"
            if in_step:
                self.names.add(key[3])
                self._leave_out(step, end, reason)
            is_traced = in_step and step in self.traced
            if self.first + in_step <= step < end and phase != "head" and not is_traced:
                self.values[step].setdefault(key, row)
                self.last = max(self.last, step * in_step)

    def _leave_out(self, last: int, end: float, reason: str) -> None:
        if last >= end:
            self.set_aside = max(self.set_aside, last)
            # steps that are compared with other executions are not spoken of
            if last > self.first and reason not in self.reasons:
                self.reasons.append(reason)


def read_earlier_steps(
    journal: RunJournal, position: Position | None, step: int, *, tail: bool = False, rank: int = 0
) -> EarlierSteps:
    """Collect what a rank found earlier in the steps that a start from `step` will execute again.

    Args:
        position: the end of the journal as the checkpoint knows it.
        tail: whether the start also repeats the tail of an epoch that ends with `step`.
    """
    earlier = EarlierSteps(step)
    abandoned = journal.abandoned_starts(position)
    if position is not None:
        earlier.accepted = journal.compared_until(position.segment, step, abandoned)[0] <= step
    for number in (each.number for each in journal.segments() if each.number not in abandoned):
        cut = journal.compared_until(number, step, abandoned)
        if (trail := read_trail(trail_path(journal.run_dir, number, rank))) is not None:
            earlier.add(trail, *cut, tail)
        # start by start: the first execution of a step counts, by whichever of the two it has left
        for block in journal.superseded(position, number):
            earlier.add_rows(block, *cut)
    return earlier


BATCHES, RANDOM, STATE = _KINDS = ("batch digest", "random state", "state digest")


class StepComparison:
    """Comparison, bit for bit, of the steps that a start executes again with their earlier executions.

    Head rows are never compared: in an epoch that is entered again they are not written.

    Args:
        reference: the earlier executions.
        incomparable: called once; returns why numbers cannot be expected to be equal, "" if they can.

    Attributes:
        first, last: the step that the start resumes from, and the last that is executed again.
        steps: count of the steps executed again.
        equal, uncompared: counts of the values found equal, and of the values without a comparison, by kind:
            "batch digest", "random state", "state digest", and metrics by their names.
        differing, difference, latest: count of the values that differ; the first of them by step, and the
            one that was found last.
        done: True when nothing is left to compare.
        lost: variables of the program that this start does not have as they were, in words.
    """

    def __init__(self, reference: EarlierSteps, incomparable: Callable[[], str] = lambda: "") -> None:
        self._earlier = reference
        self._incomparable = cache(incomparable)
        self.first, self.last = reference.first, reference.last
        self._metrics: set[str] = set()
        """Step metrics that this execution has collected."""
        self._noted: set[int] = set()
        """Steps of which something was compared, or counted as not compared."""
        self.steps = 0
        self.lost: list[str] = []
        self.equal: Counter[str] = Counter()
        self.uncompared: Counter[str] = Counter()
        self.differing = 0
        self.difference: Difference | None = None
        self.latest: Difference | None = None
        self.done = reference.last == reference.first and not reference.has_rows

    def note(self, key: Key, new: Value | None) -> None:
        """Compare a value that this execution has found, as its trail has it; None: it is not known (yet)."""
        epoch, step, phase, name, _ = key
        earlier = self._earlier
        if phase == "pass":
            self._pass_ended(step, name, epoch)
            return
        if phase == "batch" and (end := earlier.ends.get((name, epoch), step)) < step:
            del earlier.ends[name, epoch]
            expected = f"at its end after step {end}"
            self._differs(step, "samples", f"pass of {name}", expected, "not at its end")
            return
        if phase == "step":
            self._metrics.add(name)
            if new is None:
                return  # it is on a device, and follows when it is read
        component, label, kind = _component(phase, name)
        reason = "" if kind in (BATCHES, RANDOM) else self._incomparable()
        is_new = key not in earlier.values[step]
        is_covered = phase in ("batch", "step") and earlier.first < step <= earlier.last
        if phase == "head" or (is_new and not is_covered):
            return
        self._noted.add(step)
        old = earlier.values[step].pop(key, None)
        if is_new and step in earlier.traced and not reason and (phase == "batch" or name in earlier.names):
            words = ("not drawn", "drawn") if phase == "batch" else row_words(None, new)
            self._differs(step, component, label, *words)
        elif old is None or new is None or reason:
            self.uncompared[kind] += 1
        elif old == new:
            self.equal[kind] += 1
        elif phase == "batch":
            self._differs(step, component, label, *batch_words((epoch, old[0]), (epoch, new[0])))
        else:
            words = (f"{old[0]:016x}", f"{new[0]:016x}") if phase == "copy" else row_words(old, new)
            self._differs(step, component, label, *words)

    def _pass_ended(self, step: int, stream: str, pass_index: int) -> None:
        earlier, key = self._earlier, (stream, pass_index)
        end, last = earlier.ends.pop(key, None), earlier.lasts.get(key, 0)
        old = f"at its end after step {end}" if end is not None else f"not at its end until step {last}"
        if end not in (None, step) or (end is None and last > step):
            self._differs(step, "samples", f"pass of {stream}", old, "at its end")

    def other_data(self, stream: str, words: tuple[str, str]) -> bool:
        """Note other data before the resume point, unless a person has accepted it; return whether noted."""
        if not self._earlier.accepted:
            self._differs(self.first, "samples", f"batch of {stream}", *words)
        return not self._earlier.accepted

    def step_done(self, step: int) -> None:
        """Count a complete step, and compare its batches that were not drawn."""
        if self._earlier.first < step <= self._earlier.last:
            self.steps += 1
            for key in [key for key in self._earlier.values[step] if key[2] == "batch"]:
                del self._earlier.values[step][key]
                self._differs(step, "samples", f"batch of {key[3]}", "drawn", "not drawn")

    def reached(self, step: int) -> None:
        """Take note of a boundary after `step`: all of the step's rows have been read."""
        if step > self._earlier.last or (step == self._earlier.last and not self._earlier.has_rows):
            self.end()

    def end(self) -> None:
        """End the comparison, and count the rows that are missing."""
        if self.done:
            return
        self.done = True
        for step in sorted(self._earlier.traced & {*range(self.first + 1, self.first + self.steps + 1)}):
            for (_, _, phase, name, _), old in self._earlier.values[step].items():
                if phase == "step" and name in self._metrics and old is not None and not self._incomparable():
                    self._differs(step, "loss", name, *row_words(old, None))

    def _differs(self, step: int, component: str, name: str, old: str, new: str) -> None:
        self.differing += 1
        self.latest = Difference(component, name, old, new, step)
        if self.difference is None or step < self.difference.step:
            self.difference = self.latest

    def report(self) -> str:
        """Report the comparison in one line."""
        equal, earlier = _format_counts(self.equal), self._earlier
        if self.difference is not None:
            total = self.equal.total() + self.differing
            differ = f"{self.differing} of {total} compared differ"
            return f"resume differs: {in_words(self.difference)} ({differ})"
        asides = []
        if earlier.set_aside > earlier.last:
            first, last = earlier.last + 1, earlier.set_aside
            steps = f"steps {first} to {last} are" if first < last else f"step {last} is"
            asides.append(f"{steps} not compared with earlier executions: {_join(earlier.reasons)}")
        if self.lost:
            asides.append(f"not in the state: {_join(self.lost)}")
        begin = REPORTS["not verified" if asides else "nothing to verify"]
        if not self.steps and not equal:
            return f"{begin}: {'; '.join(asides) or 'no step was executed again'}"
        counts = [f"{equal} equal"] if equal else []
        if uncompared := _format_counts(self.uncompared):
            reason = self._incomparable()
            counts.append(f"{uncompared} not compared{f' ({reason})' if reason else ''}")
        bare = self.steps - sum(self.first < step <= self.first + self.steps for step in self._noted)
        if equal and bare:
            counts.append(f"{plural(bare, 'step')} left nothing to compare")
        results = ", ".join(counts) or "they left nothing to compare"
        if self.steps:
            begin = REPORTS["verified" if equal and not self.lost else "not verified"]
            report = f"{begin}: {plural(self.steps, 'step')} executed again: {results}"
        else:
            report = f"{begin}: no step was executed again; {results}"
        return "; ".join([report, *asides])


def _component(phase: str, name: str) -> tuple[str, str, str]:
    """Return the component of a value, its name in messages, and the kind as which it is counted."""
    if phase == "batch":
        return "samples", f"batch of {name}", BATCHES
    if phase != "copy":
        return "loss", name, name
    part = name.partition("/")[2]
    return (RANDOM, part, RANDOM) if part == RANDOM else ("state", f"state {part!r}", STATE)


def in_words(difference: Difference) -> str:
    """Describe a difference between an earlier execution and this one."""
    step, name, expected, actual = difference.step, difference.name, difference.expected, difference.actual
    return f"step {step} {name} was {expected} and is {actual} now"


def batch_words(old: BatchDigest | None, new: BatchDigest | None) -> tuple[str, str]:
    """Describe two batches that differ: by their passes where these differ, else by their digests."""
    if old is None or new is None:
        return ("drawn" if old else "not drawn"), ("drawn" if new else "not drawn")
    if old[0] != new[0]:
        return f"of pass {old[0] + 1}", f"of pass {new[0] + 1}"
    return f"the batch with digest {old[1]:016x}", f"the batch with digest {new[1]:016x}"


def row_words(old: Value | None, new: Value | None) -> tuple[str, str]:
    def words(row: Value | None, other: Value | None) -> str:
        if row is None:
            return "missing"
        bits, count = row
        value = bits_float(bits)
        text = f"{value!r} (bits {bits:016x})" if value != value else repr(value)
        return text if other is None or count == other[1] else f"{text} (of {count} values)"

    return words(old, new), words(new, old)


def _format_counts(counts: Counter[str]) -> str:
    """Format counts, such as "12 batch digests and 9 values of loss"; "" if nothing was counted."""
    kinds = [plural(counts[kind], kind) for kind in _KINDS if counts[kind]]
    metrics = [name for name, count in counts.items() if count and name not in _KINDS]
    if metrics:
        total = sum(counts[name] for name in metrics)
        subject = f"of {metrics[0]}" if len(metrics) == 1 else f"of {len(metrics)} metrics"
        kinds.append(f"{plural(total, 'value')} {subject}")
    return _join(kinds)


def _join(words: Iterable[str]) -> str:
    *others, last = [*words] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def accept(run_dir: Path, step: int) -> None:
    """Take away the mark of a divergence, durably: the rows from `step` on are the run's own from now on.

    Later starts do not compare those steps with earlier executions.
    """
    integer("step", step, 0)
    run = RunDir.open(run_dir, create=False)
    with RunLock(run.path).held():
        journal = RunJournal(run.path)
        steps = {event.data["step"] for event in journal.divergences()}
        if step not in steps:
            known = f"it has at {', '.join(map(str, sorted(steps)))}" if steps else "it has not diverged"
            raise ConfigError(f"{run.path} has no divergence at step {step} to accept; {known}")
        newest = [segment for segment in journal.segments() if segment.started][-1]
        # The decision gets a segment of its own: no file of a journal is appended to by another process.
        parent = Position(newest.number, newest.end)
        decision = Journal.open(run.path, run.next_segment(), parent, None, warn=lambda message: None)
        with closing(decision), no_disk_error("the decision cannot be recorded", run.path):
            decision.decide({"what": ACCEPTED, "step": step})
