"""Rollbacks as the journal has them: decisions that no resume takes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from everstep.record.event_fields import ROLLBACK, misfit
from everstep.redaction import redacted

KIND = ROLLBACK
"""Value of `what` in the decision of a rollback."""


class Batch(NamedTuple):
    """Batch of a run's stream.

    Attributes:
        stream: the stream's name.
        pass_index, batch_index: numbers of the pass over the data and of the batch in the pass; both from 0,
            but messages count from 1, like epochs and steps.
        samples: the numbers of the batch's samples, None where the stream cannot tell them.
    """

    stream: str
    pass_index: int
    batch_index: int
    samples: list[int] | None = None

    def __str__(self) -> str:
        ids = "" if self.samples is None else f" (samples {_short(self.samples)})"
        return f"batch {self.batch_index + 1} of pass {self.pass_index + 1} of stream {self.stream!r}{ids}"


class Rollback(NamedTuple):
    """Decision to go back to a checkpoint and to train on without some batches.

    Attributes:
        number: number of the rollback in the run, from 1.
        step: the step that failed.
        reason: how the step failed, in words.
        first: the first step with a batch that is now quarantined; nothing from this step on is kept.
        checkpoint: the newest checkpoint before that step.
        batches: the quarantined batches.
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
        fields = self._asdict()
        del fields["segment"]
        return {"what": KIND, **fields, "batches": [batch._asdict() for batch in self.batches]}

    @classmethod
    def among(cls, decisions: Iterable[tuple[dict[str, Any], int]]) -> list[Rollback]:
        """List the rollbacks among some decisions; a damaged decision is left out.

        Args:
            decisions: the data of each decision, and the number of the start that made it.
        """
        return [
            cls._of(data, segment)
            for data, segment in decisions
            if data.get("what") == KIND and not misfit("decision", data)
        ]

    def stored(self) -> list[Any]:
        """Return the rollback as a checkpoint holds it: the pair that `among` takes."""
        return [redacted(self.data()), self.segment]

    @classmethod
    def _of(cls, data: dict[str, Any], segment: int) -> Rollback:
        """Make a rollback of a decision that fits; further fields are left out."""
        fields = {name: data[name] for name in cls._fields if name not in ("batches", "segment")}
        batches = tuple(
            Batch(**{name: one[name] for name in Batch._fields if name in one}) for one in data["batches"]
        )
        return cls(**fields, batches=batches, segment=segment)


def shared_samples(rollbacks: Sequence[Rollback]) -> list[tuple[str, int]]:
    """Find the samples that each of two or more rollbacks has quarantined: they may be bad.

    Returns:
        (stream, sample number) of each such sample.
    """
    quarantined = [
        {(batch.stream, sample) for batch in rollback.batches for sample in batch.samples or ()}
        for rollback in rollbacks
    ]
    return sorted(set.intersection(*quarantined)) if len(quarantined) > 1 else []


def _short(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
