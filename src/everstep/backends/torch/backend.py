"""Backend for torch: tensors, scalars, random state and facts about the machine."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from everstep.backends.torch import exact_ddp, sharded
from everstep.backends.torch.model_wrappers import (
    around,
    flatten,
    model_parameters,
    models_of,
    shapes_watched,
    tensors_of,
)
from everstep.backends.torch.sharded import is_sharded, local
from everstep.backends.torch.tensor_memory import NAMES, PLAIN, LateTensor, digest_small, host_view, place_of
from everstep.backends.torch.torch_entries import AttributesEntry, make_entry
from everstep.backends.torch.update_counter import TorchUpdateCounter
from everstep.contracts.state import ArrayFacts, Backend, HostArray, LazyArray, Region, Unread
from everstep.errors import MetricError, StateError

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_CURRENT = "current"
"""The device in a random state that is for whichever device is current at its restore."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type, as in `Unread`."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(
            f"torch {torch.__version__} lacks the saved dtype {name!r}; use the torch that wrote it"
        )
    return dtype


@dataclass
class _Host(HostArray):
    """Host buffer with the view that fills it; both are kept, as making them takes longer than filling."""

    elements: Tensor = field(default_factory=torch.Tensor, repr=False)


class TorchBackend(Backend):
    """Backend for torch's objects; its global random state is that of the CPU and of every CUDA device."""

    name = "torch"
    array_types: tuple[type, ...] = (Tensor,)
    digest_small = staticmethod(digest_small)
    host_view = staticmethod(host_view)
    region = staticmethod(sharded.region)
    mesh = staticmethod(sharded.place_in_mesh)
    entry = staticmethod(make_entry)
    update_counter = staticmethod(TorchUpdateCounter)
    require_synchronised = staticmethod(exact_ddp.require_synchronised)
    exact_on_any_ranks = staticmethod(exact_ddp.exact_on_any_ranks)
    prepare_ranks = staticmethod(exact_ddp.prepare)
    shapes_watched = staticmethod(shapes_watched)

    def attributes(self, owner: Any, objects: Mapping[str, Any]) -> AttributesEntry | None:
        is_plain = isinstance(owner, Hashable) and not isinstance(owner, torch.nn.Module)
        return AttributesEntry(owner, objects) if is_plain else None

    def random_state(self) -> Any:
        """Return {"cpu": state}; once CUDA is in use, "cuda" with a state for each device, and "device".

        That is the number of the current one: a rank that sees all devices draws on its own.
        """
        # A program that does not use CUDA must not have it initialised by this question.
        state: dict[str, Any] = {"cpu": torch.default_generator.get_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
            state["device"] = torch.cuda.current_device()
        return state

    def set_random_state(self, state: Any) -> None:
        torch.default_generator.set_state(state["cpu"])
        devices = state.get("cuda", [])
        here = torch.cuda.device_count() if devices else 0
        for index, device_state in enumerate(devices[:here]):
            torch.cuda.set_rng_state(device_state, "cuda" if state.get("device") == _CURRENT else index)
        if len(devices) > here:
            warnings.warn(
                f"the random state of {len(devices)} CUDA devices is saved and {here} are here: the run "
                "continues, but draws other random numbers; for the same ones, start it on as many devices",
                stacklevel=2,
            )

    def portable_random(self, state: Any) -> Any:
        if type(state.get("device")) is not int:
            return state
        return {"cpu": state["cpu"], "cuda": [state["cuda"][state["device"]]], "device": _CURRENT}

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        tensor, name, shape, extra, region = _describe(array)
        form = (name, shape, extra, region)
        if isinstance(reuse, _Host) and (reuse.dtype, reuse.shape, reuse.extra, reuse.region) == form:
            host = reuse
            host.region = region  # equal, and of the layout that the tensor has now
        else:
            data = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda).numpy()
            elements = _elements(data, tensor.dtype, shape)
            host = _Host(name, shape, data, self.name, extra, region, elements)
        try:
            host.elements.copy_(tensor)
        except NotImplementedError as error:
            raise StateError(f"torch cannot copy a {tensor.dtype} tensor: save .view(torch.uint8)") from error
        return host

    def in_place(self, array: Any) -> HostArray:
        tensor, name, shape, extra, region = _describe(array)
        view = host_view(tensor) if tensor.is_contiguous() else None
        if view is None:
            return LazyArray(name, shape, self.name, extra, region, tensor.nbytes, lambda: _fetched(tensor))
        return HostArray(name, shape, view.reshape(-1).view(np.uint8), self.name, extra, region)

    def from_host(self, host: HostArray) -> Tensor:
        extra = host.extra
        dtype = _dtype(extra.get("dtype", host.dtype))
        if dtype.itemsize * math.prod(host.shape) != host.nbytes:
            raise StateError(
                f"{host.nbytes} saved bytes are not a tensor of {dtype} {host.shape}: "
                "the checkpoint is damaged or was not written by everstep; resume from another one"
            )
        saved = _elements(host.data, dtype, host.shape)
        strides = extra.get("strides") or saved.stride()
        tensor = torch.empty_strided(
            host.shape, strides, dtype=dtype, device=_device(extra.get("device", "cpu"))
        )
        tensor.copy_(saved)
        if isinstance(host.region, sharded.Placed):
            return host.region.tensor(tensor)
        if extra.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=extra.get("requires_grad", False))
        return tensor.requires_grad_(extra.get("requires_grad", False))

    def late(self, array: Unread) -> Tensor:
        return LateTensor.of(array, _dtype(array.dtype), lambda: self.from_host(array.read()))

    def facts(self, array: Any) -> ArrayFacts:
        return ArrayFacts(dtype_name(array.dtype), place_of(array))

    def pack(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, Tensor):
            if value.layout is not torch.sparse_coo:
                return None
            raw = value.detach()
            parts = {"indices": raw._indices(), "values": raw._values()}
            return "sparse", {**parts, "shape": list(raw.shape), "coalesced": raw.is_coalesced()}
        if type(value) is torch.Size:
            return "size", list(value)
        if isinstance(value, torch.dtype):
            return "dtype", str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return "device", str(value)
        return None

    def unpack(self, kind: str, tree: Any) -> Any:
        if kind == "sparse":
            parts = (tree["indices"], tree["values"], tree["shape"])
            return torch.sparse_coo_tensor(*parts, is_coalesced=tree["coalesced"], check_invariants=True)
        if kind == "size":
            return torch.Size(tree)
        if kind == "device":
            return torch.device(tree)
        return _dtype(tree)

    def scalar(self, value: Any) -> Any:
        if value.is_cpu:
            try:
                return float(value.item())
            except (RuntimeError, TypeError):
                pass
        if value.is_nested:
            raise MetricError(
                "a metric is one real number, got a nested tensor: reduce its parts, as with .unbind()"
            )
        if not value.is_cpu and value.numel() == 1 and not value.is_complex() and not value.is_meta:
            # A copy: the program may change its tensor before the value is read.
            return value.detach().clone()
        raise MetricError(
            f"a metric is one real number, got a {value.dtype} tensor of shape {tuple(value.shape)} on "
            f"{value.device}: reduce it, for instance with .mean(), and take the real part if it is complex"
        )

    def read_scalars(self, values: Sequence[Any]) -> list[float]:
        """Read values with one transfer for each device and dtype; floats pass through."""
        floats = [value if isinstance(value, float) else 0.0 for value in values]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                groups.setdefault((value.device, value.dtype), []).append(index)
        for indices in groups.values():
            read = torch.stack([values[index].reshape(()) for index in indices]).tolist()
            for index, number in zip(indices, read, strict=True):
                floats[index] = float(number)
        return floats

    def rows(self, array: Any, order: NDArray[np.int64]) -> Callable[[slice], Any]:
        index = torch.from_numpy(order).to(array.device)
        if array.is_contiguous():  # twice as fast as an index in brackets; of other tensors it copies all
            return lambda places: array.index_select(0, index[places])
        return lambda places: array[index[places]]

    def is_deterministic(self) -> bool:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True
        return torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark

    def parameters(self, objects: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], bool]]:
        """List the parameters; an averaged copy of a model (EMA, SWA) is left out."""
        averages = torch.optim.swa_utils.AveragedModel
        own = {name: value for name, value in flatten(objects) if not isinstance(value, averages)}
        return [
            (f"{entry}/{name}".rstrip("/"), tuple(parameter.shape), parameter.requires_grad)
            for entry, name, parameter in model_parameters(own)
            if name or parameter.requires_grad
        ]

    @contextmanager
    def evaluation_mode(self, objects: Mapping[str, Any], *, grad: bool = False) -> Iterator[None]:
        models = models_of(objects)
        models += around(models)
        # Each submodule has a mode of its own: a frozen part may be in evaluation mode during training.
        before = [(module, module.training) for model in models for module in model.modules()]
        for model in models:
            model.eval()
        try:
            with nullcontext() if grad else torch.no_grad():
                yield
        finally:
            for module, training in before:
                module.training = training

    def synchronize(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def processes(self) -> int:
        group = torch.distributed
        return group.get_world_size() if group.is_available() and group.is_initialized() else 1

    def describe(self) -> dict[str, str]:
        facts = {"torch": str(torch.__version__), "torch_threads": str(torch.get_num_threads())}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
            facts |= {"cuda": str(torch.version.cuda), "cuda_devices": ", ".join(names)}
        return facts

    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        tensors = list(tensors_of(value for _, value in flatten(objects)))
        devices = {tensor.device for tensor in tensors} - {torch.device("cpu")}
        on_cuda = [torch.cuda.get_device_properties(each) for each in devices if each.type == "cuda"]
        names = {f"{each.name}, compute capability {each.major}.{each.minor}" for each in on_cuda}
        names |= {str(each) for each in devices if each.type != "cuda"}
        facts = _cpu_facts() | (_cuda_facts() if on_cuda else {})
        if names:
            facts["devices"] = "; ".join(sorted(names))
        if layout := sharded.arrangement(tensors):
            facts["layout"] = layout
        return facts


_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
)  # fmt: skip
"""Environment variables by which torch's libraries choose among kernels."""


def _cpu_facts() -> dict[str, str]:
    onednn: Any = torch.backends.mkldnn
    built = torch.__config__.show()
    libraries = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN (\S+)"}
    versions = {name: re.search(pattern, built) for name, pattern in libraries.items()}
    return {
        "version": str(torch.__version__),
        **{name: match[1] for name, match in versions.items() if match},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "onednn_matmul": onednn.matmul.fp32_precision,
        "onednn_conv": onednn.conv.fp32_precision,
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _cuda_facts() -> dict[str, str]:
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    attention = ("flash", "mem_efficient", "math", "cudnn")
    half_sums = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    return {
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(cudnn.version()),
        "cudnn_deterministic": str(cudnn.deterministic),
        "cudnn_benchmark": str(cudnn.benchmark),
        "cuda_matmul": cuda.matmul.fp32_precision,
        "cudnn_conv": cudnn.conv.fp32_precision,
        "half_precision_sums": " ".join(name for name in half_sums if getattr(cuda.matmul, name)),
        "attention": " ".join(name for name in attention if getattr(cuda, f"{name}_sdp_enabled")()),
    }


def _describe(tensor: Tensor) -> tuple[Tensor, str, tuple[int, ...], dict[str, Any], Region | None]:
    """Return what this process holds of a tensor, without its graph, and four fields of its `HostArray`."""
    region = None
    # by its exact type: a tensor of a framework's own kind may be sharded
    if type(tensor) not in PLAIN and is_sharded(tensor):
        region, tensor = sharded.region(tensor), local(tensor)
    if type(tensor) not in PLAIN:
        remedy = "run one batch through the model first" if is_lazy(tensor) else "save a plain tensor of it"
        raise StateError(f"a {type(tensor).__name__} cannot be saved: {remedy}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else tensor.layout
        raise StateError(f"a {kind} tensor cannot be saved: save a dense one (.to_dense(), .dequantize())")
    raw = tensor.detach()
    extra: dict[str, Any] = {}
    if raw.dtype not in NAMES:
        extra["dtype"] = str(raw.dtype).removeprefix("torch.")
    if raw.stride() != _c_strides(raw.shape):
        # Kernels may choose by strides (channels last), so they are kept; gaps and overlaps are not.
        strides = torch.empty_like(raw, device="meta").stride()
        if strides != _c_strides(raw.shape):
            extra["strides"] = list(strides)
    if not raw.is_cpu:
        extra["device"] = str(raw.device)
    if type(tensor) is torch.nn.Parameter:
        extra["parameter"] = True
    if tensor.requires_grad and tensor.is_leaf:
        extra["requires_grad"] = True
    return raw, NAMES.get(raw.dtype, "U8"), tuple(raw.shape), extra, region


@lru_cache(maxsize=4096)  # the shapes of a state are the same at each save
def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.  `is_contiguous` leaves dimensions of size 1 out."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _fetched(tensor: Tensor) -> NDArray[np.uint8]:
    """Copy a tensor's elements in C order to memory that is not pinned: torch would keep that."""
    data = np.empty(tensor.nbytes, np.uint8)
    _elements(data, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    return data


def _elements(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View bytes as a tensor; an empty tensor is made, because empty bytes cannot be viewed."""
    return torch.from_numpy(data).view(dtype).view(shape) if data.size else torch.empty(shape, dtype=dtype)


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return device


BACKEND = TorchBackend()
