"""What Hugging Face's accelerate has prepared."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader

import everstep
from everstep.backends.torch.torch_entries import make_entry
from everstep.errors import ConfigError, DataError


def prepared(**options: Any) -> tuple[accelerate.Accelerator, Any, Any]:
    """A model and an optimizer that accelerate has prepared, and itself."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = torch.nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))


def program(run_dir: Path, *, stop_at: int = 0) -> list[torch.Tensor]:
    """Four epochs of three steps."""
    accelerator, model, optimizer = prepared()
    state = {"model": model, "optimizer": optimizer}
    loader = DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=2, shuffle=True)
    saves = everstep.Checkpoints(everstep.Every(steps=2))
    loop = everstep.TrainLoop(run_dir, state, services=[saves], max_epoch=4, seed=1, default_services=False)
    with loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(loader):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                if step == stop_at:
                    raise InterruptedError
        assert loop.updates == loop.step
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_an_optimizer_that_accelerate_has_prepared_is_the_one_inside(tmp_path: Path) -> None:
    whole = program(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        program(tmp_path / "cut", stop_at=7)
    for expected, got in zip(whole, program(tmp_path / "cut"), strict=True):
        assert torch.equal(expected, got)


def test_a_schedule_that_accelerate_has_prepared_is_compared(tmp_path: Path) -> None:
    def train(epochs: int, period: int, **options: Any) -> list[float]:
        accelerator, rates = accelerate.Accelerator(cpu=True), []
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, period)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        state = {"weight": weight, "optimizer": optimizer, "schedule": schedule}
        with everstep.TrainLoop(tmp_path, state, max_epoch=epochs, seed=1, **options) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps([torch.ones(2)] * 3):
                    optimizer.zero_grad()
                    accelerator.backward((weight * batch).sum())
                    optimizer.step()
                    schedule.step()
                    rates.append(optimizer.param_groups[0]["lr"])
        return rates

    train(1, 2)
    with pytest.raises(ConfigError, match="'schedule': step_size: stored 2, given 1"):
        train(2, 1)
    assert train(2, 1, on_change="override") == pytest.approx([1e-5, 1e-6, 1e-7])


class Window:
    """Where accelerate is in the window of an update."""

    def __init__(self, accelerator: accelerate.Accelerator, optimizer: Any) -> None:
        self.accelerator, self.gradients = accelerator, optimizer.gradient_state

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.accelerator.step, "sync": self.gradients.sync_gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accelerator.step, self.gradients.sync_gradients = state["step"], state["sync"]


def accumulating(run_dir: Path, *, stop_at: int = 0, saved: bool = True) -> tuple[torch.Tensor, list[str]]:
    """Twelve steps, two for an update; a save after each third. Returns the weight and the warnings."""
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    state = {"model": model, "optimizer": optimizer}
    if saved:
        state["window"] = Window(accelerator, optimizer)
    saves = everstep.Checkpoints(everstep.Every(steps=3))
    data = everstep.data.arrays(torch.arange(24.0).reshape(12, 2), batch_size=1)
    with everstep.TrainLoop(run_dir, state, services=[saves], max_epoch=1, seed=1) as loop:
        for _ in loop.iter_epochs():
            for step, (batch,) in loop.iter_steps(data):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if step == stop_at:
                    raise InterruptedError
    return model.weight.detach().clone(), [*loop.ending.warnings]


class _Warm(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the program's own around another one."""

    def __init__(self, scheduler: Any, warmup: int) -> None:
        self.scheduler, self.warmup = scheduler, warmup
        super().__init__(scheduler.optimizer)

    def get_lr(self) -> list[Any]:
        return [rate * min(1, (self.last_epoch + 1) / self.warmup) for rate in self.base_lrs]


def test_a_schedule_around_another_one_is_compared_by_options_of_its_own() -> None:
    options = []
    for warmup in (4, 8):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        entry = make_entry(_Warm(torch.optim.lr_scheduler.StepLR(optimizer, 2), warmup))
        assert entry is not None
        entry.enter()
        options.append(entry.options()["warmup"])
    assert options == ["4", "8"]


def test_a_resume_inside_a_window_of_accelerates_needs_its_count_and_a_warning_says_how(
    tmp_path: Path,
) -> None:
    whole, warnings = accumulating(tmp_path / "whole")
    assert warnings == []
    _, (warning,) = accumulating(tmp_path / "warned", saved=False)
    assert "gradient_state.sync_gradients" in warning
    assert "as `window` in docs/recipes/huggingface.md#accelerate" in warning
    for saved in (False, True):
        with pytest.raises(InterruptedError):
            accumulating(tmp_path / str(saved), stop_at=5, saved=saved)
        resumed, _ = accumulating(tmp_path / str(saved), saved=saved)
        assert torch.equal(whole, resumed) == saved


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_accelerate_has_prepared_is_refused_when_it_is_bound(stateful: bool) -> None:
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(6)))
    with pytest.raises(
        DataError, match="prepare the model and the optimizer only, give the loop the DataLoader"
    ):
        everstep.data.as_stream(loader)
