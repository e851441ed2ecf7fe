"""Self-verifying resume: steps that are executed again must find the same values again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from everstep.contracts.metrics import Block
from everstep.record.earlier_steps import EarlierSteps, Found
from everstep.record.journal_format import bits_float
from everstep.record.journal_reader import Key, comparable_rows

BATCHES, RANDOM, STATE = "batch digest", "random state", "state digest"


class Divergence(NamedTuple):
    """Difference between two executions of a step.

    Attributes:
        step: the step that differs.
        component: "batch of STREAM", "pass of STREAM", "random state", "state 'PART'", or a metric's name.
        old, new: the component's value before and now.
        in_data: whether the steps got other batches.
    """

    step: int
    component: str
    old: str
    new: str
    in_data: bool = False

    def __str__(self) -> str:
        return f"step {self.step} {self.component} was {self.old} and is {self.new} now"


class StepComparison:
    """Comparison, bit for bit, of the steps that a start executes again with their earlier executions.

    Head rows are never compared: in an epoch that is entered again they are not written.

    Args:
        reference: the earlier executions.
        incomparable: called once; returns why numbers cannot be expected to be equal, "" if they can.

    Attributes:
        steps: count of the steps executed again.
        equal, uncompared: counts of the values found equal, and of the values without a comparison, by kind:
            "batch digest", "random state", "state digest", and metrics by their names.
        differing: count of the values that differ.
        difference: the difference with the lowest step; within a step, the first that was found.
        done: True when nothing is left to compare.
    """

    def __init__(self, reference: EarlierSteps, incomparable: Callable[[], str] = lambda: "") -> None:
        self._was, self._incomparable = reference, incomparable
        self._why: str | None = None
        self._seen: set[str] = set()
        """Step metrics that this execution has collected."""
        self._drawn = [0, 0]
        """Counts of the open step's batches: those that are equal, and those that are not compared."""
        self.steps = 0
        self.equal: Counter[str] = Counter()
        self.uncompared: Counter[str] = Counter()
        self.differing = 0
        self.difference: Divergence | None = None
        self.done = reference.last == reference.first and not reference.rows

    @property
    def first(self) -> int:
        """Step that the start resumes from."""
        return self._was.first

    @property
    def last(self) -> int:
        """Last step that is executed again."""
        return self._was.last

    # ----------------------------------------------------------------------------- values found now

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Compare batch `seq` of a step, which is handed out."""
        was = self._was
        end = was.ends.get((stream, pass_index))
        if end is not None and end < step:
            del was.ends[stream, pass_index]
            self._differs(
                step, f"pass of {stream}", f"at its end after step {end}", "not at its end", in_data=True
            )
        elif step in was.traced:
            old = was.batches.get(step, {}).pop((stream, seq), None)
            if old is None:
                self._differs(step, f"batch of {stream}", "not drawn", "drawn", in_data=True)
            elif None in (old[1], digest) and old[0] == pass_index:
                self._drawn[1] += 1
            elif old == (pass_index, digest):
                self._drawn[0] += 1
            else:
                words = _told_apart(old, (pass_index, digest))
                self._differs(step, f"batch of {stream}", *words, in_data=True)
        elif was.first < step <= was.last:
            self._drawn[1] += 1

    def pass_ended(self, step: int, stream: str, pass_index: int) -> None:
        """Compare the end of a pass: the pass gave its last batch.

        Args:
            step: the last complete step, or the open step if it drew from the stream.
        """
        was = self._was
        end, last = was.ends.pop((stream, pass_index), None), was.lasts.get((stream, pass_index), 0)
        old = f"at its end after step {end}" if end is not None else f"not at its end until step {last}"
        if end not in (None, step) or (end is None and last > step):
            self._differs(step, f"pass of {stream}", old, "at its end", in_data=True)

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
                self._differs(step, f"batch of {stream}", "drawn", "not drawn", in_data=True)

    def copied(self, step: int, phase: str, part: str, digest: int) -> None:
        """Compare a part of a snapshot: "random state", or an entry of the user's state."""
        old = self._was.copies.pop((step, f"{phase}/{part}"), None)
        kind = RANDOM if part == RANDOM else STATE
        if old is None:
            return
        if kind == STATE and self._why_not():
            self.uncompared[kind] += 1
        elif old == digest:
            self.equal[kind] += 1
        else:
            component = part if kind == RANDOM else f"state {part!r}"
            self._differs(step, component, f"{old:016x}", f"{digest:016x}")

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
        for key, new in comparable_rows(block).items():
            step = key[1]
            if key in was.rows:
                self._compare(key, was.rows.pop(key), new)
            elif in_steps and was.first < step <= was.last:
                if step in was.traced and block.name in was.names and not self._why:
                    self._differs(step, block.name, "missing", _show(new, new))
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
                self._differs(step, name, _show(old, old), "missing")

    def _compare(self, key: Key, old: Found | None, new: Found) -> None:
        _, step, _, name, _ = key
        if old is None or self._why:
            self.uncompared[name] += 1
        elif old == new:
            self.equal[name] += 1
        else:
            self._differs(step, name, _show(old, new), _show(new, old))

    def _differs(self, step: int, component: str, old: str, new: str, *, in_data: bool = False) -> None:
        self.differing += 1
        if self.difference is None or step < self.difference.step:
            self.difference = Divergence(step, component, old, new, in_data)

    # -------------------------------------------------------------------------------------- the report

    def report(self) -> str:
        """Report the comparison in one line."""
        equal = _counted(self.equal)
        if self.difference is not None:
            total = self.equal.total() + self.differing
            return f"resume differs: {self.difference} ({self.differing} of {total} compared differ)"
        aside = self._aside()
        if not self.steps and not equal:
            return f"resume not verified: {aside or 'nothing was executed again'}"
        found = [f"{equal} equal"] if equal else []
        if uncompared := _counted(self.uncompared):
            found.append(f"{uncompared} not compared{f' ({self._why})' if self._why else ''}")
        again = f"{self.steps} step{'s' * (self.steps != 1)} executed again"
        verified = "verified" if equal else "not verified"
        report = f"resume {verified}: {again}: {', '.join(found) or 'they left nothing to compare'}"
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


def _told_apart(old: tuple[int, int | None], new: tuple[int, int | None]) -> tuple[str, str]:
    """Describe two batches: by their passes where these differ, else by their digests."""
    if old[0] != new[0]:
        return f"of pass {old[0] + 1}", f"of pass {new[0] + 1}"
    return f"the batch with digest {old[1]:016x}", f"the batch with digest {new[1]:016x}"


def _counted(found: Counter[str]) -> str:
    """Format counts, such as "12 batch digests and 9 values of loss"; "" if nothing was counted."""
    kinds = [_several(found[kind], kind) for kind in (BATCHES, RANDOM, STATE) if found[kind]]
    metrics = [name for name, count in found.items() if count and name not in (BATCHES, RANDOM, STATE)]
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


def _show(row: Found, other: Found) -> str:
    bits, count = row
    value = bits_float(bits)
    text = repr(value)
    if value != value:
        text += f" (bits {bits:016x})"
    return text if count == other[1] else f"{text} (of {count} values)"
