"""The proof on a GPU: laws 1 and 6 and the overhead, with deterministic kernels and with others.

    python bench/proof_gpu.py [--minutes 10] [--device cuda] [--seed N] [--out FILE]       (make proof-gpu)

Law 1: a training in a process of its own is killed by SIGKILL from outside at random moments, twice, and
started again.  With deterministic kernels the run must be that which was never killed, in every leaf and
every row.  With others it must have the same batches, the same noise and the same random state at each
step; how often its weights are equal, too, stands beside how often those of two undisturbed runs are.
Law 6 and the overhead are those of `bench/cuda_sync.py`.

It writes a dated table with the device's name, and ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import cuda_sync
import torch
from torch import nn

import everstep
from everstep.proof.compare import compare_runs

EPOCHS, BATCH, SAMPLES, WIDTH = 10, 32, 640, 256
STEPS = EPOCHS * SAMPLES // BATCH
PAUSE = 0.01
"""Seconds that each step waits."""
SHARE = 0.4
"""Of the time, for the kills under each kind of kernels; the rest is for law 6 and the overhead."""
PROMISED = ("leaf/rng/", "leaf/streams/", "leaf/progress/", "checkpoint", "ended")
"""What the kernels have no part in, and so is equal whatever they are; besides the rows of these names:"""
PROMISED_ROWS = ("batch", "noise")


# ------------------------------------------------------------------------------------- the child


class Net(nn.Module):
    """Dropout, and a sum by index: one of the kernels that add in no fixed order, unless told to."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.body = cuda_sync.net(WIDTH, device=device)
        self.places = torch.arange(4096, device=device) % 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = self.body(x).expand(-1, len(self.places) // len(x)).flatten() * torch.rand_like(x[0, 0])
        return torch.zeros(7, device=x.device).index_add(0, self.places, many.sin())


def train(run: Path, device: str) -> None:
    """One start of the program: Adam, shuffled data, noise drawn on the device, a save each 7 steps."""
    torch.manual_seed(0)
    model = Net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = everstep.data.arrays(torch.randn(SAMPLES, WIDTH), batch_size=BATCH, shuffle=True, seed=1)
    services = [
        everstep.Checkpoints(everstep.Every(steps=7)),
        everstep.services.Console(sink=lambda text: None),
    ]
    state = {"model": model, "optimizer": optimizer}
    with everstep.TrainLoop(run, state, max_epoch=EPOCHS, seed=3, services=services) as loop:
        for _epoch in loop.iter_epochs():
            for _step, (x,) in loop.iter_steps(data):
                print("step", flush=True)
                noise = torch.randn(BATCH, WIDTH, device=device)
                loss = cuda_sync.train_step(model, optimizer, x.to(device) + 0.1 * noise)
                loop.collect_metrics(loss=loss, batch=x[0, 0], noise=noise[0, 0])
                time.sleep(PAUSE)  # so that kills strike in all places of a step


# ------------------------------------------------------------------------------------ the parent


@dataclass
class Kills:
    """What came of killing under one kind of kernels."""

    deterministic: bool
    again_equal: bool = False
    """Whether a second undisturbed run was equal in all, too."""
    kills: int = 0
    runs: int = 0
    kept: int = 0
    """Runs in which all that was promised was equal."""
    equal: int = 0
    """Runs that were equal in all."""
    broken: list[str] = field(default_factory=list)
    """The first differences where a promise was broken."""


class Trainings:
    """Starts the child, and kills it."""

    def __init__(self, folder: Path, device: str, deterministic: bool, draw: random.Random) -> None:
        self._folder, self._device, self._deterministic, self._draw = folder, device, deterministic, draw

    def undisturbed(self, name: str) -> Path:
        """A run that nobody kills."""
        self._require(self._start(name))
        return self._folder / name

    def killed(self, name: str, times: int = 2) -> tuple[Path, int]:
        """A run that was killed while it trained, and how often it struck."""
        struck = 0
        for _ in range(times):
            child = self._start(name)
            assert child.stdout is not None
            # by steps, not by time: however fast the device is, no kill comes too late
            for _step in range(self._draw.randint(1, STEPS * 3 // (5 * times))):
                child.stdout.readline()
            time.sleep(self._draw.uniform(0, PAUSE))
            child.send_signal(signal.SIGKILL)
            child.communicate()
            struck += child.returncode == -signal.SIGKILL
        self._require(self._start(name))
        return self._folder / name, struck

    def _start(self, name: str) -> subprocess.Popen[str]:
        kernels = "deterministic" if self._deterministic else "other"
        command = [sys.executable, __file__, "--child", str(self._folder / name), kernels, self._device]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "EVERSTEP_INDEX": "off"}
        log = open(self._folder / f"{name}.log", "a")  # noqa: SIM115
        with log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    def _require(self, child: subprocess.Popen[str]) -> None:
        child.communicate()
        if child.returncode:
            logs = "\n".join(log.read_text() for log in self._folder.glob("*.log"))
            raise RuntimeError(f"the training ended with status {child.returncode}\n{logs[-4000:]}")


def kill(folder: Path, device: str, deterministic: bool, seconds: float, draw: random.Random) -> Kills:
    """Kill runs for so many seconds, at least one, and compare each with the undisturbed one."""
    folder.mkdir()
    ends = time.monotonic() + seconds
    trainings = Trainings(folder, device, deterministic, draw)
    whole = trainings.undisturbed("undisturbed")
    found = Kills(deterministic, not compare_runs(whole, trainings.undisturbed("undisturbed again")))
    while not found.runs or time.monotonic() < ends:
        run, struck = trainings.killed(f"killed {found.runs}")
        different = [one.path for one in compare_runs(whole, run)]
        broken = [path for path in different if deterministic or is_promised(path)]
        found.runs, found.kills = found.runs + 1, found.kills + struck
        found.kept, found.equal = found.kept + (not broken), found.equal + (not different)
        found.broken += broken[:5]
    return found


def is_promised(path: str) -> bool:
    """Whether a difference at `path` breaks the promise that holds with any kernels."""
    is_row = path.startswith("row/") and path.rpartition("/")[0].rpartition("/")[2] in PROMISED_ROWS
    return is_row or path.startswith(PROMISED)


# ------------------------------------------------------------------------------------- the table


def measure(options: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether every promise was kept."""
    device, seconds = options.device, SHARE * 60 * options.minutes
    lines, kept = heading(options), True
    with tempfile.TemporaryDirectory() as place:
        folder, draw = Path(place), random.Random(options.seed)
        told(f"law 6: {options.steps} steps under torch's guard")
        six = cuda_sync.zero_synchronisation(folder, options.steps, device)
        guarded = "" if device == "cuda" else " (no guard: this device waits for nothing)"
        equal = "all metrics equal" if six["metrics_equal"] else "**metrics differ**"
        lines.append(
            f"| 6 | any | {six['steps_without_sync']} steps without a synchronisation{guarded}; {equal} |"
        )
        kept = six["metrics_equal"]
        for deterministic in (True, False):
            kernels = "deterministic" if deterministic else "other"
            told(f"law 1, {kernels} kernels: kills for {seconds:.0f} s")
            found = kill(folder / kernels, device, deterministic, seconds, draw)
            lines += rows_of(found, kernels)
            kept = kept and found.kept == found.runs
            told(f"overhead, {kernels} kernels")
            torch.use_deterministic_algorithms(deterministic)
            cost = cuda_sync.overhead(
                folder / f"{kernels} overhead", options.repeats, device=device, width=options.width
            )
            lines.append(
                f"| overhead | {kernels} | {cost['extra_us']} us a step over {cost['bare_step_us']} us bare: "
                f"{cost['extra_percent']} % |"
            )
    return "\n".join([*lines, ""]), kept


def heading(options: argparse.Namespace) -> list[str]:
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return [
        f"# Proof on {name}, {date.today()}",
        "",
        f"{versions}; `python bench/proof_gpu.py --device {options.device} --seed {options.seed}`",
        "",
        "| law | kernels | found |",
        "|---|---|---|",
    ]


def rows_of(found: Kills, kernels: str) -> list[str]:
    what = "every leaf and row" if found.deterministic else "batches, noise and random state"
    again = "equal" if found.again_equal else "not equal"
    rows = [
        f"| 1 | {kernels} | {found.kills} kills; {what} equal in {found.kept} of {found.runs} runs |",
        f"| 1 | {kernels} | equal in all: {found.equal} of {found.runs}; two undisturbed runs: {again} |",
    ]
    return rows + [f"| 1 | {kernels} | **differs: {path}** |" for path in found.broken[:5]]


def told(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the program")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)), help="aims the kills")
    parser.add_argument("--steps", type=int, default=500, help="under torch's guard")
    parser.add_argument("--repeats", type=int, default=7, help="of the measured blocks of steps")
    parser.add_argument("--width", type=int, default=2048, help="of the measured model")
    parser.add_argument("--out", type=Path, help="default: bench/proof-DEVICE-DATE.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device here; --device cpu tries the program without one\n")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else deterministic cuBLAS is refused
    os.environ.setdefault("EVERSTEP_INDEX", "off")
    table, kept = measure(options)
    out = options.out or Path(__file__).parent / f"proof-{options.device}-{date.today()}.md"
    out.write_text(table)
    print(f"{table}\nwritten to {os.path.relpath(out)}")
    sys.exit(not kept)


def child(run: str, kernels: str, device: str) -> Any:
    torch.use_deterministic_algorithms(kernels == "deterministic")
    train(Path(run), device)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
