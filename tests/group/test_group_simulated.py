"""Groups: of one, over torch's store, and in simulations: ranks that are late, lost, started again."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from processes import outputs
from simulation import Simulation

from everstep.contracts.group import Group, require_same
from everstep.errors import ConfigError, DisagreementError, GroupError, MissingRankError
from everstep.group import StoreGroup, find_group, report
from everstep.testing import nothing_left
from gate import share


def test_an_operation_costs_five_requests_and_leaves_no_keys() -> None:
    """Beside those that wait; the writer's has two more.  The keys of two operations stay."""

    def program(rank: int) -> Any:
        group, requests = simulation.group(), simulation.requests[rank]
        for number in range(24):
            if number == 4:
                before = requests.copy()
            group.gather(number, "a number")
        simulation.sleep(1)
        made, keys = requests - before, sorted(key.partition("/")[2] for key in simulation.keys)
        group.barrier("both have counted")
        group.close()
        return {name: made[name] / 20 for name in ("set", "get", "delete")}, made["has"], keys

    for seed in range(10):
        with Simulation(seed, 2) as simulation:
            (writer, looked, keys), (other, waited, _) = simulation.run(program)
            assert writer == {"set": 2, "get": 1, "delete": 2} and other == {"set": 1, "get": 1, "delete": 1}
            assert looked >= 20 <= waited
            in_group = [key for key in keys if key[:1].isdigit() and key != "1"]
            assert in_group == ["23/0", "23/1", "23/all", "24/0", "24/1", "24/all"], f"seed {seed}: {keys}"


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class of its error and the ranks that it names."""
    try:
        return call()
    except GroupError as error:
        return type(error).__name__, error.ranks


VALUES: tuple[Any, ...] = (None, True, -7, 2**40, 0.1, "", "é\n", [1, [2, None]], {"a": [0.5]}, "x" * 100_000)


def test_of_mappings_the_message_has_the_items_that_differ() -> None:
    asked = [{"stop": None, "save": True, "n": math.nan}, *2 * [{"stop": None, "save": None, "n": math.nan}]]
    with pytest.raises(DisagreementError) as raised:
        require_same(asked, "what the programs ask for")
    listed = 'differs between the processes (rank 0: {"save": true}; ranks 1, 2: {"save": null}); start all'
    assert listed in str(raised.value) and raised.value.ranks == (0,)


def test_operations_bring_the_values_of_all_ranks_and_differences_are_errors_on_all() -> None:
    def program(rank: int) -> Any:
        group, last = simulation.group(), rank == simulation.size - 1
        for value in VALUES:
            assert group.gather([rank, value], "a value") == [[r, value] for r in range(group.size)]
        assert group.writer == (rank == 0) and group.share(rank, "a choice") == 0
        assert any(group.gather(last, "a wish")) and not any(group.gather(False, "a wish"))
        assert group.agree({"a": [1, 2.5]}, "a config") == {"a": [1, 2.5]}
        differ = outcome(lambda: group.agree(last, "the config"))
        began = simulation.now  # the group goes on after a difference
        if last:
            simulation.sleep(0.4)
        group.barrier("a late rank")
        assert simulation.now - began >= 0.4
        elsewhere = outcome(lambda: group.barrier("a place" if rank == 0 else "another place"))
        after = outcome(lambda: group.barrier("after an error"))
        for _ in range(2):
            group.close()
        return differ, elsewhere, after

    for seed in range(12):
        with Simulation(seed, 2 + seed % 3, host=(None, 0)[seed % 2]) as simulation:
            found = simulation.run(program)
        for differ, elsewhere, after in found:
            assert differ[0] == elsewhere[0] == "DisagreementError" and after == ("GroupError", ())
            assert simulation.size == 2 or differ[1] == (simulation.size - 1,)


def trained(simulation: Simulation, limit: float = 5, count: int = 3) -> Callable[[int], Any]:
    """A program that opens a group and meets a few times."""

    def program(rank: int) -> Any:
        group, found = outcome(lambda: simulation.group(limit)), "opened"
        if not isinstance(group, StoreGroup):
            return group, simulation.now
        for number in range(count):
            found = outcome(lambda: group.gather([rank, number], f"operation {number}"))  # noqa: B023
            if isinstance(found, tuple):
                break
            assert found == [[other, number] for other in range(simulation.size)]
        outcome(group.close)
        return found, simulation.now

    return program


@pytest.mark.campaign("long", gate="share")
def test_a_rank_that_is_lost_at_any_place_is_named_within_the_limit() -> None:
    """Also while the group opens.  Where the writer had heard of all, nobody can be named."""
    errors = []
    for seed in share(range(2000), 200):
        size, place = 2 + seed % 3, seed // 3 % 35
        with Simulation(seed, size) as simulation:
            lost = simulation.random.randrange(size)
            simulation.kill_at(lost, place)
            found = simulation.run(trained(simulation))
            for rank, (said, seconds) in ((r, each) for r, each in enumerate(found) if each is not None):
                if isinstance(said, tuple):
                    errors.append(said)
                    assert said in (("MissingRankError", (lost,)), ("MissingRankError", ())), (seed, found)
                    assert said[1] or lost == 0, f"seed {seed}: rank {rank} names nobody: {found}"
                assert seconds < 5 + 1 + 10, (seed, found)  # the writer waits for 10 s to leave last
    assert len([ranks for _, ranks in errors if ranks]) > len(errors) / 2 > 50


def test_a_rank_that_is_late_is_waited_for_and_named_where_it_is_too_late() -> None:
    for seed in range(60):
        late, seconds = seed % 3, (4.0, 8.0)[seed // 3 % 2]
        with Simulation(seed, 3) as simulation:
            simulation.stop_at(late, simulation.random.randrange(25), seconds)
            found = [said for said, _ in simulation.run(trained(simulation))]
        if seconds < 5:
            assert all(not isinstance(said, tuple) for said in found), (seed, found)
        for rank, said in enumerate(found):
            if isinstance(said, tuple):
                assert said[0] == "MissingRankError", (seed, found)
                assert rank == late or said[1] in [(late,), ()], (seed, found)


def test_no_key_of_a_start_that_was_killed_is_believed_by_the_next() -> None:
    for seed in range(100):
        size = 2 + seed % 2
        with Simulation(seed, size) as before:
            for rank in range(size):
                before.kill_at(rank, before.random.randrange(40))
            before.run(trained(before))
        with Simulation(seed + 1, size) as simulation:
            simulation.keys = before.keys

            def again(rank: int) -> Any:
                group = simulation.group()
                found = group.gather("new", "operation 0"), group.failure()
                group.close()
                return found

            assert simulation.run(again) == [(["new"] * size, None)] * size, f"seed {seed}"


def test_a_rank_that_opens_a_group_alone_hears_that_the_others_have_ended() -> None:
    """As by `if rank == 0: trainer.evaluate("test")` after the training."""

    def program(rank: int) -> Any:
        simulation.group().close()
        if rank != 1:
            try:
                simulation.group()
            except DisagreementError as error:
                return error.ranks, simulation.now
        return None

    for seed in range(20):
        with Simulation(seed, 2 + seed % 2) as simulation:
            found = simulation.run(program)
        assert 1 in found[0][0] and found[0][1] < 15, (seed, found)


def test_a_broken_collective_is_a_consequence_of_the_first_failure() -> None:
    """Rank 2 is lost, which its watcher tells a little later; or it raises an error of its own."""

    def program(rank: int) -> Any:
        group = simulation.group()
        group.barrier("all are here")
        if rank == 1:  # as `Peers` does
            simulation.thread(lambda: watch(group))
        if rank == 2 and lost:
            simulation.kill(2)
        error = ValueError("a bad sample") if rank == 2 else RuntimeError("Connection closed by peer")
        cause = report(group, error)
        group.close()
        return cause

    def watch(group: StoreGroup) -> None:
        simulation.pause(math.inf, lambda: 2 in simulation.dead)
        simulation.sleep(1.5)
        group.fail("its process is gone", 2)

    for seed in range(40):
        lost = seed % 2 == 0
        with Simulation(seed, 3) as simulation:
            found = simulation.run(program)
        cause = "rank 2: its process is gone" if lost else "rank 2: ValueError: a bad sample"
        assert found == [cause, cause, None], f"seed {seed}"


def test_of_failures_at_once_one_is_the_first() -> None:
    def program(rank: int) -> Any:
        group = simulation.group()
        if seed % 2:
            return report(group, RuntimeError(f"of {rank}"))
        group.fail(f"of {rank}")
        return group.failure()

    for seed in range(60):
        with Simulation(seed, 3) as simulation:
            found = simulation.run(program)
        if seed % 2:
            first = found.index(None)
            assert [each for each in found if each] == [f"rank {first}: RuntimeError: of {first}"] * 2, found
        else:
            assert found == [found[0]] * 3, found


def test_an_error_of_a_rank_that_waits_says_for_how_long_and_what_to_raise() -> None:
    def program(rank: int) -> Any:
        if rank != 1:
            with pytest.raises(MissingRankError) as caught:
                simulation.group(1.5)
            return str(caught.value)
        return None

    with Simulation(0, 3) as simulation:
        said = simulation.run(program)
    for rank in (0, 2):
        assert said[rank].startswith("rank 1 did not reach 'the opening of the group' within 1.5 s")
        assert "EVERSTEP_GROUP_LIMIT" in said[rank]


def test_one_process_is_a_group_without_thread_file_or_framework() -> None:
    group = Group()
    assert group.gather("a", "it") == ["a"] and group.share(3, "it") == group.agree(3, "it") == 3
    assert group.writer and group.store is None and group.failure() is None
    assert report(group, RuntimeError("Connection closed by peer")) is None  # there is nobody to tell
    group.close()
    program = """
import sys, threading
from everstep.group import find_group
group = find_group()
assert type(group).__name__ == "Group" and threading.active_count() == 1
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


WRONG: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
    ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' is not a number"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_ADDR is not set"),
    ({"WORLD_SIZE": "2", "EVERSTEP_GROUP_LIMIT": "soon"}, "EVERSTEP_GROUP_LIMIT='soon'"),
]


def test_a_wrong_variable_of_a_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, message in WRONG:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_group()


@pytest.mark.campaign("long")
def test_metrics_of_any_number_of_steps_are_reduced() -> None:
    """Gathered at once they have 20 MB, where the store takes 8 MiB for a value."""
    program = """
    from everstep.metrics.statistics import means_of_steps
    group = find_group()
    values = [(step // 2, "loss", step + rank / 3) for step in range(200_000 + 50_000 * rank)]
    found = means_of_steps(group, values, {step: 1.5 - rank for step in range(125_000)})
    sizes = {len(found), sum(name == "loss" for _, name, _ in found), [step for step, *_ in found] == sorted(
        step // 2 for step in range(250_000))}
    say(sizes, found[199_999][2] == (199_999 * 1.5 + (199_999 + 1 / 3) * 0.5) / 2, found[200_000])
    assert [len(each) for each in group.gather_lists([1] * 7 * rank, "lists")] == [0, 7]
    group.close()
    """
    said = "{250000, True} True (100000, 'loss', 200000.33333333334)\n"
    assert [text[3:] for text in outputs(program, 2)] == [said] * 2
