"""Names of checkpoints, and which of them stay: a pure function of those on disk.  The store deletes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import total_ordering
from typing import Any, NamedTuple

from everstep.arguments import integer
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule

_NAME = re.compile(r"(?:epoch-(\d{4,18})-)?step-(\d{8,18})")


@total_ordering
@dataclass(frozen=True)
class CheckpointName:
    """Name of a checkpoint: "step-00000120", or "epoch-0003-step-00000120" after an epoch's tail.

    Names sort from older to newer: by step; of two at one step, the checkpoint after the epoch is newer.

    Attributes:
        step: number of complete steps, from 0.
        epoch: the epoch that is over, 0 before the first epoch; None inside an epoch.
    """

    step: int
    epoch: int | None = None

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Parse what `str` returns."""
        match = _NAME.fullmatch(text)
        name = None if match is None else cls(int(match[2]), None if match[1] is None else int(match[1]))
        if name is None or str(name) != text:
            raise ConfigError(
                f"{text!r} is not a checkpoint's name; give one such as 'step-00000120' or "
                "'epoch-0003-step-00000120'"
            )
        return name

    @classmethod
    def matches(cls, text: str) -> bool:
        """Whether `text` is a checkpoint's name."""
        try:
            cls.parse(text)
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        step = f"step-{self.step:08d}"
        return step if self.epoch is None else f"epoch-{self.epoch:04d}-{step}"

    def __lt__(self, other: CheckpointName) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, int]:
        return self.step, -1 if self.epoch is None else self.epoch


class Facts(NamedTuple):
    """Facts of a checkpoint's manifest, as retention needs them.

    Attributes:
        partial: whether its epoch was cut short, so that the checkpoint inside that epoch is needed, too.
        created: time of the commit, in seconds since 1970.
        metrics: values of the checkpoint's own step.
        kept: names of all best weights that are kept, by metric, the best first.
    """

    name: CheckpointName
    partial: bool
    created: float
    metrics: dict[str, float]
    kept: dict[str, list[str]]
    segment: int = 0
    interim: bool = False

    @classmethod
    def of(cls, name: CheckpointName, body: dict[str, Any]) -> Facts:
        meta = body["meta"] or {}
        created = datetime.fromisoformat(body["created"]).timestamp()
        steps = meta.get("metric_steps") or {}
        metrics = {
            n: v for n, v in (meta.get("metrics") or {}).items() if steps.get(n, name.step) == name.step
        }
        kept, interim = kept_best(meta), is_interim(meta)
        return cls(name, body["partial"], created, metrics, kept, body["segment"], interim)


def kept_best(meta: Any) -> dict[str, list[str]]:
    """Return the names of the best weights by metric, the best first; only those of folders below `best/`."""
    return {
        metric: [name for name in names if CheckpointName.matches(name)]
        for metric, names in ((meta or {}).get("kept") or {}).items()
        if metric not in ("", ".", "..")
    }


def is_interim(meta: Any) -> bool:
    """Whether it was saved one step before an epoch's end, for its tail; it goes after the next commit."""
    return bool((meta or {}).get("interim"))


@dataclass(frozen=True)
class Retention:
    """Rule that says which checkpoints stay: those that any of the three arguments wants.

    An interim checkpoint does not count for the rule: it stays while it is the newest.

    Args:
        keep_last: the newest n; None keeps all.
        keep_every: an `Every`; also one checkpoint at each multiple of n steps or epochs, or per n seconds.
        keep_best: (metric, "min" or "max", m); also the m best by the metric's value at their own step.
            Of equal values the older checkpoint stays; a checkpoint without a value does not count.
    """

    keep_last: int | None = 3
    keep_every: Schedule | None = None
    keep_best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        keep_last = integer("keep_last", self.keep_last, none="to keep every checkpoint")
        object.__setattr__(self, "keep_last", keep_last)  # NumPy's integers become Python's
        every = self.keep_every
        if every is not None and not isinstance(every, Every):
            raise ConfigError(f"keep_every={every!r}: give a schedule such as Every(steps=1000)")
        best: Any = self.keep_best
        if best is not None:
            fits = isinstance(best, tuple) and len(best) == 3 and isinstance(best[0], str)
            if not fits or best[1] not in ("min", "max"):
                raise ConfigError(
                    f"keep_best={best!r}: give a metric, 'min' or 'max', and a number, as in "
                    "('valid_loss', 'min', 2)"
                )
            integer("keep_best's count", best[2])


def expendable(
    policy: Retention, present: Sequence[Facts], protect: Collection[CheckpointName]
) -> list[CheckpointName]:
    """List those of all whole checkpoints, oldest first, that may be deleted."""
    counted = [facts for facts in present if not facts.interim]
    newest = counted if policy.keep_last is None else counted[-policy.keep_last :]
    kept_names = {facts.name for facts in (*newest, *present[-1:])} | set(protect)
    if isinstance(policy.keep_every, Every):
        kept_names |= _spaced(policy.keep_every, counted)
    if policy.keep_best is not None:
        kept_names |= _best(*policy.keep_best, counted)
    for facts in present:
        if facts.partial and facts.name in kept_names:
            kept_names |= set(names_inside(facts.name))
    return [facts.name for facts in present if facts.name not in kept_names]


def names_inside(closed: CheckpointName) -> tuple[CheckpointName, ...]:
    """List names from which a raised limit can resume inside an epoch that was cut short, the best first.

    In an epoch of one step, the step before is the end of the epoch before.
    """
    step, epoch = closed.step, closed.epoch
    assert epoch is not None
    before = [CheckpointName(step), CheckpointName(step - 1), CheckpointName(step - 1, epoch - 1)]
    return (*before, CheckpointName(step - 2)) if step > 1 else tuple(before)


def _spaced(every: Every, present: Sequence[Facts]) -> set[CheckpointName]:
    names = [facts.name for facts in present]
    if (n := every.steps) is not None:  # of two at one step, the newer
        return set({name.step: name for name in names if name.step and name.step % n == 0}.values())
    if (n := every.epochs) is not None:
        return {name for name in names if name.epoch and name.epoch % n == 0}
    spaced: set[CheckpointName] = set()
    last = -math.inf
    for facts in present:
        if facts.created - last >= (every.seconds or 0):
            spaced.add(facts.name)
            last = facts.created
    return spaced


def _best(metric: str, mode: str, count: int, present: Sequence[Facts]) -> set[CheckpointName]:
    sign = 1 if mode == "min" else -1
    scored = [
        (sign * value, facts.name)
        for facts in present
        if isinstance(value := facts.metrics.get(metric), int | float) and not math.isnan(value)
    ]
    return {name for _, name in sorted(scored)[:count]}
