"""A state tree is divided into what ranks have in common and what is a rank's own, and put together again."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from everstep.checkpoint import format, read_checkpoint
from everstep.contracts.data import Cursor, Share, Stream
from everstep.contracts.state import HostArray
from everstep.data.adapt import as_stream
from everstep.errors import RestoreError
from everstep.state import Encoded, capture, decode, digest, encode, isolated, merge, rekey, restore, split
from everstep.supervisor.saving.rank_parts import for_rank, own_paths
from everstep.supervisor.saving.replicas import digests
from everstep.supervisor.streams.run_streams import Streams

names = st.sampled_from(["a", "b", "a/b", "$a", "", "%", "a~", "\ud800", "#", "state"])
leaf = (
    st.none() | st.integers() | st.floats(allow_nan=False) | st.just(np.arange(3.0)) | st.binary(max_size=3)
)
trees = st.dictionaries(
    names,
    st.recursive(
        leaf,
        lambda inner: (
            st.dictionaries(names | st.integers(), inner, max_size=3)
            | st.lists(inner, max_size=2)
            | st.lists(inner, max_size=2).map(tuple)
        ),
        max_leaves=8,
    ),
    max_size=4,
)
paths = st.sets(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=4)


def through_json(encoded: Encoded) -> Encoded:
    return Encoded(json.loads(json.dumps(encoded.structure)), encoded.arrays)


@settings(deadline=None, max_examples=400)
@given(trees, paths)
def test_what_was_split_is_merged_to_the_same_tree(tree: dict[str, Any], own: Any) -> None:
    whole = encode(tree)
    common, part = map(through_json, split(whole, own))
    assert digest(merge(common, part)) == digest(whole)
    assert not common.arrays.keys() & part.arrays.keys()
    # each part can be read by itself
    decode(common), decode(part)


@settings(deadline=None, max_examples=400)
@given(trees, paths)
def test_the_own_part_has_the_paths_and_nothing_else(tree: dict[str, Any], own: Any) -> None:
    common, part = (decode(each) for each in split(encode(tree), own))
    for path in own:
        found = at(tree, path)
        assert at(common, path) is LACKS
        assert (at(part, path) is LACKS) == (found is LACKS)
    assert count(common) + count(part) == count(tree)


LACKS = object()


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if type(tree) is not dict or key not in tree:
            return LACKS
        tree = tree[key]
    return tree


def count(tree: Any) -> int:
    """Number of values outside plain dictionaries."""
    return sum(map(count, tree.values())) if type(tree) is dict else 1


def test_two_parts_with_the_same_value_are_refused() -> None:
    with pytest.raises(RestoreError, match="a/b is in the common part and in a rank's own part"):
        merge(encode({"a": {"b": 1}}), encode({"a": {"b": 2}}))


# ------------------------------------------------------------------------------------ a rank's tree


def saved(rank: int, size: int, memory: bool = False, state: Any = None) -> tuple[Encoded, Encoded]:
    """Save a small state of one rank, with its own generators."""
    with isolated():
        random.seed(1)
        np.random.seed(1)
        rekey(7, rank)
        tree = {
            "progress": {"seed": 7, "step": 5},
            "user": {"w": np.arange(3.0), **({"memory": [rank]} if memory else {})},
            "streams": {"train": {"pass": 0, "position": {"batches": 2, "state": state}}},
            "rng": {f"rank{rank}": capture(), f"lines{rank}": {}},
            "wall": {"seconds": 1.0 + rank},
        }
    own = own_paths(rank, [("user", "memory")] if memory else [], [("streams", "train", "position", "state")])
    return split(encode(tree), own if size > 1 else [])


def written(folder: Path, both: list[tuple[Encoded, Encoded]]) -> Path:
    """Write a checkpoint as its ranks do: the common tree of rank 0, and the own tree of each."""
    folder = folder / f"of-{len(both)}" / "step-00000005"
    if not folder.exists():
        folder.mkdir(parents=True)
        common = both[0][0]
        file = format.write_common(folder, common)
        ranks = [format.write_own(folder, rank, own, common) for rank, (_, own) in enumerate(both)]
        facts = {"epoch": 1, "phase": "step", "partial": False, "segment": 1, "meta": None, "digest": ""}
        format.write_manifest(folder, {"name": folder.name, "step": 5, **facts}, common, file, ranks)
    return folder


def opened_by(path: Path, rank: int, size: int, declared: tuple[str, ...] = ()) -> tuple[Encoded, str | None]:
    found, note = for_rank(read_checkpoint(path, rank), rank=rank, size=size, per_rank=declared)
    return Encoded(found.structure, found.arrays), note


def opened(
    folder: Path, size_saved: int, size: int, rank: int, declared: tuple[str, ...] = (), **facts: Any
) -> tuple[Any, str | None]:
    path = written(folder, [saved(each, size_saved, **facts) for each in range(size_saved)])
    encoded, note = opened_by(path, rank, size, declared)
    return decode(encoded), note


def draws(tree: Any, rank: int) -> tuple[float, float]:
    with isolated():
        restore(tree["rng"][f"rank{rank}"])
        return random.random(), float(np.random.random())


def test_each_rank_gets_its_own_back_and_the_rest_from_the_writer(tmp_path: Path) -> None:
    path = written(tmp_path, [saved(rank, 4, memory=True, state=rank) for rank in range(4)])
    found = [opened_by(path, rank, 4, ("memory",)) for rank in range(4)]
    trees, notes = [decode(tree) for tree, _ in found], {note for _, note in found}
    assert [tree["user"]["memory"] for tree in trees] == [[0], [1], [2], [3]]
    assert [tree["streams"]["train"]["position"]["state"] for tree in trees] == [0, 1, 2, 3]
    assert {tree["wall"]["seconds"] for tree in trees} == {1.0}
    assert len({draws(tree, rank) for rank, tree in enumerate(trees)}) == 4
    assert notes == {None}


@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 8), (2, 3)])
def test_further_ranks_have_keyed_generators_as_noted(tmp_path: Path, before: int, now: int) -> None:
    here = digest(encode(capture()))
    trees, notes = zip(*(opened(tmp_path, before, now, rank) for rank in range(now)), strict=True)
    assert digest(encode(capture())) == here, "to read a checkpoint draws nothing"
    found = [draws(tree, rank) for rank, tree in enumerate(trees)]
    assert len(set(found)) == now, "each rank draws other numbers"
    assert found[:before] == [draws(opened(tmp_path, before, before, r)[0], r) for r in range(before)]
    assert found[-1] == draws(opened(tmp_path, before, now, now - 1)[0], now - 1), "equal at each start"
    (note,) = set(notes)
    assert f"is of {before} rank" in note and f"has {now} ranks" in note and "not to the bit" in note
    assert f"ranks from {before} on" in note


def test_fewer_ranks_get_theirs(tmp_path: Path) -> None:
    tree, note = opened(tmp_path, 4, 1, 0)
    assert draws(tree, 0) == draws(opened(tmp_path, 4, 4, 0)[0], 0)
    assert note is not None and "of 4 ranks, and this start has 1 rank" in note and "keyed" not in note


def test_what_is_equal_on_all_saved_ranks_is_that_of_further_ranks(tmp_path: Path) -> None:
    tree, _ = opened(tmp_path, 4, 8, 7, state={"epoch": 3})
    assert tree["streams"]["train"]["position"] == {"batches": 2, "state": {"epoch": 3}}


@pytest.mark.parametrize("size", [1, 3, 8])
def test_what_differs_by_rank_is_not_given_to_other_ranks(tmp_path: Path, size: int) -> None:
    path = written(tmp_path, [saved(rank, 4, state={"seed": rank}) for rank in range(4)])
    with pytest.raises(
        RestoreError,
        match=r"'streams/train/position/state/seed' is not the same on all saved ranks.*start with 4 ranks",
    ):
        opened_by(path, 0, size)


@pytest.mark.parametrize(("before", "now"), [(4, 8), (4, 1)])
def test_an_entry_of_each_rank_is_not_divided_among_others(tmp_path: Path, before: int, now: int) -> None:
    with pytest.raises(
        RestoreError, match=r"of 4 ranks, and this .*own cannot be divided.*'memory'; start with 4"
    ):
        opened(tmp_path, before, now, 0, ("memory",), memory=True)


def test_an_entry_of_one_process_is_not_given_to_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match=r"is of 1 rank, and this start has 2 ranks.*'memory'"):
        opened(tmp_path, 1, 2, 1, ("memory",), memory=True)


def test_an_entry_that_was_each_ranks_own_must_be_declared_again(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match=r"step-00000005: .*not declared so now: 'memory'.*PerRank"):
        opened(tmp_path, 4, 4, 1, (), memory=True)


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:0"), (1, "cuda")])
def test_each_rank_loads_what_is_in_common_onto_its_device(tmp_path: Path, rank: int, device: str) -> None:
    def on(device: str, name: str) -> Encoded:
        array = HostArray("F32", (1,), np.zeros(4, np.uint8), "torch", {"device": device, "parameter": True})
        return Encoded({"user": {name: {"$array": f"user/{name}"}}}, {f"user/{name}": array})

    path = written(tmp_path, [(on("cuda:0", "w"), on(f"cuda:{each}", "memory")) for each in range(2)])
    tree, _ = opened_by(path, rank, 2, ("memory",))
    assert tree.arrays["user/w"].extra == {"device": device, "parameter": True}
    assert tree.arrays["user/memory"].extra["device"] == f"cuda:{rank}"


# --------------------------------------------------------------------------------- streams' own keys


class Loader(Stream):
    """Data whose position has a key of its own on each rank."""

    rank_keys = ("own",)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return LoaderCursor()


class LoaderCursor(Cursor):
    done = 0

    def __next__(self) -> int:
        self.done += 1
        return self.done

    def position(self) -> Any:
        return {"batches": self.done, "own": 3}


def new_streams() -> Streams:
    return Streams(7, lambda text: None)


def test_streams_say_what_is_a_ranks_own() -> None:
    streams = new_streams()
    next(streams.bind(Loader(), "train").open())
    streams.bind(everstep.data.arrays(np.arange(4), batch_size=2), "valid")
    tree = {"streams": streams.tree()[0]}
    common, own = (decode(each) for each in split(encode(tree), streams.rank_paths()))
    assert common["streams"]["train"]["position"] == {"batches": 1}
    assert own["streams"] == {"train": {"position": {"own": 3}, "generators": [], "opened": [[], []]}}
    assert common["streams"]["valid"] == tree["streams"]["valid"]


def test_a_stream_that_is_not_bound_yet_is_a_ranks_own_as_a_whole() -> None:
    before = new_streams()
    next(before.bind(Loader(), "train").open())
    tree, words = before.tree()
    after = new_streams()
    after.load(tree, words, {}, "step-1")
    again = {"streams": after.tree()[0]}
    common, own = (decode(each) for each in split(encode(again), after.rank_paths()))
    assert common == {"streams": {}}
    assert own == again == {"streams": tree}


def of_arrays(rank: int) -> Any:
    return everstep.data.arrays(np.arange(12), batch_size=4, shuffle=True)


def of_loader(rank: int) -> Any:
    return everstep.data.loader(list(range(12)), batch_size=4, shuffle=True)


def of_torch(rank: int, kind: Any = DataLoader, workers: int = 0) -> Any:
    sampler: Any = DistributedSampler(range(12), num_replicas=2, rank=rank)
    generator = torch.Generator().manual_seed(rank)  # for the workers; another on each rank
    return kind(range(12), batch_size=2, sampler=sampler, generator=generator, num_workers=workers)


KINDS = {
    "arrays": of_arrays,
    "loader": of_loader,
    "DataLoader": of_torch,
    "StatefulDataLoader": partial(of_torch, kind=StatefulDataLoader),
    "workers": partial(of_torch, workers=1),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [1, 3])
def test_the_rest_of_a_streams_branch_is_equal_on_all_ranks(kind: str, batches: int) -> None:
    commons, owns = [], []
    for rank in range(2):
        with isolated():
            random.seed(rank)
            torch.manual_seed(rank)
            streams = new_streams()
            stream = as_stream(KINDS[kind](rank)).split(Share(rank, 2))
            bound = streams.bind(stream, "train")
            cursor = bound.open()
            for _ in range(batches):
                next(cursor)
            if batches == 3:
                bound.end_pass()
            tree = {"streams": streams.tree()[0]}
            streams.close()
        common, own = split(encode(tree), streams.rank_paths())
        assert digest(merge(common, own)) == digest(encode(tree))
        commons.append(common)
        owns.append(digest(own))
    assert digests(commons[0]) == digests(commons[1])
    assert (owns[0] == owns[1]) == (kind in ("arrays", "loader")), "a rank's own place is in its own part"
