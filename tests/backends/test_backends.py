"""Which backends there are, what both of the house promise, and what of an object is compared."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import backends
from everstep.backends.describe_values import described, is_unknown
from everstep.contracts.services import Moment
from everstep.contracts.state import HostArray, Unread
from everstep.errors import ConfigError, MetricError, StateError
from everstep.record import RunJournal
from everstep.state import decode, encode, isolated
from tiny_runs import supervised

NUMPY, TORCH = backends.get("numpy"), backends.get("torch")
BOTH = pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=["numpy", "torch"])


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.campaign("long")
def test_torch_is_active_only_once_the_program_imported_it() -> None:
    code = (
        "import sys, everstep.state, everstep.backends.torch; from everstep import backends;"
        "from everstep.contracts.state import HostArray; import numpy as np;"
        "names = lambda: [b.name for b in backends.active()];"
        "state = everstep.state.capture(); everstep.state.restore(state);"
        "print(names(), sorted(state), 'torch' in sys.modules);"
        "host = HostArray('BF16', (2,), np.zeros(4, np.uint8), 'torch');"
        "print(everstep.state.decode(everstep.state.Encoded({'$array': 'a'}, {'a': host})));"
        "print(names(), sorted(everstep.state.capture()))"
    )
    assert run(code).splitlines() == [
        "['numpy'] ['numpy', 'python'] False",
        "tensor([0., 0.], dtype=torch.bfloat16)",
        "['numpy', 'torch'] ['numpy', 'python', 'torch']",
    ]


def test_a_missing_framework_is_named_with_the_remedy() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from everstep import backends\n"
        "try: backends.get('torch')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert run(code) == "ConfigError torch is not installed: pip install torch"
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        backends.get("torhc")


def test_of_knows_arrays_and_their_subclasses() -> None:
    class Marked(torch.Tensor):
        pass

    for value in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Marked)):
        assert backends.of(value) is TORCH
    for value in (np.ones(1), np.float32(1), np.ma.array([1])):
        assert backends.of(value) is NUMPY
    for value in (1.0, [np.ones(1)], None, torch.float32):
        assert backends.of(value) is None


ARRAYS: dict[str, list[Any]] = {
    "numpy": [
        *(np.arange(6).astype(dtype).reshape(2, 3) for dtype in (*"?iQefD", ">f4", "M8[s]")),
        np.array(2.5),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0)[::2],
    ],
    "torch": [
        *(torch.arange(6.0).reshape(2, 3).to(t) for t in (torch.bool, torch.int64, torch.cdouble)),
        torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).to(torch.float8_e5m2),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.arange(3.0)),
    ],
}  # fmt: skip


def told(host: HostArray) -> Any:
    return host.dtype, host.shape, host.backend, sorted(host.extra.items()), host.data.tobytes()


@BOTH
def test_a_buffer_is_used_again_if_it_fits_and_only_then(backend: Any) -> None:
    for array, other in product(ARRAYS[backend.name], repeat=2):
        buffer = backend.to_host(other, None)
        memory, before = buffer.data, dataclasses.replace(buffer, data=buffer.data.copy())
        copied = backend.to_host(array, buffer)
        assert told(copied) == told(backend.to_host(array, None))
        assert (copied.data is memory) >= (array is other)
        if copied.data is not memory:
            assert told(buffer) == told(before)


@BOTH
def test_what_is_known_of_an_array_and_its_rows(backend: Any) -> None:
    for array in ARRAYS[backend.name]:
        host = backend.to_host(array, None)
        facts, other = backend.facts(array), backend.facts(backend.from_host(host))
        assert facts.dtype == host.dtype or "dtype" in host.extra
        assert facts == backend.facts(array) and (facts.place is None or facts.place != other.place)
        late = backend.late(Unread(facts.dtype, host.shape, lambda host=host: host))
        assert (late.dtype, late.shape) == (array.dtype, array.shape)
        in_place = backend.in_place(array)
        assert told(in_place) == told(host) and in_place.nbytes == host.nbytes
        if array.shape:
            rows = backend.rows(array, np.arange(len(array)))(
                slice(0, 2)
            )  # adjacent, which a slice would share
            assert rows.dtype == array.dtype and repr(rows.tolist()) == repr(array.tolist()[:2])
            assert not np.shares_memory(backend.host_view(rows), backend.host_view(array))


def test_a_type_that_this_torch_lacks_is_refused_by_its_name() -> None:
    saved = HostArray("U8", (2,), np.zeros(2, np.uint8), "torch", {"dtype": "float2_of_tomorrow"})
    with pytest.raises(StateError, match=r"lacks the saved dtype 'float2_of_tomorrow'"):
        TORCH.from_host(saved)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (np.float16(2), 2.0),
        (np.bool_(True), 1.0),
        (np.uint64(2**53), 2.0**53),
        (np.longdouble(1.5), 1.5),
        (np.array([[2]]), 2.0),
        (np.array(1.5, ">f4"), 1.5),
        (torch.tensor(0.1), 0.10000000149011612),
        (torch.tensor([[2.5]], dtype=torch.bfloat16), 2.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(2.0, dtype=torch.float8_e4m3fn), 2.0),
        (torch.ones(1, requires_grad=True) * 3, 3.0),
    ],
)
def test_a_scalar_in_host_memory_is_a_float_at_once(value: Any, expected: float) -> None:
    backend: Any = backends.of(value)
    kept = backend.scalar(value)
    assert type(kept) is float and kept == expected
    assert backend.read_scalars([kept, kept]) == [expected] * 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros(2), r"shape \(2,\).*\.mean\(\)"),
        (np.zeros(0), r"shape \(0,\)"),
        (np.complex64(1), "complex64"),
        (np.str_("a"), "<U1"),
        (np.datetime64("2026"), "datetime64"),
        (np.ma.masked, "masked MaskedConstant"),
        (torch.zeros(2), r"shape \(2,\).*\.mean\(\)"),
        (torch.zeros(0), r"shape \(0,\)"),
        (torch.tensor(1j), "complex64.*real part"),
        (torch.zeros((), device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "nested tensor"),
    ],
)
def test_what_is_not_one_real_number_is_refused(value: Any, says: str) -> None:
    backend: Any = backends.of(value)
    with pytest.raises(MetricError, match=says):
        backend.scalar(value)


def test_read_scalars_keeps_order_and_bits_over_mixed_dtypes() -> None:
    kept = [torch.tensor(0.1), 7.5, torch.tensor([2**53]), torch.tensor(0.1, dtype=torch.float64)]
    assert TORCH.read_scalars(kept) == [0.10000000149011612, 7.5, 2.0**53, 0.1]
    assert TORCH.read_scalars([]) == []


@BOTH
def test_the_random_state_comes_back_and_a_seed_of_any_width_determines_it(backend: Any) -> None:
    def drawn() -> str:
        return repr([np.random.rand(3) if backend is NUMPY else torch.rand(3) for _ in range(3)])

    with isolated():
        backend.seed(2**40 + 1)
        first = drawn()
        assert drawn() != first
        backend.seed(2**40 + 1)
        assert drawn() == first
        saved = decode(encode(backend.random_state()))
        expected = drawn()
        for state in (saved, decode(encode(backend.portable_random(saved)))):
            backend.set_random_state(state)
            assert drawn() == expected
        backend.set_random_state(saved)
        assert backend.fingerprint({}) == backend.fingerprint({})
        assert backend.describe()[backend.name] in (np.__version__, str(torch.__version__))
        assert drawn() == expected, "nothing draws"


def test_evaluation_mode_puts_every_flag_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    other = torch.nn.Dropout()
    model[1].eval()
    with TORCH.evaluation_mode({"model": model, "more": [other], "n": 1}):
        assert not any(m.training for m in [*model.modules(), other])
    assert [m.training for m in model.modules()] == [True, True, False]
    with pytest.raises(KeyError), TORCH.evaluation_mode({"model": model}):
        raise KeyError
    assert [m.training for m in model.modules()] == [True, True, False]
    assert other.training
    with TORCH.evaluation_mode({"adapter": model[0]}):  # the state has a part of the model
        assert not model.training
    assert model.training
    head = torch.nn.Sequential(torch.nn.Dropout(), model)  # made after an evaluation
    with TORCH.evaluation_mode({"adapter": model[0]}):
        assert not head[0].training


def test_parameters_are_named_by_entry() -> None:
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    objects = {
        "model": model,
        "scale": torch.nn.Parameter(torch.ones(())),
        "buffer": torch.ones(4),
        "d": {"m": model},
        "ema": torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1, bias=False)),
    }
    assert TORCH.parameters(objects) == [
        ("model/weight", (3, 2), True),
        ("model/bias", (3,), False),
        ("scale", (), True),
        ("d/m/weight", (3, 2), True),
        ("d/m/bias", (3,), False),
    ]
    assert NUMPY.parameters({"w": np.zeros((2, 3)), "config": {}}) == [("w", (2, 3), True)]


class Driver:
    """A machine with a GPU, as torch.cuda tells: the first question to the device initialises CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, initialised: bool) -> None:
        self.initialised = initialised
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: self.asked("H200"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.asked(0))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: self.asked([torch.zeros(16).byte()]))

    def asked(self, answer: Any) -> Any:
        self.initialised = True
        return answer


def test_a_program_on_the_cpu_of_a_machine_with_a_gpu_never_asks_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, initialised=False)
    model = torch.nn.Linear(1, 1)
    profile = everstep.services.Profile(everstep.At(1), steps=1)
    supervised(everstep.Supervisor(tmp_path, {"model": model}, max_step=3, services=[profile]))
    assert not driver.initialised and TORCH.is_deterministic()
    assert "cuda_devices" not in RunJournal(tmp_path).facts()["backends"]["torch"]
    assert "cuda" not in TORCH.random_state()
    Driver(monkeypatch, initialised=True)
    assert TORCH.describe()["cuda_devices"] == "H200"
    assert "cuda" in TORCH.random_state() and not TORCH.is_deterministic()


if torch.cuda.is_available():

    def test_on_a_device_scalars_tensors_and_random_state_come_back() -> None:
        value = torch.ones((), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept = TORCH.scalar(value)
            value += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert TORCH.read_scalars([kept, 2.0]) == [1.0, 2.0]
        tensor = torch.arange(6.0, device="cuda").view(2, 3).t()
        host = TORCH.to_host(tensor, None)
        assert TORCH.to_host(tensor, host) is host
        restored = TORCH.from_host(host)
        assert restored.device == tensor.device and restored.stride() == tensor.stride()
        assert torch.equal(restored, tensor)
        state = TORCH.random_state()
        drawn = torch.rand(3, device="cuda")
        TORCH.set_random_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), drawn)


def texts(value: Any) -> dict[str, str]:
    return described(value, "f")


class Warmup:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return step / self.length

    def half(self, step: int) -> float:
        return self(step) / 2


def test_source_counts_without_comments_and_layout() -> None:
    def rate(step: int) -> int:
        return 2 * step

    one = texts(rate)

    def rate(step: int) -> int:  # type: ignore[no-redef]
        # doubled

        return 2 * step

    assert texts(rate) == one

    def rate(step: int) -> int:  # type: ignore[no-redef]
        return 3 * step

    assert texts(rate)["f"] == one["f"] == "rate"
    assert texts(rate)["code of f"] != one["code of f"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2.0, "a"], [1, 2, "a"]),
        (np.arange(3), np.arange(1, 4)),
        (torch.zeros(1000), torch.ones(1000)),
        ({"a": 1}, {"a": 2}),
        ({"a", "b"}, {"a", "c"}),
        (range(3), range(4)),
        (Moment.AFTER_STEP, Moment.AFTER_EPOCH),
        (Warmup(3), Warmup(4)),
        (math.cos, math.sin),
        (functools.partial(math.pow, 2), functools.partial(math.pow, 3)),
        (functools.partial(max, key=lambda step: step), functools.partial(max, key=lambda step: -step)),
        (lambda step, w=1: w, lambda step, w=2: w),
        (lambda step: [n * 2 for n in range(step)], lambda step: [n * 3 for n in range(step)]),
        (lambda é, ö: "é" + ö, lambda ö, é: "é" + ö),
    ],
)
def test_what_does_otherwise_has_other_texts(one: Any, other: Any) -> None:
    assert texts(one) == texts(one) != texts(other)
    assert not any(map(is_unknown, texts(one).values()))


def test_a_lambda_is_told_apart_from_the_rest_of_its_line() -> None:
    one, other = lambda step: 2 * (  # twice
        step
    ), lambda step: 2 * step  # fmt: skip
    assert texts(lambda step: 2 * step) == texts(other) != texts(one) == texts(lambda step: 2 * (step))


def test_what_comes_with_a_package_goes_by_its_name() -> None:
    assert texts(functools.partial(math.pow, 2)) == {"f": "math.pow", "f.0": "2"}
    assert texts(torch.nn.functional.relu) == {"f": "torch.nn.functional.relu"}


def test_what_cannot_be_compared_says_what_it_is() -> None:
    warmup = Warmup(3)
    warmup.me = warmup  # type: ignore[attr-defined]
    assert texts(warmup)["f.me"] == "not compared, an object of test_backends.Warmup"
    assert is_unknown(texts(torch.nn.Linear(1, 1))["f"])  # it is state
    assert is_unknown(texts(torch.eye(2).to_sparse())["f"])
    assert texts([object()] * 101)["f"] == "not compared, 101 objects in a list"
    assert "code of f" in texts(warmup.half) and "code of f" in texts(warmup)
    made: dict[str, Any] = {}
    exec(compile("def made(step):\n    return step", "<made>", "exec"), made)
    assert texts(made["made"])["code of f"] == "not compared, the source of made is not known"
