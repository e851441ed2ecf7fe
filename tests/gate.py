"""The two tiers of tests: the gate, which `make test` runs, and the campaign, which a person runs by hand.

A test without a mark is in the gate: one commit has one verdict there, on any day, beside any neighbour. What
is random, timed, long or of one machine is marked; `make campaign` runs it, reports and never gates:

    @pytest.mark.campaign("timed")                  all of its cases
    @pytest.mark.campaign("long", gate=2)           two of its cases, spread evenly, stand in the gate as well
    @pytest.mark.campaign("long", gate="share")     it loops over `share(cases, n)`: in the gate over n

The campaign also runs every test of Hypothesis', with fresh draws: in the gate the draws are always the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

REASONS = {
    "random": "draws at random, or strikes at a time that the machine chooses",
    "timed": "depends on seconds, also on those that a program waits for",
    "long": "takes long; shorter tests of the gate find most of what it finds",
    "machine": "needs what set-up does not install, or is about one machine",
}

is_campaign = False
"""Set before any file of tests is imported."""

seed = 0
"""What random tests start from: 0 in the gate, in the campaign the one that its closing lines print."""


def spread(n: int, of: int) -> list[int]:
    """Which n of the cases 0 to of - 1 stand in the gate."""
    n = min(n, of)
    return [i * of // n for i in range(n)]


def share(cases: Iterable[T], n: int) -> list[T]:
    """All of `cases` in the campaign; n of them, in their order, in the gate."""
    listed = list(cases)
    return listed if is_campaign else [listed[number] for number in spread(n, len(listed))]


def chosen(items: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Divide collected tests into those that this tier runs, and the others."""
    items = list(items)
    cases: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        cases.setdefault((str(item.path), item.originalname), []).append(item)
    runs = set()
    for listed in cases.values():
        mark = listed[0].get_closest_marker("campaign")
        if is_campaign:
            run = listed if mark or getattr(listed[0].function, "is_hypothesis_test", False) else []
        elif mark is None or _in_gate(mark) == "share":
            run = listed
        else:
            run = [listed[number] for number in spread(int(_in_gate(mark)), len(listed))]
        runs |= set(run)
    return [item for item in items if item in runs], [item for item in items if item not in runs]


def is_campaign_only(path: Path) -> bool:
    """Whether a file of tests is marked as a whole."""
    return re.search(r"^pytestmark = \[?pytest\.mark\.campaign\(", path.read_text(), re.M) is not None


def _in_gate(mark: Any) -> int | str:
    (reason,), options = mark.args, dict(mark.kwargs)
    assert reason in REASONS, f"the campaign is for {', '.join(REASONS)}, not for {reason!r}"
    cases: int | str = options.pop("gate", 0)
    assert not options and (cases == "share" or isinstance(cases, int)), mark
    return cases
