"""The drill on several ranks: a sound script, and planted faults that only several ranks have."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from drill_counts import count_strikes
from everstep.drill import HAZARDS, RANK_HAZARDS, DrillReport, drill
from everstep.drill.campaign import aim
from everstep.drill.program import Strike
from everstep.errors import DrillError

SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"

FAULTS = {
    "mask": ("collective", ("loss", "loss", 0)),
    "tally": ("writer's commit", ("state", "seen.tally", 1)),
}
"""Fault -> the hazard, and the component that its resume spoils first, its name, and the rank."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def drilled(*args: str, **options: Any) -> DrillReport:
    return drill(SCRIPT, args, ranks=2, kills=1, **options)


@pytest.mark.campaign("long")
@pytest.mark.timeout(600)
def test_a_sound_script_on_two_ranks_is_exact() -> None:
    report = drilled(hazards=["torchrun", "SIGTERM"])
    assert report.exit_code == 0, report
    statuses = [[start.status for start in one.starts] for one in report.results]
    assert statuses == [[-9, 0], [143, 0]]
    assert report.as_dict()["ranks"] == 2 and "2 ranks, 15 steps" in report.header()
    assert "on 2 ranks" in report.verdict() and "not covered: several machines" in report.verdict()


@pytest.mark.campaign("long")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_it_names_what_a_resume_spoils_and_the_rank(fault: str) -> None:
    hazard, spoiled = FAULTS[fault]
    report = drilled(fault, hazards=[hazard])
    first = report.first_divergence
    assert report.exit_code == 1 and first is not None, report
    assert (first.component, first.name, first.rank) == spoiled, report
    assert ("on rank 1" in report.verdict()) == (fault == "tally")


@pytest.mark.campaign("long")
@pytest.mark.timeout(3600)
def test_a_sound_script_is_exact_at_every_hazard_of_ranks(tally: Any) -> None:
    report = drill(SCRIPT, ranks=3)
    assert report.exit_code == 0, report
    count_strikes(report, tally)


@pytest.mark.campaign("long")
@pytest.mark.timeout(600)
def test_a_script_that_trains_on_one_rank_alone_is_refused() -> None:
    Path("alone.py").write_text(
        "import os\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.environ['WORLD_SIZE'] = '1'\n"
        "    import everstep, numpy\n"
        "    with everstep.TrainLoop('run', {'n': {}}, seed=1, max_epoch=1) as loop:\n"
        "        for _ in loop.iter_epochs():\n"
        "            list(loop.iter_steps(everstep.data.arrays(numpy.ones(2), batch_size=1)))\n"
    )
    with pytest.raises(DrillError, match="trains on 1 of 2 ranks"):
        drill("alone.py", ranks=2)


def test_every_hazard_says_whom_it_strikes() -> None:
    """Each rank is struck at points of its own, and the same draw aims the same strikes."""
    begun = ["journal.create", "witness.enter", "witness.before", "witness.step"]
    ends = ["checkpoint.write", "loop.exit"]
    writer = [*begun, "checkpoint.tell_folder", "checkpoint.verdict", *ends]
    other = [*begun[1:], "checkpoint.heard_folder", "checkpoint.tell_part", *ends]
    assert RANK_HAZARDS.keys() > HAZARDS.keys()
    struck: dict[str, set[str]] = {}
    for hazard in ("commit", "shutdown", "resume", "writer's commit", "another's commit", "SIGINT"):
        for seed in range(20):
            strikes = aim(hazard, [writer, other], 1.0, Random(seed))
            assert strikes == aim(hazard, [writer, other], 1.0, Random(seed))
            for strike in strikes:
                assert strike.last[1] in (writer, other)[strike.rank], strike
                assert str(strike) == f"{strike.spec} @ {strike.target}"
                struck.setdefault(hazard, set()).add(strike.target)
    assert struck.pop("writer's commit") == {"rank 0"}
    assert struck.pop("another's commit") == {"rank 1"}
    assert set(map(frozenset, struck.values())) == {frozenset({"rank 0", "rank 1"})}
    assert str(Strike(seconds=1.5, target="torchrun")) == "kill torchrun after 1.500 s"
