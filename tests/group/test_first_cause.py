"""The first cause of a failure is named with its rank, and what follows from it as its consequence."""

from __future__ import annotations

import pytest
from processes import lines_by_rank, started

pytestmark = pytest.mark.campaign("timed")

JOINED = """
import torch, torch.distributed as dist
from everstep.group import Peers, report
dist.init_process_group("gloo")
group = find_group(limit=60)
peers = Peers(group)
def end(error):
    cause = report(group, error)
    say(type(error).__name__, "|", cause)
    time.sleep(4 if rank == 0 else 0)  # it hosts the store
    os._exit(0)
value = torch.ones(1)
dist.all_reduce(value)
"""

ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "its process is gone without a word",
    'end(ValueError("a bad sample"))': "ValueError: a bad sample",
}


@pytest.mark.parametrize("ends", ENDS)
def test_a_broken_collective_is_a_consequence_of_the_rank_that_is_lost(ends: str) -> None:
    program = (
        JOINED
        + f"""
if rank == 2:
    {ends}
try:
    while True:
        dist.all_reduce(value)
except RuntimeError as error:
    end(error)
"""
    )
    with started(program, 3) as processes:
        said = [process.communicate(timeout=180)[0] for process in processes]
    for rank in (0, 1):
        error, _, cause = lines_by_rank(said[rank])[rank][-1].partition(" | ")
        assert error == "RuntimeError" and cause.startswith(f"rank 2: {ENDS[ends]}"), said
    if "ValueError" in ends:
        assert lines_by_rank(said[2])[2] == ["ValueError | None"]
