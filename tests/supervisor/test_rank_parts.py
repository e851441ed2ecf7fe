"""A state of several ranks: what they have in common, what is a rank's own, who reads which data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
import gate
from everstep import data
from everstep.checkpoint import format, read_checkpoint
from everstep.contracts.data import Share
from everstep.contracts.group import DataRanks, Group
from everstep.contracts.state import HostArray
from everstep.data.adapt import as_stream
from everstep.errors import ConfigError, DisagreementError, RestoreError
from everstep.state import Encoded, capture, decode, digest, encode, isolated, merge, portable, rekey, restore
from everstep.supervisor.data_ranks import Part, begin_random, divide, read_data_ranks, sample_digests
from everstep.supervisor.opening.configuration import fingerprint, layout
from everstep.supervisor.saving.rank_parts import difference, differing, digests, for_rank, leaf_digests
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.streams.all_streams import Streams
from everstep.trainer.eval_loop import evaluating
from tiny_runs import Boom, Tiny, boom_at

names = st.sampled_from(["a", "b", "a/b", "$a", "", "%", "a~", "\ud800", "#", "state"])
leaf = (
    st.none() | st.integers() | st.floats(allow_nan=False) | st.just(np.arange(3.0)) | st.binary(max_size=3)
)


def inner(values: Any) -> Any:
    lists = st.lists(values, max_size=2)
    return st.dictionaries(names | st.integers(), values, max_size=3) | lists | lists.map(tuple)


trees = st.dictionaries(names, st.recursive(leaf, inner, max_leaves=8), max_size=4)
paths = st.sets(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=4)


def through_json(encoded: Encoded) -> Encoded:
    return Encoded(json.loads(json.dumps(encoded.structure)), encoded.arrays)


@settings(deadline=None, max_examples=400 if gate.is_campaign else 40)
@given(trees, paths)
def test_the_own_part_has_the_paths_and_nothing_else_and_merges_to_the_same_tree(tree, own) -> None:
    whole = encode(tree)
    parts = [*map(through_json, everstep.state.split(whole, own))]
    assert digest(merge(*parts)) == digest(whole)
    assert not parts[0].arrays.keys() & parts[1].arrays.keys()
    common, part = map(decode, parts)  # each can be read by itself
    for path in own:
        assert at(common, path) is LACKS
        assert (at(part, path) is LACKS) == (at(tree, path) is LACKS)
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


# ------------------------------------------------------------------------------------ a rank's tree


BRANCH = {
    "pass": 0, "last_end": None, "generators": [], "data": None, "varies": False, "opened": [], "given": [],
}  # fmt: skip


def saved(rank: int, size: int, memory: bool = False, state: Any = None) -> tuple[Encoded, Encoded]:
    """Save a small state of one rank, with its own generators."""
    with isolated():
        random.seed(1)
        np.random.seed(1)
        rekey(7, rank)
        tree = {
            "progress": {"seed": 7, "step": 5},
            "user": {"w": np.arange(3.0), **({"memory": [rank]} if memory else {})},
            "streams": {"train": {**BRANCH, "position": {"batches": 2, "state": state}}},
            "rng": {f"rank{rank}": capture(), f"lines{rank}": {}},
            "wall": {"seconds": 1.0 + rank},
        }
    own = everstep.supervisor.saving.rank_parts.own_paths(
        rank, [("user", "memory")] if memory else [], [("streams", "train", "position", "state")]
    )
    return everstep.state.split(encode(tree), own if size > 1 else [])


def written(folder: Path, both: list[tuple[Encoded, Encoded]], meta: Any = None) -> Path:
    """Write a checkpoint as its ranks do: the common tree of rank 0, and the own tree of each."""
    folder = folder / f"of-{len(both)}" / "step-00000005"
    if not folder.exists():
        folder.mkdir(parents=True)
        common = both[0][0]
        file = format.write_common(folder, common)
        ranks = [format.write_own(folder, rank, own, common) for rank, (_, own) in enumerate(both)]
        facts = {"epoch": 1, "phase": "step", "partial": False, "segment": 1, "meta": meta, "digest": ""}
        format.write_manifest(folder, {"name": folder.name, "step": 5, **facts}, common, file, ranks)
    return folder


def opened_by(path: Path, rank: int, size: int, memory: Any = None, of: Any = None) -> Encoded:
    """Open a checkpoint as a rank of a program whose `memory` is declared, if one is given."""
    user, group = (
        UserState({"w": np.zeros(3)} | ({} if memory is None else {"memory": memory})),
        Group(rank, size, None),
    )
    if of is not None:
        group.data = DataRanks(of)
    found = for_rank(read_checkpoint(path, rank), group, user)
    return Encoded(found.structure, found.arrays)


def opened(folder: Path, before: int, now: int, rank: int, declared: Any = None, **facts: Any) -> Any:
    """The tree of a rank, of a checkpoint that other ranks have saved."""
    path = written(folder, [saved(each, before, **facts) for each in range(before)])
    return decode(opened_by(path, rank, now, declared))


def draws(tree: Any, rank: int) -> tuple[float, float]:
    with isolated():
        restore(tree["rng"][f"rank{rank}"])
        return random.random(), float(np.random.random())


def test_each_rank_gets_its_own_back_and_the_rest_from_the_writer(tmp_path: Path) -> None:
    path = written(tmp_path, [saved(rank, 4, memory=True, state=rank) for rank in range(4)])
    trees = [decode(opened_by(path, rank, 4, everstep.PerRank([]))) for rank in range(4)]
    assert [tree["user"]["memory"] for tree in trees] == [[0], [1], [2], [3]]
    assert [tree["streams"]["train"]["position"]["state"] for tree in trees] == [0, 1, 2, 3]
    assert {tree["wall"]["seconds"] for tree in trees} == {1.0}
    assert len({draws(tree, rank) for rank, tree in enumerate(trees)}) == 4


@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 8), (2, 3), (4, 2), (4, 1)])
def test_another_number_of_ranks_has_keyed_generators(tmp_path: Path, before: int, now: int) -> None:
    def drawn(size: int, now: int, rank: int) -> tuple[float, float]:
        return draws(opened(tmp_path, size, now, rank), rank)

    here = digest(encode(capture()))
    trees = [opened(tmp_path, before, now, rank) for rank in range(now)]
    assert digest(encode(capture())) == here, "to read a checkpoint draws nothing"
    found = [draws(tree, rank) for rank, tree in enumerate(trees)]
    assert len(set(found)) == now, "each rank draws other numbers"
    assert found[0] == drawn(before, before, 0), "rank 0 keeps its own"
    assert found[-1] == drawn(before, now, now - 1), "equal at each start"
    assert not 1 < now < before or found[1] != drawn(before, before, 1)
    assert found[1:] == [drawn(5, now, each) for each in range(1, now)]


def test_the_first_part_draws_on_as_the_rank_that_read_it(tmp_path: Path) -> None:
    both = [saved(rank, 2) for rank in range(2)]
    path = written(tmp_path, both, {"data_ranks": [1, 0]})
    assert draws(decode(opened_by(path, 0, 3)), 0) == draws(decode(both[1][1]), 1)


def with_own(rank: int, **branches: Any) -> tuple[Encoded, Encoded]:
    common, own = saved(rank, 2)
    return common, encode({**decode(own), **branches})


def test_lines_that_run_again_draw_the_same_at_each_start(tmp_path: Path) -> None:
    def lines(rank: int) -> dict[str, Any]:
        with isolated():
            random.seed(rank)
            marks = {place: {"global": capture(), "state": {"g": rank}} for place in ("enter", "epoch")}
        return {f"rank{rank}": capture(), f"lines{rank}": marks}

    path = written(tmp_path, [with_own(rank, rng=lines(rank)) for rank in range(2)])
    first, second = (decode(opened_by(path, rank, 3))["rng"] for rank in (0, 2))
    assert digest(encode(second["lines2"]["enter"])) == digest(encode(first["lines0"]["enter"]))
    assert digest(encode(second["lines2"]["epoch"]["global"])) == digest(encode(second["rank2"]))


# ------------------------------------------------------------- the devices of ranks that see all of them


class Devices:
    """Two CUDA devices that each process sees, as torch.cuda tells; their generators are of the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generators, self.current = [torch.Generator(), torch.Generator()], 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        states = lambda: [each.get_state() for each in self.generators]  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", states)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int | str = "cuda") -> None:
        self.generators[self.current if device == "cuda" else int(device)].set_state(state)

    def process(self, device: int) -> None:
        """Begin a process of which this is the device."""
        self.current = device
        for each in self.generators:
            each.manual_seed(5)

    def dropout(self) -> float:
        return float(torch.rand((), generator=self.generators[self.current]))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def test_ranks_with_one_part_are_compared_by_what_their_own_devices_drew(devices: Devices) -> None:
    told = []
    for rank, drawn in ((0, 1), (1, 1), (1, 2)):
        devices.process(rank)
        for _ in range(drawn):
            devices.dropout()
        own = encode({"rng": {f"rank{rank}": capture(), f"lines{rank}": {}}})
        told.append(digests(Encoded({}), own, (0, 1)))
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("place", ["now", "enter"])
def test_ranks_of_the_first_part_draw_on_their_own_devices(place: str, tmp_path: Path, devices: Any) -> None:
    devices.process(0)
    devices.dropout()
    drawn = capture()
    branch = {"rank0": drawn, "lines0": {"enter": {"global": drawn, "state": {}}}}
    whole = encode({**decode(saved(0, 1)[0]), "rng": branch})
    expected = devices.dropout()
    path = written(tmp_path, [(whole, Encoded({}))])
    devices.process(1)
    tree = decode(opened_by(path, 1, 2, of=[0, 0]))["rng"]
    with isolated():
        restore(tree["rank1"] if place == "now" else tree["lines1"]["enter"]["global"])
        assert devices.dropout() == expected


def test_a_rank_gets_the_states_of_all_its_devices_back(devices: Devices) -> None:
    devices.process(1)
    devices.dropout()
    kept = capture()
    states = [each.get_state() for each in devices.generators]
    older = {**kept, "torch": {name: kept["torch"][name] for name in ("cpu", "cuda")}}
    for state in (kept, older, portable(older)):  # the device was not always saved
        devices.process(0)
        restore(state)
        assert all(map(torch.equal, (each.get_state() for each in devices.generators), states))


# --------------------------------------------------------------------------- entries of each rank


def taken(states: list[list[int]], rank: int, size: int) -> list[int]:
    """Divide the members of all memories by their place."""
    return [each for state in states for each in state][rank::size]


@pytest.mark.parametrize(("before", "now"), [(4, 8), (4, 1), (1, 3), (3, 2)])
def test_a_function_merges_an_entry_of_each_rank(tmp_path: Path, before: int, now: int) -> None:
    memory, all_of_it = everstep.PerRank([], merge=taken), [[each] for each in range(before)]
    found = [opened(tmp_path, before, now, rank, memory, memory=True) for rank in range(now)]
    merged = [tree["user"]["memory"] for tree in found]
    assert merged == [taken(all_of_it, rank, now) for rank in range(now)]
    assert sorted(each for one in merged for each in one) == list(range(before))


def test_a_function_gets_the_value_of_a_slot_and_copies(tmp_path: Path) -> None:
    def emptied(states: list[Any], rank: int, size: int) -> Any:
        assert [each.tolist() for each in states] == [[0.0], [10.0]]
        total = sum(states)
        for each in states:
            each[:] = 0  # a copy, which the second call has not seen
        return total

    slots = [{"memory": {"value": np.array([10.0 * rank]), "replaced": False}} for rank in range(2)]
    path = written(tmp_path, [with_own(rank, user=slot) for rank, slot in enumerate(slots)])
    memory = everstep.PerRank(everstep.Slot(np.zeros(1)), merge=emptied)
    found = decode(opened_by(path, 0, 3, memory))["user"]["memory"]
    assert found["value"].tolist() == [10.0] and found["replaced"] is False


WRONG: dict[str, Any] = {
    "a dict -> a list": lambda states, rank, size: {"a": 1},
    "KeyError: 'x'": lambda states, rank, size: {}["x"],
    "cannot be saved": lambda states, rank, size: [object()],
    "a NoneType -> a list": lambda states, rank, size: states.clear(),
}


def test_a_function_that_draws_random_numbers_draws_the_same_at_each_start(tmp_path: Path) -> None:
    memory = everstep.PerRank([], merge=lambda states, rank, size: [random.random()])
    drawn = [opened(tmp_path, 4, 2, rank, memory, memory=True)["user"]["memory"] for rank in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("said", WRONG)
def test_a_function_that_fails_or_does_not_fit_is_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(RestoreError, match=r"of 4 ranks, and this start has 2 ranks.*'memory'") as caught:
        opened(tmp_path, 4, 2, 1, everstep.PerRank([], merge=WRONG[said]), memory=True)
    assert said in str(caught.value), caught.value


WINDOW = {"torch": {"grad": {"model": {"w": np.ones(2)}}}}
WITH = partial(saved, size=2, memory=True)
REFUSED: dict[str, tuple[Any, Any, int, str]] = {
    "no function": (WITH, everstep.PerRank([]), 3,
                    "of 2 ranks.*cannot be divided.*merge=function.*start with 2"),
    "not declared": (WITH, [], 2, r"step-00000005: .*not declared so in state=: 'memory'.*PerRank"),
    "an open window": (lambda rank: with_own(rank, gradients=WINDOW), None, 1,
                       "window of accumulated gradients.*of 2 ranks; start with 2"),
    "what has to be equal": (lambda rank: with_own(rank, progress={"window": rank}), None, 3,
                             "'progress/window' is not the same on all saved ranks.*start with 2"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_given_to_other_ranks(tmp_path: Path, what: str) -> None:
    make, declared, now, words = REFUSED[what]
    path = written(tmp_path, [make(rank) for rank in range(2)])
    with pytest.raises(RestoreError, match=words):
        opened_by(path, 0, now, declared)
    if what == "an open window":
        opened_by(path, 0, 2)


def on(device: str, name: str = "w") -> Encoded:
    """The state of a model with one array, which was saved on that device."""
    array = HostArray("F32", (1,), np.zeros(4, np.uint8), "torch", {"device": device, "parameter": True})
    return Encoded({"user": {name: {"$array": f"user/{name}"}}}, {f"user/{name}": array})


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:0"), (1, "cuda")])
def test_each_rank_loads_what_is_in_common_onto_its_device(tmp_path: Path, rank: int, device: str) -> None:
    path = written(tmp_path, [(on("cuda:0", "w"), on(f"cuda:{each}", "memory")) for each in range(2)])
    tree = opened_by(path, rank, 2, everstep.PerRank([]))
    assert tree.arrays["user/w"].extra == {"device": device, "parameter": True}
    assert tree.arrays["user/memory"].extra["device"] == f"cuda:{rank}"


# --------------------------------------------------------------------------------- streams' own keys


def new_streams() -> Streams:
    return Streams(7, lambda text: None)


def of_torch(rank: int, kind: Any = DataLoader, workers: int = 0) -> Any:
    sampler: Any = DistributedSampler(range(12), num_replicas=2, rank=rank)
    generator = torch.Generator().manual_seed(rank)  # for the workers; another on each rank
    return kind(range(12), batch_size=2, sampler=sampler, generator=generator, num_workers=workers)


KINDS = {
    "arrays": lambda rank: everstep.data.arrays(np.arange(12), batch_size=4, shuffle=True),
    "loader": lambda rank: everstep.data.loader(list(range(12)), batch_size=4, shuffle=True),
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
            tree = {"streams": streams.tree(head_may_follow=True)[0]}
            streams.close()
        common, own = everstep.state.split(encode(tree), streams.rank_paths())
        assert digest(merge(common, own)) == digest(encode(tree))
        commons.append(common)
        owns.append(digest(own))
    assert digests(commons[0]) == digests(commons[1])
    assert (owns[0] == owns[1]) == (kind in ("arrays", "loader")), "a rank's own place is in its own part"


def test_a_stream_that_is_not_bound_yet_is_a_ranks_own_as_a_whole() -> None:
    before = new_streams()
    next(before.bind(as_stream(of_torch(0)).split(Share(0, 2)), "train").open())
    tree, words = before.tree(head_may_follow=True)
    after = new_streams()
    after.load(tree, words, {}, "step-1")
    again = {"streams": after.tree(head_may_follow=True)[0]}
    common, own = everstep.state.split(encode(again), after.rank_paths())
    assert decode(common) == {"streams": {}}
    assert digest(own) == digest(encode(again)) == digest(encode({"streams": tree}))


class Told(Group):
    """A group in which the other ranks have said something."""

    def __init__(self, *everyone: Part | None) -> None:
        super().__init__(0, len(everyone), None)
        self._everyone = everyone

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        return [None if each is None else list(each) for each in self._everyone]


def divided(*everyone: Part | None) -> DataRanks:
    group = Told(*everyone)
    divide(group, everyone[0])
    return group.data


@pytest.mark.parametrize(
    ("ranks", "covers"),
    [([0, 2], True), ([1, 2], True), ([0, 1, 2, 3], True), ([0], False), ([0, 1], False), ([0, 1, 2], False)],
)
def test_a_mean_over_ranks_counts_each_part_equally_often(ranks: list[int], covers: bool) -> None:
    assert DataRanks([0, 0, 1, 1]).covered_by(ranks) is covers


def test_what_one_rank_says() -> None:
    assert read_data_ranks(None) is None
    assert read_data_ranks(1) == read_data_ranks((0, 1)) == read_data_ranks([0, 1]) == Part(0, 1)
    assert read_data_ranks((1, 2)) == Part(1, 2)


ROW, OTHER = (0, 2), (1, 3)

DIVIDED: dict[tuple[Part | None, ...], tuple[tuple[int, ...], bool, bool, tuple[int, ...]]] = {
    (None, None, None): ((0, 1, 2), False, True, (0, 1, 2)),
    (Part(1, 2), Part(0, 2)): ((1, 0), False, False, (1, 0)),
    tuple(Part(place, 2) for place in (0, 0, 1, 1)): ((0, 0, 1, 1), True, False, (0, 2)),
    tuple(Part(*each) for each in ((0, 2, ROW), (0, 2, OTHER), (1, 2, ROW), (1, 2, OTHER))):
        ((0, 0, 1, 1), True, False, (0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("everyone", DIVIDED)
def test_what_fits_divides_the_data(everyone: tuple[Part | None, ...]) -> None:
    data = divided(*everyone)
    assert (data.of, data.shared, data.in_order, data.first) == DIVIDED[everyone]
    if data.shared:
        assert data.together(3) == (2, 3)
        assert data.unlike("aabb") == () and data.unlike("axby") == (1, 3)


UNFIT = {
    "the sizes": ([Part(0, 1), Part(0, 2)], DisagreementError, "1 part on rank 0, and 2 parts on rank 1"),
    "one alone": ([Part(0, 1), None], DisagreementError, "1 part on rank 0, and no value on rank 1"),
    "the counts": ([Part(0, 2), Part(0, 2), Part(1, 2)], ConfigError, "it is 0 of 2, 1 of 1"),
    "nobody": ([Part(0, 2)], ConfigError, "it is 0 of 1, 1 of 0"),
    "a rank outside": ([Part(0, 2, (0, 1)), Part(None, 2, (0, 1))], ConfigError, "rank 0 is a mesh"),
    "a larger mesh": ([Part(0, 2, (0, 5)), Part(1, 2, (0, 5))], ConfigError, "mesh of the ranks 0, 5"),
    "other rows": ([Part(0, 2, (0, 1)), Part(1, 2, (1, 0))], ConfigError, "does not fit the 2 ranks"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_the_ranks_say_has_to_fit(what: str) -> None:
    everyone, kind, words = UNFIT[what]
    with pytest.raises(kind, match=words):
        divided(*everyone)


class Telling(Group):
    """A rank that gives what the writer has told to the ranks that come after it."""

    told: ClassVar[list[Any]] = []

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        if self.writer:
            self.told[:] = [json.loads(json.dumps(value))]
        return self.told


@pytest.mark.parametrize("of", [(0, 0, 1, 1), (1, 1, 0, 0), (1, 0), (0, 1)])
def test_each_part_begins_with_random_numbers_of_its_own(of: tuple[int, ...]) -> None:
    drawn: dict[int, set[tuple[float, ...]]] = {}
    with isolated():
        everstep.state.seed_all(0)
        alone = drawn_now()
        for rank, part in enumerate(of):
            everstep.state.seed_all(0)
            group = Telling(rank, len(of), None)
            group.data = DataRanks(of)
            begin_random(group, 7)
            drawn.setdefault(part, set()).add(drawn_now())
    assert drawn[0] == {alone} and len(drawn[1]) == 1 and not drawn[0] & drawn[1]


def drawn_now() -> tuple[float, ...]:
    return random.random(), np.random.random()


LAYOUTS = {
    (0, 1, 2, 3): "", (0, 0, 0, 0): "batches in 1 part", (0, 0, 1, 1): "batches in 2 parts",
    (0, 1, 0, 1): "batches in 2 parts (ranks read the parts 0, 1, 0, 1)",
    (1, 0, 2, 3): "batches in 4 parts (ranks read the parts 1, 0, 2, 3)",
}  # fmt: skip


@pytest.mark.parametrize("of", LAYOUTS)
def test_other_parts_on_as_many_ranks_are_another_layout(of: tuple[int, ...]) -> None:
    assert layout(fingerprint({}, DataRanks(of))) == LAYOUTS[of]


@pytest.mark.parametrize("given", [None, 1, (0, 1)])
def test_one_process_reads_everything(given: Any, tmp_path: Path) -> None:
    data = everstep.data.arrays(np.arange(4), batch_size=2)
    with everstep.TrainLoop(tmp_path / "run", {"w": np.zeros(1)}, max_epoch=1, data_ranks=given) as loop:
        drawn = [ids.tolist() for _ in loop.iter_epochs() for _, (ids,) in loop.iter_steps(data)]
        assert (loop.data_rank, loop.data_ranks) == (0, 1)
    assert drawn == [[0, 1], [2, 3]]


def with_memory(run_dir: Path, declare: Callable[[Any], Any], stop_at: int = 0) -> tuple[Any, list[int]]:
    """Train with a memory in the state; return the digest at the end and the memory."""
    memory = dict[str, Any](seen=[])
    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=None)
    tiny = Tiny(run_dir, max_epoch=2, also={"memory": declare(memory)}, services=[saves])

    def inside(loop: Any, step: int) -> None:
        memory["seen"].append(step)
        boom_at(stop_at)(loop, step)

    return tiny.train(inside).loop.ending.digest, memory["seen"]


def structure(run_dir: Path) -> Any:
    return read_checkpoint(max((run_dir / "checkpoints").iterdir())).structure["user"]


def test_on_one_process_the_declaration_changes_nothing(tmp_path: Path) -> None:
    bare, declared = tmp_path / "bare", tmp_path / "declared"
    assert with_memory(bare, lambda memory: memory) == with_memory(declared, everstep.PerRank)
    assert structure(bare) == structure(declared)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("first", [everstep.PerRank, lambda memory: memory])
def test_a_run_resumes_with_and_without_the_declaration(tmp_path: Path, first: Any) -> None:
    undisturbed = with_memory(tmp_path / "a", everstep.PerRank)
    with pytest.raises(Boom):
        with_memory(tmp_path / "b", first, stop_at=6)
    assert with_memory(tmp_path / "b", everstep.PerRank) == undisturbed


class Player(everstep.Task):
    """A task with a model of each rank's own."""

    def __init__(self) -> None:
        self.model = torch.nn.Dropout()

    def state(self) -> dict[str, Any]:
        return {"model": everstep.PerRank(self.model)}


def test_an_evaluation_switches_the_mode_of_a_declared_model() -> None:
    task = Player()
    with evaluating(task, seed=1):
        assert not task.model.training
    assert task.model.training


def test_the_state_describes_its_entries_for_the_other_ranks() -> None:
    user = UserState({"w": np.zeros(2), "memory": everstep.PerRank({"a": 1}), "slot": everstep.Slot(1)})
    described = {"w": "numpy.ndarray", "memory": "PerRank", "slot": "everstep.state.entries.Slot"}
    assert user.describe() == described
    assert user.per_rank == {"memory"} and user.objects["memory"] == {"a": 1}


def common(**user: Any) -> Encoded:
    return encode({"progress": {"step": 1}, "user": user, "services": {"a": 1}, "wall": {}})


def test_each_entry_has_a_digest_and_what_ranks_need_not_share_has_none() -> None:
    found = digests(common(w=np.zeros(2), note={"a": [1, 2.0]}))
    assert list(found) == ["progress", "user/note", "user/w"]
    assert all(len(each) == 16 for each in found.values())


@pytest.mark.parametrize(("other", "path"), [
    ({"w": np.array([0.0, -0.0])}, "user/w"), ({"w": np.zeros(2, np.float32)}, "user/w"),
    ({"w": np.zeros((1, 2))}, "user/w"), ({"w": [0.0, 0.0]}, "user/w"), ({}, "user/w"),
    ({"w": np.zeros(2), "more": []}, "user/more"),
])  # fmt: skip
def test_any_difference_is_found_and_named(other: dict[str, Any], path: str) -> None:
    ranks = [common(w=np.zeros(2)), common(w=np.zeros(2)), common(**other)]
    part = differing([digests(each) for each in ranks])
    assert part == path
    message = str(difference(part, [leaf_digests(each, part) for each in ranks]))
    assert f"{path!r} of rank 2 is not that of the writer" in message


def test_the_device_of_an_array_is_each_ranks_own() -> None:
    assert digests(on("cuda:0")) == digests(on("cuda:1"))


@pytest.mark.parametrize(("part", "words"), [
    ("streams/train", "stream 'train' is not the same .* give all ranks the same data"),
    ("progress", "the place in the run is not the same .* the same loop"),
    ("user/a%2Fb", r"state entry 'a/b'.*'user/a/b/x' of rank 1 .*'a/b': everstep\.PerRank"),
])  # fmt: skip
def test_the_message_names_the_part_and_the_remedy(part: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        raise difference(part, [{f"{part}/x": "0"}, {f"{part}/x": "1"}])


class Files:
    """Paths and labels in the order of a disk, and a long dictionary."""

    def __init__(self, root: str = "/data", order: int = 1) -> None:
        self.paths = [(f"{root}/{n}.png", n % 3) for n in range(64)][::order]
        self.names, self.calls = {0: "cat", 1: "dog"}, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, n: int) -> int:
        return n


def split_by(seed: int) -> Any:
    return random_split(TensorDataset(torch.zeros(64)), [64, 0], torch.Generator().manual_seed(seed))[0]


CONCAT = lambda rank: data.as_stream(DataLoader(ConcatDataset([split_by(rank)])))  # noqa: E731
SAMPLES: list[tuple[Callable[[int], Any], str | None]] = [
    (lambda rank: data.arrays(np.arange(64) + rank, batch_size=8), "arrays"),
    (lambda rank: data.loader(split_by(rank), batch_size=8), "dataset.indices"),
    (CONCAT, "user_loader.dataset.datasets[0].indices"),
    (lambda rank: data.loader(Files(order=1 - 2 * rank), batch_size=8), "dataset.paths"),
    (lambda rank: data.loader(split_by(3), batch_size=8), None),
    (lambda rank: data.as_stream(DataLoader(split_by(3))), None),
    (lambda rank: data.loader(Files(f"/node{rank}"), batch_size=8), None),
]


@pytest.mark.parametrize(("make", "path"), SAMPLES)
def test_samples_that_differ_have_other_digests(make: Callable[[int], Any], path: str | None) -> None:
    """Lengths are equal in each case: a split without a seed, files in the order of a disk."""
    one, other = sample_digests(make(0)), sample_digests(make(1))
    assert one and one.keys() == other.keys()
    differing = {each for each in one if one[each] != other[each]}
    assert path in differing if path else not differing, differing


def test_a_long_dictionary_of_a_dataset_is_left_out_of_the_comparison() -> None:
    stream: Any = SimpleNamespace(dataset=Files())
    stream.dataset.labels, stream.dataset.places = {"cat": [0]}, {f"{n}.png": [n] for n in range(100_000)}
    assert list(sample_digests(stream)) == ["dataset.paths", "dataset.labels.cat"]
