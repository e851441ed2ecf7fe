"""A compiled model and batches of several shapes: torch compiles by what the process has seen before.

The compiler of these tests computes other bits wherever a shape is not static, as Inductor's kernels may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import everstep
from everstep.drill.program import Program, Undisturbed, cause
from everstep.proof.compare import compare_runs
from tiny_runs import Boom, events

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
    found = Undisturbed(ends[0]).first_divergence(ends[1])
    assert found is not None and found.component == "state", found
    assert "is compiled" in cause(found) and "a counter" not in cause(found)
