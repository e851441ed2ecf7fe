"""`checked`: a stream whose batches are looked at before anything is made of them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from everstep.contracts import Cursor, Stream
from everstep.data.adapt import as_stream
from everstep.errors import ConfigError, DataError, nearest
from everstep.keywords import checked_keywords, whole

Policy = Literal["ignore", "warn", "error"]


@checked_keywords
def checked(
    data: Any,
    *,
    sources: Collection[str] | None = None,
    fixed_batch_size: int | None = None,
    empty_batch: Policy = "error",
    unequal_lengths: Policy = "error",
    missing_source: Policy = "error",
    unused_source: Policy = "warn",
    wrong_size: Policy = "error",
) -> Stream:
    """The stream over `data`, each batch checked as it is handed out; every batch is handed out.

    The parts of a batch are what a mapping, tuple or list holds; those without a length are passed over.
    What is found is ignored, warned about (once a kind and stream) or a `DataError` at that batch.

    Args:
        data: anything that `as_stream` takes.
        sources: for batches that are mappings: the keys that the step uses; None checks no keys.
        fixed_batch_size: how long each part must be, 1 or more; None: any length.
        empty_batch: a batch without parts, or with a part of length 0.
        unequal_lengths: parts that are not equally long.
        missing_source: a key of `sources` that a batch lacks.
        unused_source: a key of a batch that `sources` lacks.
        wrong_size: a length other than `fixed_batch_size`.

    Raises:
        ConfigError: a policy is none of the three.
    """
    policies = {
        "empty_batch": empty_batch,
        "unequal_lengths": unequal_lengths,
        "missing_source": missing_source,
        "unused_source": unused_source,
        "wrong_size": wrong_size,
    }
    for name, policy in policies.items():
        if policy not in get_args(Policy):
            raise ConfigError(f"{name}={policy!r}: give one; {nearest(str(policy), get_args(Policy))}")
    whole("fixed_batch_size", fixed_batch_size, none="for any length")
    return CheckedStream(as_stream(data), _Checks(sources, fixed_batch_size, policies))


@dataclass
class _Checks:
    """What is asked of each batch; `warned`: the kinds that were warned about."""

    sources: Collection[str] | None
    size: int | None
    policies: Mapping[str, Policy]
    warned: set[str] = field(default_factory=set)

    def check(self, batch: Any, where: str) -> None:
        for kind, problem in self._problems(batch):
            policy = self.policies[kind]
            message = f'{where}: {problem}, or pass {kind}="ignore" to everstep.data.checked'
            if policy == "error":
                raise DataError(message)
            if policy == "warn" and kind not in self.warned:
                self.warned.add(kind)
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _problems(self, batch: Any) -> Iterator[tuple[str, str]]:
        parts = _parts(batch)
        if self.sources is not None:
            yield from self._keys(parts)
        sizes = {name: len(part) for name, part in parts.items() if _has_length(part)}
        told = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
        if not parts or 0 in sizes.values():
            yield "empty_batch", f"a batch is empty (sizes {told or 'none'}); leave it out of the data"
        elif len(set(sizes.values())) > 1:
            yield "unequal_lengths", f"the parts are not equally long (sizes {told}); make them so"
        elif self.size is not None and any(size != self.size for size in sizes.values()):
            yield "wrong_size", f"the sizes are {told}, not {self.size}; make batches of that size"

    def _keys(self, parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        assert self.sources is not None
        for name in self.sources:
            if name not in parts:
                yield "missing_source", f"no source {name!r}; {nearest(name, parts)}; give it"
        unused = [repr(name) for name in parts if name not in self.sources]
        if unused:
            yield "unused_source", f"nothing uses {', '.join(unused)}; leave it out of the data"


def _parts(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): part for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return {str(number): part for number, part in enumerate(batch)}
    return {"batch": batch}


def _has_length(part: Any) -> bool:
    return hasattr(part, "__len__") and getattr(part, "shape", True) != ()


class CheckedStream:
    """See `checked`."""

    def __init__(self, stream: Stream, checks: _Checks) -> None:
        self._stream, self._checks = stream, checks

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        cursor = self._stream.open(purpose, pass_index, position, seed=seed)
        return CheckedCursor(cursor, self._checks, f"stream {purpose!r}, pass {pass_index}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # describe, generators: those of the data


class CheckedCursor:
    """A cursor that looks at what it hands out; batches are counted from where it was opened."""

    def __init__(self, cursor: Cursor, checks: _Checks, what: str) -> None:
        self._cursor, self._checks, self._what = cursor, checks, what
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._cursor)
        self._number += 1
        self._checks.check(batch, f"{self._what}, batch {self._number}")
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
