"""The torch backend: scalars, seeding, modes, what it says of itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.backends import get
from everstep.errors import MetricError
from everstep.record import RunJournal

TORCH = get("torch")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.1), 0.10000000149011612),
        (torch.tensor([[2.5]], dtype=torch.bfloat16), 2.5),
        (torch.tensor(-3), -3.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(2.0, dtype=torch.float8_e4m3fn), 2.0),
        (torch.ones(1, requires_grad=True) * 3, 3.0),
    ],
)
def test_scalar_on_the_cpu_is_a_float_at_once(value: Any, expected: float) -> None:
    kept = TORCH.scalar(value)
    assert type(kept) is float and kept == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(2), r"shape \(2,\).*\.mean\(\)"),
        (torch.zeros(0), r"shape \(0,\)"),
        (torch.tensor(1j), "complex64.*real part"),
        (torch.zeros((), device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "nested tensor"),
    ],
)
def test_what_is_not_one_real_number_is_refused(value: Any, says: str) -> None:
    with pytest.raises(MetricError, match=says):
        TORCH.scalar(value)


def test_read_scalars_keeps_order_and_bits_over_mixed_dtypes() -> None:
    kept = [
        torch.tensor(0.1),
        7.5,
        torch.tensor([2**53]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([[3.0]]),
    ]
    assert TORCH.read_scalars(kept) == [0.10000000149011612, 7.5, 2.0**53, 0.1, 3.0]
    assert TORCH.read_scalars([]) == []


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


def test_seed_and_describe() -> None:
    before = TORCH.random_state()
    TORCH.seed(2**40 + 7)
    drawn = torch.rand(2)
    TORCH.seed(2**40 + 7)
    assert torch.equal(torch.rand(2), drawn)
    TORCH.set_random_state(before)
    assert TORCH.describe()["torch"] == str(torch.__version__)


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
    with everstep.Supervisor(tmp_path, {"model": model}, max_step=3, services=[profile]) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()
    assert not driver.initialised and TORCH.is_deterministic()
    assert "cuda_devices" not in RunJournal(tmp_path).facts()["backends"]["torch"]
    assert "cuda" not in TORCH.random_state()


def test_a_program_that_uses_cuda_is_described_with_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, initialised=True)
    assert TORCH.describe()["cuda_devices"] == "H200"
    assert "cuda" in TORCH.random_state() and not TORCH.is_deterministic()


if torch.cuda.is_available():

    def test_on_a_device_a_scalar_is_a_copy_that_waits_for_nobody() -> None:
        value = torch.ones((), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept = TORCH.scalar(value)
            value += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert TORCH.read_scalars([kept, 2.0]) == [1.0, 2.0]

    def test_on_a_device_tensors_and_random_state_come_back() -> None:
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
