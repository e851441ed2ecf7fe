"""An evaluation of a stream that is split: equally many forwards on each rank, each sample once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import everstep
from everstep.contracts.data import Share, Stream
from everstep.data import arrays, as_stream
from everstep.errors import DataError
from everstep.trainer.eval_loop import evaluate
from everstep.trainer.multi_run import SharedStream, Tap
from everstep.trainer.named_streams import TrainInputs


class Counting(everstep.Task):
    """Counts its forwards, and collects the samples that a reduction is given."""

    def __init__(self) -> None:
        self.forwards, self.samples = 0, []  # type: ignore[var-annotated]

    def state(self) -> Mapping[str, Any]:
        return {}

    def train_step(self, inputs: Any) -> Mapping[str, Any]:
        raise AssertionError("not trained")

    def eval_step(self, inputs: Any) -> Mapping[str, Any]:
        self.forwards += 1
        [ids] = inputs
        return {"mean": float(np.mean(np.asarray(ids, dtype=float))), "ids": np.asarray(ids).tolist()}

    def batch_size(self, inputs: Any) -> int:
        return len(inputs[0])

    def eval_begin(self) -> Any:
        return self.samples

    def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        state.extend(outputs["ids"])
        return state


def in_memory(length: int, batch: int, share: Share) -> Stream:
    return arrays(np.arange(length), batch_size=batch).split(share)


def sampled(length: int, batch: int, share: Share) -> Stream:
    numbers = torch.utils.data.TensorDataset(torch.arange(length))
    sampler = DistributedSampler(numbers, share.size, share.rank, shuffle=False)
    return as_stream(DataLoader(numbers, batch // share.size, sampler=sampler)).split(share)


@pytest.mark.parametrize("make", [in_memory, sampled])
@pytest.mark.parametrize(
    ("length", "batch", "num_steps"), [(7, 3, -1), (8, 3, -1), (1, 3, -1), (9, 6, 1), (12, 6, -1)]
)
def test_each_rank_makes_as_many_forwards_and_each_sample_counts_once(
    make: Any, length: int, batch: int, num_steps: int
) -> None:
    tasks, sums = [Counting() for _ in range(3)], 0.0
    seen: list[Any] = []
    for rank, task in enumerate(tasks):
        stream = make(length, batch, Share(rank, 3, "pad"))
        found = evaluate(task, stream, "valid", num_steps, 0, seen=seen.append)
        sums += found.get("mean", 0.0) * len(task.samples)
    evaluated = length if num_steps < 0 else batch * num_steps
    assert {task.forwards for task in tasks} == {-(-evaluated // batch)}
    assert sorted(sample for task in tasks for sample in task.samples) == list(range(evaluated))
    assert sums == pytest.approx(sum(range(evaluated)))
    assert sum(len(step.batch[0]) for step in seen) == evaluated


def test_a_rank_that_is_handed_padding_alone_is_not_an_evaluation_without_a_batch() -> None:
    assert evaluate(Counting(), in_memory(1, 3, Share(2, 3, "pad")), "valid", -1, 0) == {}
    nothing = arrays(np.arange(1), batch_size=3, drop_last=True).split(Share(2, 3, "pad"))
    with pytest.raises(DataError, match="gave no batch to evaluate; give it data"):
        evaluate(Counting(), nothing, "valid", -1, 0)


def test_inputs_of_several_batches_have_a_weight_only_where_the_parts_are_alike() -> None:
    def pair(batches: Iterator[Any]) -> Any:
        return next(batches), next(batches)

    even = TrainInputs(in_memory(8, 2, Share()), pair).split(Share(1, 2))
    cursor = even.open("train", 0, seed=0)
    assert [[int(part[0]) for [part] in inputs] for inputs in cursor] == [[1, 3], [5, 7]]
    assert cursor.weight == 1.0
    uneven = TrainInputs(in_memory(12, 3, Share()), pair).split(Share(1, 2, "weight"))
    with pytest.raises(DataError, match=r'next_train_inputs drew 2 batches.*give uneven="drop"'):
        next(uneven.open("train", 0, seed=0))
    single = TrainInputs(in_memory(12, 3, Share()), next).split(Share(1, 2, "weight"))
    cursor = single.open("train", 0, seed=0)
    assert (next(cursor)[0].tolist(), cursor.weight) == ([2], pytest.approx(2 / 3))


def test_a_stream_that_several_models_read_together_is_refused_by_name() -> None:
    tap = Tap(SharedStream(in_memory(12, 3, Share())))
    assert tap.split(Share()) is tap
    with pytest.raises(
        DataError, match=r"arrays\(.*read once for several models.*train each model by a Trainer"
    ):
        tap.split(Share(0, 2))
