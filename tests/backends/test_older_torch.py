"""What replaces calls of newer releases of torch gives the same, or refuses by name."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from everstep.backends import get
from everstep.backends.torch import older_torch, sharded
from everstep.contracts.state import HostArray
from everstep.errors import StateError


def test_the_norm_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    newer = older_torch.total_norm(gradients)
    monkeypatch.delattr(torch.nn.utils, "get_total_norm", raising=False)
    torch.testing.assert_close(older_torch.total_norm(gradients), newer)
    assert older_torch.total_norm([]) == 0


def test_the_precision_of_float32_products() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert older_torch.fp32_precision(torch.backends, "matmul") == "medium"  # has no matmul, as of old
        assert older_torch.fp32_precision(torch.backends, "conv") in ("True", "False")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_dtensor_whose_layout_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import tensor

    class Held(torch.Tensor):
        """Stands for a DTensor, which no single process can make."""

    monkeypatch.setattr(tensor, "DTensor", Held)
    held = torch.zeros(2).as_subclass(Held)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0"))
    assert sharded.is_sharded(held)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    with pytest.raises(StateError, match=r"torch 2\.12 or newer; this is torch 2\.11\.0\+cpu: update it"):
        sharded.is_sharded(held)
    assert not sharded.is_sharded(torch.zeros(2))


def test_a_type_that_this_torch_lacks_is_refused_by_its_name() -> None:
    saved = HostArray("U8", (2,), bytearray(2), "torch", {"dtype": "float2_of_tomorrow"})
    with pytest.raises(StateError, match=r"'float2_of_tomorrow', which torch .* lacks"):
        get("torch").from_host(saved)
