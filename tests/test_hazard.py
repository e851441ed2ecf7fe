"""Hazards: what a spec does, and which specs are refused."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

import pytest

from everstep import hazard
from everstep.errors import ConfigError


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The numbers of the SIGUSR1 that this process was sent."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)
    hazard.arm(None)


def test_a_signal_is_sent_at_the_nth_time(heard: list[int]) -> None:
    hazard.arm("SIGUSR1:here:2")
    for expected in ([], [signal.SIGUSR1], [signal.SIGUSR1]):
        hazard.reach("elsewhere")
        hazard.reach("here")
        assert heard == expected


def test_the_second_part_is_armed_when_the_first_has_struck(heard: list[int]) -> None:
    hazard.arm("SIGUSR1:here:2 then ENOSPC:there:1-2")
    hazard.reach("there")
    hazard.reach("here")
    hazard.reach("there")
    hazard.reach("here")
    assert heard == [signal.SIGUSR1]
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
