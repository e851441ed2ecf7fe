"""Hugging Face's `IterableDataset`: its state lacks its shuffle buffer; a resume is exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from everstep.contracts.data import Share
from everstep.data import as_stream
from everstep.errors import DataError
from everstep.proof.compare import compare_runs

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's


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


def program(run_dir: Path, data: Any, *, stop_at: int = 0, **limits: int) -> list[list[int]]:
    seen: list[list[int]] = []
    saves = everstep.Checkpoints(everstep.Every(steps=1))
    options: dict[str, Any] = {"max_epoch": 2, **limits}
    with everstep.TrainLoop(run_dir, services=[saves], seed=1, default_services=False, **options) as loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                if step == stop_at:
                    raise InterruptedError
                seen.append(list(map(int, batch["x"])))
    return seen


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_is_lost_or_given_twice_by_a_resume(kind: str, tmp_path: Path) -> None:
    whole = program(tmp_path / "whole", KINDS[kind]())
    for stop_at in (8, 33):
        cut = tmp_path / str(stop_at)
        with pytest.raises(InterruptedError):
            program(cut, KINDS[kind](), stop_at=stop_at)
        assert program(cut, KINDS[kind]()) == whole[stop_at - 1 :]
    assert [each for each in compare_runs(tmp_path / "whole", tmp_path / "8") if each.path != "ended"] == []


NOT_SHUFFLED = [kind for kind in KINDS if "not shuffled" in kind]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("limits", [{"max_step": 13}, {"max_step": 13, "steps_per_epoch": 7}], ids=str)
@pytest.mark.parametrize("kind", NOT_SHUFFLED)
def test_a_run_that_ends_inside_a_pass_says_where_and_not_how_it_came_there(
    kind: str, limits: dict[str, int], tmp_path: Path
) -> None:
    whole = program(tmp_path / "whole", KINDS[kind](), **limits)
    with pytest.raises(InterruptedError):
        program(tmp_path / "cut", KINDS[kind](), stop_at=8, **limits)
    assert program(tmp_path / "cut", KINDS[kind](), **limits) == whole[7:]
    assert compare_runs(tmp_path / "whole", tmp_path / "cut") == []
    longer = {**limits, "max_step": 17}
    rest = program(tmp_path / "whole", KINDS[kind](), **longer)
    assert program(tmp_path / "cut", KINDS[kind](), **longer) == rest


@pytest.mark.parametrize("kind", NOT_SHUFFLED)
def test_a_position_that_nothing_was_drawn_from_is_the_one_that_was_opened(kind: str) -> None:
    with closing(as_stream(KINDS[kind]()).open("train", 0, seed=1)) as cursor:
        for _ in range(7):
            next(cursor)
        position = cursor.position()
    with closing(as_stream(KINDS[kind]()).open("train", 0, position, seed=1)) as cursor:
        assert cursor.position() == position


def test_a_shuffle_without_a_seed_is_another_one_at_the_resume_and_refused(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        program(tmp_path / "run", source(seed=None).batch(5), stop_at=8)
    with pytest.raises(DataError, match=r"shuffle\.0 was '30 samples, generator \w+' at the checkpoint"):
        program(tmp_path / "run", source(seed=None).batch(5))


def test_what_is_split_by_node_is_a_ranks_part_and_anything_else_is_refused() -> None:
    whole = datasets.Dataset.from_dict({"a": list(range(12))}).to_iterable_dataset()
    half = split_dataset_by_node(whole, rank=1, world_size=2)
    for data in (half, DataLoader(half, batch_size=None)):
        stream = as_stream(data).split(Share(1, 2))
        assert [sample["a"] for sample in stream.open("train", 0, seed=0)] == [1, 3, 5, 7, 9, 11]
        with pytest.raises(DataError, match="part of rank 1 of 2, and this is rank 0 of 2"):
            as_stream(data).split(Share(0, 2))
    for data in (whole, DataLoader(whole)):
        with pytest.raises(DataError, match="does not say that it splits itself"):
            as_stream(data).split(Share(0, 2))
