"""Backend for NumPy: arrays, scalars, and random state, Python's, too."""

from __future__ import annotations

import ast
import math
import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.contracts.state import ArrayFacts, Backend, Entry, HostArray, LazyArray, Mismatch
from everstep.errors import MetricError, RestoreError, StateError

WHOLE = 1 << 16
"""Size in bytes up to which all elements of an array count in its digest: 2 us of a step."""

small_digest: Callable[[Any, int], int] = xxhash.xxh3_64_intdigest
"""(buffer of an array's elements in C order, seed ^ `layout_number`) -> the digest of a small array."""

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32",
    "float64": "F64", "complex64": "C64",
}  # fmt: skip
"""Names of NumPy's element types in safetensors; other types are kept as bytes with a description."""
_DTYPES = {name: np.dtype(numpy_name) for numpy_name, name in _NAMES.items()}


@lru_cache(maxsize=1024)
def layout_number(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int | None:
    """Digest an element type and a shape; None if elements have bytes beside their values."""
    if dtype.kind not in "biufc" or dtype.char in "gG":  # long doubles have unused bytes
        return None
    return xxhash.xxh3_64_intdigest(f"{dtype.str}{tuple(shape)}".encode())


def state_of(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy or torch as a tree that a checkpoint can hold.

    The modules `random` and `np.random` stand for the global generators.
    """
    if generator is random or isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_classic = generator is np.random or isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if is_classic else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Restore what `state_of` returned."""
    if generator is random or isinstance(generator, random.Random):
        if state["version"] != 3:
            raise RestoreError(
                f"Python's random state has version {state['version']}: resume with the Python that wrote it"
            )
        generator.setstate((3, tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class NumpyBackend(Backend):
    """Backend for NumPy arrays and scalars; the global random state is that of `np.random`'s functions."""

    name = "numpy"
    array_types: tuple[type, ...] = (np.ndarray, np.generic)

    def random_state(self) -> Any:
        return state_of(np.random)

    def set_random_state(self, state: Any) -> None:
        np.random.set_state(state)

    def seed(self, seed: int) -> None:
        """Seed `np.random`'s module-level functions, with the seed's lower 32 bits."""
        np.random.seed(seed % 2**32)

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        _refuse_array(array)
        name, extra = _describe(array)
        if reuse is not None and (reuse.dtype, reuse.shape, reuse.extra) == (name, array.shape, extra):
            host = reuse
        else:
            host = HostArray(name, array.shape, np.empty(array.nbytes, np.uint8), self.name, extra)
        np.copyto(host.data.view(array.dtype).reshape(array.shape), array)
        return host

    def in_place(self, array: Any) -> HostArray:
        _refuse_array(array)
        name, extra = _describe(array)
        if array.flags.c_contiguous:
            return HostArray(name, array.shape, array.reshape(-1).view(np.uint8), self.name, extra)
        form = (name, array.shape, self.name, extra, None, array.nbytes)
        return LazyArray(*form, lambda: self.to_host(array, None).data)

    def from_host(self, host: HostArray) -> NDArray[Any]:
        described = host.extra.get("dtype")
        dtype = _DTYPES[host.dtype] if described is None else _dtype(described)
        if dtype.hasobject or dtype.itemsize * math.prod(host.shape) != host.nbytes:
            raise StateError(
                f"{host.nbytes} saved bytes are not an array of {dtype} {host.shape}: "
                "the checkpoint is damaged or was not written by everstep; resume from another one"
            )
        order = host.extra.get("order", list(range(len(host.shape))))
        array = np.empty([host.shape[axis] for axis in order], dtype).transpose(np.argsort(order))
        np.copyto(array, host.data.view(dtype).reshape(host.shape))
        return array

    def facts(self, array: Any) -> ArrayFacts:
        interface = array.__array_interface__
        place = (interface["data"], array.shape, array.strides, array.dtype.str) if array.size else None
        return ArrayFacts(_NAMES.get(array.dtype.name, array.dtype.str), place)

    def pack(self, value: Any) -> tuple[str, Any] | None:
        if type(value) is np.str_:
            return "str", str(value)
        if type(value) is np.bytes_:
            return "bytes", bytes(value)
        if isinstance(value, np.generic) and value.dtype.char not in "VgG":
            return value.dtype.str, value.tobytes()
        return None

    def unpack(self, kind: str, tree: Any) -> Any:
        if kind == "str":
            return np.str_(tree)
        if kind == "bytes":
            return np.bytes_(tree)
        return np.frombuffer(tree, np.dtype(kind))[0]

    def scalar(self, value: Any) -> float:
        if value.size != 1:
            raise MetricError(f"a metric is one number, got an array of shape {value.shape}: use its .mean()")
        if value.dtype.kind not in "biuf":
            raise MetricError(f"a metric is a real number, got dtype {value.dtype}: convert it first")
        if np.ma.is_masked(value):
            raise MetricError(f"a metric is a number, got a masked {type(value).__name__}: give its value")
        return float(value.item())

    def digest_small(self, arrays: Sequence[Any], seed: int) -> tuple[int, int]:
        done = 0
        for array in arrays:
            if type(array) is not np.ndarray or array.nbytes > WHOLE or not array.flags.c_contiguous:
                break
            if (number := layout_number(array.dtype, array.shape)) is None:
                break
            seed = small_digest(array, seed ^ number)
            done += 1
        return seed, done

    def host_view(self, array: Any) -> NDArray[Any] | None:
        return None if isinstance(array, np.ma.MaskedArray) else np.asarray(array)

    def rows(self, array: Any, order: NDArray[np.int64]) -> Callable[[slice], Any]:
        return lambda places: array[order[places]]

    def entry(self, value: Any) -> Entry | None:
        if isinstance(value, np.ndarray):
            return ArrayEntry(value)
        if isinstance(value, np.random.Generator):
            return NumpyGeneratorEntry(value)
        if isinstance(value, np.random.RandomState):
            return GeneratorEntry(value)
        return None

    def parameters(self, objects: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, value.shape, True) for name, value in objects.items() if isinstance(value, np.ndarray)]

    def describe(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        built: Any = np.show_config(mode="dicts")
        blas = built.get("Build Dependencies", {}).get("blas", {})
        return {
            "version": np.__version__,
            "blas": f"{blas.get('name')} {blas.get('version')}",
            "simd": " ".join(built.get("SIMD Extensions", {}).get("found", ())),
            "blas_threads": _blas_threads(),
            **{name: os.environ[name] for name in ("OPENBLAS_CORETYPE",) if name in os.environ},
        }


class ArrayEntry(Entry):
    """Entry of an array; restored in place."""

    def __init__(self, array: NDArray[Any]) -> None:
        _refuse_array(array)
        if not array.flags.writeable:
            raise StateError(
                f"an array of {array.dtype} {array.shape} is read-only: use a copy, or hold it in Slot(array)"
            )
        self.array = array

    def save(self) -> Any:
        return self.array

    def check(self, tree: Any) -> Mismatch:
        saved = f"{tree.dtype} {tree.shape}" if isinstance(tree, np.ndarray) else f"a {type(tree).__name__}"
        live = f"{self.array.dtype} {self.array.shape}"
        return Mismatch([], [], [] if saved == live else [f"{saved} -> {live}"])

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        np.copyto(self.array, tree)

    def guarded(self, path: tuple[Any, ...]) -> bool:
        return bool(np.issubdtype(self.array.dtype, np.inexact))


class GeneratorEntry(Entry):
    is_random = True

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def save(self) -> Any:
        return state_of(self.generator)

    def form(self, tree: Any) -> str:
        """Name what two states of one kind of generator have in common."""
        if not isinstance(tree, dict):
            return f"a {type(tree).__name__}"
        return f"bit generator {tree['bit_generator']}" if "bit_generator" in tree else f"keys {list(tree)}"

    def check(self, tree: Any) -> Mismatch:
        saved, live = self.form(tree), self.form(self.save())
        return Mismatch([], [], [] if saved == live else [f"{saved} -> {live}"])

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        set_state_of(self.generator, tree)


class NumpyGeneratorEntry(GeneratorEntry):
    """Entry of a `np.random.Generator`: its bit generator's state, and the number of children spawned."""

    def as_seeded(self) -> bool:
        """Whether the state is the one that the seed gives, and a person chose that seed."""
        bits: Any = self.generator.bit_generator
        seeds = bits.seed_seq
        if not isinstance(seeds, np.random.SeedSequence):
            return False
        # The system's own entropy has 128 bits.
        chosen = not isinstance(seeds.entropy, int) or seeds.entropy.bit_length() <= 64
        return chosen and pickle.dumps(type(bits)(seeds).state) == pickle.dumps(bits.state)

    def save(self) -> Any:
        bits = self.generator.bit_generator
        seeds = bits.seed_seq
        state = getattr(seeds, "state", None) if isinstance(seeds, np.random.SeedSequence) else None
        return {"state": bits.state, "seed_sequence": state}

    def form(self, tree: Any) -> str:
        whole = isinstance(tree, dict) and tree.keys() >= {"state", "seed_sequence"}
        return super().form(tree["state"] if whole else tree)

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        bits = self.generator.bit_generator
        if tree["seed_sequence"] is None:
            bits.state = tree["state"]
        else:
            bits.__setstate__((tree["state"], np.random.SeedSequence(**tree["seed_sequence"])))


def _blas_threads() -> str:
    """Count the threads as the BLAS does when it is loaded: by its variables, else by the processors."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name):
            return os.environ[name]
    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def _refuse_array(array: NDArray[Any]) -> None:
    if array.dtype.char in "gG":
        raise StateError(f"{array.dtype} has other bits on other machines: convert it to float64, complex128")
    if type(array) is not np.ndarray:
        raise StateError(
            f"a {type(array).__name__} would come back as a plain array: save np.asarray(...) of it"
        )
    if array.dtype.hasobject or not array.dtype.itemsize:
        raise StateError(
            f"an array of dtype {array.dtype} holds Python objects or nothing: use numbers, or a list"
        )


def _describe(array: NDArray[Any]) -> tuple[str, dict[str, Any]]:
    extra: dict[str, Any] = {}
    name = _NAMES.get(array.dtype.name) if array.dtype.isnative else None
    if name is None:
        descr = np.lib.format.dtype_to_descr(array.dtype)
        extra["dtype"] = descr if isinstance(descr, str) else repr(descr)  # JSON has no tuples
    long = [axis for axis, size in enumerate(array.shape) if size > 1]
    order = long if len(long) < 2 else sorted(long, key=lambda axis: -abs(array.strides[axis]))
    if order != long:
        extra["order"] = [axis for axis in range(array.ndim) if axis not in long] + order
    return name or "U8", extra


def _dtype(text: str) -> np.dtype[Any]:
    descr: Any = ast.literal_eval(text) if text.startswith("[") else text
    return np.lib.format.descr_to_dtype(descr)


BACKEND = NumpyBackend()
