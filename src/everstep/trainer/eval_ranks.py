"""Evaluation on several ranks: in parts, or by each rank as a whole; the values are those of one process.

Means and statistics are put together from parts: each rank evaluates its part of each batch.  What else an
evaluation may compute (an AUC of all scores, say) follows from all batches, so each rank evaluates the whole
data; the ranks then compare the batches that they were handed, and take the writer's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.contracts.data import WHOLE, Cursor, Share, Stream
from everstep.contracts.group import Group
from everstep.contracts.tasks import Task
from everstep.data.cursor import CursorWrapper
from everstep.errors import DataError, DisagreementError, UsageError
from everstep.group import group_size
from everstep.metrics.statistics import Aggregate
from everstep.record import batch_digest
from everstep.services.evaluate import Evaluate
from everstep.supervisor.data_ranks import require_alike, require_same_samples

_WHOLE = ("eval_begin", "eval_reduce", "eval_end", "next_eval_inputs")
"""Methods of a task that see more than one batch, or draw batches, as they like."""

Row = tuple[int, float, float]
"""(batch, mean over a rank's part of it, weight of that part)."""


def refuse_several(noun: str, remedy: str) -> None:
    """Refuse what only one process can do."""
    if (size := group_size()) > 1:
        raise UsageError(f"{noun} is for one process, and here {size} train together; {remedy}")


class EvalRanks:
    """The ranks that evaluate a stream together; usually there is one."""

    def __init__(self, group: Group | None = None, why_whole: str | None = None) -> None:
        self.group = group or Group()
        if self.group.data.size == 1:
            why_whole = why_whole or "the ranks compute with the same batches"
        self.why_whole = why_whole
        self.divides = self.group.data.size > 1 and why_whole is None
        self._name = ""

    def share_of(self, stream: Stream, name: str) -> Stream:
        """Return the stream of what this rank evaluates.

        Where a stream cannot be divided, each rank evaluates the whole of it.
        """
        self._name = name
        if self.group.size == 1:
            return stream
        if self.divides:
            try:
                part = stream.split(Share(self.group.data_rank, self.group.data.size, "pad"))
            except DataError as error:
                self.divides, self.why_whole = False, str(error)
            else:
                require_same_samples(self.group, stream, name)
                return part
        return whole(stream, self.why_whole)

    def notice(self, name: str) -> str | None:
        """Say, after an evaluation, that each rank makes the whole of it; None where they divide it."""
        if self.group.data.size == 1 or self.divides:
            return None
        return f"stream {name!r} is evaluated as a whole by each of {self.group.size} ranks: {self.why_whole}"

    def with_notes(self, cursor: Cursor) -> Cursor:
        """Return the cursor that notes the batches which several ranks have to be handed alike."""
        alike = self.group.data.shared or (self.group.size > 1 and not self.divides)
        return _NotedCursor(cursor) if alike else cursor

    def weight(self, batch_size: float, sized: bool, cursor: Cursor) -> float:
        """Return the weight of this rank's part of a batch."""
        return batch_size if sized or not self.divides else cursor.weight / self.group.data.size

    def batches(self, metric: str, rows: Sequence[Row]) -> list[Row]:
        """Put the batches of a metric together from their parts."""
        parts: dict[int, Aggregate] = {}
        for batch, mean, weight in self._gather(rows, f"the batches of {self._name}/{metric}"):
            parts.setdefault(batch, Aggregate()).add([mean], [weight])
        return [(batch, *aggregate.mean_and_weight) for batch, aggregate in sorted(parts.items())]

    def samples(self, metric: str, values: Sequence[float]) -> list[float]:
        """Put the values of a metric's samples together."""
        return self._gather(values, f"the samples of {self._name}/{metric}")

    def means(self, own: Mapping[str, Aggregate], bad: dict[str, tuple[int, float]]) -> dict[str, Aggregate]:
        """Put means together, and the first batches in which values are not finite."""
        pairs = {name: aggregate.mean_and_weight for name, aggregate in own.items()}
        together: dict[str, Aggregate] = {}
        gathered = self.group.gather([pairs, bad], f"the evaluation of stream {self._name!r}")
        for means, worst in self.group.data.of_parts(gathered):
            for name, (mean, weight) in means.items():
                together.setdefault(name, Aggregate()).add([mean], [weight])
            for name, (batch, value) in worst.items():
                bad[name] = min(bad.get(name, (batch, value)), (batch, value))
        return together

    def _gather(self, values: Sequence[Any], title: str) -> list[Any]:
        """Gather the values of all parts, in the order of parts."""
        parts = self.group.data.of_parts(self.group.gather_lists(values, title))
        return [value for part in parts for value in part]

    def agree(self, values: dict[str, float], cursor: Cursor) -> dict[str, float]:
        """Return the values on which all ranks go on: of the whole data, those of the writer."""
        if not isinstance(cursor, _NotedCursor):
            return values
        if self.divides:
            title = f"the batches of stream {self._name!r}"
            require_alike(self.group.data, self.group.gather(cursor.noted, title), title)
            return values
        try:
            self.group.agree(cursor.noted, f"the data of stream {self._name!r}")
        except DisagreementError as error:
            error.add_note(_each_whole(self.why_whole))
            raise
        agreed_values: dict[str, float] = self.group.share(values, f"the evaluation of stream {self._name!r}")
        return agreed_values


def whole(stream: Stream, reason: str | None) -> Stream:
    """Return the whole stream, of which each rank is handed all batches."""
    try:
        return stream.split(WHOLE)
    except DataError as error:
        error.add_note(_each_whole(reason))
        raise


def _each_whole(reason: str | None) -> str:
    return f"each rank reads all samples here, as {reason}; give data that is not divided among the ranks"


class _NotedCursor(CursorWrapper):
    """Cursor that notes how many batches it hands out, and their digest."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(cursor)
        self.noted = [0, 0]

    def __next__(self) -> Any:
        batch = next(self.cursor)
        count, digest = self.noted
        # None: a batch that gives nothing to digest
        self.noted = [count + 1, batch_digest(batch, digest) or digest]
        return batch


def why_whole(task: Task, service: Evaluate | None, looked_at: bool) -> str | None:
    """Say why an evaluation of parts would find something else; None where it would not."""
    overridden = [name for name in _WHOLE if getattr(type(task), name) is not getattr(Task, name)]
    if service is not None and (service.agg_func or service.online_agg_func):
        return f"{service!r} has a function of all outputs"
    if overridden:
        return f"{type(task).__name__} has {overridden[0]} of its own"
    return "services look at the batches of evaluations" if looked_at else None
