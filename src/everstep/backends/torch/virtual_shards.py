"""`everstep.torch.VirtualShards`: gradients whose bits do not depend on the number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from everstep.arguments import checked_keywords, integer
from everstep.backends.torch.data_rng import get_state, seed_all, set_state
from everstep.backends.torch.model_wrappers import bare, layers
from everstep.backends.torch.parallel import open_group, processes
from everstep.backends.torch.shard_buffers import ShardBuffers
from everstep.backends.torch.sharded import refuse_sharded
from everstep.contracts.tasks import counted
from everstep.errors import ConfigError, DataError, StateError

Values: TypeAlias = dict[str, Tensor]
"""Metrics by name, a real number each."""

_FACTS = "facts"
_REMEDY = (
    "choose a batch size that the number of shards divides, and drop_last=True where the last batch is "
    "shorter"
)
_CHUNK = 1 << 22
"""Elements that the ranks exchange at a time; each rank holds as many of each other rank."""

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
    shard's activations are in memory, as with accumulation.  On a GPU each call waits for the device once.

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
                f"the model is in a {type(model).__name__}, which averages gradients itself: give "
                "VirtualShards the model without everstep.torch.parallel"
            )
        for name, parameter in model.named_parameters():
            refuse_sharded(parameter, repr(name), "VirtualShards needs whole parameters on each rank")
        self._model = bare(model)
        if not self.parameters():
            raise ConfigError(
                f"no parameter of the {type(model).__name__} is trained (requires_grad), so there is "
                "nothing to average: leave out VirtualShards"
            )
        open_group(on_cuda=self._device.type == "cuda")
        self.ranks = processes()
        self._rank = dist.get_rank() if self.ranks > 1 else 0
        if self.count % self.ranks:
            raise ConfigError(
                f"{self.count} shards cannot be divided among {self.ranks} ranks: start 1, 2, 4 ... ranks, "
                f"at most {self.count}; or give VirtualShards a larger power of two"
            )
        self._passes = 0
        self._seed = torch.initial_seed() & (2**63 - 1)
        self._begin_alike()
        _alive.add(self)

    def parameters(self) -> list[Tensor]:
        """List the parameters that are trained now."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    @property
    def _device(self) -> torch.device:
        return self.parameters()[0].device

    def _begin_alike(self) -> None:
        """Give all ranks the weights, the buffers and the seed of rank 0."""
        if self.ranks == 1:
            return
        seed = torch.tensor([self._seed], device=self._device)
        with torch.no_grad():
            for tensor in (seed, *self._model.parameters(), *self._model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        self._seed = int(seed)

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

    # -------------------------------------------------------------------------------- one pass

    def backward(
        self,
        batch: Any,
        forward: Callable[[Any], Any],
        scale: Callable[[Tensor], Tensor] | None = None,
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
        parts = _divided(batch, own)
        parameters, buffers = self.parameters(), ShardBuffers(self._model)
        tree, single = _Tree(), False
        metrics: Values = {}
        with _own_random_state():
            for index, part in enumerate(parts):
                buffers.reset()
                _seed(self._key(self._rank * own + index))
                metrics, single = _metrics(forward(part))
                loss = metrics["loss"] if scale is None else scale(metrics["loss"])
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                alike = [*_squared(counted(part) or 0), *chain(*map(_squared, buffers.changes()))]
                facts = [*metrics.values(), *alike, *_used(gradients)]
                tree.add(_flat(parameters, gradients, buffers.averaged(), facts))
        self._passes += 1
        total = tree.total
        for flat in total.values():
            self._across_ranks(flat)
            flat.mul_(1 / self.count)  # a power of two: exact
        told = total.pop(_FACTS)
        values, (mean, square, *rest) = told[: len(metrics)], told[len(metrics) :].tolist()
        if square != mean**2:
            raise DataError(
                f"the ranks have parts of different lengths of a batch of {mean * self.count:.0f} samples, "
                f"which cannot be divided into {self.count} shards of equal size; {_REMEDY}"
            )
        counters = buffers.counters()
        _require_alike(counters, rest[: 2 * len(counters)])
        buffers.put(_hand_out(total, parameters, rest[2 * len(counters) :], buffers.averaged()))
        found = {name: values[index].clone() for index, name in enumerate(metrics)}
        return found["loss"] if single else found

    def _key(self, shard: int) -> int:
        text = f"{self._seed}/{self._passes}/{shard}".encode()
        return xxhash.xxh3_64_intdigest(text) >> 1

    def _across_ranks(self, flat: Tensor) -> None:
        """Replace the sum over this rank's shards by that over all: the upper levels of the tree."""
        if self.ranks == 1:
            return
        for chunk in torch.split(flat, _CHUNK):
            parts = [torch.empty_like(chunk) for _ in range(self.ranks)]
            dist.all_gather(parts, chunk)
            tree = _Tree()
            for part in parts:
                tree.add({"": part})
            chunk.copy_(tree.total[""])


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Leave the global random states as they were: the rest of the program draws from these."""
    state = get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _seed(key: int) -> None:
    seed_all(key)
    torch.manual_seed(key)  # devices, too


class _Tree:
    """Sum of tensors by name, as a binary tree over the order in which they come; as many as a power of two.

    At most one sum for each level is held.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, dict[str, Tensor]]] = []

    def add(self, values: dict[str, Tensor]) -> None:
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, left = self._sums.pop()
            values = {name: left[name].add_(value) for name, value in values.items()}
            level += 1
        self._sums.append((level, values))

    @property
    def total(self) -> dict[str, Tensor]:
        ((_, values),) = self._sums
        return values


def _flat(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    buffers: Sequence[Tensor],
    facts: Sequence[object],
) -> dict[str, Tensor]:
    """Copy what one shard gives into one tensor for each kind of elements: each is exchanged as a whole."""
    found: dict[str, list[Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(
                f"VirtualShards cannot add {gradient.layout} gradients: make dense ones (sparse=False)"
            )
        value = torch.zeros_like(parameter) if gradient is None else gradient
        found.setdefault(_kind(parameter), []).append(value.detach().reshape(-1))
    for buffer in buffers:
        found.setdefault(_kind(buffer), []).append(buffer.detach().reshape(-1))
    device = parameters[0].device
    told = [torch.as_tensor(fact).detach().reshape(1).to(device, torch.float64) for fact in facts]
    return {**{kind: torch.cat(values) for kind, values in found.items()}, _FACTS: torch.cat(told)}


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


def _hand_out(
    total: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    used: Sequence[float],
    buffers: Sequence[Tensor],
) -> list[Tensor]:
    """Give the means to gradients, and return those of buffers.

    A parameter that no shard has used gets no gradient, as always.
    """
    rest = dict(total)

    def taken(like: Tensor) -> Tensor:
        kind = _kind(like)
        first, rest[kind] = rest[kind].tensor_split([like.numel()])
        return first.view(like.shape)

    for parameter, anywhere in zip(parameters, used, strict=True):
        gradient = taken(parameter)
        if anywhere and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        elif anywhere:
            parameter.grad.add_(gradient)  # type: ignore[union-attr]
        if anywhere:
            # as a backward pass does: an optimizer may step in such a hook
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)
    return [taken(buffer) for buffer in buffers]


def _require_alike(names: Sequence[str], told: Sequence[float]) -> None:
    """Require that each shard has made the same of the buffers that have no mean."""
    for name, mean, square in zip(names, told[::2], told[1::2], strict=True):
        if square != mean**2:
            raise ConfigError(
                f"the shards of a batch change the buffer {name!r} of the model in different ways, and only "
                "buffers of floating-point numbers are averaged over the shards: make it a float64 tensor"
            )


def _used(gradients: Sequence[Tensor | None]) -> list[float]:
    return [float(gradient is not None) for gradient in gradients]


def _squared(number: Tensor | float) -> list[Tensor | float]:
    """Return a number and its square: by the means of both it is seen whether all shards have the same."""
    return [number, number * number]


def _metrics(result: Any) -> tuple[Values, bool]:
    """Return the metrics of a forward pass, and whether it returned the loss alone."""
    single = isinstance(result, Tensor)
    found = {"loss": result} if single else result
    if not isinstance(found, Mapping) or not isinstance(found.get("loss"), Tensor):
        raise ConfigError(
            f'forward returned {result!r:.80}: return the loss, or a mapping with the tensor "loss"'
        )
    values = {name: torch.as_tensor(value) for name, value in found.items()}
    for name, value in values.items():
        if value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"forward returned {name!r} of shape {tuple(value.shape)} {value.dtype}: return one real "
                "number, a mean over the shard's samples"
            )
    return values, single


def _aligned(part: Any) -> Any:
    """Copy a part to memory of its own: kernels choose by the address, and a part of more begins anywhere."""
    if isinstance(part, np.ndarray):
        own = np.empty_like(part, order="C") if part.dtype.hasobject else _aligned_like(part)
        own[...] = part
        return own
    return part.clone(memory_format=torch.preserve_format)


def _aligned_like(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make an array whose memory begins where torch would let it begin; NumPy's may begin elsewhere."""
    memory = torch.empty(part.nbytes, dtype=torch.uint8).numpy()
    own: np.ndarray[Any, Any] = memory.view(part.dtype).reshape(part.shape)
    return own


def _divided(batch: Any, count: int) -> list[Any]:
    """Divide a batch into parts of equal size along the first dimension."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim == 0 or len(batch) == 0 or len(batch) % count:
            raise DataError(
                f"an array of shape {tuple(batch.shape)} cannot be divided into {count} equal shards on "
                f"this rank; {_REMEDY}"
            )
        each = len(batch) // count
        return [_aligned(batch[start : start + each]) for start in range(0, len(batch), each)]
    if isinstance(batch, Mapping):
        parts = {name: _divided(value, count) for name, value in batch.items()}
        return [{name: values[index] for name, values in parts.items()} for index in range(count)]
    if isinstance(batch, tuple | list):
        columns = [_divided(value, count) for value in batch]
        rows = ([values[index] for values in columns] for index in range(count))
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in rows]
    raise DataError(
        f"a batch holds a {type(batch).__name__}, which cannot be divided into shards: give arrays, "
        "also in tuples, lists and dictionaries"
    )


def require_saved(objects: Iterable[Any], parameters: Iterable[Tensor]) -> None:
    """Require that all that train the parameters are among the objects of the state.

    Raises:
        StateError: one is missing; says what to add.
    """
    if not _alive:
        return
    held, trained = set(map(id, objects)), set(map(id, parameters))
    for shards in _alive:
        if id(shards) not in held and not trained.isdisjoint(map(id, shards.parameters())):
            raise StateError(
                "the state lacks the VirtualShards of its model, whose random numbers a resume would repeat; "
                "add the object, as in state={'model': model, 'optimizer': optimizer, 'shards': shards}"
            )


def averaged(objects: Iterable[Any]) -> set[int]:
    """Identities of the parameters whose gradients the VirtualShards among the objects average."""
    return {id(p) for value in objects if isinstance(value, VirtualShards) for p in value.parameters()}
