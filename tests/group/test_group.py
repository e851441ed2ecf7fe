"""A group of real processes, over torchrun's store, a process group's, and one that rank 0 hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ended, lines_by_rank, outputs, started, under_torchrun

from everstep.errors import ConfigError
from everstep.group import Single, find_group
from everstep.testing import nothing_left


def test_one_process_is_a_group() -> None:
    group = Single()
    assert group.gather("a", "it") == ["a"] and group.share(3, "it") == group.agree(3, "it") == 3
    assert group.any(True, "it") and group.writer and group.store is None
    group.close()


def test_one_process_has_no_thread_file_or_framework() -> None:
    program = """
import sys, threading
from everstep.group import find_group
group = find_group()
assert type(group).__name__ == "Single" and threading.active_count() == 1
value = {"a": object()}
assert group.gather(value, "a value")[0] is value
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
    with nothing_left():
        find_group().barrier("alone")


@pytest.mark.campaign("long")
def test_a_process_group_of_the_program_is_one() -> None:
    program = """
    import torch, torch.distributed as dist
    before = find_group()  # its store is at the same address
    dist.init_process_group("gloo")
    del os.environ["WORLD_SIZE"], os.environ["RANK"]
    group = find_group()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    say(group.gather(int(total), "the sum"), before.gather(rank, "the ranks"), group.size)
    group.close(); before.close()
    dist.destroy_process_group()
    """
    assert outputs(program, 2) == ["0: [1, 1] [0, 1] 2\n", "1: [1, 1] [0, 1] 2\n"]


@pytest.mark.campaign("timed")
def test_ranks_that_torchrun_starts_again_do_not_read_the_keys_of_before(tmp_path: Path) -> None:
    program = """
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    group = find_group()
    say(restart, group.gather([restart, rank], "the restarts"))
    if restart == 0:
        group.gather("old", "an operation that the restart has, too")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    say(restart, group.gather("new", "an operation that the restart has, too"))
    group.close()
    """
    with under_torchrun(program, 2, tmp_path, "--max-restarts=1") as torchrun:
        text, _ = torchrun.communicate(timeout=180)
    assert torchrun.returncode == 0, text
    said = ["0 [[0, 0], [0, 1]]", "1 [[1, 0], [1, 1]]", "1 ['new', 'new']"]
    assert lines_by_rank(text) == {0: said, 1: said}


@pytest.mark.campaign("timed")
def test_when_the_rank_that_hosts_the_store_is_killed_the_store_is_lost() -> None:
    program = """
    import everstep
    from everstep.group import Agreement
    group = find_group()
    lost = []
    agreement = Agreement(group, lambda: 0, lambda: None, lost.append)  # its thread blocks
    group.barrier("all are here")
    if rank == 0:
        time.sleep(0.3)  # the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier("after the kill")
    except everstep.errors.GroupError as error:
        say(type(error).__name__)
    agreement.close()
    group.close()
    say([type(error).__name__ for error in lost], threading.active_count())
    """
    with started(program, 3) as processes:
        printed = ended(processes)
    for rank in (1, 2):
        assert lines_by_rank(printed[rank])[rank] == ["StoreLostError", "['StoreLostError'] 1"], printed[rank]


@pytest.mark.campaign("timed")
def test_without_torchrun_the_error_names_its_store(tmp_path: Path) -> None:
    program = """
    import ctypes, everstep
    group = find_group()
    ctypes.CDLL(None).prctl(1, 0)  # as a rank of another machine, whose own torchrun lives
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    group.barrier("all are here")
    if rank == 0:
        time.sleep(0.3)  # rank 1 has left the barrier
        os.kill(os.getppid(), signal.SIGKILL)
    try:
        while True:
            group.barrier("again")
    except everstep.errors.StoreLostError as error:
        say("lost", "torchrun" in str(error), len(str(error)) < 300)
    """
    with under_torchrun(program, 2, tmp_path) as torchrun:
        text = torchrun.communicate(timeout=180)[0]  # ends when the last holder of the pipe does
    assert lines_by_rank(text) == {0: ["lost True True"], 1: ["lost True True"]}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "EVERSTEP_GROUP_LIMIT": "soon"}, "EVERSTEP_GROUP_LIMIT='soon'"),
    ],
)
def test_a_wrong_variable_of_a_launcher_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_group()


@pytest.mark.campaign("long")
def test_a_process_opens_one_connection_for_its_requests_and_one_that_blocks() -> None:
    """With torch's process group there are three; each costs two questions to a name server."""
    program = """
    import torch, everstep
    from everstep.backends.torch.parallel import open_group
    from everstep.group import Agreement, GroupNews
    from everstep.checkpoint import RankExchange
    def connections():
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        sockets = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdecimal()
                   and os.path.lexists(f"/proc/self/fd/{n}")}
        lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}")]
        return sum(line[2].endswith(port) and f"socket:[{line[9]}]" in sockets for line in lines[1:])
    for make in (find_group, lambda: open_group(False) or find_group()):
        group = make()
        agreement = Agreement(group, lambda: 0, lambda: None)
        users = RankExchange(group), GroupNews(group)
        say(connections())
        group.barrier("both have counted")
        agreement.close()
        group.close()
    """
    assert outputs(program, 2) == ["0: 2\n0: 3\n", "1: 2\n1: 3\n"]


@pytest.mark.campaign("long")
def test_metrics_of_any_number_of_steps_are_reduced() -> None:
    """Gathered at once they have 20 MB, where the store takes 8 MiB for a value."""
    program = """
    from everstep.metrics.across_ranks import AcrossRanks
    group = find_group(limit=100)
    values = [(step // 2, "loss", step + rank / 3) for step in range(200_000 + 50_000 * rank)]
    found = AcrossRanks(group).steps(values, {step: 1.5 - rank for step in range(125_000)})
    sizes = {len(found), sum(name == "loss" for _, name, _ in found), [step for step, *_ in found] == sorted(
        step // 2 for step in range(250_000))}
    say(sizes, found[199_999][2] == (199_999 * 1.5 + (199_999 + 1 / 3) * 0.5) / 2, found[200_000])
    assert [len(each) for each in group.gather_lists([1] * 7 * rank, "lists")] == [0, 7]
    group.close()
    """
    assert [text[3:] for text in outputs(program, 2)] == [
        "{250000, True} True (100000, 'loss', 200000.33333333334)\n"
    ] * 2


@pytest.mark.campaign("timed")
def test_a_signal_is_handled_while_a_rank_waits() -> None:
    program = """
    handled = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(time.monotonic()))
    group = find_group()
    group.barrier("all are here")
    if rank == 1:
        time.sleep(1.5)
    else:
        began = time.monotonic()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    group.barrier("rank 1 is late")
    say(rank == 1 or handled[0] - began < 1)
    group.close()
    """
    assert outputs(program, 2) == ["0: True\n", "1: True\n"]
