"""Bases: of cursors, of streams over samples, and of streams and cursors around others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import Any, Self, TypeVar

from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.order import Plan, Sampling
from everstep.errors import DataError, UsageError


class PassCursor(Cursor):
    """Cursor over an iterator of batches.

    Args:
        what: the data, in words, for messages.
        done: batches of the pass before the place where the cursor is opened.
        knows_done: False where the number of those batches is not known.
        total: batches of the whole pass, None if unknown.
        closer: called once, when the pass is over or left.
    """

    def __init__(
        self,
        what: str,
        batches: Iterator[Any],
        *,
        done: int = 0,
        total: int | None = None,
        ended: bool = False,
        knows_done: bool = True,
        closer: Callable[[], object] | None = None,
    ) -> None:
        self.what, self.ended = what, ended
        self._handed_out, self._knows_done = done, knows_done
        self._total = total
        self._batches: Iterator[Any] | None = None if ended else batches
        self._closer = closer
        self._error: BaseException | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            return self._refuse()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended = True
            self.close()
            raise
        except BaseException as error:
            # The source may have moved on, so its next batch would be the wrong batch.
            self._error = error
            self.close()
            raise
        self._handed_out += 1
        return batch

    @property
    def done(self) -> int | None:  # type: ignore[override]
        return self._handed_out if self._knows_done else None

    def _refuse(self) -> Any:
        if self.ended:
            raise StopIteration
        count = self._handed_out
        if self._error is not None:
            cause = f"{type(self._error).__name__}: {self._error}"
            raise DataError(
                f"{self.what}: fetching batch {count} failed ({cause}); open the pass at its position"
            ) from self._error
        raise UsageError(f"{self.what}: the pass was closed after {count} batches; open a new one")

    def position(self) -> Any:
        """Return the place in the pass: the number of batches; a subclass with more state overrides this."""
        return {"batches": self.done}

    def remaining(self) -> int | None:
        if self.ended:
            return 0
        return None if self._total is None else max(self._total - self._handed_out, 0)

    def close(self) -> None:
        self._batches = None
        closer, self._closer = self._closer, None  # before the call: a closer runs once, even if it raises
        if closer is not None:
            closer()


class SampledCursor(PassCursor):
    """Cursor over the batches of a plan, from batch `start` on."""

    def __init__(
        self, plan: Plan, batches: Iterator[Any], start: int, *, closer: Callable[[], object] | None = None
    ) -> None:
        super().__init__(f"data {plan.purpose!r}", batches, done=start, total=len(plan), closer=closer)
        self._plan = plan

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self._plan.weight(self._handed_out - 1) if self._handed_out else 1.0

    def sample_numbers(self, first: int, end: int) -> list[Any]:
        return [self._plan.used(batch) for batch in range(first, end)]


class SampledStream(Stream):
    """Stream over samples.  Immutable.

    It can also be iterated directly, as for an evaluation (`for x, y in valid:`): always the same pass, and
    the global random state stays unchanged.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    @abstractmethod
    def _open(self, plan: Plan, first: int) -> SampledCursor:
        """Open a pass at batch `first`."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> SampledCursor:
        plan = self._sampling.plan(purpose, pass_index, seed)
        return self._open(plan, 0 if position is None else position["batches"])

    def describe(self, seed: int) -> dict[str, Any]:
        return self._sampling.describe(seed)

    def split(self, share: Share) -> Self:
        part = copy(self)
        part._sampling = replace(self._sampling, share=share)
        return part

    def sample_ids(self, purpose: str, pass_index: int, index: int, *, seed: int) -> list[int]:
        samples: list[int] = self._sampling.plan(purpose, pass_index, seed).indices(index).tolist()
        return samples

    def __len__(self) -> int:
        return self._sampling.batches

    def __iter__(self) -> Iterator[Any]:
        """Yield one whole pass, always the same: pass 0 of purpose "alone", the stream's seed or 0."""
        with closing(self.open("alone", 0, seed=0)) as cursor:
            yield from cursor


_Kind = TypeVar("_Kind", bound=type)
_MISSING = object()


def forwarding_to(attribute: str) -> Callable[[_Kind], _Kind]:
    """Forward a base's public members to the object in `attribute`; a class decorator.

    Members that the class defines stay.  Members that the other object lacks have the base's default.
    """

    def add(kind: _Kind) -> _Kind:
        for name, member in vars(kind.__base__).items():
            own = name in vars(kind) or name.startswith("_")
            if not own and not getattr(member, "__isabstractmethod__", False):
                setattr(kind, name, _forwarded(kind, attribute, name))
        return kind

    return add


def _forwarded(kind: type, attribute: str, name: str) -> property:
    def get(self: Any) -> Any:
        value = getattr(getattr(self, attribute), name, _MISSING)
        return getattr(super(kind, self), name) if value is _MISSING else value

    return property(get)


@forwarding_to("stream")
class StreamWrapper(Stream):
    """Stream around another stream, which supplies `generators`, `keeps_place` and the like."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    kind = Stream.kind  # not forwarded: the wrapper is part of what the run reads

    def split(self, share: Share) -> Stream:
        part = copy(self)
        part.stream = self.stream.split(share)
        return part


@forwarding_to("cursor")
class CursorWrapper(Cursor):
    """Cursor around another cursor, which knows the position."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.left_out: list[int] = []
        """Numbers of the batches that this cursor itself has passed over since they were asked for."""

    def position(self) -> Any:
        return self.cursor.position()

    def passed_over(self) -> list[int]:
        numbers, self.left_out = sorted([*self.cursor.passed_over(), *self.left_out]), []
        return numbers
