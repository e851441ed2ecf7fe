"""Calls that came with newer releases of torch, and what replaces them in older ones.

The comment beside a call names its release.  All else in this folder runs with torch 2.4, the lower bound in
pyproject.toml.  In 2.3 the state of OneCycleLR and SWALR holds a function, which no checkpoint takes, and an
optimizer does not tell that a scheduler was made for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.errors import StateError

FLOAT8 = {
    getattr(torch, name): saved
    for name, saved in (
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e8m0fnu", "F8_E8M0"),  # 2.7; no replacement: a checkpoint that has it names the dtype
    )
    if hasattr(torch, name)
}
"""torch's floats of 8 bits, with the names that safetensors gives them."""


HOME_OF_DTENSORS = f"torch.distributed.{'tensor' if torch.__version__ >= '2.5' else '_tensor'}"
"""Module with `DTensor` and `Shard`."""


def require_readable_shards() -> None:
    """Refuse a DTensor where its layout cannot be read.

    Nothing replaces what is read: the box of another rank (2.8), the mesh of which a mesh is a part (2.10),
    and the groups of parameters that `fully_shard` gathers together (2.12).
    """
    if torch.__version__ < "2.12":
        raise StateError(
            "the state has a tensor that is sharded over processes (fully_shard, parallelize_module), which "
            f"everstep saves with torch 2.12 or newer; this is torch {torch.__version__}: update it, or use "
            "everstep.torch.parallel"
        )


def accelerators() -> int:
    """Return the number of devices that torch finds."""
    if hasattr(torch, "accelerator"):  # 2.6
        return torch.accelerator.device_count()
    return torch.cuda.device_count()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, on their device."""
    if hasattr(torch.nn.utils, "get_total_norm"):  # 2.6
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(each) for each in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def fp32_precision(library: Any, operation: str) -> str:
    """Return how one of `torch.backends` multiplies float32 numbers in "matmul" or "conv"."""
    found = getattr(getattr(library, operation, None), "fp32_precision", None)  # 2.9
    if found is None:
        found = (
            torch.get_float32_matmul_precision() if operation == "matmul" else torch.backends.cudnn.allow_tf32
        )
    return str(found)


def save_alone(state: Mapping[str, Any], writer: Any) -> None:
    """Save in the format of torch.distributed.checkpoint from this process, whatever group there is."""
    from torch.distributed.checkpoint import state_dict_saver

    if "no_dist" in inspect.signature(state_dict_saver.save).parameters:  # 2.9
        state_dict_saver.save(dict(state), storage_writer=writer, no_dist=True)
    else:
        state_dict_saver.save_state_dict(dict(state), writer, no_dist=True)
