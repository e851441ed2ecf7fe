"""Models that several processes train: what synchronises them, and how that is made exact."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from everstep.backends.torch import virtual_shards
from everstep.backends.torch.model_wrappers import (
    alive_modules,
    bare,
    flatten,
    model_parameters,
    models_of,
    optimizers,
    stepped_by,
    stepped_parameters,
)
from everstep.backends.torch.optimizers import MinibatchOptimizer, layers
from everstep.backends.torch.parallel import Ranks
from everstep.backends.torch.sharded import fsdp_modules, is_sharded, layout, param_groups, ranks_of
from everstep.backends.torch.virtual_shards import VirtualShards
from everstep.contracts.group import DataRanks, named
from everstep.errors import ConfigError, StateError, some


def prepare(objects: Mapping[str, Any], data: DataRanks) -> None:
    """Make each DistributedDataParallel that trains the objects compute equal bits in each step and start.

    An optimizer of the state that makes an update of several steps gets to know the ranks.
    """
    wrappers = _wrappers(objects)
    for ddp in wrappers:
        _fix_buckets(ddp)
        _share_buffers(ddp)
    sharded = [model for model in models_of(objects) if fsdp_modules(model)]
    for layer in (layer for _, optimizer in optimizers(objects) for layer in layers(optimizer)):
        if isinstance(layer, MinibatchOptimizer):
            first = stepped_by(layer)[0]
            if is_sharded(first) and sharded:
                layer.ranks = Ranks(first.device, models=sharded)
            elif wrappers:
                layer.ranks = Ranks(wrappers[0].device, wrappers[0].process_group)


def require_synchronised(objects: Mapping[str, Any], data: DataRanks) -> None:
    """Raise ConfigError for objects that each rank would train on its own, or not bit for bit."""
    size = len(data.of)
    _refuse_old_fsdp(objects)
    _require_over_all(objects, data)
    wrappers = _wrappers(objects)
    averaged = {id(parameter) for ddp in wrappers for parameter in _averaged(ddp)}
    averaged |= virtual_shards.averaged_parameters(value for _, value in flatten(objects))
    names = {id(p): f"{entry}/{name}".rstrip("/") for entry, name, p in model_parameters(objects)}
    alone = [
        names.get(id(parameter), f"parameter {index} of {owner!r}")
        for owner, index, parameter in stepped_parameters(objects)
        if parameter.requires_grad and id(parameter) not in averaged and not is_sharded(parameter)
    ]
    # ranks that all read the whole batch compute equal gradients: each save compares the parameters
    if alone and data.size > 1:
        remedy = (
            "no wrapper averages the gradients; wrap the model before the loop, model = "
            "everstep.torch.parallel(model), and train with what it returns (a Task: parallel=True)"
        )
        if data.shared or any(map(fsdp_modules, models_of(objects))):
            mesh = ", mesh=mesh['dp']" if data.shared else ""
            remedy = (
                f"call fully_shard(model{mesh}) for the model as a whole, too, after parallelize_module and "
                "before the optimizer is made from its parameters"
            )
        raise ConfigError(f"each of {size} ranks would train {some(alone)} on its own: {remedy}")
    for ddp in wrappers:
        averaging = dist.get_process_group_ranks(ddp.process_group)
        if not data.covered_by(averaging):
            raise ConfigError(
                f"the DistributedDataParallel of a {type(ddp.module).__name__} averages over "
                f"{len(averaging)} of {len(data.of)} ranks: leave out its process_group="
            )
        _refuse_hook(ddp, objects)
    if data.shared and any(isinstance(value, VirtualShards) for _, value in flatten(objects)):
        raise ConfigError(f"VirtualShards divides each batch among all {size} ranks: leave out data_ranks=")


def exact_on_any_ranks(objects: Mapping[str, Any]) -> bool:
    by_shards = virtual_shards.averaged_parameters(value for _, value in flatten(objects))
    stepped = [parameter for _, _, parameter in stepped_parameters(objects) if parameter.requires_grad]
    return bool(stepped) and all(id(parameter) in by_shards for parameter in stepped)


def _wrappers(objects: Mapping[str, Any]) -> list[DistributedDataParallel]:
    """Find what averages gradients of the state, also outside it: a state may hold the bare model.

    The order is that of the parameters in the state, on all ranks: each wrapper makes collectives.
    """
    order: dict[int, int] = {}
    for *_, parameter in (*model_parameters(objects), *stepped_parameters(objects)):
        order.setdefault(id(parameter), len(order))
    places = {
        ddp: min((order[id(p)] for p in _averaged(ddp) if id(p) in order), default=-1)
        for ddp in alive_modules()
        if isinstance(ddp, DistributedDataParallel)
    }
    return sorted((ddp for ddp, place in places.items() if place >= 0), key=places.__getitem__)


def _averaged(ddp: DistributedDataParallel) -> Iterator[Tensor]:
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield parameter


def _refuse_old_fsdp(objects: Mapping[str, Any]) -> None:
    home = sys.modules.get("torch.distributed.fsdp")
    for entry, value in flatten(objects):
        parts = value.modules() if isinstance(value, Module) and home is not None else ()
        if any(isinstance(part, home.FullyShardedDataParallel) for part in parts):  # type: ignore[union-attr]
            raise ConfigError(
                f"state entry {entry!r} is a FullyShardedDataParallel, which keeps its weights in flat "
                "parameters; use torch.distributed.fsdp.fully_shard(model) instead"
            )


def _require_over_all(objects: Mapping[str, Any], data: DataRanks) -> None:
    """Refuse a sharded parameter whose gradient is not that of the whole batch.

    `fully_shard` averages gradients over its mesh.  What tensor parallelism divides is computed by all its
    ranks together, from the part of the batch that they read.
    """
    stepped = {id(parameter) for *_, parameter in stepped_parameters(objects) if parameter.requires_grad}
    groups = [group for model in models_of(objects) for group in param_groups(model)]
    pairs = [(group, each) for group in groups for each in group.fsdp_params]
    over = {id(each.sharded_param): ranks_of(group.mesh_info.mesh) for group, each in pairs}
    inside = {id(each.sharded_param): _beside(group, each) for group, each in pairs if each.is_dtensor}
    for entry, name, parameter in model_parameters(objects):
        if not is_sharded(parameter):
            continue
        what = repr(f"{entry}/{name}".rstrip("/"))
        try:
            layout(parameter)
        except StateError as error:
            raise ConfigError(f"{what}: {error}") from None
        averaging = over.get(id(parameter), [dist.get_rank()])
        if id(parameter) in stepped and not data.covered_by(averaging):
            why = _not_whole(data, averaging)
            raise ConfigError(f"{what}: its gradient is that of {named(averaging)}, {why}")
        dividing = inside.get(id(parameter), [])
        if len({data.of[rank] for rank in dividing}) > 1:
            raise ConfigError(
                f"{what} is divided by tensor parallelism over {named(dividing)}, to which data_ranks= hands "
                "different samples: give data_ranks=mesh['dp'] of the mesh that parallelize_module divides"
            )


def _beside(group: Any, parameter: Any) -> list[int]:
    """Return the ranks of tensor parallelism that hold a parameter of `fully_shard` together."""
    mesh, spmd = parameter._unsharded_dtensor_spec.mesh, getattr(group.mesh_info, "dp_mesh_dims", None)
    if spmd is not None:  # one mesh for both
        names = {*mesh.mesh_dim_names} - {*spmd.shard_names, *spmd.replicate_names}
        if not names:
            return []
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names if name in names)]
    return ranks_of(mesh)


def _not_whole(data: DataRanks, averaging: list[int]) -> str:
    if not data.shared:
        return (
            "alone, and each rank is handed samples of its own: for tensor parallelism give data_ranks=1, or "
            "data_ranks=mesh['dp'], the mesh of fully_shard; else call fully_shard(model) over all ranks"
        )
    read = ", ".join(str(data.of[rank]) for rank in averaging)
    parts = f"which read the part {read} of each batch, of {data.size} parts (data_ranks=)"
    return f"{parts}: after parallelize_module, call fully_shard(model, mesh=mesh['dp']) with that mesh"


_PRECISION = "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"


def _refuse_hook(ddp: DistributedDataParallel, objects: Mapping[str, Any]) -> None:
    """Refuse a communication hook that keeps what no checkpoint has, as PowerSGD's error feedback."""
    saved = {id(value) for _, value in flatten(objects)}
    for hook, state in ddp._comm_hooks:
        stateless = isinstance(state, type(None) | dist.ProcessGroup | weakref.ref) or (
            type(state).__module__ == _PRECISION
        )
        if not stateless and id(state) not in saved:
            raise ConfigError(
                f"the communication hook {getattr(hook, '__qualname__', hook)} keeps a "
                f"{type(state).__name__}, which the state does not save; make it an entry of the state, or "
                "use a hook without state, such as torch's fp16_compress_hook"
            )


def _fix_buckets(ddp: Any) -> None:
    """Give the gradients their final places in buckets, which torch chooses after the first backward pass.

    How an all-reduce over three or more ranks rounds depends on an element's place in its bucket.  torch
    begins with one layout and changes to that of the order in which gradients became ready, so the first
    step (with static_graph the first two) of each start has other bits.  Here the reducer is made anew, as
    torch does for a pickled model, and takes the final layout at once: parameters from the last to the first,
    which is about the order of a backward pass.  No gradient, hook, buffer or random number is touched.
    """
    # without static_graph, find_unused_parameters keeps torch's first layout
    changes = ddp.static_graph or not ddp.find_unused_parameters
    if not changes or not hasattr(ddp, "reducer") or ddp._use_python_reducer:
        return
    hook = str(ddp._get_ddp_logging_data().get("comm_hook"))
    parameters, sparse = ddp._build_params_for_reducer()
    parameters.reverse()
    sparse.reverse()
    ddp.reducer._remove_autograd_hooks()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    _take_settings(ddp, hook)
    ddp.reducer._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    assert ddp._has_rebuilt_buckets, "torch did not take the layout"


def _take_settings(ddp: Any, hook: str) -> None:
    """Give a new reducer what the program has set; torch knows a `hook` of its own by the name alone."""
    c10d: Any = dist
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for function, state in ddp._comm_hooks:
        c10d._register_comm_hook(ddp.reducer, state, function)
        ddp.logger._set_comm_hook_name(hook)
    if not ddp._comm_hooks and hook.startswith(prefix := "BuiltinCommHookType."):
        ddp._register_builtin_comm_hook(getattr(c10d.BuiltinCommHookType, hook.removeprefix(prefix)))
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if ddp._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in _averaged(ddp)):
        ddp.reducer._set_optimizer_in_backward()


def _share_buffers(ddp: Any) -> None:
    """Give all ranks the buffers of rank 0 after each forward pass, and now.

    torch does so before the next pass.  In between, each rank has statistics of its own: an evaluation, an
    average of the model and a checkpoint would take these, and a resume gives all ranks those of rank 0.
    What a training computes is the same either way.
    """
    if not ddp.forward_sync_buffers or hasattr(ddp, "buffer_hook"):
        return  # left to the program, or done already
    if ddp.modules_buffers:
        ddp._sync_buffers()
    ddp.forward_sync_buffers = False
    ddp.register_forward_hook(_after_forward)


def _after_forward(ddp: Any, inputs: Any, output: Any) -> None:
    # in an evaluation the ranks need not make equally many passes
    trains = torch.is_grad_enabled() or bare(ddp).training
    # in `no_sync`, too, where torch leaves it out: a save may stand inside a window
    if trains and ddp.modules_buffers:
        ddp._sync_buffers()
