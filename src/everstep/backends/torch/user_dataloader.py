"""Stream over the user's own torch `DataLoader`, or torchdata's `StatefulDataLoader`.

The stream draws what a bare loop over the loader draws, and resumes exactly if the number of workers is
unchanged:

- the position has the random state in which the pass began; it also has the states, at the start of the
  pass and now, of generators that are attributes of the loader, its samplers, its dataset or its collate
  function;
- a sampler of the user's own, which may draw as it goes, has its pass drawn as a whole where the pass begins
  (`everstep.data.pass_order`); of torch's samplers, whose first draw decides the pass, the state before that
  draw is enough;
- for a map-style dataset without workers, no sample before the place is fetched but those of the last batch,
  which the run compares;
- with workers, or an `IterableDataset`, batches are drawn and discarded, because the workers' random
  state (or the dataset's place) follows from what was loaded; the cursor's note gives their number;
- a `StatefulDataLoader` without workers, whose dataset has state, is restored by its own `state_dict`.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch import default_generator
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from everstep.backends.numpy import same_state, set_state_of, state_of
from everstep.backends.torch import data_rng
from everstep.backends.torch.data_rng import Generator
from everstep.backends.torch.loader_workers import WorkerBatches, end_persistent, start
from everstep.contracts.data import WHOLE, Share, Stream
from everstep.data.adapters import is_stateful, length_of, skip
from everstep.data.cursor import PassCursor
from everstep.data.order import Sampling, key_at
from everstep.data.other_libraries import (
    begin_anew,
    is_hugging_face,
    ranks_said,
    require_ranks,
    shuffle_buffers,
)
from everstep.data.pass_order import KeptBySamplers, PassOrder, can_be_saved, is_known, plain_index, unpacked
from everstep.errors import DataError, NotResumableError

_SETTINGS = (
    *("batch_size", "drop_last", "replacement", "num_samples", "shuffle", "seed"),
    *("num_replicas", "rank"),  # a DistributedSampler's
)
"""Attributes that decide a sampler's choice and never change; counters and the epoch are left out."""


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
        return itertools.islice(iter(self.given), self.count)

    def __len__(self) -> int:
        return len(self.given) if self.count is None else self.count


class DataLoaderStream(Stream):
    """Stream over a `DataLoader` as the user made it; see the module.

    Generators of the loader move on from pass to pass.  A loader with persistent workers, or with
    `in_order=False`, can be evaluated on, but not read by a run.
    """

    shareable = False
    no_thread = (
        "draw from the global random state in a thread; give the DataLoader num_workers=1 or more instead: "
        "its workers make prefetch_factor batches ahead"
    )

    rank_keys = ("start", "first", "generators", "now", "own", "order", "samplers", "last")

    def __init__(self, loader: DataLoader[Any], share: Share | None = None) -> None:
        self.given = self.loader = loader
        """The user's loader; `loader` is another where it is split among ranks."""
        self._share = share or WHOLE
        self._sampler: PassSampler | None = None
        self._sampling: Sampling | None = None
        """Batches of all ranks; None where the data splits itself, at its word."""
        sampler = getattr(loader, _chosen_at(loader))
        # one process reads what several ranks read together where the sampler says that it hands out all
        if share is not None or ranks_said(sampler) == (0, 1):
            self._split(sampler)
        self.generators: list[Generator] = _generators(self.loader)
        own = {place: each for place, each in _samplers(loader).items() if not _is_torchs(each)}
        self.kept = KeptBySamplers(own, [loader.dataset, *self.generators])
        """What the user's own samplers keep from pass to pass."""
        workers = loader.num_workers > 0
        self._draws_whole_pass = (
            not _decides_at_once(loader._index_sampler)
            and is_known(loader._index_sampler)
            and not (workers and loader.persistent_workers)  # these belong to the user's loader
        )
        self.samples_of = () if workers else (loader.dataset, loader.collate_fn)  # workers have copies
        self.draws_again = not workers and not isinstance(loader.dataset, IterableDataset)
        self.resumes = "replay" if shuffle_buffers(loader.dataset) else "state"
        self.unhashed_keys = ("own",) if is_hugging_face(loader.dataset) else ()
        # A loader with state is left out: asked for it, it would make its iterator.
        self.holds_state = [d for d in [loader.dataset] if is_stateful(d) and not is_stateful(loader)]

    def _split(self, sampler: Any) -> None:
        """Read a rank's part: what the sampler, or an `IterableDataset`, hands out."""
        loader, share = self.given, self._share
        iterable = isinstance(loader.dataset, IterableDataset)
        if share.size == 1 and (iterable or ranks_said(sampler) is None):
            return
        if iterable:
            require_ranks(loader.dataset, share)
            return
        if ranks_said(sampler) is None:
            raise DataError(_remedy(loader, share))
        require_ranks(sampler, share)
        # torch's or torchdata's DistributedSampler chooses the samples, also in a subclass
        library = type(sampler).__iter__.__module__.partition(".")[0]
        if isinstance(sampler, DistributedSampler) and library in ("torch", "torchdata"):
            self._sampling = Sampling(
                kind=type(loader).__name__,
                # without the samples that the sampler repeats
                length=min(sampler.total_size, len(sampler.dataset)),  # type: ignore[arg-type]
                batch_size=(loader.batch_size or 1) * share.size,
                shuffle=False,
                seed=None,
                drop_last=loader.drop_last,
                share=share,
            )
        self._sampler = PassSampler(sampler, None if self._sampling is None else self._sampling.own_samples)
        self.loader = _with_sampler(loader, self._sampler)

    @property
    def keeps_place(self) -> Any:
        """Object with one place for all iterators: the loader or its dataset; None if neither has one."""
        loader = self.given
        if is_stateful(loader) or (loader.persistent_workers and loader.num_workers > 0):
            return loader
        dataset = loader.dataset
        return dataset if isinstance(dataset, Iterator) or is_stateful(dataset) else None

    @contextmanager
    def place_kept(self, batches: bool = False) -> Iterator[None]:
        dataset: Any = self.loader.dataset
        if not is_stateful(dataset):
            yield
            return
        before = copy.deepcopy(dataset.state_dict())
        try:
            yield
        finally:
            dataset.load_state_dict(before)

    @property
    def unsaveable(self) -> str | None:  # type: ignore[override]
        """Reason why no checkpoint can be made while a run reads the loader, with the remedy; else None."""
        return _unsaveable(self.given, self._draws_whole_pass)

    def loader_of_pass(self, entries: list[Any] | None) -> tuple[DataLoader[Any], PassOrder | None]:
        """Return the loader to read a pass from, and the order of the pass where it is drawn as a whole.

        Args:
            entries: the order, if it is known.
        """
        if not self._draws_whole_pass:
            return self.loader, None
        in_batches = self.loader._auto_collation
        order = PassOrder(self.loader._index_sampler, in_batches, self.kept, entries)
        return _copied(self.loader, "batch_sampler" if in_batches else "sampler", order), order

    def split(self, share: Share) -> DataLoaderStream:
        """Return the stream of a rank's part, where the loader's sampler or `IterableDataset` is a rank's.

        `set_epoch` of the sampler is called with each pass; the samples that a `DistributedSampler` repeats
        are left out.
        """
        return DataLoaderStream(self.given, share)

    def of_other_ranks(self, what: str, saved: Sequence[Any], key: int) -> Any:
        """Return random state by the rank; rank 0 keeps its own, and generators that were equal stay equal.

        The global state is that of the workers and of collate functions; a `DistributedSampler` has none.
        """
        if what == "last":
            return None  # another rank's batch
        if what in ("own", "order", "samplers") or (len(saved) == 1 and what in ("generators", "now")):
            return super().of_other_ranks(what, saved, key)
        if self._share.rank == 0 or saved[0] is None:
            return saved[0]
        own = key_at(key, self._share.rank)
        if what in ("start", "first"):
            return data_rng.keyed_state(own)
        return [data_rng.keyed_state_of(each, key_at(own, i)) for i, each in enumerate(self.generators)]

    def weight(self, batch: int) -> float:
        return 1.0 if self._sampling is None else self._sampling.weight(batch)

    def end_workers(self) -> None:
        end_persistent(self.loader)

    @property
    def carries_over(self) -> bool:  # type: ignore[override]
        """Whether the next pass depends on the end of this pass.

        Then a resume between two passes opens the last position of the earlier pass, closes it, and
        opens the next pass from there.
        """
        loader = self.loader
        kept = bool(self.generators) or bool(self.kept)
        return kept or loader.persistent_workers or is_stateful(loader)

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
        own = position["own"] if self.resumes == "state" else None
        return DataLoaderCursor(what, self, {**position, "own": own})

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the loader; a split one as that of one process with the batches of all ranks."""
        loader, ranks = self.given, self._share.size
        iterable = isinstance(loader.dataset, IterableDataset)
        inside = {"num_workers": loader.num_workers}
        # A DataLoader's shuffle= is a choice between two of torch's samplers.
        samplers = _facts(_samplers(loader))
        if ranks > 1 and self._sampling is None:
            inside["ranks"] = ranks  # the place in data that splits itself is a place in one rank's part
        elif ranks > 1 and self._sampler is not None:
            samples = len(self._sampler.given.dataset)
            samplers |= {"sampler.num_replicas": 1, "sampler.rank": 0, "sampler.num_samples": samples}
        return {
            "kind": "dataloader",
            "length": None if iterable else length_of(loader.dataset),
            "batch_size": None if loader.batch_size is None else loader.batch_size * ranks,
            "drop_last": loader.drop_last,
            **samplers,
            **shuffle_buffers(loader.dataset),
            "inside": inside,
        }

    def __repr__(self) -> str:
        return f"{type(self.loader).__name__}(num_workers={self.loader.num_workers})"


def _chosen_at(loader: DataLoader[Any]) -> str:
    """Return the attribute that holds the sampler of the user's choice."""
    # Beside a batch_sampler= the loader's own sampler is not used; without one it is the only choice.
    return "batch_sampler" if loader.batch_size is None and loader.batch_sampler is not None else "sampler"


def _remedy(loader: DataLoader[Any], share: Share) -> str:
    place = _chosen_at(loader)
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


def _with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    place, chosen = _chosen_at(loader), sampler
    if place == "sampler" and loader.batch_sampler is not None:
        place, given = "batch_sampler", loader.batch_sampler
        chosen = type(given)(sampler, loader.batch_size, loader.drop_last)  # type: ignore[call-arg]
    return _copied(loader, place, chosen)


def _copied(loader: DataLoader[Any], place: str, sampler: Any) -> DataLoader[Any]:
    made = copy.copy(loader)
    made._iterator = None
    # A loader refuses to have its sampler set; this loader is not read yet.
    vars(made)[place] = sampler
    return made


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Objects that choose the samples, by place: "sampler", "batch_sampler", "batch_sampler.sampler" ..."""
    name = _chosen_at(loader)
    sampler, found = getattr(loader, name), dict[str, Any]()
    while sampler is not None and not any(sampler is each for each in found.values()):
        found[name] = sampler
        name, sampler = f"{name}.sampler", getattr(sampler, "sampler", None)
    return found


def _facts(samplers: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, sampler in samplers.items():
        facts[name] = type(sampler).__name__
        for setting in _SETTINGS:
            value = getattr(sampler, setting, None)
            value = value.item() if isinstance(value, np.generic) else value
            # a class of the user's may have a method so named
            if isinstance(value, bool | int | float | str):
                facts[f"{name}.{setting}"] = value
    return facts


def _is_torchs(sampler: Any) -> bool:
    """Whether torch's or torchdata's code, or no code at all, yields what a sampler yields."""
    code = getattr(type(sampler).__iter__, "__module__", "") if hasattr(type(sampler), "__iter__") else ""
    return type(sampler) in (list, tuple, range) or code.partition(".")[0] in ("torch", "torchdata")


def _decides_at_once(sampler: Any) -> bool:
    """Whether the first draw of a pass decides the whole pass, and random state alone decides that draw."""
    inner = getattr(sampler, "sampler", None)
    drawn_later = getattr(sampler, "replacement", False) and sampler.generator is not None
    reads_weights = isinstance(sampler, WeightedRandomSampler)
    return (
        _is_torchs(sampler)
        and not (drawn_later or reads_weights)
        and (inner is None or _decides_at_once(inner))
    )


def _unsaveable(loader: DataLoader[Any], draws_whole_pass: bool) -> str | None:
    own = [each for each in _samplers(loader).values() if is_stateful(each) and not _is_torchs(each)]
    if loader.num_workers > 0 and loader.persistent_workers:
        fault, remedy = "persistent_workers=True", "persistent_workers=False"
        why = "the random state of its workers spans passes and cannot be saved"
    elif loader.num_workers > 0 and not loader.in_order:
        fault, remedy, why = "in_order=False", "in_order=True", "batches come in no fixed order"
    elif own and not draws_whole_pass:
        return (
            f"it has the sampler {type(own[0]).__name__}, which has a state_dict and no length: give it "
            "__len__, so that its passes can be drawn where they begin, or use "
            "everstep.data.loader(dataset, batch_size=...)"
        )
    else:
        return None
    return (
        f"it has {fault}: {why}; give it {remedy}, or use everstep.data.loader(dataset, "
        f"batch_size={loader.batch_size}, num_workers={loader.num_workers}, ...)"
    )


def _generators(loader: DataLoader[Any]) -> list[Generator]:
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = [loader, loader.sampler, loader.batch_sampler, inner, loader.collate_fn]
    dataset: Any = loader.dataset
    while dataset is not None and not any(dataset is holder for holder in holders):
        holders.append(dataset)
        dataset = getattr(dataset, "dataset", None)  # a Subset's
    return data_rng.held_by(holders)


def _own_state(loader: Any) -> Any:
    """Return a stateful loader's own state; None if that has no more than its sampler's place."""
    # A loader that is asked before it has an iterator makes one, and draws random numbers for it.
    if loader.num_workers > 0 or not is_stateful(loader) or loader._iterator is None:
        return None
    own = loader.state_dict()
    fetcher = own["fetcher_state"] or {}
    if own["dataset_state"] is None and fetcher.get("dataset_iter_state") is None:
        return None
    # A state that is loaded as finished begins the next pass; a position stands at the end of this pass.
    return {**copy.deepcopy(own), "_iterator_finished": False}


def _states(generators: list[Generator]) -> list[Any]:
    return [state_of(generator) for generator in generators]


def _set_all(generators: list[Generator], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        set_state_of(generator, state)


def _others_moved(before: tuple[Any, Any, Any]) -> bool:
    python, numpy, _ = data_rng.raw_state()
    return python != before[0] or not same_state(numpy, before[1])


class DataLoaderCursor(PassCursor):
    """Pass of a user's DataLoader."""

    def __init__(self, what: str, stream: DataLoaderStream, saved: dict[str, Any] | None = None) -> None:
        loader, self._order = stream.loader_of_pass(unpacked(saved.get("order")) if saved else None)
        generators = stream.generators
        self._stream, self._loader, self._generators = stream, loader, generators
        self._workers = self.fetch_error_may_be_signal = loader.num_workers > 0
        self._opened = saved
        self._last: Any = None
        """Indices and random state of the batch that was fetched last, if this process can fetch it again."""
        self._all_states: bool | None = None
        """Whether fetching draws from Python's or NumPy's global generator, whose states are slow to get."""
        if saved is None:
            self._began, self._start, self._first = _states(generators), data_rng.get_state(), None
            done, ended, source = 0, False, self._iterate(what)
        else:
            self._began, self._start, self._first = saved["generators"], saved["start"], saved["first"]
            done, ended, source = saved["batches"], saved["ended"], self._reopen(what, saved)
        closer = source.close if isinstance(source, WorkerBatches) else None
        # The length of an IterableDataset is a guess, and asking for it arms a warning of torch's.
        total = None if self._iterable else length_of(loader)
        super().__init__(what, source, done=done, total=total, ended=ended, closer=closer)

    def _iterate(self, what: str) -> Any:
        if self._workers:
            return start(self._loader, what)
        source: Any = iter(self._loader)
        if (next_index := getattr(source, "_next_index", None)) is not None:

            def noting() -> Any:
                index = next_index()
                known = self._all_states is False
                random = (None, None, default_generator.get_state()) if known else data_rng.raw_state()
                self._last = plain_index(index), random, _states(self._generators)
                return index

            source._next_index = noting
        return source

    def _reopen(self, what: str, saved: dict[str, Any]) -> Iterator[Any]:
        source: Any = iter(())
        own, ended, replayed = saved["own"], saved["ended"], self._stream.replayed
        last: Any = saved.get("last")
        # set by the run, which compares the last batch
        by_index = replayed and last is not None and own is None and self._stream.draws_again
        if own is not None or not ended or by_index:
            _set_all(self._generators, saved["generators"])
            data_rng.set_state(saved["start"])
            if own is not None:
                self._loader.load_state_dict(copy.deepcopy(own))  # type: ignore[attr-defined]
            source = self._iterate(what)
        if own is None and not ended and saved["batches"]:
            try:
                self._advance(what, source, saved)
            except BaseException:
                if isinstance(source, WorkerBatches):
                    source.close()
                raise
        if replayed and by_index and hasattr(source, "_dataset_fetcher"):
            self._draw_last(lambda: source._dataset_fetcher.fetch(last["index"]), last, replayed)
        self._last, self._all_states = last, None if last is None else last["random"]["python"] is not None
        # last, because the advance draws: the generators stand where other passes have left them, too
        _set_all(self._generators, saved["now"])
        self._stream.kept.load(saved.get("samplers", {}))
        return iter(()) if ended else source

    def _advance(self, what: str, source: Any, saved: dict[str, Any]) -> None:
        done, last, replayed = saved["batches"], saved.get("last"), self._stream.replayed
        fetched = self._workers or self._iterable or not hasattr(source, "_next_index")
        if not fetched and self._order is not None and self._order.entries is not None:
            self._order.first = done
            return
        # The sampler draws its seed at the first fetch, in whatever state the random state is then.
        data_rng.set_state(saved["first"])

        def draw(count: int) -> Iterator[Any]:
            with suppress(StopIteration):
                for _ in range(count):
                    yield next(source) if fetched else type(source)._next_index(source)

        if self._workers or last is None or replayed is None or not fetched:
            note = skip(what, draw(done), done, replayed if self._workers else None)
        else:
            # in the step's process only the random state of the last batch is known
            note = skip(what, draw(done - 1), done - 1)
            self._draw_last(lambda: next(draw(1), None), last, replayed)
        self.note = note if fetched else None

    def _draw_last(
        self, draw: Callable[[], Any], last: dict[str, Any], replayed: Callable[[Any], object]
    ) -> None:
        """Draw the last batch again for the run, in the random state in which it was drawn."""
        _set_all(self._generators, last["generators"])
        data_rng.set_state(last["random"])
        before = data_rng.raw_state()
        batch = draw()
        # another than the first batch of the pass may draw from generators whose states are not known
        if last["random"]["python"] is not None or not _others_moved(before):
            replayed(batch)

    @property
    def _iterable(self) -> bool:
        return isinstance(self._loader.dataset, IterableDataset)

    def __next__(self) -> Any:
        if self._first is None:
            self._first = data_rng.get_state()
        batch = super().__next__()
        if self._all_states is None and self._last is not None:
            index, random, generators = self._last
            self._all_states = _others_moved(random)
            if not self._all_states:
                self._last = index, (None, None, random[2]), generators
        return batch

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self._stream.weight(self._count - 1) if self._count else 1.0

    @property
    def _is_left(self) -> bool:
        """Whether the pass is over, and the next pass does not depend on the dataset's state."""
        return self.ended and is_hugging_face(self._loader.dataset)

    def position(self) -> dict[str, Any]:
        if refusal := self._stream.unsaveable:
            raise NotResumableError(f"{self.what} cannot be saved: {refusal}")
        order = None if self._order is None or self.ended else self._order.packed()
        return {
            "batches": self.done,
            "ended": self.ended,
            "start": self._start,
            "first": self._first,
            "generators": self._began,
            "now": _states(self._generators),
            "order": order,
            "samplers": self._stream.kept.save(),
            "last": self._saved_last(),
            "own": None if self._stream.resumes == "replay" or self._is_left else self._own(),
        }

    def _saved_last(self) -> Any:
        if isinstance(self._last, tuple):
            index, random, generators = self._last
            last = {"index": index, "random": data_rng.tree_of(random), "generators": generators}
            self._last = last if can_be_saved(index) else None
        return self._last

    def _own(self) -> Any:
        opened = self._opened or {"own": None}
        if opened["own"] is not None and (self.done, self.ended) == (opened["batches"], opened["ended"]):
            # some datasets go to their place only at the next batch, and until then return the start
            return opened["own"]
        return _own_state(self._loader)
