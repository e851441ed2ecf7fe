"""Hazards: what a spec does, and which specs are refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep import hazard
from everstep.errors import ConfigError


def test_the_nth_time_is_struck_and_then_a_second_part_is_armed() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    hazard.arm("SIGUSR1:here:2 then ENOSPC:there:1-2")
    for point, expected in (("there", 0), ("here", 0), ("here", 1), ("here", 1)):
        hazard.reach(point)
        assert len(heard) == expected
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            hazard.reach("there")
        assert caught.value.errno == errno.ENOSPC
    hazard.reach("there")
    hazard.reach("here")
    assert heard == [signal.SIGUSR1]


@pytest.mark.parametrize("spec", ["", "kill", "kill:here", "kill:here:x", "SIGNOT:here:1", "kill::1"])
def test_what_is_no_spec_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="'SIGNAL:POINT:N'"):
        hazard.arm(spec)


@pytest.mark.parametrize(("end", "struck"), [("", [0, 1]), (" @ rank 1", [1])])
def test_the_environment_aims_at_all_ranks_or_at_one(end: str, struck: list[int]) -> None:
    statuses = [_reached("here", rank, f"kill:here:1{end}") for rank in range(2)]
    assert statuses == [-signal.SIGKILL if rank in struck else 0 for rank in range(2)]


def test_each_rank_traces_into_a_file_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        _reached(f"here-{rank}", rank, f"trace:{tmp_path}/{{rank}}")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["here-0\n", "here-1\n"]


def _reached(point: str, rank: int, spec: str) -> int:
    """Let a process of this rank come to a point; returns its exit status."""
    program = f"from everstep import hazard; hazard.reach({point!r})"
    variables = {**os.environ, "EVERSTEP_HAZARD": spec, "RANK": str(rank)}
    return subprocess.run([sys.executable, "-c", program], env=variables, check=False).returncode
