"""Events: the types of their fields (an event of other types is damaged, and nobody reads it); rollbacks.

Whatever everstep writes fits.  A kind or a field that is not named here may hold anything that JSON can hold:
the reason of a stop is any value that a program gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from everstep.redaction import redacted
from everstep.untrusted_files import Count, Seconds, misfits

DIVERGED = "diverged"
"""Kind of an event: steps that were executed again gave different results."""
WARNED = "warned once"
"""Kind of an event: a warning that each run gives once."""
CHOSEN, ACCEPTED, ROLLBACK = "chosen", "accepted", "rollback"
"""Decisions: a person chose another checkpoint or configuration; accepted a divergence; the run goes back."""

DEEPEST = 200
"""Most levels of lists and objects in an event: deeper ones exhaust the stack of whoever reads them."""


def misfit(kind: str, data: Mapping[str, Any]) -> str:
    """Say which field of an event has a wrong type, or is missing; "" if all fit."""
    decision = data.get("what") if kind == "decision" else None
    fields = _DECISIONS.get(str(decision), {}) if decision is not None else _KINDS.get(kind, {})
    name = next(misfits(data, fields), None)
    if name is None:
        return ""
    return f"{name!r} is {data[name]!r:.60}" if name in data else f"{name!r} is missing"


def levels(tree: Any) -> int:
    """Count the levels of lists and objects in a tree of JSON values, whatever their number."""
    depth, level = 0, [tree]
    while level := [each for each in level if isinstance(each, dict | list | tuple)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth


_PLACE: dict[str, Any] = {"step?": Count, "epoch?": Count}

_KINDS: dict[str, dict[str, Any]] = {
    "segment": {
        "facts": {
            **dict.fromkeys(("resumed_from?", "resume?"), str | None),
            **dict.fromkeys(("ranks?", "ranks_before?"), Count),
        },
        "run?": str | None,
        "parent?": tuple[Count, Count] | None,
    },
    "checkpoint": {"name": str, "bytes": Count},
    "progress": _PLACE,
    "best": {"metric": str, "value": float, "step": Count},
    "times": {"epoch?": Count, "steps?": list[Count], "seconds?": Seconds, "data_wait?": Seconds},
    "ended": _PLACE,
    "interrupted": {"status?": int, **_PLACE},
    "closed": {"status": Literal["finished", "stopped", "failed", "killed"], **_PLACE},
    "verified": {"report?": str, "steps?": Count},
    WARNED: {"message": str},
    DIVERGED: {"step": Count, **dict.fromkeys(("component?", "old?", "new?", "report?"), str)},
    "head": {"stream": str, "step": Count, "given": list, "touched": bool},
    "summary": {
        "name": str,
        "step": Count,
        "text?": str,
        "image?": {"file": str, **dict.fromkeys(("height?", "width?", "channels?"), Count)},
        "histogram?": {
            **dict.fromkeys(("min?", "max?", "num?", "sum?", "sum_squares?"), float),
            "bucket_limit?": list[float],
            "bucket?": list[float],
        },
    },
}

_BATCH: dict[str, Any] = {
    "stream": str,
    "pass_index": Count,
    "batch_index": Count,
    "samples?": list[int] | None,
}

_DECISIONS: dict[str, dict[str, Any]] = {
    CHOSEN: {"step": Count, "why?": str},
    ACCEPTED: {"step": Count},
    ROLLBACK: {
        **dict.fromkeys(("number", "step", "first"), Count),
        **dict.fromkeys(("reason", "checkpoint"), str),
        "batches": [_BATCH],
    },
}


class Batch(NamedTuple):
    """Batch of a run's stream.

    Its pass over the data and its number there are from 0, but messages count from 1, like epochs and steps.
    `samples` are the numbers of its samples, None where the stream cannot tell them.
    """

    stream: str
    pass_index: int
    batch_index: int
    samples: list[int] | None = None

    def __str__(self) -> str:
        numbers = self.samples or ()
        more = ", ..." if len(numbers) > 8 else ""
        ids = "" if self.samples is None else f" (samples {', '.join(map(str, numbers[:8]))}{more})"
        return f"batch {self.batch_index + 1} of pass {self.pass_index + 1} of stream {self.stream!r}{ids}"


class Rollback(NamedTuple):
    """Decision to go back to a checkpoint and to train on without some batches.

    Attributes:
        number: number of the rollback in the run, from 1.
        step, reason: the step that failed, and how.
        first: the first step with a batch that is now quarantined; nothing from this step on is kept.
        checkpoint: the newest checkpoint before that step.
        segment: number of the start that made the decision.
    """

    number: int
    step: int
    reason: str
    first: int
    checkpoint: str
    batches: tuple[Batch, ...]
    segment: int

    def data(self) -> dict[str, Any]:
        """Return the decision's data as its event holds it."""
        fields = {**self._asdict(), "batches": [batch._asdict() for batch in self.batches]}
        del fields["segment"]
        return {"what": ROLLBACK, **fields}

    def stored(self) -> list[Any]:
        """Return the rollback as a checkpoint holds it: the pair that `among` takes."""
        return [redacted(self.data()), self.segment]

    @classmethod
    def among(cls, decisions: Iterable[tuple[dict[str, Any], int]]) -> list[Rollback]:
        """List the rollbacks among (data, start) of decisions; a damaged decision is left out."""
        rollbacks = []
        for data, segment in decisions:
            if data.get("what") == ROLLBACK and not misfit("decision", data):
                batches = (
                    Batch(**{name: each[name] for name in Batch._fields if name in each})
                    for each in data["batches"]
                )
                fields = {name: data[name] for name in cls._fields[:5]}
                rollbacks.append(cls(**fields, batches=tuple(batches), segment=segment))
        return rollbacks


def shared_samples(rollbacks: Sequence[Rollback]) -> list[tuple[str, int]]:
    """Find each (stream, sample number) that all of two or more rollbacks have quarantined: it may be bad."""
    quarantined = [
        {(batch.stream, sample) for batch in rollback.batches for sample in batch.samples or ()}
        for rollback in rollbacks
    ]
    return sorted(set.intersection(*quarantined)) if len(quarantined) > 1 else []
