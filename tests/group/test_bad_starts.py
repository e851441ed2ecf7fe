"""Bad input of loops on several ranks: one clear error on each rank, quickly, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, lines_by_rank, outputs, started
from rank_loops import HEAD


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def test_ranks_that_were_started_differently_are_told_what_differs(folder: Path) -> None:
    program = """
say(*ended("run", epochs=1))
say(*ended(f"run-{rank}"))
say(*ended("run", epochs=2 + rank))
say(*ended("run", seed=7 + rank))
say(*ended("run", config={"width": 3 + rank, "rank": rank}))
say(*ended("run", on_change=("error", "override")[rank]))
say(*ended("run", services=[everstep.EarlyStop("loss", threshold=-1.0)] if rank else []))
numbers = np.random.default_rng(0)
x, y = x[: 64 - 8 * rank], y[: 64 - 8 * rank]
say(*ended("data"))
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    for rank in range(2):
        whole, _folders, epochs, seed, config, change, guards, data = said[rank]
        assert whole.startswith("ended 8 ")
        assert "max_epoch: rank 0 has 2, rank 1 has 3" in epochs
        assert "seed: rank 0 has 7, rank 1 has 8" in seed
        assert "config.width: rank 0 has 3, rank 1 has 4" in config and "config.rank" not in config
        assert 'on_change: rank 0 has "error", rank 1 has "override"' in change
        assert guards.startswith("DisagreementError: ") and 'rank 1 has "EarlyStop"' in guards, guards
        assert data.startswith("DisagreementError: the data of stream 'train' differs between the processes")
    assert said[1][1].startswith("RunDirError: rank 1 finds no run") and "all of them see" in said[1][1]
    assert "rank 1 has failed: RunDirError: rank 1 finds no run" in said[0][1]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1].endswith("00000008")


OPENING = """
began = time.monotonic()
try:
    find_group()
except Exception as error:
    say(f"{type(error).__name__}: {error}")
say(time.monotonic() - began < 20)
"""


def test_a_rank_that_never_comes_is_named_within_the_limit_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERSTEP_GROUP_LIMIT", "1.5")
    program = "if rank == 1: sys.exit()\n" + OPENING
    with started(program, 3) as processes:
        said = lines_by_rank("".join(ended(processes, 60)))
    assert said[0][0].startswith(
        "MissingRankError: rank 1 did not come to 'the opening of the group' within 1.5 s"
    )
    assert "EVERSTEP_GROUP_LIMIT" in said[0][0]
    assert said[0][1] == said[2][1] == "True"


def test_a_rendezvous_without_an_address_or_without_an_answer_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERSTEP_GROUP_LIMIT", "1.5")
    program = (
        """
if rank == 0:
    sys.exit()  # nobody hosts the store
"""
        + OPENING
        + """
del os.environ["MASTER_ADDR"]
"""
        + OPENING
        + """
os.environ["EVERSTEP_GROUP_LIMIT"] = "soon"
"""
        + OPENING
    )
    with started(program, 2) as processes:
        said = lines_by_rank("".join(ended(processes, 60)))[1]
    assert said[0].startswith("StoreLostError: no store answers at 127.0.0.1:")
    assert said[2].startswith("ConfigError: ") and "MASTER_ADDR" in said[2]
    assert said[4].startswith("ConfigError: EVERSTEP_GROUP_LIMIT='soon'")
    assert said[1] == said[3] == said[5] == "True"
