"""`everstep.torch.parallel`: a model whose gradients are averaged over the processes that train together."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from everstep.backends.torch.model_wrappers import layers
from everstep.backends.torch.sharded import refuse_sharded, window
from everstep.errors import ConfigError, StoreLostError, nearest

PAUSE = 0.05
"""Seconds at the end of a process with a process group, in which gloo's threads get Python's lock once more.

They let go of the last tensors then.  One that asks for the lock later aborts the process, as the interpreter
ends its thread inside a destructor.
"""
_OPTIONS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}


def parallel(model: Module, **options: Any) -> Module:
    """Make a model average its gradients over all processes that train together.

        model = everstep.torch.parallel(model)

    On one process this returns the model unchanged, so that a program with this line runs with and without
    torchrun.  On several it returns the model in torch's DistributedDataParallel, which gives all ranks the
    weights of rank 0.  A model that is in one already is returned unchanged.

    A process group that the program has initialised is used.  Otherwise one is initialised, and destroyed
    when the process ends: gloo for a model on the CPU; nccl for one on CUDA, which is moved to the device
    LOCAL_RANK.

    Args:
        model: the model, on its device.  Names in a checkpoint stay those of this bare model.
        options: arguments of DistributedDataParallel (bucket_cap_mb, find_unused_parameters ...).
    """
    if not isinstance(model, Module):
        raise ConfigError(f"parallel({model!r:.80}): give a torch.nn.Module")
    for name in options.keys() - _OPTIONS:
        raise ConfigError(f"parallel has no option {name!r}: {nearest(name, _OPTIONS)}")
    if processes() == 1:
        return model
    if any(isinstance(layer, DistributedDataParallel) for layer in layers(model)):
        if options:
            raise ConfigError(f"the model is in a DistributedDataParallel already: give {options} there")
        return model
    for name, parameter in model.named_parameters():
        refuse_sharded(parameter, repr(name), "its gradients are averaged already: leave out parallel(...)")
    if type(model).forward is Module.forward:
        raise ConfigError(
            f"the {type(model).__name__} has no forward: give each part that is called to parallel(...)"
        )
    require_trainable(model, "parallel(...) around it")
    kinds = {parameter.device.type for parameter in model.parameters()}
    open_group(on_cuda=kinds == {"cuda"})
    devices = {parameter.device for parameter in model.parameters()}
    if kinds == {"cuda"} and len(devices) == 1:
        device = devices.pop()
        if _made_here:  # every process has made the model on the first device
            device = torch.device("cuda", torch.cuda.current_device())
            model.to(device)
        options = {"device_ids": [device.index], **options}
    return DistributedDataParallel(model, **options)


def require_trainable(model: Module, what: str) -> None:
    """Refuse a model of which nothing is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"no parameter of the {type(model).__name__} is trained (requires_grad): leave out {what}"
        )


def launched(name: str) -> str:
    """Return a variable that launchers such as torchrun set; refuse a process without it."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set in one of several processes: set it as torchrun does")
    return value


def launched_number(name: str) -> int:
    value = launched(name)
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a number: set it as torchrun does")
    return int(value)


def processes() -> int:
    """Number of processes, from the process group or else from the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return launched_number("WORLD_SIZE") if os.environ.get("WORLD_SIZE") else 1


_made_here: list[int] = []
"""The process in which `open_group` has made the process group; a forked child leaves it alone."""


def _leave_group() -> None:
    """Destroy the group at the end of its process, which torch warns about otherwise."""
    if os.getpid() not in _made_here or not dist.is_initialized():
        return
    # After an error the others may be gone or inside a collective: nothing here may wait for them.
    if getattr(sys, "last_value", None) is None:
        time.sleep(PAUSE)
        dist.destroy_process_group()
    elif dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def open_group(on_cuda: bool) -> None:
    """Initialise the process group, and choose this process's CUDA device; with one process, do nothing."""
    if processes() == 1 or dist.is_initialized():
        return
    if on_cuda:
        count = torch.cuda.device_count()
        index = launched_number("LOCAL_RANK") if count > 1 else 0  # a launcher may show each process only one
        if index >= count:
            raise ConfigError(
                f"LOCAL_RANK={index} has none of {count} CUDA devices: use torchrun --nproc-per-node={count}"
            )
        torch.cuda.set_device(index)
    # After torchrun --max-restarts its store still has the addresses of processes that are gone, and
    # init_process_group uses them (pytorch#135712).  So all meet first, and have keys of their own.
    group = importlib.import_module("everstep.group").find_group()  # by its name: group loads backends
    store = group.store.below("torch/").store
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size)
    group.close()
    _made_here.append(os.getpid())
    atexit.register(_leave_group)


class Ranks:
    """The ranks that train one model; all of them call each method at the same place.

    Args:
        device: where the gradients are.
        group: the process group that averages them; None for all processes.
        models: the models that `fully_shard` divides, which average their gradients in each backward pass.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, models: Sequence[Module] = ()
    ) -> None:
        self._group, self._device, self._models = group, device, models
        self.size = dist.get_world_size(self._group)

    def means(self, values: Sequence[float | Tensor]) -> list[float] | list[Tensor]:
        """Return the mean over ranks of each number, in float64: equal bits on all ranks.

        Numbers on a GPU are returned as tensors there: reading them would wait for it.
        """
        means = torch.stack([self._number(value) for value in values])
        dist.all_reduce(means, group=self._group)
        means /= self.size
        return means.tolist() if means.is_cpu else list(means)

    def _number(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().reshape(()).to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that `no_sync` has kept from it; one that no rank has stays None."""
        if self._models:
            if window(self._models):
                raise ConfigError(
                    "a short window ends, and its gradients were not averaged: leave out "
                    "model.set_requires_gradient_sync(False), or flush no MinibatchOptimizer"
                )
            return
        having = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32).to(self._device)
        dist.all_reduce(having, dist.ReduceOp.MAX, group=self._group)
        for parameter, anywhere in zip(parameters, having.tolist(), strict=True):
            if anywhere:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad, group=self._group)
                parameter.grad = grad.div_(self.size)


FOREVER = timedelta(days=20)
"""The limit of a wait without a limit: torch takes 0 for none at all, and counts milliseconds in 32 bits."""

ANSWER = 10.0
"""Seconds for a host to accept a connection that was there before; torch asks for twice as long."""

_connections: dict[Any, Any] = {}
"""Connections by address or by the process group's store, kept until this process ends.

Rank 0's may be the server, which other ranks may still ask.
"""


def connect(limit: float) -> tuple[int, int, TorchStore]:
    """Return rank, size, and a connection to the store that all ranks see."""
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        groups: Any = dist.distributed_c10d._get_default_store()
        if groups not in _connections:
            _connections[groups] = _clone(groups, [])  # torch's threads wait in the process group's own
            atexit.register(time.sleep, PAUSE)
        own = _connections[groups]
    else:
        rank, size = launched_number("RANK"), launched_number("WORLD_SIZE")
        if not 0 <= rank < size:
            raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}: set RANK to 0 up to WORLD_SIZE - 1")
        own = _store_at_the_address(rank, limit)
    own.set_timeout(timedelta(seconds=limit))
    # without torchrun's restart count, which is each agent's own: an agent that joins later has another
    prefix = f"everstep/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/"
    return rank, size, TorchStore(PrefixStore(prefix, own))


def _store_at_the_address(rank: int, limit: float) -> Any:
    """Connect as torch's env:// rendezvous does, without its wait for all ranks, which names none of them."""
    host, port = launched("MASTER_ADDR"), launched_number("MASTER_PORT")
    if (host, port) in _connections:
        return _connections[host, port]
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = min(limit, ANSWER) if torchruns else limit
    with _lost_if_it_fails([], f"no store answers at {host}:{port} within {limit:g} s"):
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not torchruns,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,  # a later init_process_group of this process shares the server
        )
    _connections[host, port] = store
    return store


def _clone(store: Any, loss: list[str]) -> Any:
    limit = store.timeout
    with _lost_if_it_fails(loss):
        store.set_timeout(min(limit, timedelta(seconds=ANSWER)))  # the clone takes it
        clone = store.clone()
        store.set_timeout(limit)
        clone.set_timeout(limit)
        return clone


@contextmanager
def _lost_if_it_fails(
    loss: list[str], what: str = "the store of the processes that train together is gone"
) -> Iterator[None]:
    """Raise a failure of a request as `StoreLostError`; note it in `loss`, and make no request after it."""
    if loss:  # at each request torch would print a stack of C++
        raise StoreLostError(loss[0])
    try:
        yield
    except dist.DistError as error:
        first_line = str(error).partition("\n")[0]  # more are a stack of C++
        loss.append(
            f"{what} ({first_line}); check the process that hosts it (torchrun, or rank 0), then start again"
        )
        raise StoreLostError(loss[0]) from error


class TorchStore:
    """A connection to a store of torch.distributed, as a `KeyValueStore`; torch lets threads take turns."""

    def __init__(self, store: Any, loss: list[str] | None = None) -> None:
        self.store, self._loss = store, [] if loss is None else loss

    def clone(self) -> TorchStore:
        return TorchStore(_clone(self.store, self._loss), self._loss)

    def below(self, prefix: str) -> TorchStore:
        return TorchStore(PrefixStore(prefix, self.store), self._loss)

    def _ask(self, request: str, *arguments: Any) -> Any:
        with _lost_if_it_fails(self._loss):
            return getattr(self.store, request)(*arguments)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def set_all(self, keys: Sequence[str], value: str) -> None:
        self._ask("multi_set", list(keys), [value] * len(keys))

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def get(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self._ask("multi_get", list(keys))]

    def set_once(self, key: str, value: str) -> str:
        return str(self._ask("compare_set", key, "", value), "utf-8")

    def delete(self, key: str) -> None:
        self._ask("delete_key", key)

    def block(self, key: str) -> None:
        self._ask("wait", [key], FOREVER)
