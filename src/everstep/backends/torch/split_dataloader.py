"""Split of a user's `DataLoader` among ranks: by its `DistributedSampler`, or by its data's own word.

A `DistributedSampler` hands rank r the samples r, r + N, r + 2N ... of one order, so the batches number b of
all ranks together are batch b of one process with N times the batch size.  Where N does not divide the
samples, the sampler repeats the first ones at the end; the repeated samples are left out here, because they
would count twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from everstep.contracts.data import Share
from everstep.data.order import Sampling
from everstep.data.other_libraries import ranks_said, require_ranks
from everstep.errors import DataError


class PassSampler(Sampler[Any]):
    """The first `count` items of a sampler, in the order of pass `pass_index`.

    Attributes:
        pass_index: pass whose order the next iteration has, for samplers with `set_epoch`.
    """

    def __init__(self, given: Any, count: int | None) -> None:
        self.given, self.count, self.pass_index = given, count, 0

    def __iter__(self) -> Iterator[Any]:
        # Here and not where the pass is opened: an evaluation on the same sampler may come in between.
        if hasattr(self.given, "set_epoch"):
            self.given.set_epoch(self.pass_index)
        return islice(iter(self.given), self.count)

    def __len__(self) -> int:
        return len(self.given) if self.count is None else self.count


class Part(NamedTuple):
    """A rank's part of a DataLoader.

    Attributes:
        loader: a loader like the user's, with `sampler` in place of the user's.
        sampler: the sampler, which takes the number of the pass; None for an `IterableDataset`.
        sampling: batches of all ranks; None where the data splits itself, at its word.
    """

    loader: DataLoader[Any]
    sampler: PassSampler | None = None
    sampling: Sampling | None = None


def split(loader: DataLoader[Any], share: Share) -> Part:
    """Split a loader."""
    place = chosen_at(loader)
    sampler = getattr(loader, place)
    iterable = isinstance(loader.dataset, IterableDataset)
    if share.size == 1 and (iterable or ranks_said(sampler) is None):
        return Part(loader)
    if iterable:
        require_ranks(loader.dataset, share)
        return Part(loader)
    if ranks_said(sampler) is None:
        raise DataError(_remedy(loader, place, share))
    require_ranks(sampler, share)
    # torch's or torchdata's DistributedSampler chooses the samples, also in a subclass
    room = type(sampler).__iter__.__module__.partition(".")[0]
    is_understood = isinstance(sampler, DistributedSampler) and room in ("torch", "torchdata")
    sampling = _sampling(loader, sampler, share) if is_understood else None
    own = PassSampler(sampler, None if sampling is None else sampling.own_samples)
    return Part(_with_sampler(loader, place, own), own, sampling)


def splits_for_one(loader: DataLoader[Any]) -> bool:
    """Whether a loader's sampler says that it splits itself, and hands out all samples.

    One process then reads what several ranks read together: the loop calls the sampler's `set_epoch`.
    """
    return ranks_said(getattr(loader, chosen_at(loader))) == (0, 1)


def chosen_at(loader: DataLoader[Any]) -> str:
    """Return the attribute that holds the sampler of the user's choice."""
    # Beside a batch_sampler= the loader's own sampler is not used; without one it is the only choice.
    return "batch_sampler" if loader.batch_size is None and loader.batch_sampler is not None else "sampler"


def _remedy(loader: DataLoader[Any], place: str, share: Share) -> str:
    kind, sampler = type(loader).__name__, type(getattr(loader, place)).__name__
    if place == "batch_sampler":
        return (
            f"a {kind} with the batch_sampler {sampler}, which does not say its rank, would hand each of "
            f"{share.size} ranks the same batches; give it the attributes num_replicas and rank if it yields "
            "a rank's own batches, or use sampler=DistributedSampler(dataset) with batch_size="
        )
    return (
        f"a {kind} with the sampler {sampler} would hand each of {share.size} ranks the same batches; add "
        "sampler=torch.utils.data.DistributedSampler(dataset) in place of shuffle=True, with the batch_size "
        "of one rank, or use everstep.data.loader(dataset, batch_size=...) with that of all ranks"
    )


def _sampling(loader: DataLoader[Any], sampler: Any, share: Share) -> Sampling:
    """Describe the batches of all ranks together, without the samples that the sampler repeats."""
    length = min(sampler.total_size, len(sampler.dataset))
    return Sampling(
        kind=type(loader).__name__,
        length=length,
        batch_size=(loader.batch_size or 1) * share.size,
        shuffle=False,
        seed=None,
        drop_last=loader.drop_last,
        share=share,
    )


def _with_sampler(loader: DataLoader[Any], place: str, sampler: PassSampler) -> DataLoader[Any]:
    """Copy a loader with another sampler; the user's stays as it is."""
    made = copy(loader)
    made._iterator = None
    if place == "sampler" and loader.batch_sampler is not None:
        place, given = "batch_sampler", loader.batch_sampler
        chosen: Any = type(given)(sampler, loader.batch_size, loader.drop_last)  # type: ignore[call-arg]
    else:
        chosen = sampler
    # A loader refuses to have its sampler set; this loader is not read yet.
    vars(made)[place] = chosen
    return made


def whole_facts(facts: dict[str, Any], part: Part, share: Share) -> dict[str, Any]:
    """Return the description of a split loader as that of one process with the batches of all ranks."""
    if share.size == 1:
        return facts
    whole = dict(facts)
    if facts["batch_size"] is not None:
        whole["batch_size"] = facts["batch_size"] * share.size
    if part.sampling is None:
        # The place in data that splits itself is a place in one rank's part.
        return {**whole, "inside": {**facts["inside"], "ranks": share.size}}
    assert part.sampler is not None
    of_one = {"num_replicas": 1, "rank": 0, "num_samples": len(part.sampler.given.dataset)}
    return {**whole, **{f"sampler.{name}": value for name, value in of_one.items()}}
