"""Divergence: the first step, and the first component, at which two runs, or a run and its replay, part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.checkpoint import Checkpoint, CheckpointName, Store, read_checkpoint
from everstep.errors import ReplayError
from everstep.record import RunJournal
from everstep.replaying.execution import Executed, execute, plan_for
from everstep.replaying.recorded_program import program_of, start_of
from everstep.replaying.run_copy import RunCopy, can_begin_anew, copy_run, last_step, origin
from everstep.replaying.verify import (
    ValueDifference,
    compare_values,
    counted,
    left_out,
    recorded_values,
    replayed_values,
)
from everstep.services.replayed import differing_leaves
from everstep.state import Encoded
from everstep.supervisor.opening.configuration import differences

_FACTS = ("argv", "config", "controllers", "seed", "limits", "ranks", "fingerprint", "packages", "git")
"""Facts of starts that are compared."""


class Subject(NamedTuple):
    """One of the two sides."""

    name: str
    run_dir: Path
    given: tuple[str, ...] = ()


@dataclass
class DivergeReport:
    """Result of comparing two sides.

    Attributes:
        a, b: the sides, in words.
        settings: settings that differ, in lines.
        equal: number of recorded values that are equal, by kind.
        recorded: first recorded value that differs; None if none does.
        last_equal: newest checkpoint before that whose states are equal in both; "" if there is none.
        first_unequal: first checkpoint whose states differ; "" if there is none.
        parting: first step and parts, as found by executing both again; None if that was not possible, or
            found nothing.
        notes: what else was found, in sentences.
    """

    a: str
    b: str
    settings: list[str] = field(default_factory=list)
    equal: dict[str, int] = field(default_factory=dict)
    recorded: ValueDifference | None = None
    last_equal: str = ""
    first_unequal: str = ""
    parting: Parting | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.recorded is not None or any(self.equal.values())

    @property
    def step(self) -> int | None:
        """First step at which the sides part; None if they are equal."""
        if self.parting is not None:
            return self.parting.step
        return None if self.recorded is None else self.recorded.step

    @property
    def component(self) -> str | None:
        """First component in which they part; None if they are equal."""
        if self.parting is not None:
            return self.parting.component
        if self.recorded is None:
            return None
        return {"metric": "loss"}.get(self.recorded.kind, self.recorded.kind)

    def __str__(self) -> str:
        lines = [f"A {self.a}", f"B {self.b}", *(f"  {each}" for each in self.settings)]
        lines.append(f"recorded: equal values: {counted(self.equal)}")
        if not self.compared:
            return "\n".join([*lines, *self.notes, "not comparable: they have recorded nothing in common"])
        if self.recorded is None:
            return "\n".join([*lines, *self.notes, "equal in all that both have recorded"])
        lines.append(f"recorded: the first that differs: {self.recorded}")
        if self.last_equal or self.first_unequal:
            between = [f"{self.last_equal or 'none'} is the last equal checkpoint"]
            between += [f"{self.first_unequal} the first unequal one"] if self.first_unequal else []
            lines.append(f"recorded: {', '.join(between)}")
        lines += self.notes
        if self.parting is None:
            return "\n".join([*lines, f"differ: they part at step {self.step}, in the {self.component}"])
        first, *others = told(self.parting.parts)
        why = self.parting.parts[0].where
        if self.parting.step == 1 and "between" in why:
            why = "as the run began"
        lines.append(f"differ: they part at step {self.parting.step}, in the {first} ({why})")
        return "\n".join([*lines, *(f"  then {each}" for each in others)])

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        parting = self.parting and {
            "step": self.parting.step,
            "parts": [part._asdict() for part in self.parting.parts],
        }
        recorded = self.recorded and self.recorded._asdict()
        return {
            **vars(self),
            "recorded": recorded,
            "parting": parting,
            "step": self.step,
            "component": self.component,
        }


# ------------------------------------------------------------------------------------ what is recorded


def compare_recorded(a: Path, b: Path) -> DivergeReport:
    """Compare what two runs have recorded: settings, metrics, batch digests, states in checkpoints."""
    report = DivergeReport(str(a), str(b))
    origins = origin(a), origin(b)
    first = 1 + max(0 if name is None else name.step for name in origins)
    ends = last_step(a), last_step(b)
    steps = range(first, min(ends) + 1)
    values = [recorded_values(run_dir, steps) for run_dir in (a, b)]
    found, equal = compare_values(values[0], values[1], shared=True)
    for name, own, other in zip("AB", values, values[::-1], strict=True):
        if alone := sorted(own.names - other.names):
            more = f" and {len(alone) - 8} more" if len(alone) > 8 else ""
            what = f"{', '.join(alone[:8])}{more} in steps {first} to {min(ends)}"
            report.notes.append(f"only {name} has recorded {what}: not compared")
    for side, began in zip("AB", origins, strict=True):
        if began is not None:
            report.notes.append(f"{side} began with {began} of another run: compared from step {first} on")
    if ends[0] != ends[1]:
        report.notes.append(f"A has {ends[0]} steps and B {ends[1]}: the first {min(ends)} are compared")
    states = list(_compare_states(a, b))
    alike = [name for name, difference in states if difference is None]
    unequal = [(name, difference) for name, difference in states if difference is not None]
    found += [difference for _, difference in unequal if difference is not None]
    report.equal = {**equal, "states of checkpoints": len(alike)}
    report.recorded = min(found, key=lambda each: (each.step, each.order), default=None)
    report.notes += _rollbacks(a, b)
    before = [name for name in alike if report.recorded is not None and name.step < report.recorded.step]
    report.last_equal = str(before[-1]) if before else ""
    report.first_unequal = str(unequal[0][0]) if unequal else ""
    at = report.recorded.step if report.recorded is not None else max(1, min(ends))
    report.settings = list(compare_settings(a, b, at))
    return report


def _rollbacks(a: Path, b: Path) -> Iterator[str]:
    """Tell the rollbacks that only one of two runs has made: from there on it has other batches."""
    made = [{str((each.first, each.batches)): each for each in RunJournal(run).rollbacks()} for run in (a, b)]
    for side, own, other in zip("AB", made, made[::-1], strict=True):
        for rollback in [own[place] for place in own if place not in other]:
            yield (
                f"{side}: rollback {rollback.number} has left out the batch of step {rollback.first}, as "
                f"step {rollback.step} failed: {rollback.reason}"
            )


def _compare_states(a: Path, b: Path) -> Iterator[tuple[CheckpointName, ValueDifference | None]]:
    """Compare the checkpoints that both have, up to the first that differs."""
    one, other = Store(a), Store(b)
    for name in sorted({f.name for f in one.facts()} & {f.name for f in other.facts()}):
        difference = _state_difference(one, other, name)
        yield name, difference
        if difference is not None:
            return


def _state_difference(one: Store, other: Store, name: CheckpointName) -> ValueDifference | None:
    # equal states have equal digests: no array is read for them
    digests = {read_checkpoint(each.path(name), wanted=lambda array: False).digest for each in (one, other)}
    if len(digests) == 1:
        return None
    a, b = one.read(name), other.read(name)
    settings = (*_settings_in(a), *_settings_in(b))
    # another gamma of a scheduler is among the settings, and changes a step later, or never
    leaves = [
        (path, units)
        for path, units in differing_leaves(Encoded(a.structure, a.arrays), Encoded(b.structure, b.arrays))
        if not path.startswith(settings)
    ]
    if not leaves:
        return None
    path, units = leaves[0]
    more = f" and {len(leaves) - 1} more leaves" if len(leaves) > 1 else ""
    return ValueDifference(name.step, "state", f"{path}{more}", f"in A's {name}", "in B's", units, 90)


def _settings_in(checkpoint: Checkpoint) -> list[str]:
    """Places of values that are settings: the seed, and entries that are neither weights nor an optimizer."""
    structure: Any = checkpoint.structure
    entries = structure.get("user", {})
    arrays = {path.split("/")[1] for path in checkpoint.arrays if path.startswith("user/")}
    plain = [n for n, tree in entries.items() if n not in arrays and "param_groups" not in str(tree)[:10_000]]
    return ["progress/seed", *(f"user/{name}/" for name in plain)]


def compare_settings(a: Path, b: Path, step: int) -> list[str]:
    """List the settings that differ between the starts that recorded a step, as lines."""
    one, other = (_settings(run_dir, step) for run_dir in (a, b))
    found = differences(one, other)
    lines = [f"{each.path}: {each.stored} in A, {each.given} in B" for each in found]
    return lines[:20] + ([f"and {len(lines) - 20} more settings"] if len(lines) > 20 else [])


def _settings(run_dir: Path, step: int) -> dict[str, Any]:
    try:
        facts = start_of(run_dir, step).facts
    except ReplayError:
        return {}
    told_of = {name: facts[name] for name in _FACTS if facts.get(name) is not None}
    if isinstance(told_of.get("git"), dict):
        told_of["git"] = {name: told_of["git"].get(name) for name in ("commit", "diff")}
    if isinstance(argv := told_of.get("argv"), list):
        # the name of the run itself is no setting
        told_of["argv"] = " ".join(str(each) for each in argv if Path(str(each)).name != run_dir.name)
    saved = [f for f in Store(run_dir).facts() if f.name.step >= step] or Store(run_dir).facts()[-1:]
    if saved:
        meta: Any = Store(run_dir).read(saved[0].name).meta
        told_of["options"] = meta.get("options") or {}
    return told_of


# ------------------------------------------------------------------------------------ execution again


def diverge(a: Subject, b: Subject, folder: Path, *, trust: bool = False) -> DivergeReport:
    """Find where two runs part."""
    report = compare_recorded(a.run_dir, b.run_dir)
    if report.recorded is None:
        return report
    at = report.recorded.step
    try:
        pair = [_Side(each, at, report.last_equal, folder / each.name, trust) for each in (a, b)]
        _execute_both(pair, report)
    except ReplayError as error:
        report.notes.append(f"not executed again: {error}")
    return report


class _Side:
    """A run, executed again up to the step of the first recorded difference."""

    def __init__(self, subject: Subject, at: int, last_equal: str, folder: Path, trust: bool) -> None:
        at = max(at, 1)
        self.subject, self.folder, self._tries = subject, folder, 0
        self.program = program_of(subject.run_dir, at, subject.given, trust=trust)
        self._begin = CheckpointName.parse(last_equal).step if last_equal else at - 1
        # what changes behind a step is seen before the next one
        self.last = min(at + 1, max(last_step(subject.run_dir), 1))
        self.copy: RunCopy
        self.executed: Executed
        self.unfaithful: ValueDifference | None = None

    def execute(self, *, anew: bool = False) -> None:
        """Execute the steps again; also compare them with what the run itself has recorded."""
        self._tries += 1
        place = self.folder / str(self._tries)
        self.copy = copy_run(self.subject.run_dir, place, self._begin, anew=anew)
        begin = self.copy.step + 1
        plan = plan_for(self.copy, self.last, parts=begin)
        self.executed = execute(self.program, self.copy, plan)
        steps = range(begin, self.last + 1)
        own = recorded_values(self.subject.run_dir, steps)
        found, _ = compare_values(
            own, replayed_values(self.copy, steps), left_out(self.subject.run_dir, self.executed)
        )
        self.unfaithful = found[0] if found else None

    def can_begin_anew(self) -> bool:
        """Whether an execution from nothing is possible, and is another one."""
        return self.copy.checkpoint is not None and can_begin_anew(self.subject.run_dir)


def _execute_both(pair: Sequence[_Side], report: DivergeReport) -> None:
    """Execute both sides again from equal states, and find the first part of a step that differs."""
    for side in pair:
        side.execute()
    for side in pair:
        report.notes += [f"{side.subject.name}: {each}" for each in side.program.notes]
        if side.unfaithful is not None and side.can_begin_anew():
            # a resume that is not exact spoils each execution from a checkpoint
            was, origin = side.unfaithful, side.copy.origin
            side.execute(anew=True)
            if side.unfaithful is None:
                report.notes.append(
                    f"{side.subject.name}: executed from {origin} it is not what it was ({was}), and from "
                    "its start it is: a resume of this program is not exact (everstep drill SCRIPT)"
                )
    for side in pair:
        if side.unfaithful is not None:
            report.notes.append(
                f"{side.subject.name}: executed again from {side.copy.origin} it does not find its own "
                f"record: {side.unfaithful}"
            )
    parting = first_parting(*(parts_of(side.executed) for side in pair))
    if parting is None:
        origins = " and ".join(dict.fromkeys(side.copy.origin for side in pair))
        report.notes.append(
            f"executed again from {origins}, both find the same up to step {pair[0].last}: what differs in "
            "the record is not in the programs as they are now"
        )
        return
    if all(side.copy.step + 1 == parting.step for side in pair) and parting.parts[0].where.startswith(
        "before"
    ):
        report.notes.append(f"no common state is recorded before step {parting.step}: they may part earlier")
    report.parting = parting


# ------------------------------------------------------------------------------------- parts of steps

Parts: TypeAlias = dict[int, dict[str, str]]
"""Step -> part -> digest, as `everstep.services.replayed` tells them."""

COMPONENTS = ("data", "random state", "weights", "loss", "gradient", "optimizer", "update", "state")
"""Components of a step that a parting names."""

_BEFORE, _INSIDE, _AFTER = range(3)

_KINDS = {
    "weights before": (
        _BEFORE,
        "weights",
        "before the step: lines between two steps have changed it, or a service",
    ),
    "optimizer before": (
        _BEFORE,
        "optimizer",
        "before the step: its options or moments were changed between two steps",
    ),
    "gradient before": (
        _BEFORE,
        "gradient",
        "before the step: lines between two steps have changed what waits for a later update",
    ),
    "state before": (_BEFORE, "state", "before the step: lines between two steps have changed it"),
    "data": (_BEFORE, "data", "the batch that the step was handed"),
    "random before": (
        _BEFORE,
        "random state",
        "before the step's own lines: the data, or lines between steps, drew",
    ),
    "random after": (_BEFORE, "random state", "the step's own lines drew more, fewer or other numbers"),
    "input inside": (
        _INSIDE,
        "data",
        "what the model was given: the step's lines made something else of the same batch",
    ),
    "weights inside": (_INSIDE, "weights", "changed in the step, before the forward pass"),
    "loss": (_INSIDE, "loss", "from equal data, random state and weights"),
    "gradient inside": (_INSIDE, "gradient", "from an equal loss, as the optimizer was about to use it"),
    "optimizer inside": (
        _INSIDE,
        "optimizer",
        "its options or moments as it was about to step, with equal gradients",
    ),
    "gradient after": (_AFTER, "gradient", "from an equal loss; it waits for the update of a later step"),
    "weights after": (_AFTER, "update", "from equal gradients, options and moments"),
    "optimizer after": (_AFTER, "optimizer", "after the step, with an equal update"),
    "state after": (_AFTER, "state", "after the step"),
}
"""Kind of part -> (where it stands, component, what is known of it).

The order is that of cause and effect within a step; other draws come before what is computed from them.
Inside a step it is that of time: a step may make several forward passes and updates, of several models.
"""

_PULL = "pull inside/"
"""Gradients of a model's output: they tell which backward pass another loss began, and are no component."""

_ONLY_ONE = {
    False: ("loss", "a forward pass that only one of them made"),
    True: ("update", "an update that only one of them made"),
}

_Rank: TypeAlias = tuple[int, ...]
"""Place of a part in the order of cause and effect."""


class Part(NamedTuple):
    """Part of a step that differs.

    Attributes:
        component: one of `COMPONENTS`.
        name: what differs, such as "model/0.weight".
        where: what is known of the place, in words.
        place: the part, as `everstep.services.replayed` names it.
    """

    component: str
    name: str
    where: str
    place: str


class Parting(NamedTuple):
    """First step at which two executions differ, with the parts that do, by cause and effect."""

    step: int
    parts: list[Part]

    @property
    def component(self) -> str:
        return self.parts[0].component


def parts_of(executed: Executed) -> Parts:
    """Return the parts that an execution has told."""
    return {line["step"]: line["parts"] for line in executed.found if line["at"] == "parts"}


def first_parting(a: Parts, b: Parts) -> Parting | None:
    """Find the first step of which a part differs; None if none does.

    Entries of the state that are neither weights nor an optimizer count only where nothing else differs: they
    may hold settings, such as the factor of a schedule, long before it acts.
    """
    return _first(a, b, but=("state",)) or _first(a, b)


def _first(a: Parts, b: Parts, but: tuple[str, ...] = ()) -> Parting | None:
    for step in sorted(a.keys() & b.keys()):
        found = list(_differing(a[step], b[step]))
        if any(part.component not in but for _, part in found):
            in_order = sorted(found, key=lambda each: (each[1].component in but, each[0], each[1].name))
            return Parting(step, [part for _, part in in_order])
    return None


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[tuple[_Rank, Part]]:
    unequal = [place for place in {**a, **b} if a.get(place) != b.get(place)]
    timelines = [_timeline(side) for side in (a, b)]
    times = {**timelines[1], **timelines[0]}
    of_loss = _update_of_loss(unequal, times)
    for place in unequal:
        if place.startswith(_PULL):
            continue
        kind, _, name = place.partition("/")
        stands, component, where = _KINDS[kind]
        rank: _Rank = (stands, list(_KINDS).index(kind))
        if kind == "loss":
            rank = (_INSIDE, of_loss, 1)
        elif stands == _INSIDE:
            event, after_loss = _event(place), kind in ("gradient inside", "optimizer inside")
            update, at = times[event]
            rank = (_INSIDE, update, 2 if after_loss else 0, at)
            if not all(event in timeline for timeline in timelines):
                component, where = _ONLY_ONE[after_loss]
            name = name.partition("/")[2]
        yield rank, Part(component, name or component, where, place)


def _update_of_loss(unequal: Sequence[str], times: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of updates that came before the loss that differs.

    Gradients of outputs tell: where they are equal in each backward pass, another loss is an effect.
    """
    seen = any(event.startswith(_PULL) for event in times)
    causes = [each for each in unequal if each.startswith(_PULL if seen else "gradient inside/")]
    last = max((update for update, _ in times.values()), default=0)
    return min((times[_event(each)][0] for each in causes), default=last)


def _event(place: str) -> str:
    """Name what happened inside a step: "weights inside/2/model" is the second forward pass of that model."""
    return "/".join(place.split("/")[:3])


def _timeline(parts: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return, for each event inside a step, the number of updates before it, and its own number."""
    events = dict.fromkeys(_event(place) for place in parts if " inside/" in place)
    found, updates = dict[str, tuple[int, int]](), 0
    for at, event in enumerate(events):
        found[event] = updates, at
        updates += event.startswith("optimizer inside/")
    return found


def told(parts: Iterable[Part], most: int = 6) -> Iterator[str]:
    """Write the parts in lines, those of one component and place together."""
    groups: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.component, part.where), []).append(part)
    for (component, _), members in list(groups.items())[:most]:
        every = list(dict.fromkeys(each.name for each in members))
        names = ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
        yield f"{component}: {names}"
