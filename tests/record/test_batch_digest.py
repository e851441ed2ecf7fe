"""Equal batches have equal digests, whatever way they came."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from everstep.record import batch_digest


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "?"])
@pytest.mark.parametrize("count", [1, 9, 5000, 40_000])
def test_how_an_array_lies_in_memory_makes_no_difference(dtype: str, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 2, (count, 6)).astype(dtype)
    for strided in (values[:, ::2], values.T, values[::-1]):
        from_worker = pickle.loads(pickle.dumps(strided))
        found = batch_digest(strided, 0)
        assert found == batch_digest(from_worker, 0) == batch_digest(np.ascontiguousarray(strided), 0)
        assert found is not None


@pytest.mark.parametrize("count", [10, 5000, 400_000])
@pytest.mark.parametrize("contiguous", [True, False])
def test_values_at_either_end_and_many_between_count(count: int, contiguous: bool) -> None:
    values = np.zeros(2 * count, np.float32)[:: 1 if contiguous else 2]
    before = batch_digest(values, 0)
    for at in (0, -1, slice(count // 3, count // 2)):
        changed = values.copy()
        changed[at] = 1.0
        assert batch_digest(changed, 0) != before


def test_equal_dicts_are_equal_in_any_order() -> None:
    """As where keys were taken out of a set of texts: another order in each process."""
    assert batch_digest({"x": 1, "y": 2}, 0) == batch_digest({"y": 2, "x": 1}, 0)
    assert batch_digest({"x": 1, "y": 2}, 0) != batch_digest({"y": 1, "x": 2}, 0)


def test_each_element_of_a_small_array_counts() -> None:
    values = torch.zeros(128, 128)  # 64 KiB, the largest
    digests = {batch_digest((values, 1), 0)}
    for place in range(0, values.numel(), 97):
        values.view(-1)[place] += 1.0
        digests.add(batch_digest((values, 1), 0))
    assert len(digests) == 1 + len(range(0, values.numel(), 97))


def test_small_batches_that_differ_in_form_have_different_digests() -> None:
    ones, row = torch.ones(2, 3), torch.ones(6)
    same_bytes = [ones, ones.view(3, 2), row, row.view(torch.int32), row.view(torch.int16)]
    arrays = [*same_bytes, torch.ones(3), torch.ones(0), torch.zeros(6), torch.ones(6, dtype=torch.float64)]
    forms = [
        *(lambda x: x, lambda x: (x,), lambda x: [[x]], lambda x: [[x], []], lambda x: (x, x)),
        *(lambda x: ((x, x),), lambda x: (x, [x]), lambda x: [x, 1], lambda x: [1, x]),
        *(lambda x: {"x": x}, lambda x: {"y": x}, lambda x: {"x": x, "y": x}, lambda x: {"x": (x,)}),
    ]
    digests = [batch_digest(form(array), 0) for form in forms for array in arrays]
    assert None not in digests and len(set(digests)) == len(digests)


@pytest.mark.parametrize("side", [2, 50, 400])
def test_a_tensor_has_the_digest_of_its_values_whatever_holds_them(side: int) -> None:
    values = torch.arange(side * side, dtype=torch.float32).view(side, side)
    found = batch_digest([values], 0)
    same = [
        values.numpy().copy(),
        torch.nn.Parameter(values),
        values.clone().requires_grad_(),
        values.t().contiguous().t(),
        torch.stack([values, values], dim=2)[:, :, 1],
        values.clone().share_memory_(),
    ]
    assert [batch_digest([each], 0) for each in same] == [found] * len(same)
    assert batch_digest([values.bfloat16()], 0) == batch_digest([values.bfloat16().view(torch.int16)], 0)


def test_tensors_whose_memory_has_other_values_or_is_elsewhere_are_left_out() -> None:
    class Own(torch.Tensor):
        pass

    numbers = torch.ones(2, 2, dtype=torch.complex64)
    plain = torch.ones(2, 2)
    conjugates = numbers.conj(), numbers.conj().imag
    for left_out in (
        *conjugates,
        plain.to_sparse(),
        plain.to_mkldnn(),
        plain.to("meta"),
        plain.as_subclass(Own),
    ):
        assert batch_digest([left_out], 0) is None
        assert batch_digest([left_out, plain], 0) == batch_digest([object(), plain], 0)
    assert batch_digest([numbers], 0) is not None


def test_a_program_may_resize_its_batch_after_the_digest() -> None:
    for shape in ((4,), (4, 2)):
        for batch in (torch.ones(shape), torch.ones(shape).t(), torch.ones(200, 200)):
            assert batch_digest([batch], 0) is not None
            batch.resize_(500, 500)
