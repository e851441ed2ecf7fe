"""On a GPU: a step with nothing due waits for nothing, and what a step and a save cost.

    python bench/cuda_sync.py            prints one JSON line

Law 6 is asked of torch itself: `torch.cuda.set_sync_debug_mode("error")` raises at any call that
synchronises, around every step in which nothing is due.  `bench/proof_gpu.py` has the kills.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from everstep.record import RunJournal
from everstep.testing import ManualClock


def net(width: int = 256, depth: int = 3, device: str = "cuda") -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 1)).to(device)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def guard(device: str, mode: str) -> None:
    """Torch's word on calls that synchronise; a CPU has none."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def zero_synchronisation(folder: Path, steps: int = 500, device: str = "cuda") -> dict[str, Any]:
    """Steps with all services on and none due under torch's own guard, then the metrics, read at once."""
    torch.manual_seed(0)
    model, x = net(device=device), torch.randn(64, 256, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        train_step(model, optimizer, x)  # allocations, library handles
    expected: list[torch.Tensor] = []
    state = {"model": model, "optimizer": optimizer}
    services = [everstep.EarlyStop("loss", patience=9), everstep.services.Console(sink=lambda text: None)]
    still = ManualClock()  # nothing on a schedule of seconds becomes due
    with everstep.TrainLoop(
        folder / "sync", state, max_step=steps, max_epoch=1, services=services, clock=still
    ) as loop:
        for _epoch in loop.iter_epochs():
            for step in loop.iter_steps():
                if step == 20:  # the step-0 checkpoint is announced: from here on nothing is due
                    guard(device, "error")
                loss = train_step(model, optimizer, x)
                loop.collect_metrics(loss=loss)
                expected.append(loss.detach().clone())
                if step == steps - 1:
                    guard(device, "default")
    _, found = RunJournal(folder / "sync").series("loss")
    return {"steps_without_sync": steps - 21, "metrics_equal": found == torch.stack(expected).tolist()}


def overhead(
    folder: Path, repeats: int = 7, steps: int = 300, device: str = "cuda", width: int = 2048
) -> dict[str, Any]:
    """Wall time of a step under a TrainLoop with a metric, against the bare loop, in turns."""
    model, x = net(width, 6, device), torch.randn(512, width, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def bare() -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(steps):
            train_step(model, optimizer, x)
        synchronise(device)
        return (time.perf_counter() - began) / steps

    def ours(number: int) -> float:
        state = {"model": model, "optimizer": optimizer}
        run = folder / f"overhead{number}"
        services = [everstep.Checkpoints(everstep.Never()), everstep.services.Console(sink=lambda text: None)]
        with everstep.TrainLoop(run, state, max_step=steps + 50, max_epoch=1, services=services) as loop:
            for _epoch in loop.iter_epochs():
                for step in loop.iter_steps():
                    if step == 51:
                        synchronise(device)
                        began = time.perf_counter()
                    loop.collect_metrics(loss=train_step(model, optimizer, x))
                    if step == steps + 50:
                        synchronise(device)
                        took = (time.perf_counter() - began) / steps
        return took

    bare()
    pairs = [(bare(), ours(i)) for i in range(repeats)]
    base = statistics.median(b for b, _ in pairs)
    extra = statistics.median(o - b for b, o in pairs)
    return {
        "bare_step_us": round(base * 1e6, 1),
        "extra_us": round(extra * 1e6, 1),
        "extra_percent": round(100 * extra / base, 2),
    }


def snapshot(folder: Path) -> dict[str, Any]:
    """How long a save of 50 M parameters with Adam keeps the training thread, against one plain copy."""
    model = nn.Sequential(*[nn.Linear(2500, 2500) for _ in range(8)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(16, 2500, device="cuda")
    train_step(model, optimizer, x)
    tensors = [p.detach() for p in model.parameters()]
    tensors += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    copies, saves, before = [], [], 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor)
        copies.append(time.perf_counter() - began)
    state = {"model": model, "optimizer": optimizer}
    services = [everstep.Checkpoints(everstep.Every(steps=20), keep_last=1)]
    with everstep.TrainLoop(
        folder / "snapshot", state, max_step=121, max_epoch=1, services=services, default_services=False
    ) as loop:
        for _epoch in loop.iter_epochs():
            for step in loop.iter_steps():
                if step % 20 == 1 and step > 1:
                    saves.append(time.perf_counter() - before)
                    time.sleep(2)  # let the write end: waiting for the disk is not the copy
                train_step(model, optimizer, x)
                torch.cuda.synchronize()
                before = time.perf_counter()
    return {
        "megabytes": round(sum(t.nbytes for t in tensors) / 1e6),
        "copy_ms": round(statistics.median(copies) * 1e3, 1),
        "first_save_ms": round(saves[0] * 1e3, 1),
        "save_ms": round(statistics.median(saves) * 1e3, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        for part in (zero_synchronisation, overhead, snapshot):
            result[part.__name__] = part(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
