"""examples/ddp.py, fsdp.py and the README on two ranks: losses of one, equal runs after a kill of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gate
import warm
from everstep.polling import wait_until
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

sys.path.append(str(Path(__file__).parents[1] / "group"))
from processes import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 8 if gate.is_campaign else 2
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")


SIZE = {"ddp": f"--epochs={EPOCHS}", "fsdp": "--small"}


def options(run: Path, example: str = "ddp") -> list[str]:
    return [str(EXAMPLES / f"{example}.py"), f"--run-dir={run}", SIZE[example]]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_ranks(command: list[str]) -> list[subprocess.Popen[str]]:
    """Start a program on two ranks without a launcher, which takes seconds."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(command, RANK=str(rank), **group) for rank in range(2)]


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=240)[0]
    finally:
        process.kill()


def run_ranks(run: Path, example: str = "ddp") -> str:
    """Run the example on two ranks to its end; return what they say."""
    ranks = start_ranks(options(run, example))
    said = "".join(map(ended, ranks))
    # torch's gloo aborts now and then as the interpreter ends, when all is done
    assert {rank.returncode for rank in ranks} <= {0, -signal.SIGABRT}, said
    assert said.count("digest of the state") == 1
    return said


README = """
import os
os.chdir({folder!r})
names = {{}}
exec({code!r}, names)
print("ranks:", names["loop"].ranks)
"""


@pytest.mark.campaign("long")
def test_the_program_of_the_readme_runs_on_two_ranks_as_it_stands(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = (root / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "model = everstep.torch.parallel(model)" in code
    program = README.format(folder=str(tmp_path), code=code)
    ranks = start_ranks(["-c", program])
    said = "".join(map(ended, ranks))
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said.count("ranks: 2") == 2 and said.count("[Epoch 20/20") == 1
    epochs, _ = RunJournal(tmp_path / "runs" / "first").series("valid_loss", "tail")
    assert len(epochs) == 20


def await_checkpoint(run: Path) -> None:
    assert wait_until(lambda: len(list((run / "checkpoints").glob("*step-*"))) >= 3, 120)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nobody killed."""
    run = tmp_path_factory.mktemp("ddp") / "run"
    run_ranks(run)
    return run


@pytest.mark.campaign("long")
def test_two_ranks_have_the_losses_of_one(undisturbed: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    warm.run([sys.executable, *options(one)], check=True, capture_output=True)
    for names in (("loss",), ("valid_accuracy", "tail")):
        steps, values = RunJournal(one).series(*names)
        assert RunJournal(undisturbed).series(*names) == (steps, pytest.approx(values, rel=1e-10))
    assert len(RunJournal(one).series("loss")[0]) == EPOCHS * 45


@pytest.mark.campaign("long")
@pytest.mark.parametrize("example", SIZE)
def test_killed_and_started_again(tmp_path: Path, example: str) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_ranks(straight, example)
    series = ("loss",) if example == "ddp" else ("valid_loss", "tail")
    losses = RunJournal(straight).series(*series)[1]
    assert losses[-1] < losses[0]
    ranks = start_ranks(options(run, example))
    await_checkpoint(run)
    ranks[1].kill()
    said = "".join(map(ended, ranks))
    assert ranks[0].returncode == 1, said
    assert "resuming" in run_ranks(run, example)
    assert compare_runs(straight, run) == []


@pytest.mark.campaign("long")
def test_on_one_process_fsdp_goes_on_from_two(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = start_ranks(options(run, "fsdp"))
    await_checkpoint(run)
    for rank in ranks:
        rank.kill()
    "".join(map(ended, ranks))
    command = [sys.executable, *options(run, "fsdp")]
    said = warm.run(command, check=True, capture_output=True, text=True).stdout
    assert "is of 2 ranks, and this start has 1 rank" in said
    assert "digest of the state" in said


@pytest.mark.campaign("long")
def test_torchrun_starts_the_ranks_again_by_itself(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = start(["-m", *TORCHRUN, *options(run)])
    await_checkpoint(run)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ranks = [rank for rank in map(int, children) if os.getsid(rank) == rank]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    said = ended(torchrun)
    assert torchrun.returncode == 0 and "resuming" in said, said
    assert compare_runs(undisturbed, run) == []
