"""A group of one, a group over a process group's store, and what large metrics need of torch's."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from processes import outputs

from everstep.errors import ConfigError
from everstep.group import Single, find_group
from everstep.testing import nothing_left


def test_one_process_is_a_group() -> None:
    group = Single()
    assert group.gather("a", "it") == ["a"] and group.share(3, "it") == group.agree(3, "it") == 3
    assert group.writer and group.store is None
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
def test_metrics_of_any_number_of_steps_are_reduced() -> None:
    """Gathered at once they have 20 MB, where the store takes 8 MiB for a value."""
    program = """
    from everstep.metrics.aggregation import AcrossRanks
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
