"""The place at which two executions of the same steps part: the step, and the component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from everstep.replaying.execution import Executed

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
