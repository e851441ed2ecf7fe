"""`everstep.torch.VirtualShards`: gradients whose bits do not depend on the number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from everstep.arguments import checked_keywords, integer
from everstep.backends.torch.data_rng import get_state, seed_all, set_state
from everstep.backends.torch.model_wrappers import bare, layers
from everstep.backends.torch.parallel import open_group, processes, require_trainable
from everstep.backends.torch.sharded import refuse_sharded
from everstep.contracts.tasks import counted
from everstep.errors import ConfigError, DataError, StateError

_FACTS = "facts"
_REMEDY = "choose a batch size that the number of shards divides, and drop_last=True"
_CHUNK = 1 << 22
"""Elements that the ranks exchange at a time; each rank holds as many of each other rank."""
_ODD = -7046029254386353131
"""Odd constant of xxHash, as a signed 64-bit integer; torch multiplies without a check for overflow."""

_alive: weakref.WeakSet[VirtualShards] = weakref.WeakSet()
"""All that a program holds, for the checks of its state."""


class VirtualShards:
    """Gradients with equal bits on 1, 2, 4 ... ranks.

        shards = everstep.torch.VirtualShards(model, 4)
        state = {"model": model, "optimizer": optimizer, "shards": shards}
        ...
        loss = shards.backward((bx, by), lambda part: cross_entropy(model(part[0]), part[1]))
        optimizer.step()

    Each batch of all ranks is divided into `count` shards of equal size, whatever the number of ranks.  A
    forward and a backward pass run for each shard alone, on the rank that has its samples.  Gradients,
    metrics and buffers are averaged over the shards as a binary tree: the same additions in the same order on
    any number of ranks.  Random numbers of a shard (Python's, NumPy's and torch's) follow from the seed, the
    pass and the shard.

    The price is speed: the passes are smaller, and each rank receives the gradients of all others.  Only one
    shard's activations are in memory.  On a GPU each call waits for the device once.

    The object replaces `everstep.torch.parallel`, and must be an entry of the state.  All ranks begin with
    the weights and buffers of rank 0.  Equal bits need equal numbers of threads in each process, as
    `torch.set_num_threads` sets: torchrun sets OMP_NUM_THREADS=1.

    Args:
        model: the model without a wrapper of several ranks, on its device.
        count: number of shards, a power of two.  It must be a multiple of the number of ranks, and a divisor
            of the size of each batch.

    Raises:
        ConfigError: `count` does not fit the number of ranks, nothing in the model is trained, or the model
            is in a wrapper that averages gradients itself.
        StateError: a parameter is sharded.
    """

    @checked_keywords
    def __init__(self, model: Module, count: int) -> None:
        self.count = integer("count", count)
        if self.count & (self.count - 1):
            raise ConfigError(f"VirtualShards(count={count}): give a power of two, such as 4 or 8")
        if not isinstance(model, Module):
            raise ConfigError(f"VirtualShards({model!r:.80}): give a torch.nn.Module")
        if any(isinstance(layer, DistributedDataParallel | DataParallel) for layer in layers(model)):
            raise ConfigError(
                f"the model is in a {type(model).__name__}: give VirtualShards the model without parallel()"
            )
        for name, parameter in model.named_parameters():
            refuse_sharded(parameter, repr(name), "VirtualShards needs whole parameters on each rank")
        require_trainable(model, "VirtualShards")
        self._model = bare(model)
        device = self.parameters()[0].device
        open_group(on_cuda=device.type == "cuda")
        self.ranks = processes()
        self._rank = dist.get_rank() if self.ranks > 1 else 0
        if self.count % self.ranks:
            raise ConfigError(
                f"{self.count} shards cannot be divided among {self.ranks} ranks: start 1, 2, 4 ... ranks, "
                f"at most {self.count}; or give VirtualShards a larger power of two"
            )
        self._passes = 0
        self._seed = torch.initial_seed() & (2**63 - 1)
        if self.ranks > 1:  # all ranks begin with the weights, the buffers and the seed of rank 0
            seed = torch.tensor([self._seed], device=device)
            with torch.no_grad():
                for tensor in (seed, *self._model.parameters(), *self._model.buffers()):
                    dist.broadcast(tensor.detach(), 0)
            self._seed = int(seed)
        _alive.add(self)

    def parameters(self) -> list[Tensor]:
        """List the parameters that are trained now."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, int]:
        """Return the number of shards, the seed and the number of passes."""
        return {"count": self.count, "seed": self._seed, "passes": self._passes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the random numbers of a saved state.

        Raises:
            StateError: the saved number of shards is another, which gives other bits.
        """
        if state["count"] != self.count:
            raise StateError(
                f"the run was trained with VirtualShards(model, {state['count']}), and this program has "
                f"{self.count}, which gives other bits: give {state['count']}, or start in another directory"
            )
        self._seed, self._passes = state["seed"], state["passes"]

    def backward(
        self, batch: Any, forward: Callable[[Any], Any], scale: Callable[[Tensor], Tensor] | None = None
    ) -> Any:
        """Run `forward` and a backward pass for each shard, and add the mean gradients to `.grad`.

        All ranks call this for each step.

        Args:
            batch: this rank's part of the batch: an array, or arrays in tuples, lists and dictionaries, all
                of the same length.
            forward: called with the same of one shard; returns the loss, a mean over the shard's samples, or
                a mapping of metrics with "loss".  It must not change anything but buffers of the model.
            scale: applied to each loss before the backward pass, as `GradScaler.scale`.

        Returns:
            The mean over all shards of what `forward` returned, equal on all ranks, without a graph.

        Raises:
            DataError: the batch cannot be divided into shards of equal size.
            ConfigError: `forward` returned something else; a gradient is sparse; or a buffer of integers was
                changed in another way for each shard.
        """
        own = self.count // self.ranks
        parameters, buffers = self.parameters(), _Buffers(self._model)
        names: list[str] = []
        single = False

        def run(shard: int, part: Any) -> dict[str, Tensor]:
            nonlocal names, single
            buffers.reset()
            key = xxhash.xxh3_64_intdigest(f"{self._seed}/{self._passes}/{shard}".encode()) >> 1
            seed_all(key)
            torch.manual_seed(key)  # devices, too
            metrics, single = _metrics(forward(part))
            if names and names != list(metrics):
                both = f"the metrics {list(metrics)} for a shard, and {names} for one before"
                raise ConfigError(f"forward returned {both}: return the same of each")
            names = list(metrics)
            loss = metrics["loss"] if scale is None else scale(metrics["loss"])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            # the mean of a number and that of its square: by both it is seen whether all shards have the same
            alike = [each for n in (counted(part) or 0, *buffers.changes()) for each in (n, n * n)]
            used = [float(gradient is not None) for gradient in gradients]
            return _flat(parameters, gradients, buffers.floating(), [*metrics.values(), *alike, *used])

        with _own_random_state():
            parts = enumerate(_divided(batch, own), self._rank * own)
            total = _summed((run(shard, part) for shard, part in parts), own)
        self._passes += 1
        for flat in total.values():
            self._across_ranks(flat)
            flat.mul_(1 / self.count)  # a power of two: exact
        facts = total.pop(_FACTS)
        values, (mean, square, *remaining) = facts[: len(names)], facts[len(names) :].tolist()
        if square != mean**2:
            raise DataError(
                f"the ranks have parts of different lengths of a batch of {mean * self.count:.0f} samples, "
                f"which cannot be divided into {self.count} shards of equal size; {_REMEDY}"
            )
        for name in buffers.counters():
            mean, square, *remaining = remaining
            if square != mean**2:
                raise ConfigError(
                    f"the shards of a batch change the buffer {name!r} of the model in different ways, and "
                    "only buffers of floating-point numbers are averaged: make it a float64 tensor"
                )
        _hand_out(total, parameters, remaining, buffers)
        metrics = {name: values[index].clone() for index, name in enumerate(names)}
        return metrics["loss"] if single else metrics

    def _across_ranks(self, flat: Tensor) -> None:
        """Replace the sum over this rank's shards by that over all: the upper levels of the tree."""
        if self.ranks == 1:
            return
        for chunk in torch.split(flat, _CHUNK):
            parts = [torch.empty_like(chunk) for _ in range(self.ranks)]
            dist.all_gather(parts, chunk)
            chunk.copy_(_summed(({"": part} for part in parts), self.ranks)[""])


def _own_random_state() -> ExitStack:
    """Leave the global random states as they were: the rest of the program draws from these."""
    stack = ExitStack()
    stack.callback(set_state, get_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    return stack


def _summed(parts: Iterator[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Sum tensors by name as a binary tree over their order, of which one sum for each level is held."""
    if count == 1:
        return next(parts)
    left, right = _summed(parts, count // 2), _summed(parts, count // 2)
    return {name: left[name].add_(value) for name, value in right.items()}


class _Buffers:
    """The buffers of a model by their places, since a program may put another tensor into a place."""

    def __init__(self, model: Module) -> None:
        self._places = [
            (part._buffers, key, f"{path}.{key}".lstrip("."), tensor)
            for path, part in model.named_modules()
            for key, tensor in part._buffers.items()
        ]
        self._begun = [None if tensor is None else tensor.detach().clone() for *_, tensor in self._places]
        self._versions: list[int] = []

    def reset(self) -> None:
        """Give the model the buffers with which the first shard began."""
        for (holder, key, _, tensor), value in zip(self._places, self._begun, strict=True):
            holder[key] = tensor
            if tensor is not None and value is not None:
                tensor.copy_(value)
        self._versions = [0 if tensor is None else tensor._version for *_, tensor in self._places]

    def _current(self, inexact: bool) -> Iterator[tuple[int, str, Tensor]]:
        """Yield number, name and tensor of the buffers of inexact numbers, or of the others."""
        for index, (holder, key, name, _) in enumerate(self._places):
            tensor = holder.get(key)
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()) == inexact:
                yield index, name, tensor

    def floating(self) -> list[Tensor]:
        """List the buffers of which the mean over the shards is made: those of inexact numbers."""
        return [tensor for *_, tensor in self._current(inexact=True)]

    def put(self, means: Iterator[Tensor]) -> None:
        """Give the means to the buffers that `floating` lists: in place, unless the program replaces them."""
        for (index, _, current), mean in zip(list(self._current(inexact=True)), means, strict=True):
            holder, key, _, tensor = self._places[index]
            if current is tensor:
                current.copy_(mean)
            else:
                holder[key] = mean.clone()

    def counters(self) -> list[str]:
        """Names of the other buffers (counters, masks), which each shard has to change alike."""
        return [name for _, name, _ in self._current(inexact=False)]

    def changes(self) -> Iterator[Tensor | int]:
        """Yield for each of `counters` a digest of 20 bits of its change by the shard, 0 for none."""
        for index, _, now in self._current(inexact=False):
            begun = self._begun[index]
            # a large mask that nobody writes to is not read
            if now is self._places[index][3] and now._version == self._versions[index]:
                yield 0
                continue
            change = now.detach().to(torch.int64)
            if begun is not None and begun.shape == now.shape:
                change = change - begun.to(torch.int64)
            places = torch.arange(1, 2 * now.numel(), 2, device=now.device)
            yield (change.reshape(-1) * places * _ODD).sum() >> 44


def _flat(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    buffers: Sequence[Tensor],
    facts: Sequence[object],
) -> dict[str, Tensor]:
    """Copy what one shard gives into one tensor for each kind of elements: each is exchanged as a whole."""
    values: dict[str, list[Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(
                f"VirtualShards cannot add {gradient.layout} gradients: make dense ones (sparse=False)"
            )
        value = torch.zeros_like(parameter) if gradient is None else gradient
        values.setdefault(_kind(parameter), []).append(value.detach().reshape(-1))
    for buffer in buffers:
        values.setdefault(_kind(buffer), []).append(buffer.detach().reshape(-1))
    device = parameters[0].device
    values[_FACTS] = [torch.as_tensor(f).detach().reshape(1).to(device, torch.float64) for f in facts]
    return {kind: torch.cat(parts) for kind, parts in values.items()}


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


def _hand_out(
    means: dict[str, Tensor], parameters: Sequence[Tensor], used: Sequence[float], buffers: _Buffers
) -> None:
    """Give the means to gradients and buffers; a parameter that no shard has used gets none, as always."""

    def next_part(like: Tensor) -> Tensor:
        kind = _kind(like)
        first, means[kind] = means[kind].tensor_split([like.numel()])
        return first.view(like.shape)

    for parameter, anywhere in zip(parameters, used, strict=True):
        gradient = next_part(parameter)
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            parameter.grad.add_(gradient)
        # as a backward pass does: an optimizer may step in such a hook
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)
    buffers.put(next_part(buffer) for buffer in buffers.floating())


def _metrics(result: Any) -> tuple[dict[str, Tensor], bool]:
    """Return the metrics of a `forward`, and whether it returned the loss alone."""
    single = isinstance(result, Tensor)
    metrics = {"loss": result} if single else result
    if not isinstance(metrics, Mapping) or not isinstance(metrics.get("loss"), Tensor):
        raise ConfigError(
            f'forward returned {result!r:.80}: return the loss, or a mapping with the tensor "loss"'
        )
    values = {name: torch.as_tensor(value) for name, value in metrics.items()}
    for name, value in values.items():
        if value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"forward returned {name!r} of shape {tuple(value.shape)} {value.dtype}: return one real mean"
            )
    return values, single


def _aligned(part: Any) -> Any:
    """Copy a part to memory of its own: kernels choose by the address, and a part of more begins anywhere."""
    if not isinstance(part, np.ndarray):
        return part.clone(memory_format=torch.preserve_format)
    if part.dtype.hasobject:
        return part.copy()
    memory = torch.empty(part.nbytes, dtype=torch.uint8).numpy()  # begins where torch lets it begin
    own: np.ndarray[Any, Any] = memory.view(part.dtype).reshape(part.shape)
    own[...] = part
    return own


def _divided(batch: Any, count: int) -> list[Any]:
    columns: list[list[Any]] = []
    leaves, spec = tree_flatten(batch)
    if not leaves:
        raise DataError(f"the batch {batch!r:.80} holds no array to divide into shards: give arrays")
    for leaf in leaves:
        if not isinstance(leaf, Tensor | np.ndarray):
            raise DataError(
                f"a batch holds a {type(leaf).__name__}, which cannot be divided into shards: give arrays"
            )
        if leaf.ndim == 0 or len(leaf) == 0 or len(leaf) % count:
            raise DataError(
                f"an array of shape {tuple(leaf.shape)} cannot be divided into {count} equal shards on "
                f"this rank; {_REMEDY}"
            )
        each = len(leaf) // count
        columns.append([_aligned(leaf[start : start + each]) for start in range(0, len(leaf), each)])
    return [tree_unflatten(row, spec) for row in zip(*columns, strict=True)]


def require_saved(objects: Iterable[Any], parameters: Iterable[Tensor]) -> None:
    """Require that all that train the parameters are among the objects of the state."""
    ids, trained = set(map(id, objects)), set(map(id, parameters))
    for shards in _alive:
        if id(shards) not in ids and not trained.isdisjoint(map(id, shards.parameters())):
            raise StateError(
                "the state lacks the VirtualShards of its model, whose random numbers a resume would repeat; "
                "add the object, as in state={'model': model, 'optimizer': optimizer, 'shards': shards}"
            )


def averaged_parameters(objects: Iterable[Any]) -> set[int]:
    """Identities of the parameters whose gradients the VirtualShards among the objects average."""
    return {id(p) for value in objects if isinstance(value, VirtualShards) for p in value.parameters()}
