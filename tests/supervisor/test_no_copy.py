"""Saves: their order on the disk, and `Checkpoints(copy=False)`, which writes the live arrays."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, hazard
from everstep.checkpoint import Store
from everstep.errors import Interrupted
from everstep.state import Buffers, digest, encode
from everstep.supervisor.saving.saver import Spill
from everstep.testing import armed, nothing_left
from tiny_runs import Boom, Tiny, boom_at


class Program(Tiny):
    """Torch and NumPy, arrays that do not lie in C order, a memory, best weights."""

    def __init__(self, run_dir: Path, *, copy: bool = False, every: Any = None, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.turned = np.zeros((3, 4), order="F")
        self.memory = everstep.data.RingBuffer(10, {"loss": "float32"})
        names = ("model", "optimizer", "turned", "memory")
        saves = everstep.Checkpoints(every or Every(steps=3), keep_last=None, copy=copy)
        services = [saves, everstep.Best("valid_loss")]
        also = {name: getattr(self, name) for name in names}
        super().__init__(run_dir, samples=10, also=also, services=services, max_epoch=3, **more)

    def update(self, ids: Any) -> None:
        super().update(ids)
        loss = self.model(torch.from_numpy(ids).float()[:, None] / 10).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.turned[0, 1:] += self.loop.step
        self.memory.append(loss=loss.item())

    def run(self, inside: Any = lambda loop, step: None, tail: Any = lambda loop, epoch: None) -> str:
        def measured(loop: Any, epoch: int) -> None:
            loop.collect_metrics(valid_loss=float(self.turned.sum() + self.w.sum()))
            tail(loop, epoch)

        ending = self.train(inside, measured).loop.ending
        assert ending.digest is not None
        return ending.digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Program(tmp_path_factory.mktemp("undisturbed"), copy=True).run()


def steps_of(run_dir: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 4, 5, 9, 10])
def test_a_crash_in_any_place(tmp_path: Path, undisturbed: str, at: int) -> None:
    with pytest.raises(Boom):
        Program(tmp_path).run(inside=boom_at(at))
    with pytest.raises(Boom):
        Program(tmp_path).run(tail=boom_at(2))
    assert Program(tmp_path).run() == undisturbed


def interrupt_at(at: int) -> Any:
    def hook(loop: Any, count: int) -> None:
        if count == at:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("where", "at"), [("inside", 4), ("inside", 5), ("tail", 1)])
def test_a_signal_saves_the_state_in_a_step_and_the_one_kept_on_disk_in_the_tail(
    tmp_path: Path, undisturbed: str, where: str, at: int
) -> None:
    def hook(loop: Any, count: int) -> None:
        interrupt_at(at)(loop, count)
        if where == "tail":
            loop.collect_metrics(valid_loss=2.0)  # which looks for signals

    found = []
    for copy in (True, False):
        run_dir = tmp_path / str(copy)
        with nothing_left():
            interrupted = Program(run_dir, copy=copy, every=everstep.Never())
            with pytest.raises(Interrupted):
                interrupted.run(**{where: hook})
        found.append(steps_of(run_dir))
        assert Program(run_dir, copy=copy, every=everstep.Never()).run() == undisturbed
    assert found[0] == found[1] and found[0][-1] >= 4


def test_a_disk_that_refuses_what_is_kept_costs_a_warning(tmp_path: Path, undisturbed: str) -> None:
    program = Program(tmp_path)
    with armed("ENOSPC:checkpoint.spill:5-40"):
        assert program.run() == undisturbed
    assert any("a save failed" in line for line in program.lines)


def test_nothing_is_copied_and_no_live_array_is_kept() -> None:
    live = {"n": np.arange(6.0), "t": torch.arange(6.0), "f": np.asfortranarray(np.ones((2, 3)))}
    buffers = Buffers(copy=False)
    encoded = encode(live, buffers)
    assert buffers.kept == {}
    before = digest(encoded)
    assert before == digest(encode(live))
    live["n"][0] = live["t"][1] = live["f"][1, 1] = 7
    assert digest(encoded) == digest(encode(live)) != before


def test_what_is_kept_on_disk_comes_back_and_damage_is_noticed(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    live = {"n": np.arange(6.0), "t": torch.arange(6.0).bfloat16(), "empty": np.zeros((0, 3))}
    kept, was = spill.keep(encode(live, Buffers(copy=False))), digest(encode(live))
    live["n"] += 1
    assert digest(kept) == was and list(tmp_path.iterdir()) == []
    assert spill._file is not None
    os.pwrite(spill._file.fileno(), b"x", 20)
    with pytest.raises(OSError, match="has changed there"):
        _ = kept.arrays["n"].data
    spill.close()


EPOCHS = 4


def seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Train with best weights and one kept checkpoint; (operation, checkpoints before it) of the writer."""
    found: list[tuple[str, list[str]]] = []

    def look(operation: str) -> None:
        if threading.current_thread().name == "everstep-writer":
            store = Store(run_dir)
            found.append((operation, [str(name) for name in store.names()]))
            for facts in store.facts():
                for metric, names in facts.kept.items():
                    lost = [name for name in names if not (store.best_folder(metric) / name).exists()]
                    assert not lost, f"before {operation}: {facts.name} names {lost}, which is not there"

    monkeypatch.setattr(hazard, "_action", look)
    services = [everstep.Best("valid_loss"), everstep.Checkpoints(everstep.Every(epochs=1), keep_last=1)]
    Tiny(run_dir, services=services, max_epoch=EPOCHS).train(
        tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
    )
    return found


def test_rows_then_the_checkpoint_then_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(tmp_path, monkeypatch)
    names = [f"epoch-{epoch:04d}-step-{4 * epoch:08d}" for epoch in range(EPOCHS + 1)]
    came = [next(at for at, (_, there) in enumerate(found) if name in there) for name in names]
    for before, name, start, end in zip(names, names[1:], came, came[1:], strict=False):
        operations = [operation for operation, _ in found[start:end]]
        assert "journal.fsync" in operations, f"{name} is there before its rows are durable"
        assert before in found[end][1], f"{before} went before {name} was there"
    assert [str(name) for name in Store(tmp_path).names()] == names[-1:]
