"""Both backends of the house keep the contract of backends.

1. Each array comes back from host memory equal in type, dtype, shape and bits, in memory of its own; the host
   buffer is used again if it fits, and only then.
2. The global random state comes back, also through a checkpoint's encoding; a seed determines it.
3. A metric value is one real number, copied; anything else is a `MetricError`.
4. The framework's own objects have entries that restore them to the bit and refuse what does not fit.
5. Updates are counted when they happen, until the counter is closed; open gradients come back.
6. Evaluation mode, the table of parameters, the description and the fingerprint change nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from everstep import backends
from everstep.backends.numpy import NumpyBackend
from everstep.backends.torch.backend import TorchBackend
from everstep.contracts.group import DataRanks
from everstep.contracts.state import Backend, Entry, HostArray, Mismatch, Unread
from everstep.errors import MetricError
from everstep.state import Encoded, decode, digest, encode, isolated

_NUMPY_READS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64"}
_ROUNDS = 3

State = Mapping[str, Any]


def check_backend(
    backend: Backend,
    *,
    arrays: Sequence[Any],
    draw: Callable[[], Any],
    make: Callable[[], State],
    update: Callable[[State], object],
    accumulate: Callable[[State], object] | None = None,
) -> None:
    """Check every member of `everstep.contracts.state.Backend`.

    Args:
        arrays: an array of each dtype and memory order that the framework has.
        draw: draws random numbers from the framework's global state.
        make: makes the framework's own objects, as a user passes them in `state=`.
        update: trains the objects for a step.
        accumulate: computes gradients without a step; None if the framework keeps no gradients.
    """
    with isolated():
        _check_facts(backend)
        _check_fingerprint(backend, make())
        for array in arrays:
            _check_round_trip(backend, array)
        _check_reuse(backend, arrays)
        _check_random_state(backend, draw)
        _check_scalars(backend, {backend.to_host(array, None).dtype for array in arrays})
        _check_entries(backend, make, update)
        _check_updates(backend, make, update)
        if accumulate is not None:
            _check_gradients(backend, make, update, accumulate)
        _check_evaluation_mode(backend, make(), update)


def _check_fingerprint(backend: Backend, state: State) -> None:
    before = encode(backend.random_state())
    found = backend.fingerprint(state)
    texts = all(isinstance(text, str) for pair in found.items() for text in pair)
    assert found and texts, f"fingerprint() gives {found!r}: give strings by name"
    assert backend.fingerprint(state) == found, "fingerprint() gives something else the second time"
    assert digest(encode(backend.random_state())) == digest(before), "fingerprint() draws random numbers"


def _check_facts(backend: Backend) -> None:
    assert isinstance(backend.name, str) and backend.name, f"name {backend.name!r}: give a string"
    types = backend.array_types
    assert isinstance(types, tuple) and all(isinstance(t, type) for t in types), f"array_types {types!r}"
    facts = backend.describe()
    texts = all(isinstance(text, str) for pair in facts.items() for text in pair)
    assert facts and texts, f"describe() gives {facts!r}: give strings by name"
    assert backend.processes() == 1, (
        f"processes() is {backend.processes()}: there is one process here, outside any group"
    )
    assert backend.mesh(object()) is None, "mesh() takes an object that is not the framework's"
    data = DataRanks(range(2))
    backend.require_synchronised({}, data)  # a state without models is refused by nobody
    backend.prepare_ranks({}, data)
    assert not backend.exact_on_any_ranks({}), "exact_on_any_ranks() answers for a state without models"
    assert backend.entry(object()) is None, "entry() takes an object that is not the framework's"
    assert backend.pack(object()) is None, "pack() takes an object that is not the framework's"


# ----------------------------------------------------------------------------------------- arrays


def _check_round_trip(backend: Backend, array: Any) -> None:
    what = f"{array.dtype} {tuple(array.shape)}"
    assert issubclass(type(array), backend.array_types), f"{what}: {type(array)} is not among array_types"
    host = backend.to_host(array, None)
    data = host.data
    plain = data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous and data.flags.writeable
    assert plain, f"{what}: the host data must be uint8, 1-D, contiguous and writable"
    assert host.backend == backend.name, f"{what}: the host array names the backend {host.backend!r}"
    assert host.shape == tuple(array.shape), f"{what}: the host array has shape {host.shape}"
    _require_values(array, host, what)
    again = backend.from_host(host)
    same = type(again) is type(array) and again.dtype == array.dtype and again.shape == array.shape
    assert same, f"{what}: comes back as a {type(again).__name__} {again.dtype} {tuple(again.shape)}"
    _require_host(backend.to_host(again, None), host, f"{what}: what comes back differs")
    if host.dtype != "BOOL":
        _check_all_bits(backend, host, what)
    data[:] ^= 1
    _require_host(backend.to_host(again, None), _flipped(host), f"{what}: shares memory with the host array")
    data[:] ^= 1
    _check_array_facts(backend, array, again, host)
    _check_rows(backend, array, what)


def _check_rows(backend: Backend, array: Any, what: str) -> None:
    """Require that rows come in their order, and as copies."""
    if not array.shape:
        return
    order = np.arange(len(array))  # adjacent rows, which a slice would not copy
    rows = backend.rows(array, order)(slice(0, 2))
    same = issubclass(type(rows), backend.array_types) and rows.dtype == array.dtype
    wanted = repr(array.tolist()[:2])
    assert same and repr(rows.tolist()) == wanted, f"{what}: rows() gives {rows!r}, not {wanted}"
    copy, own = backend.host_view(rows), backend.host_view(array)
    shares = copy is not None and own is not None and np.shares_memory(copy, own)
    assert not shares, f"{what}: rows() shares memory with the array"


def _check_array_facts(backend: Backend, array: Any, copy: Any, host: HostArray) -> None:
    what = f"{array.dtype} {tuple(array.shape)}"
    facts, other = backend.facts(array), backend.facts(copy)
    named = facts.dtype == host.dtype or "dtype" in host.extra
    assert named, f"{what}: facts() names the type {facts.dtype}, and to_host() {host.dtype}"
    apart = facts == backend.facts(array) and (facts.place is None or facts.place != other.place)
    assert apart, f"{what}: facts() gives the place {facts.place!r} and {other.place!r} for a copy"
    late = backend.late(Unread(facts.dtype, host.shape, lambda: host))
    same = late.dtype == array.dtype and late.shape == array.shape
    assert same, f"{what}: late() makes a {late.dtype} {tuple(late.shape)}"


def _require_values(array: Any, host: HostArray, what: str) -> None:
    """Require that NumPy reads the array's elements, in C order, from the host bytes."""
    if host.dtype in _NUMPY_READS and "dtype" not in host.extra:
        read = backends.get("numpy").from_host(dataclasses.replace(host, extra={}))
        values = repr(array.tolist())
        assert repr(read.tolist()) == values, f"{what}: the host bytes read {read.tolist()}, not {values}"


def _check_all_bits(backend: Backend, host: HostArray, what: str) -> None:
    """Require that every bit of any element comes back: negative zeros, payloads of NaNs."""
    noise = np.random.default_rng(0).integers(0, 256, host.data.size, np.uint8)
    top, size = np.zeros_like(host.data), max(host.data.size // max(math.prod(host.shape), 1), 1)
    top[size - 1 :: size] = 0x80
    for bits in (noise, top):
        given = dataclasses.replace(host, data=bits)
        _require_host(backend.to_host(backend.from_host(given), None), given, f"{what}: bits are lost")


def _flipped(host: HostArray) -> HostArray:
    return dataclasses.replace(host, data=host.data ^ np.uint8(1))


def _require_host(got: HostArray, expected: HostArray, broken: str) -> None:
    left, right = (
        (h.dtype, h.shape, h.backend, sorted(h.extra.items()), h.data.tobytes()) for h in (got, expected)
    )
    assert left == right, f"{broken}: {left[:4]} {left[4][:16]!r} is not {right[:4]} {right[4][:16]!r}"


def _check_reuse(backend: Backend, arrays: Sequence[Any]) -> None:
    for array, other in product(arrays, arrays):
        fresh, buffer = backend.to_host(array, None), backend.to_host(other, None)
        memory, before = buffer.data, dataclasses.replace(buffer, data=buffer.data.copy())
        copied = backend.to_host(array, buffer)
        what = f"{array.dtype} {tuple(array.shape)} over {other.dtype} {tuple(other.shape)}"
        _require_host(copied, fresh, f"{what}: copied into a kept buffer it differs")
        if array is other:
            assert copied.data is memory, f"{what}: the kept buffer fits and must be used again"
        elif copied.data is not memory:
            _require_host(buffer, before, f"{what}: a buffer that does not fit was written to")


# ------------------------------------------------------------------------- random state, scalars


def _check_random_state(backend: Backend, draw: Callable[[], Any]) -> None:
    def drawn() -> str:
        return digest(encode([draw() for _ in range(3)]))

    backend.seed(2**40 + 1)
    first, second = drawn(), drawn()
    assert first != second, "draw() gives the same numbers twice; it must use the global random state"
    backend.seed(2**40 + 1)
    assert drawn() == first, "the same seed gives other numbers"
    backend.seed(2**40 + 2)
    assert drawn() != first, "another seed gives the same numbers"
    saved = encode(backend.random_state())
    expected = drawn()
    drawn()
    backend.set_random_state(decode(saved))
    assert drawn() == expected, "set_random_state() does not bring back what random_state() returned"
    backend.set_random_state(decode(encode(backend.portable_random(decode(saved)))))
    assert drawn() == expected, "set_random_state() does not bring back what portable_random() returned"


def _check_scalars(backend: Backend, dtypes: set[str]) -> None:
    numpy_dtypes = {"F16": "f2", "F32": "f4", "F64": "f8", "I32": "i4", "I64": "i8", "U8": "u1"}
    for dtype in dtypes & numpy_dtypes.keys():
        for shape in ((), (1,), (1, 1)):
            for value in (3.0, *([math.nan, -math.inf] if dtype[0] == "F" else [])):
                array = _made(backend, dtype, shape, np.full(1, value, numpy_dtypes[dtype]))
                kept = backend.scalar(array)
                array += 1
                (read,) = backend.read_scalars([kept])
                assert type(read) is float, f"read_scalars() gives a {type(read).__name__}, not a float"
                assert repr(read) == repr(value), f"a {dtype} {shape} metric of {value} is read as {read}"
        refused = _made(backend, dtype, (2,), np.zeros(2, numpy_dtypes[dtype]))
        _require_no_scalar(backend, refused, f"two {dtype} elements")
    if "C64" in dtypes:
        _require_no_scalar(backend, _made(backend, "C64", (), np.zeros(1, "c8")), "a complex number")
    one = backend.scalar(_made(backend, "F32", (), np.full(1, 0.5, "f4")))
    assert backend.read_scalars([1.0, one, 2.0, one]) == [1.0, 0.5, 2.0, 0.5], (
        "read_scalars() mixes values up"
    )
    assert backend.read_scalars([]) == [], "read_scalars() of nothing must be nothing"


def _made(backend: Backend, dtype: str, shape: tuple[int, ...], elements: Any) -> Any:
    return backend.from_host(HostArray(dtype, shape, elements.view(np.uint8), backend.name))


def _require_no_scalar(backend: Backend, array: Any, what: str) -> None:
    try:
        backend.scalar(array)
    except MetricError:
        return
    raise AssertionError(f"{what}: scalar() must raise MetricError")


# --------------------------------------------------------------------------- entries and updates


def _check_entries(backend: Backend, make: Callable[[], State], update: Callable[[State], object]) -> None:
    state = make()
    fresh = _saved(backend, state)
    update(state)
    saved = _saved(backend, state)
    assert digest(saved) != digest(fresh), "update() changed nothing that the entries save"
    tree, restored = decode(saved), make()
    for name, entry in _entries(backend, restored).items():
        found = entry.check(tree[name])
        assert found == Mismatch([], [], []), f"entry {name!r} does not fit what it saved itself: {found}"
        entry.load(tree[name])
        _require_refused(entry, name)
    _require_state(_saved(backend, restored), saved, "what was restored is not what was saved")
    for _ in range(_ROUNDS):
        with isolated():
            update(state)
        update(restored)
        _require_state(
            _saved(backend, restored), _saved(backend, state), "the restored objects continue in another way"
        )


def _entries(backend: Backend, state: State) -> dict[str, Entry]:
    found = {name: backend.entry(value) for name, value in state.items()}
    lacking = [f"{name!r} (a {type(state[name]).__name__})" for name in state if found[name] is None]
    assert not lacking, f"entry() gives None for {', '.join(lacking)}"
    return {name: entry for name, entry in found.items() if entry is not None}


def _saved(backend: Backend, state: State) -> Encoded:
    return encode({name: entry.save() for name, entry in _entries(backend, state).items()})


def _require_refused(entry: Entry, name: str) -> None:
    try:
        if any(entry.check({"no such part": 0})):
            return
        entry.load({"no such part": 0})
    except Exception:
        return
    raise AssertionError(f"entry {name!r} takes a state that is not its own")


def _require_state(got: Encoded, expected: Encoded, broken: str) -> None:
    assert digest(got) == digest(expected), broken


def _check_updates(backend: Backend, make: Callable[[], State], update: Callable[[State], object]) -> None:
    state = make()
    counter = backend.update_counter(state)
    if counter is None:
        return
    try:
        assert counter.updates == 0, f"a new counter has counted {counter.updates} updates"
        counts = []
        for _ in range(_ROUNDS):
            update(state)
            counts.append(counter.updates)
        even = counts[0] > 0 and counts == [counts[0] * n for n in range(1, _ROUNDS + 1)]
        assert even or not counter.optimizers, f"after 1, 2, 3 update() the counter has counted {counts}"
        assert counter.strangers() == [], f"the state's own optimizers are strangers: {counter.strangers()}"
        update(make())
        assert counter.updates == counts[-1], "updates of another state are counted"
    finally:
        counter.close()
    update(state)
    assert counter.updates == counts[-1], "a closed counter still counts"


def _check_gradients(
    backend: Backend,
    make: Callable[[], State],
    update: Callable[[State], object],
    accumulate: Callable[[State], object],
) -> None:
    for state, counter in _counted(backend, make()):
        update(state)
        accumulate(state)
        saved = encode(counter.gradients())
        assert saved.arrays, "after accumulate() gradients() is empty: an open window would be lost"
        objects = _saved(backend, state)
    for state, counter in _counted(backend, make()):
        for name, entry in _entries(backend, state).items():
            entry.load(decode(objects)[name])
        counter.load_gradients(decode(saved))
        _require_state(encode(counter.gradients()), saved, "load_gradients() does not bring back gradients()")
        counter.load_gradients(None)
        assert not encode(counter.gradients()).arrays, "load_gradients(None) must clear them"


def _counted(backend: Backend, state: State) -> Iterator[tuple[State, Any]]:
    counter = backend.update_counter(state)
    assert counter is not None, "update_counter() gives None for a state that accumulates gradients"
    try:
        yield state, counter
    finally:
        counter.close()


def _check_evaluation_mode(backend: Backend, state: State, update: Callable[[State], object]) -> None:
    update(state)
    names = [name for name, _, _ in backend.parameters(state)]
    strange = [name for name in names if name.split("/", 1)[0] not in state]
    assert not strange and len(set(names)) == len(names), f"parameters() names {strange or names}"
    before = _saved(backend, state)
    modes = _modes(state)
    for fails in (False, True):
        try:
            with backend.evaluation_mode(state):
                if fails:
                    raise _InsideEvaluation
        except _InsideEvaluation:
            pass
        assert _modes(state) == modes, "evaluation_mode() does not put every mode back"
    _require_state(_saved(backend, state), before, "evaluation_mode() changes the state")


class _InsideEvaluation(Exception):
    """Error that is raised inside an evaluation on purpose."""


def _modes(state: State) -> list[Any]:
    """List the `training` flags of all modules; None for objects without such a flag."""
    found = []
    for value in state.values():
        parts = value.modules() if callable(getattr(value, "modules", None)) else [value]
        found += [getattr(part, "training", None) for part in parts]
    return found


# ------------------------------------------------------------------------------- the two backends

NUMPY_DTYPES = [*"?bBhHiIqQefdFD", ">f4", "M8[s]"]
NUMPY_ARRAYS = [
    *(np.arange(6).astype(dtype).reshape(2, 3) for dtype in NUMPY_DTYPES),
    np.array(2.5),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    np.arange(12.0)[::2],
]


def draw_numpy() -> Any:
    return np.random.rand(3)


def make_numpy() -> dict[str, Any]:
    return {"weights": np.zeros(3), "noise": np.random.default_rng(1), "old": np.random.RandomState(1)}


def update_numpy(state: Mapping[str, Any]) -> None:
    state["weights"][:] += state["noise"].random(3) + state["old"].rand(3) + np.random.rand(3)


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
TORCH_ARRAYS = [
    *(torch.arange(6.0).reshape(2, 3).to(dtype) for dtype in TORCH_DTYPES),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    torch.nn.Parameter(torch.arange(3.0)),
    torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
    torch.arange(3.0).requires_grad_(),
]


def draw_torch() -> Any:
    return torch.rand(3)


def make_torch() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    model[1].eval()  # a frozen part keeps its own mode
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "noise": torch.Generator().manual_seed(3)}


def accumulate_torch(state: Mapping[str, Any]) -> None:
    batch = torch.rand(5, 3) + torch.rand(5, 3, generator=state["noise"])
    state["model"](batch).square().mean().backward()


def update_torch(state: Mapping[str, Any]) -> None:
    state["optimizer"].zero_grad()
    accumulate_torch(state)
    state["optimizer"].step()


def check_numpy(backend: Backend) -> None:
    check_backend(backend, arrays=NUMPY_ARRAYS, draw=draw_numpy, make=make_numpy, update=update_numpy)


def check_torch(backend: Backend) -> None:
    check_backend(
        backend,
        arrays=TORCH_ARRAYS,
        draw=draw_torch,
        make=make_torch,
        update=update_torch,
        accumulate=accumulate_torch,
    )


def test_numpy_passes() -> None:
    check_numpy(NumpyBackend())


def test_torch_passes() -> None:
    check_torch(TorchBackend())
