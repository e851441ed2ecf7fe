"""`loader`: a map-style dataset through torch's DataLoader, in our order, with keyed random state.

Before each sample Python's, NumPy's and torch's (CPU) global random states are seeded with a key of
(seed, purpose, pass, position of the sample in the pass).  So samples, their order and their augmentation do
not depend on the number of workers, on prefetching, or on where a resume starts, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from everstep.arguments import checked_keywords
from everstep.backends.torch import data_rng
from everstep.backends.torch.loader_workers import WorkerInit, start
from everstep.data.cursor import SampledCursor, SampledStream
from everstep.data.order import Plan, Sampling, key_at, pass_key
from everstep.errors import DataError

Collate: TypeAlias = Callable[[list[Any]], Any]


@checked_keywords
def loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
    timeout: float = 0,
    multiprocessing_context: Any = None,
    worker_init_fn: WorkerInit | None = None,
) -> Loader:
    """Make a stream of a dataset with `__len__` and `__getitem__`; it resumes at any batch, to the bit.

    The stream has a length (batches in a pass).  It can be iterated directly, as for an evaluation: that
    gives the same pass with the same augmentation each time, and touches no run's position.

    Samples are fetched singly, because each has random state of its own (`__getitems__` is not used).
    Randomness must come from the global generators of Python, NumPy or torch on the CPU.  A resume restores
    a generator that is an attribute of the dataset if there are no workers; with workers, it warns.

    Args:
        dataset: a map-style torch Dataset, or anything with `__len__` and `__getitem__`.
        batch_size: samples in a batch, on all ranks together; the last batch may be smaller.
        shuffle: a new order each pass, a pure function of (seed, purpose, pass).
        seed: None takes the run's seed.
        drop_last: leave out a last batch that is smaller.
        num_workers: processes that make batches; 0 makes them in the main process.
        collate_fn: makes a batch of a list of samples; None is torch's `default_collate`.  Its random
            state is keyed by the batch and, on several ranks, by the rank.
        prefetch_factor, pin_memory, timeout, multiprocessing_context, worker_init_fn: as for torch's
            DataLoader.  `timeout` is in seconds, 0 for none.

    Raises:
        DataError: the dataset is iterable-style, has no length or no `__getitem__`, or is empty.
        ConfigError: `batch_size` or `seed` is not an integer, or `batch_size` is less than 1.
        ValueError: torch refuses a combination of its options.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"loader() was given a {type(dataset).__name__}, whose samples cannot be fetched by index; give "
            "a dataset with __len__ and __getitem__, or give the loop torch's DataLoader over it"
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(f"loader() was given a {type(dataset).__name__} without a length; give it __len__")
    options = {
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "pin_memory": pin_memory,
        "timeout": timeout,
        "multiprocessing_context": multiprocessing_context,
        "worker_init_fn": worker_init_fn,
    }
    sampling = Sampling("loader", len(dataset), batch_size, shuffle, seed, drop_last, keyed=True)
    return Loader(dataset, sampling, collate_fn or default_collate, options)


class Loader(SampledStream):
    """Stream that `loader` makes; immutable."""

    no_thread = "change the global random state in a thread; give the loader itself, with num_workers=1"

    def __init__(self, dataset: Any, sampling: Sampling, collate: Collate, options: dict[str, Any]) -> None:
        self._dataset, self._collate, self._options = dataset, collate, options
        self.contents = (dataset,)
        super().__init__(sampling)
        # made for its checks alone: a bad combination of options is an error here, not at the first pass
        DataLoader(dataset, **options)

    @property
    def generators(self) -> Sequence[Any]:  # type: ignore[override]
        return data_rng.held_at(self._generators)

    @cached_property
    def _generators(self) -> data_rng.Places:
        """As they are when a run first asks, behind the head of an epoch: a pass may make others."""
        return data_rng.places_of([self._dataset, self._collate])

    def _open(self, plan: Plan, first: int) -> SampledCursor:
        purpose, pass_index = plan.purpose, plan.pass_index
        source: DataLoader[Any] = DataLoader(
            _Batches(self._dataset, plan, self._collate),  # type: ignore[arg-type]
            # The items of the dataset are whole batches.
            batch_size=None,
            sampler=range(first, len(plan)),
            collate_fn=_Batches.as_it_is,
            # Without a generator, each iterator would draw its seed from the global one.
            generator=torch.Generator().manual_seed(pass_key("workers", plan.seed, purpose, pass_index)),
            **self._options,
        )
        if source.num_workers > 0:
            batches = start(source, f"data {purpose!r}", self._dataset)
            cursor = SampledCursor(plan, batches, first, closer=batches.close)
            cursor.fetch_error_may_be_signal = True
        else:
            cursor = SampledCursor(plan, iter(source), first)
        if first and self.generators and source.num_workers > 0:
            cursor.note = (
                f"{cursor.what} cannot resume exactly: its dataset keeps a generator of its own, whose "
                "copies in the workers are not saved; draw from the global generators, or give num_workers=0"
            )
        return cursor

    def __repr__(self) -> str:
        return f"loader({type(self._dataset).__name__}, num_workers={self._options['num_workers']})"


class _Batches:
    """Dataset of batches by index, which workers get: each batch is a pure function of the plan."""

    def __init__(self, dataset: Any, plan: Plan, collate: Collate) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, collate
        pass_of = (plan.seed, plan.purpose, plan.pass_index)
        self._sample_key = pass_key("sample", *pass_of)
        self._collate_key = pass_key("collate", *pass_of)

    @staticmethod
    def as_it_is(batch: Any) -> Any:
        return batch

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, batch: int) -> Any:
        part = self._plan.part(batch)
        samples = []
        with ExitStack() as stack:
            if get_worker_info() is None:  # nothing else draws from a worker's global states
                stack.callback(data_rng.set_state, data_rng.get_state())
            for position, index in enumerate(self._plan.order[part].tolist(), part.start):
                data_rng.seed_all(key_at(self._sample_key, position))
                samples.append(self._dataset[index])
            key, share = key_at(self._collate_key, batch), self._plan.share
            # Ranks draw different numbers; one process has the key that it had before there were ranks.
            data_rng.seed_all(key if share.size == 1 else key_at(key, share.rank))
            return self._collate(samples)
