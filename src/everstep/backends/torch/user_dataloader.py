"""Stream over the user's own torch `DataLoader`, or torchdata's `StatefulDataLoader`.

The stream draws what a bare loop over the loader draws, and resumes exactly if the number of workers is
unchanged.  A pass is brought to its place in one way: it begins again in the random state in which it began
(the global states, and generators that are attributes of the loader, its samplers, its dataset or its collate
function), and then

- a `StatefulDataLoader` without workers, whose dataset has state, is restored by its own `state_dict`;
- else the order of the batches before is drawn, and of a map-style dataset without workers no sample.  The
  pass of a sampler of the user's own, which may draw as it goes, is a part of the position
  (`everstep.data.pass_order`);
- with workers, or an `IterableDataset`, the batches are drawn, too, because the workers' random state (or the
  dataset's place) follows from what was loaded; the cursor's note gives their number.

A generator that is not an attribute of those objects is not restored, nor is an `IterableDataset` that
chooses samples by the global generator that the step uses, too: the run's comparison finds other batches.

On several ranks a `DistributedSampler` hands rank r the samples r, r + N, r + 2N ... of one order, so the
batches number b of all ranks together are batch b of one process with N times the batch size.  Where N does
not divide the samples, the sampler repeats the first ones at the end; the repeated samples are left out here,
because they would count twice.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from everstep.backends.torch import data_rng
from everstep.backends.torch.loader_workers import WorkerBatches, end_persistent, start
from everstep.contracts.data import WHOLE, Share, Stream
from everstep.data.adapt import is_stateful, length_of, skip
from everstep.data.cursor import PassCursor
from everstep.data.order import Sampling, key_at
from everstep.data.other_libraries import (
    begin_anew,
    declared_ranks,
    is_hugging_face,
    require_ranks,
    shuffle_buffers,
    takes_count,
)
from everstep.data.pass_order import PassOrder, SamplerStates, is_known, unpacked
from everstep.errors import DataError

_SETTINGS = (
    *("batch_size", "drop_last", "replacement", "num_samples", "shuffle", "seed"),
    *("num_replicas", "rank"),  # a DistributedSampler's
)
"""Attributes that decide a sampler's choice and never change; counters and the epoch are left out."""


class PassSampler(Sampler[Any]):
    """The first `count` items of a sampler, in the order of pass `pass_index`."""

    def __init__(self, sampler: Any, count: int | None) -> None:
        # not `sampler`, by which a loader's samplers are found, one inside another
        self.inner, self.count, self.pass_index = sampler, count, 0

    def __iter__(self) -> Iterator[Any]:
        # Here and not where the pass is opened: an evaluation on the same sampler may come in between.
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(self.pass_index)
        return itertools.islice(iter(self.inner), self.count)

    def __len__(self) -> int:
        return len(self.inner) if self.count is None else self.count


class DataLoaderStream(Stream):
    """Stream over a `DataLoader` as the user made it; see the module.

    A loader with persistent workers, or with `in_order=False`, can be evaluated on, but not read by a run.
    """

    no_thread = (
        "draw from the global random state in a thread; give the DataLoader itself, with num_workers=1"
    )
    rank_keys = ("start", "first", "generators", "now", "loader_state", "order", "samplers")

    def __init__(self, loader: DataLoader[Any], share: Share | None = None) -> None:
        self.user_loader = self.loader = loader
        """`loader` is another one where the batches are split among ranks."""
        self._share = share or WHOLE
        self._sampler: PassSampler | None = None
        self._sampling: Sampling | None = None
        """Batches of all ranks; None where the data splits itself, at its word."""
        sampler = getattr(loader, _chosen_at(loader))
        # one process reads what several ranks read together where the sampler says that it hands out all
        if share is not None or declared_ranks(sampler) == (0, 1):
            self._split(sampler)
        chosen = [*_samplers(self.loader).values(), self.loader, self.loader.collate_fn]
        self._generators = data_rng.places_of(chosen)
        samplers = _samplers(loader)
        self._user_samplers = {place: s for place, s in samplers.items() if not _is_torchs(s)}
        weighted = {place: s for place, s in samplers.items() if isinstance(s, WeightedRandomSampler)}
        self.samplers = SamplerStates(self._user_samplers | weighted, [loader.dataset, *self.generators])
        """What the user's own samplers keep from pass to pass."""
        workers = loader.num_workers > 0
        self._draws_whole_pass = (
            not _decides_at_once(loader._index_sampler)
            and is_known(loader._index_sampler)
            and not (workers and loader.persistent_workers)  # these belong to the user's loader
        )
        iterable = isinstance(loader.dataset, IterableDataset)
        self.contents = () if iterable else (loader.dataset, *samplers.values())
        self.resumes = "replay" if shuffle_buffers(loader.dataset) else "state"
        self.unhashed_keys = ("loader_state", "set") if is_hugging_face(loader.dataset) else ("set",)
        # A loader with state is left out: asked for it, it would make its iterator.
        self.holds_state = [d for d in [loader.dataset] if _has_state(d) and not is_stateful(loader)]

    def _split(self, sampler: Any) -> None:
        """Read a rank's part: what the sampler, or an `IterableDataset`, hands out."""
        loader, share = self.user_loader, self._share
        if isinstance(loader.dataset, IterableDataset):
            if share.size > 1:
                require_ranks(loader.dataset, share)
            return
        if declared_ranks(sampler) is None:
            if share.size > 1:
                raise DataError(_remedy(loader, share))
            return
        require_ranks(sampler, share)
        # torch's or torchdata's DistributedSampler chooses the samples, also in a subclass
        if isinstance(sampler, DistributedSampler) and _is_torchs(sampler):
            self._sampling = Sampling(
                kind=type(loader).__name__,
                # without the samples that the sampler repeats
                length=min(sampler.total_size, len(sampler.dataset)),  # type: ignore[arg-type]
                batch_size=(_batch_size(loader) or 1) * share.size,
                shuffle=False,
                seed=None,
                drop_last=loader.drop_last,
                share=share,
            )
        self._sampler = PassSampler(sampler, None if self._sampling is None else self._sampling.own_samples)
        place, chosen = _chosen_at(loader), self._sampler
        if place == "sampler" and loader.batch_sampler is not None:
            kind: Any = type(loader.batch_sampler)
            place, chosen = "batch_sampler", kind(chosen, _batch_size(loader), loader.drop_last)
        self.loader = _copy_with(loader, place, chosen)

    @property
    def generators(self) -> Sequence[Any]:  # type: ignore[override]
        return data_rng.held_at(self._generators)

    @property
    def keeps_place(self) -> Any:
        """Object with one place for all iterators: the loader or its dataset; None if neither has one."""
        loader, dataset = self.user_loader, self.user_loader.dataset
        if is_stateful(loader) or (loader.persistent_workers and loader.num_workers > 0):
            return loader
        return dataset if isinstance(dataset, Iterator) or _has_state(dataset) else None

    def place_kept(self, batches: bool = False) -> ExitStack:
        dataset: Any = self.loader.dataset
        stack = ExitStack()
        if _has_state(dataset):
            stack.callback(dataset.load_state_dict, copy.deepcopy(dataset.state_dict()))
        return stack

    @property
    def unsaveable(self) -> str | None:  # type: ignore[override]
        loader = self.user_loader
        stateful = [each for each in self._user_samplers.values() if is_stateful(each)]
        if loader.num_workers > 0 and loader.persistent_workers:
            fault, remedy = "persistent_workers=True", "persistent_workers=False"
            why = "the random state of its workers spans passes and cannot be saved"
        elif loader.num_workers > 0 and not loader.in_order:
            fault, remedy, why = "in_order=False", "in_order=True", "batches come in no fixed order"
        elif stateful and not (self._draws_whole_pass and length_of(loader._index_sampler) is not None):
            sampler = type(stateful[0]).__name__
            return (
                f"it has the sampler {sampler}, which has a state_dict and no length: give it __len__, or "
                "read everstep.data.replay(loader), if a new process draws the same passes"
            )
        else:
            return None
        return (
            f"it has {fault}: {why}; give it {remedy}, or use everstep.data.loader(dataset, "
            f"batch_size={loader.batch_size}, num_workers={loader.num_workers}, ...)"
        )

    def loader_of_pass(self, entries: list[Any] | None) -> tuple[DataLoader[Any], PassOrder | None]:
        """Return the loader to read a pass from, and the order of the pass where it is drawn as a whole."""
        if not self._draws_whole_pass:
            return self.loader, None
        in_batches = self.loader._auto_collation
        order = PassOrder(self.loader._index_sampler, in_batches, self.samplers, entries)
        return _copy_with(self.loader, "batch_sampler" if in_batches else "sampler", order), order

    def split(self, share: Share) -> DataLoaderStream:
        return DataLoaderStream(self.user_loader, share)

    def of_other_ranks(self, what: str, saved: Sequence[Any], key: int) -> Any:
        """Return random state by the rank; rank 0 keeps its own, and generators that were equal stay equal.

        The global state is that of the workers and of collate functions; a `DistributedSampler` has none.
        """
        kept_if_equal = ("generators", "now") if len(saved) == 1 else ()
        if what in ("loader_state", "order", "samplers", *kept_if_equal):
            return super().of_other_ranks(what, saved, key)
        if self._share.rank == 0 or saved[0] is None:
            return saved[0]
        rank_key = key_at(key, self._share.rank)
        if what in ("start", "first"):
            return data_rng.keyed_state(rank_key)
        return [data_rng.keyed_state_of(each, key_at(rank_key, i)) for i, each in enumerate(self.generators)]

    def updated_end(self, end: Any) -> Any:
        return {**end, "samplers": self.samplers.save(head_follows=True)}

    def weight(self, batch: int) -> float:
        return 1.0 if self._sampling is None else self._sampling.weight(batch)

    def end_workers(self) -> None:
        end_persistent(self.loader)

    @property
    def carries_over(self) -> bool:  # type: ignore[override]
        """Whether the next pass depends on the end of this pass: a resume then opens and closes this one."""
        loader = self.loader
        has_state = bool(self.generators) or bool(self.samplers)
        return has_state or loader.persistent_workers or is_stateful(loader)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> DataLoaderCursor:
        what = f"data {purpose!r} ({type(self.loader).__name__})"
        if self._sampler is not None:
            self._sampler.pass_index = pass_index
        if position is None:
            begin_anew(self.loader.dataset)
            return DataLoaderCursor(what, self)
        then = len(position["now"])
        if then != len(self.generators):
            raise DataError(
                f"{what}: the loader, its samplers and its dataset held {then} generators at the checkpoint "
                f"and hold {len(self.generators)} now; give generator= as it was then"
            )
        loader_state = position["loader_state"] if self.resumes == "state" else None
        return DataLoaderCursor(what, self, {**position, "loader_state": loader_state})

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the loader; a split one as that of one process with the batches of all ranks."""
        loader, ranks = self.user_loader, self._share.size
        iterable = isinstance(loader.dataset, IterableDataset)
        inside = {"num_workers": loader.num_workers}
        samplers = dict[str, Any]()
        for place, sampler in _samplers(loader).items():  # shuffle= is a choice between two of torch's
            samplers[place] = type(sampler).__name__
            for setting in _SETTINGS:
                value = getattr(sampler, setting, None)
                value = value.item() if isinstance(value, np.generic) else value
                # a class of the user's may have a method so named
                if isinstance(value, bool | int | float | str):
                    samplers[f"{place}.{setting}"] = value
        if ranks > 1 and self._sampling is None:
            inside["ranks"] = ranks  # the place in data that splits itself is a place in one rank's part
        elif ranks > 1 and self._sampler is not None:
            samples = len(self._sampler.inner.dataset)
            samplers |= {"sampler.num_replicas": 1, "sampler.rank": 0, "sampler.num_samples": samples}
        return {
            "kind": "dataloader",
            "length": None if iterable else length_of(loader.dataset),
            "batch_size": None if (size := _batch_size(loader)) is None else size * ranks,
            "drop_last": loader.drop_last,
            **samplers,
            **shuffle_buffers(loader.dataset),
            "inside": inside,
        }

    def __repr__(self) -> str:
        return f"{type(self.loader).__name__}(num_workers={self.loader.num_workers})"


class DataLoaderCursor(PassCursor):
    def __init__(self, what: str, stream: DataLoaderStream, saved: dict[str, Any] | None = None) -> None:
        loader, self._order = stream.loader_of_pass(unpacked(saved.get("order")) if saved else None)
        generators = stream.generators
        self._stream, self._loader, self._generators = stream, loader, generators
        self._workers = self.fetch_error_may_be_signal = loader.num_workers > 0
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._opened_at = saved
        if saved is None:
            self._start, self._began, self._first = data_rng.get_state(), data_rng.states_of(generators), None
            done, ended, source = 0, False, self._iterate(what)
        else:
            self._start, self._began, self._first = saved["start"], saved["generators"], saved["first"]
            done, ended, source = saved["batches"], saved["ended"], self._reopen(what, saved)
        closer = source.close if isinstance(source, WorkerBatches) else None
        # The length of an IterableDataset is a guess, and asking for it arms a warning of torch's.
        total = None if self._iterable else length_of(loader)
        super().__init__(what, source, done=done, total=total, ended=ended, closer=closer)

    def _iterate(self, what: str) -> Any:
        return start(self._loader, what) if self._workers else iter(self._loader)

    def _reopen(self, what: str, saved: dict[str, Any]) -> Iterator[Any]:
        stream, loader_state = self._stream, saved["loader_state"]
        source: Any = iter(())
        if loader_state is not None or not saved["ended"]:
            data_rng.set_states_of(self._generators, saved["generators"])
            data_rng.set_state(saved["start"])
            if loader_state is not None:
                self._loader.load_state_dict(copy.deepcopy(loader_state))  # type: ignore[attr-defined]
            source = self._iterate(what)
        if loader_state is None and not saved["ended"] and saved["batches"]:
            try:
                self._advance(what, source, saved)
            except BaseException:
                if isinstance(source, WorkerBatches):
                    source.close()
                raise
        # last, because the advance draws: the generators stand where other passes have left them, too
        data_rng.set_states_of(self._generators, saved["now"])
        stream.samplers.load(saved.get("samplers", {}), saved.get("set"), in_pass=not saved["ended"])
        return iter(()) if saved["ended"] else source

    def _advance(self, what: str, source: Any, saved: dict[str, Any]) -> None:
        """Draw what lies before the place: the batches, or where these need not be fetched their indices."""
        done = saved["batches"]
        fetched = self._workers or self._iterable or not hasattr(source, "_next_index")
        if not fetched and self._order is not None and self._order.entries is not None:
            self._order.first = done
            return
        # The sampler draws its seed at the first fetch, in whatever state the random state is then.
        data_rng.set_state(saved["first"])
        before = data_rng.mark()

        def draw() -> Iterator[Any]:
            with suppress(StopIteration):
                while True:
                    yield next(source) if fetched else source._next_index()

        note = skip(what, draw(), done, self._stream.replayed if fetched else None)
        self.note = note if fetched else None
        # in the step's process the steps may have drawn from the global state between two batches
        self.may_differ = not self._workers and data_rng.mark() != before

    def __next__(self) -> Any:
        if self._first is None:
            self._first = data_rng.get_state()
        return super().__next__()

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self._stream.weight(self._handed_out - 1) if self._handed_out else 1.0

    def position(self) -> dict[str, Any]:
        return {
            "batches": self.done,
            "ended": self.ended,
            "start": self._start,
            "first": self._first,
            "generators": self._began,
            "now": data_rng.states_of(self._generators),
            "order": None if self._order is None or self.ended else self._order.packed(),
            "samplers": self._stream.samplers.save(),
            "set": self._stream.samplers.set_by_head,
            "loader_state": self._loader_state(),
        }

    def _loader_state(self) -> Any:
        """Return a stateful loader's own state; None if that has no more than its sampler's place."""
        loader: Any = self._loader
        # a pass of Hugging Face's begins at the start, whatever its state at the end of the pass before
        if self._stream.resumes == "replay" or (self.ended and is_hugging_face(loader.dataset)):
            return None
        at = self._opened_at or {"loader_state": None}
        if at["loader_state"] is not None and (self.done, self.ended) == (at["batches"], at["ended"]):
            # some datasets go to their place only at the next batch, and until then return the start
            return at["loader_state"]
        # A loader that is asked before it has an iterator makes one, and draws random numbers for it.
        if loader.num_workers > 0 or not is_stateful(loader) or loader._iterator is None:
            return None
        state = loader.state_dict()
        fetcher = state["fetcher_state"] or {}
        if state["dataset_state"] is None and fetcher.get("dataset_iter_state") is None:
            return None
        # A state that is loaded as finished begins the next pass; a position stands at the end of this pass.
        return {**copy.deepcopy(state), "_iterator_finished": False}


def _chosen_at(loader: DataLoader[Any]) -> str:
    """Return the attribute that holds the sampler of the user's choice."""
    # Beside a batch_sampler= the loader's own sampler is not used; without one it is the only choice.
    return "batch_sampler" if loader.batch_size is None and loader.batch_sampler is not None else "sampler"


def _batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the size of the batches; that of the loader's own batch sampler may have been set since."""
    sampler = loader.batch_sampler
    return sampler.batch_size if loader.batch_size and type(sampler) is BatchSampler else loader.batch_size


def _copy_with(loader: DataLoader[Any], place: str, sampler: Any) -> DataLoader[Any]:
    clone = copy.copy(loader)
    clone._iterator = None
    # A loader refuses to have its sampler set; this loader is not read yet.
    vars(clone)[place] = sampler
    return clone


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Objects that choose the samples, by place: "sampler", "batch_sampler", "batch_sampler.sampler" ..."""
    name = _chosen_at(loader)
    sampler, samplers = getattr(loader, name), dict[str, Any]()
    while sampler is not None and not any(sampler is each for each in samplers.values()):
        samplers[name] = sampler
        name, sampler = f"{name}.sampler", getattr(sampler, "sampler", None)
    return samplers


def _has_state(dataset: Any) -> bool:
    """Whether a dataset can be asked for its state here; MosaicML's is told the place by their loader."""
    return is_stateful(dataset) and not takes_count(dataset)


def _is_torchs(sampler: Any) -> bool:
    """Whether torch's or torchdata's code, or no code at all, yields what a sampler yields."""
    code = getattr(type(sampler).__iter__, "__module__", "") if hasattr(type(sampler), "__iter__") else ""
    return type(sampler) in (list, tuple, range) or code.partition(".")[0] in ("torch", "torchdata")


def _decides_at_once(sampler: Any) -> bool:
    """Whether the first draw of a pass decides the whole pass, and random state alone decides that draw."""
    inner = getattr(sampler, "sampler", None)
    drawn_later = getattr(sampler, "replacement", False) and sampler.generator is not None
    reads_weights = isinstance(sampler, WeightedRandomSampler)
    decides = _is_torchs(sampler) and not (drawn_later or reads_weights)
    return decides and (inner is None or _decides_at_once(inner))


def _remedy(loader: DataLoader[Any], share: Share) -> str:
    place = _chosen_at(loader)
    kind, sampler = type(loader).__name__, type(getattr(loader, place)).__name__
    if place == "batch_sampler":
        return (
            f"a {kind} with the batch_sampler {sampler} would hand each of {share.size} ranks the same "
            "batches; give it num_replicas and rank if it yields a rank's own batches, or use "
            "sampler=DistributedSampler(dataset)"
        )
    return (
        f"a {kind} with the sampler {sampler} would hand each of {share.size} ranks the same batches; add "
        "sampler=torch.utils.data.DistributedSampler(dataset) in place of shuffle=True, with the batch_size "
        "of one rank, or use everstep.data.loader(dataset, batch_size=...) with that of all ranks"
    )
