"""A rank that is gone is noticed within seconds, and one that is only stopped is not lost."""

from __future__ import annotations

import pytest
from processes import ended, lines_by_rank, outputs, started

pytestmark = pytest.mark.campaign("timed")

JOINED = """
from everstep.errors import GroupError
from everstep.group import Peers
group = find_group(limit=60)
peers = Peers(group)
group.barrier("all have joined")
"""


def test_a_killed_rank_is_noticed_within_five_seconds() -> None:
    program = (
        JOINED
        + """
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    group.barrier("the lost rank does not come")
except GroupError as error:
    say(type(error).__name__, error.ranks, time.monotonic() - began < 5)
time.sleep(3 if rank == 0 else 0)  # it hosts the store, where the others look once a second
os._exit(0)
"""
    )
    with started(program, 3) as processes:
        said = lines_by_rank("".join(ended(processes)))
    assert said == {rank: ["PeerFailedError (2,) True"] for rank in (0, 1)}


def test_a_stopped_rank_is_not_lost() -> None:
    """It is stopped for longer than a machine may be silent."""
    program = (
        JOINED
        + """
if rank == 1:
    if os.fork() == 0:  # somebody has to continue it
        time.sleep(7)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
group.barrier("a stopped rank")
peers.close()
group.close()
say(threading.active_count())
"""
    )
    assert outputs(program, 2) == ["0: 1\n", "1: 1\n"]


def test_ranks_that_leave_in_any_order_are_not_lost() -> None:
    program = (
        JOINED
        + """
time.sleep(0.3 * ((rank + 1) % size))
peers.close()
time.sleep(0.5)
group.barrier("all have left")
group.close()
say(threading.active_count())
"""
    )
    assert outputs(program, 3) == ["0: 1\n", "1: 1\n", "2: 1\n"]


def test_a_rank_that_cannot_be_reached_is_an_error_on_all() -> None:
    program = """
import everstep.group.peers
from everstep.errors import GroupError
everstep.group.peers.REACH = 1
group = find_group(limit=60)
if rank == 1:  # it says an address at which nobody is
    gather = group.gather
    group.gather = lambda value, what: gather([value[0], 9] if "addresses" in what else value, what)
try:
    everstep.group.Peers(group)
except GroupError as error:
    say("rank 0 does not reach rank 1" in str(error))
group.close()
say(threading.active_count())
"""
    with started(program, 2) as processes:
        printed = ended(processes)
    assert [lines_by_rank(text)[rank] for rank, text in enumerate(printed)] == [["True", "1"]] * 2
