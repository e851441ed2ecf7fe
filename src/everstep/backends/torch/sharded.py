"""Tensors that several processes hold together (DTensor): the box that this process holds, and back.

`fully_shard`, HSDP and `parallelize_module` make a DTensor of each parameter: a mesh of ranks, and for each
dimension of the mesh a placement, which divides the tensor (`Shard`) or repeats it (`Replicate`).  So every
rank knows by itself which box of a tensor each other rank holds, and nobody has to be asked for a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from everstep.contracts.state import Region
from everstep.errors import RestoreError, StateError


@dataclass(frozen=True)
class Placed(Region):
    """Region of a DTensor, and what makes a DTensor again of its elements."""

    mesh: Any = field(compare=False, repr=False)
    placements: Any = field(compare=False, repr=False)
    stride: Any = field(compare=False, repr=False)

    def tensor(self, local: Tensor, sums: Sequence[int] = ()) -> Tensor:
        """Make the DTensor of which this process holds `local`; no other process is asked.

        Args:
            sums: dimensions of the mesh over which the elements are still to be summed.
        """
        home = _home()
        placements = [home.Partial() if dim in sums else own for dim, own in enumerate(self.placements)]
        form = {"shape": torch.Size(self.whole), "stride": self.stride}
        dtensor: Tensor = home.DTensor.from_local(local, self.mesh, placements, **form)
        return dtensor.detach()


def place_in_mesh(value: Any) -> tuple[int | None, list[int]] | None:
    """Return this process's place in a mesh, None outside it, and the ranks of the mesh; None for others."""
    home = sys.modules.get("torch.distributed.device_mesh")
    if home is None or not isinstance(value, home.DeviceMesh):
        return None
    ranks, own = ranks_of(value), dist.get_rank()
    return (ranks.index(own) if own in ranks else None), ranks


def ranks_of(mesh: Any) -> list[int]:
    """Return the ranks of a mesh, in its order."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _home() -> Any:
    # importing the module takes a second; a program that has not imported it has no DTensor
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(value: Any) -> bool:
    home = _home()
    if home is None or not isinstance(value, home.DTensor):
        return False
    if torch.__version__ < "2.12":  # which boxes other ranks hold, and what fully_shard gathers, is not told
        raise StateError(
            "everstep saves tensors that are sharded over processes with torch 2.12 or newer; this is torch "
            f"{torch.__version__}: update it, or use everstep.torch.parallel"
        )
    return True


def refuse_sharded(tensor: Tensor, what: str, remedy: str) -> None:
    if is_sharded(tensor):
        raise StateError(f"{what} is sharded over processes (fully_shard, parallelize_module): {remedy}")


def local(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that this process holds, in their memory, without the graph."""
    return tensor._local_tensor.detach() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a small tensor that processes may hold together: all of them call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their mesh, whole ones together: torch refuses operations on a mixture."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)  # type: ignore[attr-defined]
    return list(groups.values())


def layout(tensor: Any) -> Placed:
    """Return the region of a DTensor that this process holds, whether others hold the same one or not."""
    return _layout(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))


def region(array: Any) -> Placed | None:
    """Return the region of a tensor that this process holds; None where every process holds all of it."""
    if not is_sharded(array):
        return None
    placed = layout(array)
    return None if len(placed.holders) == dist.get_world_size() else placed


def arrangement(tensors: Iterable[Tensor]) -> str:
    """Describe how tensors are laid out over processes, on which the order of their sums depends.

    The text is equal on all ranks; "" where nothing is sharded.
    """
    texts = set()
    kinds = {(tensor.device_mesh, tuple(tensor.placements)) for tensor in filter(is_sharded, tensors)}  # type: ignore[attr-defined]
    for mesh, placements in kinds:
        ranks = _grid(mesh, placements)[0].flatten().tolist()
        order = "" if ranks == sorted(ranks) else f" of the ranks {ranks}"
        texts.add(f"{', '.join(map(repr, placements))} over {' x '.join(map(str, mesh.shape))}{order}")
    return "; ".join(sorted(texts))


def unmade_sums(gradient: Tensor, parameter: Tensor) -> list[int] | None:
    """Return the dimensions of the mesh over which a gradient is still to be summed; None: there are none.

    That of a parameter which all ranks hold may be such a sum (SequenceParallel): the optimizer makes it.
    """
    if not is_sharded(gradient) or not is_sharded(parameter):
        return None
    pairs = list(zip(gradient.placements, parameter.placements, strict=True))  # type: ignore[attr-defined]
    sums = [dim for dim, (own, _) in enumerate(pairs) if own.is_partial("sum")]
    if any(own != its and dim not in sums for dim, (own, its) in enumerate(pairs)):
        raise StateError(
            f"a gradient has other placements than its parameter of shape {tuple(parameter.shape)}: {pairs}; "
            "save where no window is open, as with Checkpoints(Every(steps=...))"
        )
    return sums or None


def laid_like(live: Any, saved: Any) -> Any:
    """Return a saved whole tensor as `live` is laid out; any other saved value as it is."""
    fits = is_sharded(live) and isinstance(saved, Tensor) and not is_sharded(saved)
    if not fits or saved.shape != live.shape:
        return saved
    placed = layout(live)
    inside = tuple(slice(at, at + count) for at, count in zip(placed.offset, placed.shape, strict=True))
    # a copy: the rest of the whole tensor is not kept alive
    return placed.tensor(saved.detach()[inside].to(local(live).device, copy=True).contiguous())


# a state has few meshes and shapes, which are the same at each save
@lru_cache(maxsize=10_000)
def _layout(
    mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], stride: tuple[int, ...]
) -> Placed:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box

    if any(placement.is_partial() for placement in placements):
        raise StateError(
            f"a DTensor of placements {placements} is a sum that was not made yet: save "
            "tensor.redistribute(placements=...) with Shard or Replicate"
        )
    grid, spread = _grid(mesh, placements)
    _require_boxes(mesh, placements, shape)
    sizes, offset = box(shape, mesh, placements)
    place = (grid == dist.get_rank()).nonzero()[0].tolist()
    same = grid[tuple(at if divides else slice(None) for at, divides in zip(place, spread, strict=True))]
    # an empty box begins nowhere: torch gives the end of the tensor
    offset = tuple(min(at, most) for at, most in zip(offset, shape, strict=True))
    holders = tuple(sorted(same.flatten().tolist()))
    return Placed(tuple(offset), tuple(sizes), shape, holders, mesh, placements, stride)


def _grid(mesh: Any, placements: tuple[Any, ...]) -> tuple[Tensor, list[bool]]:
    """Return all ranks as a grid, and for each of its dimensions whether it divides the tensor.

    A tensor on a part of a larger mesh (a parameter that tensor parallelism leaves alone) is repeated along
    the other dimensions; that its copies are equal is compared at each save.
    """
    size, divides = dist.get_world_size(), [not placement.is_replicate() for placement in placements]
    if mesh.size() == size:
        return mesh.mesh, divides
    root = mesh._get_root_mesh()
    names, every = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root.size() != size or not names or not set(names) <= set(every):
        raise StateError(
            f"a tensor is sharded over {mesh}, a part of the {size} ranks: make one mesh over all of them, "
            "as init_device_mesh(..., mesh_dim_names=...), and shard over its dimensions"
        )
    by_name = dict(zip(names, divides, strict=True))
    return root.mesh, [by_name.get(name, False) for name in every]


def _require_boxes(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Refuse a layout in which a process holds rows that do not follow each other.

    The first index and the length of each part are known: these intervals must fill a divided dimension.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as box_at

    plain = _home().Shard
    for dim in {p.dim for p in placements if not p.is_replicate() and type(p) is not plain}:
        over = [
            n if not p.is_replicate() and p.dim == dim else 1
            for n, p in zip(mesh.shape, placements, strict=True)
        ]
        boxes = (box_at(shape, mesh.shape, list(place), placements) for place in product(*map(range, over)))
        parts = sorted((offset[dim], sizes[dim]) for sizes, offset in boxes if sizes[dim])
        ends = [0, *(start + count for start, count in parts)]
        if [start for start, _ in parts] != ends[:-1] or ends[-1] != shape[dim]:
            raise StateError(
                f"a DTensor of shape {shape} with placements {placements} over {mesh} gives a process rows "
                "that do not follow each other, which everstep does not save: divide another dimension"
            )


def fsdp_modules(module: Module) -> list[Any]:
    """List the parts of a module to which `fully_shard` was applied."""
    home = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(home, "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def reshard(module: Module) -> None:
    """Let a module's parameters be the sharded ones, which a forward pass has put away.

    The next forward pass gathers them again: what is computed is the same.
    """
    for part in fsdp_modules(module):
        part.reshard()


def param_groups(module: Module) -> Iterator[Any]:
    """Yield torch's groups of parameters that are gathered together, in the order of the modules."""
    for part in fsdp_modules(module):
        yield from part._get_fsdp_state()._fsdp_param_groups


def precision(module: Module) -> str:
    """Describe the `MixedPrecisionPolicy` of `fully_shard`; "" where it is torch's default."""
    policies = [group.mp_policy for group in param_groups(module)]
    texts = ["" if policy == type(policy)() else repr(policy) for policy in policies]
    if len(set(texts)) < 2:
        return "".join(texts[:1])
    parts = [(text or "none", len(list(alike))) for text, alike in groupby(texts)]
    return "; ".join(f"{text} for {count} of its parts" for text, count in parts)


# ------------------------------------------------------------------------ windows of accumulation
#
# With `set_requires_gradient_sync(False)` a backward pass leaves each rank the gradients of its own samples,
# of whole parameters; with `set_requires_all_reduce(False)` those that only a part of the ranks have summed.
# torch keeps both beside the parameters, until the pass that ends the window reduces them.


def window(models: Iterable[Module]) -> dict[str, Tensor]:
    """Return the gradients of open windows, by the place of what has them; empty outside a window."""
    gradients: dict[str, Tensor] = {}
    for place, group in _groups(models):
        if group._partial_reduce_output is not None:
            gradients[place] = group._partial_reduce_output
        for index, parameter in enumerate(group.fsdp_params):
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None:
                gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if gradient is not None:
                gradients[f"{place}.{index}"] = _own_part(parameter, gradient)
    return gradients


def load_window(models: Iterable[Module], saved: dict[str, Tensor]) -> None:
    """Give back what `window` returned; what is not there is cleared."""
    rest = dict(saved)
    for place, group in _groups(models):
        group._partial_reduce_output = _copied(rest.pop(place, None), group.device)
        for index, parameter in enumerate(group.fsdp_params):
            gradient = _copied(rest.pop(f"{place}.{index}", None), group.device)
            if getattr(parameter, "_unsharded_param", None) is not None:
                parameter._unsharded_param.grad = None
            if gradient is not None and parameter.is_dtensor:
                spec = parameter._unsharded_dtensor_spec
                form = {"shape": spec.shape, "stride": spec.stride}
                gradient = _home().DTensor.from_local(gradient, spec.mesh, spec.placements, **form)
            # where a pass of another dtype leaves its sum; the next pass adds to it, in the same order
            parameter.unsharded_accumulated_grad = gradient
    if rest:
        raise RestoreError(
            "saved gradients of an open window belong to no parameter: shard the model as before",
            unexpected=list(rest),
        )


def _groups(models: Iterable[Module]) -> Iterable[tuple[str, Any]]:
    for number, model in enumerate(models):
        for index, group in enumerate(param_groups(model)):
            yield f"{number}.{index}", group


def _own_part(parameter: Any, gradient: Tensor) -> Tensor:
    if not is_sharded(gradient):
        return gradient
    spec = parameter._unsharded_dtensor_spec
    if tuple(gradient.placements) != tuple(spec.placements):  # type: ignore[attr-defined]
        raise StateError(
            f"the gradient of {parameter._param_fqn!r} in an open window is not laid out as its parameter, "
            "so it cannot be saved: save where no window is open, as with Checkpoints(Every(steps=...))"
        )
    return local(gradient)


def _copied(gradient: Tensor | None, device: Any) -> Tensor | None:
    return None if gradient is None else gradient.to(device, copy=True)
