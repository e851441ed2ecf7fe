"""Elastic launches: an agent of torchrun is lost, the rest continues, and another agent joins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import HEAD, free_port, outputs
from test_other_ranks import losses, samples

from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("timed")

PROGRAM = """
import json
import numpy, torch
import everstep
from everstep import Every

folder = FOLDER
numbers = numpy.random.default_rng(0)
x, y = numbers.standard_normal((60, 5)), numbers.standard_normal((60, 1))
torch.manual_seed(0)
torch.set_num_threads(1)
bare = torch.nn.Linear(5, 1).double()
model = everstep.torch.parallel(bare)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
services = [everstep.Checkpoints(Every(steps=4))]
open(f"{folder}/{os.getppid()}.{os.getpid()}", "w").close()
with everstep.TrainLoop(f"{folder}/run", {"model": model, "optimizer": optimizer}, seed=7, max_epoch=24,
                        services=services) as loop:
    for epoch in loop.iter_epochs():
        for step, (ids, bx, by) in loop.iter_steps(
            everstep.data.arrays(numpy.arange(60), x, y, batch_size=12, shuffle=True)
        ):
            say("ids", json.dumps([step, ids.tolist()]))
            loss = torch.nn.functional.mse_loss(model(torch.as_tensor(bx)), torch.as_tensor(by))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.collect_metrics(loss=loss)
            open(f"{folder}/{size}-{step}", "w").close()
            if os.environ.get("TORCHELASTIC_RUN_ID"):  # until there are two again, there is time to join
                time.sleep(0.5 if size == 1 and step > 20 else 0.02)
"""


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start an agent of torchrun with one rank, which other agents may join."""
    timing = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-id=elastic"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={timing}"]
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, "--monitor-interval=0.2", "program.py"],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )


def lose(folder: Path, lost: subprocess.Popen[bytes]) -> None:
    """Kill an agent with its ranks, as the loss of its machine does."""
    lost.kill()
    for path in folder.glob(f"{lost.pid}.*"):
        try:
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    lost.wait()


def until(seen: Callable[[], object], limit: float = 120) -> None:
    end = time.monotonic() + limit
    while not seen() and time.monotonic() < end:
        time.sleep(0.05)
    assert seen()


def test_an_agent_is_lost_and_another_joins(tmp_path: Path) -> None:
    folder, straight = tmp_path / "elastic", tmp_path / "straight"
    folder.mkdir()
    straight.mkdir()
    expected = samples(outputs(PROGRAM.replace("FOLDER", repr(str(straight))), 1))
    (folder / "program.py").write_text(HEAD + PROGRAM.replace("FOLDER", repr(str(folder))))
    port = free_port()
    agents = [agent(folder, port)]
    try:
        time.sleep(0.5)  # the first agent hosts the store of the rendezvous
        agents.append(agent(folder, port))
        until(lambda: (folder / "2-9").exists())
        lose(folder, agents[1])
        until(lambda: list(folder.glob("1-*")))
        agents.append(agent(folder, port))
        for each in (agents[0], agents[2]):
            assert each.wait(timeout=150) == 0, (folder / "said").read_text()
    finally:
        for each in agents:
            lose(folder, each)
    said = (folder / "said").read_text()
    starts = [event.data["facts"] for event in RunJournal(folder / "run").events("segment", valid=False)]
    changes = [(facts["ranks"], facts.get("ranks_before")) for facts in starts]
    assert changes[0][0] in (1, 2) and changes[-1][0] == 2, said  # the second agent may come later
    assert (1, 2) in changes and (2, 1) in changes, said
    # a step that ran again, or on ranks of which one was lost, had the same samples: each is there
    found = samples([said])
    assert found.keys() == expected.keys()
    assert all(set(ids) == set(expected[step]) for step, ids in found.items())
    straightly = losses(straight / "run")
    assert losses(folder / "run").keys() == straightly.keys()
    for place, loss in losses(folder / "run").items():
        assert loss == pytest.approx(straightly[place], abs=1e-10), place
