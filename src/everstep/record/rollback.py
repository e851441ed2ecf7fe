"""Rollbacks as the journal has them: decisions, which no resume takes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from everstep.redaction import redacted

KIND = "rollback"
"""What the decision's `what` says."""


class Batch(NamedTuple):
    """One batch of a run's stream.

    Attributes:
        stream: its name.
        pass_index, batch_index: which pass over the data, and which batch of it; both from 0, and in words,
            as epochs and steps are, from 1.
        samples: the numbers of its samples, None where the stream cannot tell them.
    """

    stream: str
    pass_index: int
    batch_index: int
    samples: list[int] | None = None

    def __str__(self) -> str:
        ids = "" if self.samples is None else f" (samples {_short(self.samples)})"
        return f"batch {self.batch_index + 1} of pass {self.pass_index + 1} of stream {self.stream!r}{ids}"


class Rollback(NamedTuple):
    """The decision to go back to a checkpoint and to go on without some batches.

    Attributes:
        number: which one of the run it is, from 1.
        step: the step that failed.
        reason: how, in words.
        first: the first step that had a batch which is now quarantined: nothing from there on is kept.
        checkpoint: the newest one before that step.
        batches: the quarantined ones.
        segment: the start of the run that decided it.
    """

    number: int
    step: int
    reason: str
    first: int
    checkpoint: str
    batches: tuple[Batch, ...]
    segment: int

    def data(self) -> dict[str, Any]:
        """As the event holds it."""
        fields = self._asdict()
        del fields["segment"]
        return {"what": KIND, **fields, "batches": [batch._asdict() for batch in self.batches]}

    @classmethod
    def among(cls, decisions: Iterable[tuple[dict[str, Any], int]]) -> list[Rollback]:
        """Those of some decisions that are rollbacks.

        Args:
            decisions: the data of each, and the start that decided it.
        """
        return [cls._of(data, segment) for data, segment in decisions if data.get("what") == KIND]

    def stored(self) -> list[Any]:
        """As a checkpoint holds it, beside the journal: the inverse is `among` one."""
        return [redacted(self.data()), self.segment]

    @classmethod
    def fits(cls, data: dict[str, Any]) -> bool:
        """Whether a decision has all that one of its kind has."""
        try:
            cls.among([(data, 1)])
        except (KeyError, TypeError):
            return False
        return True

    @classmethod
    def _of(cls, data: dict[str, Any], segment: int) -> Rollback:
        fields = {name: value for name, value in data.items() if name in cls._fields}
        fields["batches"] = tuple(Batch(**batch) for batch in data["batches"])
        return cls(**fields, segment=segment)


def shared_samples(rollbacks: Sequence[Rollback]) -> list[tuple[str, int]]:
    """(stream, sample) of each that all of two or more rollbacks have quarantined: it may be what is bad."""
    quarantined = [
        {(batch.stream, sample) for batch in rollback.batches for sample in batch.samples or ()}
        for rollback in rollbacks
    ]
    return sorted(set.intersection(*quarantined)) if len(quarantined) > 1 else []


def _short(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
