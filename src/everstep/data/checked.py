"""Stream that checks its batches before they are used (`checked`)."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args

from everstep.arguments import checked_keywords, integer
from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import as_stream
from everstep.data.cursor import CursorWrapper, StreamWrapper
from everstep.errors import ConfigError, DataError, nearest

Policy = Literal["ignore", "warn", "error"]

_LEFT_OUT = ("empty_batch", "wrong_size")
"""Kinds of batches that no step gets, whatever the policy."""


@checked_keywords
def checked(
    data: Any,
    *,
    sources: Collection[str] | None = None,
    fixed_batch_size: int | None = None,
    empty_batch: Policy = "error",
    empty_stream: Policy = "error",
    unequal_lengths: Policy = "error",
    missing_source: Policy = "error",
    unused_source: Policy = "warn",
    wrong_size: Policy = "error",
) -> Stream:
    """Make a stream over `data` that checks each batch as it is handed out.

    A policy says what happens to a kind of problem: "ignore", "warn" (once a kind and stream) or "error" (a
    `DataError` at that batch).  The message has the stream, the batch's number in its pass, from 1, the keys
    and their sizes.  A batch that is empty or of a wrong size is left out unless the policy is "error"; any
    other batch is handed out.

    The parts of a batch are the items of a mapping, tuple or list, also of nested mappings and tuples
    ("image.left"); a nested list is one part, and parts without a length are passed over.

    Args:
        data: anything that `as_stream` takes.
        sources: for batches that are mappings: the keys that the step uses; None checks no keys.
        fixed_batch_size: length of each part, 1 or more, on all ranks together; None: any length.
        empty_batch: policy for a batch without parts, or with parts that all have length 0.
        empty_stream: policy for a pass without any batch.  If it is not "error", such an epoch has no step,
            and such an evaluation has no metric.  It is an error all the same where the run would never end:
            in an epoch that is a number of steps, and in a run without `max_epoch`.
        unequal_lengths: policy for parts of different lengths.
        missing_source: policy for a key of `sources` that a batch lacks.
        unused_source: policy for a key of a batch that `sources` lacks.
        wrong_size: policy for a length other than `fixed_batch_size`.
    """
    policies = dict(
        empty_batch=empty_batch,
        empty_stream=empty_stream,
        unequal_lengths=unequal_lengths,
        missing_source=missing_source,
        unused_source=unused_source,
        wrong_size=wrong_size,
    )
    for name, policy in policies.items():
        if policy not in get_args(Policy):
            raise ConfigError(f"{name}={policy!r}: give one; {nearest(str(policy), get_args(Policy))}")
    fixed_batch_size = integer("fixed_batch_size", fixed_batch_size, none="for any length")
    if isinstance(sources, str):
        raise ConfigError(f"sources={sources!r}: give a list of keys, as in [{sources!r}]")
    return CheckedStream(as_stream(data), sources, fixed_batch_size, policies)


def _parts(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): part for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return {str(number): part for number, part in enumerate(batch)}
    return {"batch": batch}


def _leaves(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts that have a length."""
    for name, part in parts.items():
        if isinstance(part, Mapping | tuple):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _leaves(_parts(part)))
        elif (
            not isinstance(part, str | bytes) and hasattr(part, "__len__") and getattr(part, "shape", 1) != ()
        ):
            yield name, part


def _keys(sources: Collection[str], parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sources:
        if name not in parts:
            yield "missing_source", f"no source {name!r}; {nearest(name, parts)}; give it"
    unused = [repr(name) for name in parts if name not in sources]
    if unused:
        yield "unused_source", f"nothing uses {', '.join(unused)}; leave it out of the data"


class CheckedStream(StreamWrapper):
    def __init__(
        self,
        stream: Stream,
        sources: Collection[str] | None,
        size: int | None,
        policies: Mapping[str, Policy],
    ) -> None:
        super().__init__(stream)
        self._sources, self._size, self._policies = sources, size, policies
        self._warned: set[str] = set()
        """Kinds of problems that were warned about."""

    @property
    def may_be_empty(self) -> bool:  # type: ignore[override]
        return self._policies["empty_stream"] != "error"

    @property
    def leaves_out(self) -> bool:
        """Whether some batches may not be handed out."""
        kinds = _LEFT_OUT if self._size is not None else _LEFT_OUT[:1]
        return any(self._policies[kind] != "error" for kind in kinds)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        cursor = self.stream.open(purpose, pass_index, position, seed=seed)
        what = f"stream {purpose!r}, pass {pass_index + 1}"
        if position is not None and cursor.done is None:
            what += " from the resume on"
        return CheckedCursor(cursor, self, what, fresh=position is None)

    def split(self, share: Share) -> Stream:
        if share.size > 1 and self.leaves_out:
            raise DataError(
                f"checked(...) may leave out a batch on one of {share.size} ranks alone, and the others "
                'would wait for it; give empty_batch="error" and wrong_size="error"'
            )
        size = None if self._size is None else len(share.of(self._size)[0])
        return CheckedStream(self.stream.split(share), self._sources, size, self._policies)

    def passes(self, batch: Any, where: str) -> bool:
        """Whether the batch is handed out."""
        problems = list(self._problems(batch))
        for kind, problem in problems:
            self.report(kind, f"{where}: {problem}")
        return not any(kind in _LEFT_OUT for kind, _ in problems)

    def report(self, kind: str, problem: str) -> None:
        """Apply the policy to a problem."""
        policy = self._policies[kind]
        remedy = "leave such batches out" if kind in _LEFT_OUT else "allow it"
        message = f'{problem}, or pass {kind}="ignore" to everstep.data.checked to {remedy}'
        if policy == "error":
            raise DataError(message)
        if policy == "warn" and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _problems(self, batch: Any) -> Iterator[tuple[str, str]]:
        parts = _parts(batch)
        sizes = {name: len(part) for name, part in _leaves(parts)}
        shown = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
        if not parts or (sizes and not any(sizes.values())):
            yield "empty_batch", f"a batch is empty (sizes {shown or 'none'}); leave it out of the data"
            return  # an empty batch is reported once, not again for its keys and its size
        if self._sources is not None:
            yield from _keys(self._sources, parts)
        if len(set(sizes.values())) > 1:
            yield "unequal_lengths", f"the parts are not equally long (sizes {shown}); make them so"
        elif self._size is not None and any(size != self._size for size in sizes.values()):
            yield "wrong_size", f"the sizes are {shown}, not {self._size}; make batches of that size"


class CheckedCursor(CursorWrapper):
    def __init__(self, cursor: Cursor, stream: CheckedStream, what: str, *, fresh: bool) -> None:
        super().__init__(cursor)
        self._stream, self._what = stream, what
        self._opened_at = cursor.done or 0
        self._drawn = 0
        self._empty = fresh or cursor.done == 0
        """Whether the pass has handed out no batch, as far as can be told."""

    def __next__(self) -> Any:
        while True:
            try:
                batch = next(self.cursor)
            except StopIteration:
                if self._empty:
                    self._empty = False  # reported once, though the end may be asked for again
                    self._stream.report(
                        "empty_stream", f"{self._what}: no batch in a whole pass; give it data"
                    )
                raise
            self._drawn += 1  # before the check: a message counts the batches that were left out, too
            if self._stream.passes(batch, f"{self._what}, batch {self._opened_at + self._drawn}"):
                self._empty = False
                return batch
            if self.cursor.done is not None:
                self.left_out.append(self.cursor.done - 1)

    def remaining(self) -> int | None:
        left = self.cursor.remaining()
        return left if not left or not self._stream.leaves_out else None
