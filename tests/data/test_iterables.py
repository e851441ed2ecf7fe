"""Sequences, iterables, what has a state of its own, Hugging Face's datasets: what a run believes of each.

A number, a state that is known or declared, and else only batches that are drawn again.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import everstep
from everstep.contracts.data import Share
from everstep.data import as_stream, replay, stateful
from everstep.data.adapt import describe, is_stateful
from everstep.errors import DataError, DivergenceError, NotResumableError
from everstep.proof.compare import compare_runs
from everstep.testing.checks import check_stream
from tiny_runs import bind

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's


class Lines:
    """Batches in order; has no state."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from (np.full(2, at) for at in range(self.count))


class Shuffled(Lines):
    """Draws the order of each pass from the global generator, as many datasets do."""

    def __iter__(self) -> Iterator[Any]:
        yield from (np.full(2, at) for at in random.sample(range(self.count), self.count))


class Epochs(Lines):
    """Its order follows from the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from np.random.default_rng(self.epoch).permutation(2 * self.count).reshape(-1, 2)


class Place(Lines):
    """Tells its place, and the generator that makes each pass another one."""

    def __init__(self, count: int = 5) -> None:
        super().__init__(count)
        self.at, self.generator = 0, np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        for at in range(self.at, self.count):
            self.at = at + 1
            yield np.full(2, order[at])
        self.at = 0

    def order(self) -> Any:
        return self.generator.permutation(self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.generator.bit_generator.state = state["at"], state["generator"]


class Counts(Place):
    """Its state is the whole place."""

    def order(self) -> Any:
        return range(self.count)


class SelfState:
    """Its own iterator; starts anew at the end of a pass; its order depends on all passes before."""

    def __init__(self) -> None:
        self.at, self.sum = 0, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at == 4:
            self.at = 0
            raise StopIteration
        self.at += 1
        self.sum = self.sum * 3 + self.at
        return self.sum

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "sum": self.sum}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.sum = state["at"], state["sum"]


class Streaming:
    """A dataset as streaming libraries have it: the number of samples is told to it."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        yield from range(start, 6)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        assert from_beginning
        return {"sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["sample_in_epoch"]


class Passes(IterableDataset[Any]):
    """As MosaicML's: after the last sample its state begins an empty pass."""

    next_epoch, start = 0, 0

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.next_epoch, self.start
        self.next_epoch, self.start = epoch + 1, 0
        yield from (np.full(2, 10 * epoch + at) for at in range(start, 5))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"epoch": max(0, self.next_epoch - 1), "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_epoch, self.start = state.values()


class StreamingDataLoader(DataLoader[Any]):
    """As MosaicML's, which tells the dataset the place."""

    __module__ = "streaming.base.dataloader"
    yielded = 0

    def __iter__(self) -> Any:
        self.yielded = 0
        for batch in super().__iter__():
            self.yielded += 1
            yield batch

    def state_dict(self) -> Any:
        return self.dataset.state_dict(self.yielded, False)

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class GrainLike:
    """Its iterators have `get_state` and `set_state`."""

    class Iterator:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if self.at == 5:
                raise StopIteration
            self.at += 1
            return np.full(2, self.at)

        def get_state(self) -> bytes:
            return str(self.at).encode()

        def set_state(self, state: bytes) -> None:
            self.at = int(state)

    def __iter__(self) -> Any:
        return self.Iterator()


@pytest.mark.parametrize("make", [
    lambda: as_stream([1, 2, 3]), lambda: as_stream(range(4)), lambda: as_stream(([1], [2])),
    lambda: as_stream(SelfState()), lambda: stateful(SelfState()), lambda: as_stream(Streaming()),
    lambda: as_stream(GrainLike()), lambda: stateful(GrainLike()), lambda: as_stream(Lines()),
])  # fmt: skip
def test_laws(make: Any) -> None:
    check_stream(make)


def program(run_dir: Path, data: Any, *, stop_at: int = 0, **options: Any) -> list[tuple[int, Any]]:
    saves = everstep.Checkpoints(everstep.Every(steps=1))
    seen = []
    with everstep.TrainLoop(run_dir, services=[saves], seed=1, **{"max_epoch": 2, **options}) as loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data() if callable(data) else data):
                if step == stop_at:
                    raise InterruptedError
                random.random()  # as a step draws
                seen.append((step, batch if isinstance(batch, dict) else np.asarray(batch).tolist()))
    return seen


def windows() -> Iterator[Any]:
    """Batches in random order; the head of each epoch makes a generator of them."""
    yield from (np.full(2, number) for number in random.sample(range(5), 5))


RUNS: dict[str, tuple[Callable[[], Any], int]] = {
    "generator": (lambda: windows, 3), "generator, second pass": (lambda: windows, 8),
    "generator, its first batch": (lambda: windows, 6),
    "lines": (Lines, 3), "shuffled": (Shuffled, 3), "shuffled, second pass": (Shuffled, 8),
    "epochs": (Epochs, 8), "place": (Place, 3), "place, second pass": (Place, 8),
    "MosaicML's": (lambda: StreamingDataLoader(Passes(), None), 3),
    "MosaicML's, second pass": (lambda: StreamingDataLoader(Passes(), None), 8),
    "MosaicML's, its first batch": (lambda: StreamingDataLoader(Passes(), None), 6),
    "declared": (lambda: stateful(Counts()), 8),
    "checked": (lambda: everstep.data.checked(Epochs()), 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_resume_inside_a_pass_is_exact(tmp_path: Path, kind: str, capsys: Any) -> None:
    make, stop_at = RUNS[kind]
    whole = program(tmp_path / "whole", make())
    with pytest.raises(InterruptedError):
        program(tmp_path / "cut", make(), stop_at=stop_at)
    capsys.readouterr()
    assert program(tmp_path / "cut", make()) == whole[stop_at - 1 :]
    assert len(whole) == 10
    # a state that nobody vouched for is used where a pass begins
    says = "everstep.data.stateful(data)" in capsys.readouterr().out
    assert says == kind.startswith("place")


def test_batches_that_come_otherwise_are_noticed_at_the_resume(tmp_path: Path) -> None:
    another = itertools.count()

    class Chance(Lines):
        def __iter__(self) -> Iterator[Any]:
            yield from (np.full(2, next(another)) for _ in range(5))

    with pytest.raises(InterruptedError):
        program(tmp_path / "run", Chance(), stop_at=5)
    with pytest.raises(DivergenceError, match=r"step 4 batch of train was one of the 4 of pass 1.*set_epoch"):
        program(tmp_path / "run", Chance())


def test_a_dataset_that_counts_its_passes_is_noticed_at_the_resume_in_a_loader(tmp_path: Path) -> None:
    class OfLitdata(Passes):
        def state_dict(self, num_samples: int) -> Any:  # type: ignore[override]
            raise AssertionError

    for kind in (Passes, OfLitdata):
        with pytest.raises(InterruptedError):
            program(tmp_path / kind.__name__, DataLoader(kind(), None), stop_at=8)
        with pytest.raises(DivergenceError, match=r"step 7 batch of train was one of the 2 of pass 2"):
            program(tmp_path / kind.__name__, DataLoader(kind(), None))


def test_a_state_dict_in_c_without_a_signature_is_a_state() -> None:
    data = SimpleNamespace(state_dict=getattr, load_state_dict=getattr)
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(data.state_dict)
    assert is_stateful(data)


def test_nothing_is_drawn_but_what_the_run_is_handed(tmp_path: Path) -> None:
    drawn = {"batches": 0}

    class Hard(Lines):
        """Drawing a batch changes an entry of the run's state."""

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                drawn["batches"] += 1
                yield batch

    assert len(program(tmp_path / "run", Hard(), state={"drawn": drawn})) == drawn["batches"] == 10


def test_what_is_known_to_tell_its_place_needs_no_word() -> None:
    class Grain(Place):
        pass

    ways = [as_stream(data).resumes for data in (Place(), replay(Place()), stateful(Place()))]
    assert ways == ["replay", "replay", "state"]
    Grain.__module__ = "grain._src.python.data_loader"
    assert as_stream(Grain()).resumes == "state"


def test_replay_says_what_it_cost_and_checks_the_end() -> None:
    cursor = replay(Lines()).open("train", 0, seed=0)
    next(cursor), next(cursor)
    again = replay(Lines()).open("train", 0, cursor.position(), seed=0)
    assert str(again.note).startswith("data 'train' (Lines): replayed 2 batches in 0.")
    assert [int(batch[0]) for batch in again] == [2, 3, 4]
    with pytest.raises(DataError, match="ended after 1 batches, but the checkpoint is after 2"):
        replay(Lines(1)).open("train", 0, cursor.position(), seed=0)


def test_an_iterator_gives_one_pass_unless_it_goes_back_to_the_start() -> None:
    class Once:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at > 2:
                raise StopIteration
            return self.at

    class Again(Once):
        def __iter__(self) -> Any:
            self.at = 0
            return self

    stream = as_stream(iter([1, 2]))
    assert list(stream.open("train", 0, seed=0)) == [1, 2]
    with pytest.raises(DataError, match="exhausted: an iterator gives one pass, and pass 2 was to begin"):
        stream.open("train", 1, seed=0)
    stream = as_stream(Again())
    assert [list(stream.open("train", p, seed=0)) for p in range(2)] == [[1, 2], [1, 2]]
    stream = as_stream(Once())
    list(stream.open("train", 0, seed=0))
    with pytest.raises(DataError, match="exhausted"):
        next(stream.open("train", 1, seed=0))


def test_an_error_ends_the_cursor_and_generators_are_closed() -> None:
    closed = []

    def broken() -> Iterator[int]:
        try:
            yield 1
            raise KeyError("disk")
        finally:
            closed.append(True)

    cursor = as_stream(broken()).open("train", 0, seed=0)
    next(cursor)
    with pytest.raises(KeyError, match="disk"):
        next(cursor)
    with pytest.raises(DataError, match="fetching batch 1 failed"):
        next(cursor)

    class Source:
        def __iter__(self) -> Iterator[int]:
            return broken()

    closed.clear()
    cursor = as_stream(Source()).open("train", 0, seed=0)
    next(cursor)
    cursor.close()
    assert closed == [True]


@pytest.mark.parametrize(("hidden", "remedy"), [
    (lambda data: tqdm(data, disable=True), r"as in tqdm\(loop.iter_steps\(loader\)\)"),
    (lambda data: zip(data, data, strict=True), "StackDataset"),
    (itertools.cycle, "do in the loop what cycle does"),
])  # fmt: skip
def test_data_whose_place_is_hidden_is_refused(hidden: Any, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(NotResumableError, match=f"stream 'train': .* hides the place.*{remedy}"):
        bind(hidden([1, 2, 3]), tmp_path / "run")


def source(shuffle: bool = True, seed: int | None = 1) -> Any:
    whole = datasets.Dataset.from_dict({"x": list(range(100))}).to_iterable_dataset(num_shards=4)
    return whole.shuffle(seed=seed, buffer_size=30) if shuffle else whole


KINDS: dict[str, Callable[[], Any]] = {
    "itself": lambda: source().batch(5),
    "mapped": lambda: source().map(lambda row: {"x": row["x"] + 1}).batch(5),
    "interleaved": lambda: datasets.interleave_datasets([source(), source(seed=2)]).batch(5),
    "not shuffled": lambda: source(shuffle=False).batch(5),
    "formatted, not shuffled": lambda: source(shuffle=False).with_format("torch").batch(5),
    "in a StatefulDataLoader": lambda: StatefulDataLoader(source(), batch_size=5),
    "in a StatefulDataLoader, not shuffled": lambda: StatefulDataLoader(source(shuffle=False), batch_size=5),
    "in a DataLoader": lambda: DataLoader(source(), batch_size=5),
}


def trained_on(run_dir: Path, data: Any, **options: Any) -> list[list[int]]:
    seen = program(run_dir, data, default_services=False, **options)
    return [list(map(int, batch["x"])) for _, batch in seen]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_is_lost_or_given_twice_by_a_resume(kind: str, tmp_path: Path) -> None:
    whole = trained_on(tmp_path / "whole", KINDS[kind]())
    for stop_at in (8, 33):
        cut = tmp_path / str(stop_at)
        with pytest.raises(InterruptedError):
            trained_on(cut, KINDS[kind](), stop_at=stop_at)
        assert trained_on(cut, KINDS[kind]()) == whole[stop_at - 1 :]
    assert [each for each in compare_runs(tmp_path / "whole", tmp_path / "8") if each.path != "ended"] == []


NOT_SHUFFLED = [kind for kind in KINDS if "not shuffled" in kind]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("limits", [{"max_step": 13}, {"max_step": 13, "steps_per_epoch": 7}], ids=str)
@pytest.mark.parametrize("kind", NOT_SHUFFLED)
def test_a_run_that_ends_inside_a_pass_says_where(kind: str, limits: dict[str, int], tmp_path: Path) -> None:
    whole = trained_on(tmp_path / "whole", KINDS[kind](), **limits)
    with pytest.raises(InterruptedError):
        trained_on(tmp_path / "cut", KINDS[kind](), stop_at=8, **limits)
    assert trained_on(tmp_path / "cut", KINDS[kind](), **limits) == whole[7:]
    assert compare_runs(tmp_path / "whole", tmp_path / "cut") == []
    longer = {**limits, "max_step": 17}
    rest = trained_on(tmp_path / "whole", KINDS[kind](), **longer)
    assert trained_on(tmp_path / "cut", KINDS[kind](), **longer) == rest


@pytest.mark.parametrize("kind", NOT_SHUFFLED)
def test_a_position_that_nothing_was_drawn_from_is_the_one_that_was_opened(kind: str) -> None:
    with closing(as_stream(KINDS[kind]()).open("train", 0, seed=1)) as cursor:
        position = [next(cursor) for _ in range(7)] and cursor.position()
    with closing(as_stream(KINDS[kind]()).open("train", 0, position, seed=1)) as cursor:
        assert cursor.position() == position


def test_a_shuffle_without_a_seed_is_another_one_at_the_resume_and_refused(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        trained_on(tmp_path / "run", source(seed=None).batch(5), stop_at=8)
    with pytest.raises(DataError, match=r"shuffle\.0 was '30 samples, generator \w+' at the checkpoint"):
        trained_on(tmp_path / "run", source(seed=None).batch(5))


def test_what_is_split_by_node_is_a_ranks_part_and_anything_else_is_refused() -> None:
    whole = datasets.Dataset.from_dict({"a": list(range(12))}).to_iterable_dataset()
    half = split_dataset_by_node(whole, rank=1, world_size=2)
    for data in (half, DataLoader(half, batch_size=None)):
        stream = as_stream(data).split(Share(1, 2))
        assert [sample["a"] for sample in stream.open("train", 0, seed=0)] == [1, 3, 5, 7, 9, 11]
        assert describe(stream, 0)["inside"]["ranks"] == 2  # its places are those of one rank
        with pytest.raises(DataError, match="part of rank 1 of 2, and this is rank 0 of 2"):
            as_stream(data).split(Share(0, 2))
    for data in (whole, DataLoader(whole)):
        with pytest.raises(DataError, match="does not say that it splits itself"):
            as_stream(data).split(Share(0, 2))
