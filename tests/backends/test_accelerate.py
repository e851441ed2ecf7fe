"""What accelerate has prepared, and a compiled model whose batches have several shapes.

Torch compiles by what the process has seen before: the compiler of these tests computes other bits wherever a
shape is not static, as Inductor's kernels may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import everstep
from everstep.backends.torch.torch_entries import make_entry
from everstep.drill.program import Program, cause, first_divergence
from everstep.errors import ConfigError, DataError
from everstep.proof.compare import compare_runs
from tiny_runs import Boom, events


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
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
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
        assert 2 * loop.updates == loop.step or not saved
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


X = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))


def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
    factor = 1.001 if any(isinstance(each, torch.SymInt) for each in inputs) else 1.0
    return lambda *args: tuple(out * factor for out in graph(*args))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Fit(everstep.torch.Task):
    crash = 0
    """Epoch at whose begin it fails."""

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        (x,) = batch
        return {"loss": mse_loss(self.model(x), x)}

    def train_loop_begin(self) -> None:
        if Fit.crash:
            Fit.crash -= 1
            if not Fit.crash:
                raise Boom


def test_a_resumed_task_uses_the_kernels_of_the_undisturbed_one(tmp_path: Path) -> None:
    def start(name: str, crash: int = 0) -> None:
        torch._dynamo.reset()  # as in a new process
        Fit.crash = crash
        task = Fit(compile={"backend": compiler})
        data = {"train": everstep.data.arrays(X, batch_size=4)}  # the last batch has two samples
        everstep.Trainer(task, data, tmp_path / name, max_epoch=3, seed=1).run_training()

    start("straight")
    with pytest.raises(Boom):
        start("killed", crash=2)
    start("killed")
    assert compare_runs(tmp_path / "straight", tmp_path / "killed") == []


def trained(run_dir: Path, sizes: list[int], rate: float = 0.1, **how: Any) -> tuple[str, ...]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 3)
    compiled = torch.compile(model, backend="eager", **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = [X[:1].repeat(size, 1) for size in sizes]
    state = {"model": model, "optimizer": optimizer}
    with everstep.TrainLoop(run_dir, state, max_epoch=1, seed=1) as loop:
        for _ in loop.iter_epochs():
            for _, x in loop.iter_steps(batches):
                loss = compiled(x).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return loop.ending.warnings


def test_a_model_compiled_for_any_shape_is_named_at_the_second_one_once_in_a_run(tmp_path: Path) -> None:
    (said,) = trained(tmp_path / "run", [4, 4, 2, 3])
    assert "Linear is compiled" in said and "dynamic=False" in said
    assert events(tmp_path / "run", "warned once") == [{"message": said}]
    assert trained(tmp_path / "one", [4, 4, 4]) == ()
    assert trained(tmp_path / "static", [4, 2, 3], dynamic=False) == ()
    (said,) = trained(tmp_path / "many", [*range(2, 12)], dynamic=False)
    assert "batches of 9 shapes" in said


def test_a_drill_names_what_the_run_has_warned_of(tmp_path: Path) -> None:
    ends = []
    for name, rate in (("a", 0.1), ("b", 0.2)):
        program = Program(("true",), tmp_path / name, 1.0)
        trained(program.root / "run", [4, 2], rate)
        ends.append(program)
    found = first_divergence(ends[0], ends[1])
    assert found is not None and found.component == "state", found
    assert "is compiled" in cause(found) and "a counter" not in cause(found)
