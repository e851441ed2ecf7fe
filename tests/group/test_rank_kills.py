"""Law 1 on several ranks: programs x strikes; whatever is killed, the run ends as the undisturbed."""

from __future__ import annotations

import random
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from layouts import HEAD
from processes import POLL, ended, outputs, started
from test_other_ranks import PROGRAM as DDP

from everstep.polling import wait_until
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("random")

LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("fsdp", 2, {}), ("fsdp", 4, {}), ("hsdp", 4, {}), ("mixed precision", 2, {}),
    ("fsdp", 2, {"wrapped": "by hand"}), ("fsdp", 4, {"wrapped": "by hand"}),
    ("fsdp", 2, {"wrapped": "clipped"}), ("fsdp", 2, {"wrapped": "window"}),
    ("plain", 2, {"dropout": 0.3}), ("turned", 2, {"dropout": 0.3}),
    ("plain+", 4, {"dropout": 0.3, "wrapped": "global"}), ("sequence", 2, {"wrapped": "window", "every": 1}),
    ("sequence+", 4, {"data": "torch"}), ("ddp", 2, {"wrapped": "no_sync", "every": 1}),
]  # fmt: skip

ROWS: dict[str, tuple[int, str, tuple[int, ...]]] = {
    **{
        f"DDP on {size}": (size, f"{DDP}\ntrain(run, of_{data}, (kill_at, None), 0.2, 6, slow=slow)", (9, 11))
        for size, data in ((2, "arrays"), (3, "loader"), (4, "arrays"))
    },
    "a Task's window on 2": (2, f"{HEAD}\nrun_task(run, 'ddp', 'normed', kill_at)", (7, 11)),
    **{
        " ".join([f"{how} on {n}", *map(str, more.values())]): (
            n,
            f"{HEAD}\ntrain(run, {how!r}, kill_at, slow, epochs=5, **{more})",
            (8, 11),
        )
        for how, n, more in LAYOUTS
    },
}
"""Number of ranks, program, and the steps (of each start) in which the last rank kills itself."""


def program(row: str, run: Path, kill_at: int = 0, slow: float = 0.0) -> tuple[str, int]:
    size, text, _ = ROWS[row]
    return f"run, kill_at, slow = {str(run)!r}, {kill_at}, {slow}\n{text}", size


def trained(row: str, run: Path, kill_at: int = 0) -> list[str]:
    return outputs(*program(row, run, kill_at), dies=bool(kill_at))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@cache
def undisturbed(row: str, folder: Path) -> Path:
    trained(row, run := folder / row)
    return run


@pytest.mark.parametrize("row", ROWS)
def test_killed_twice_it_ends_as_the_undisturbed(row: str, folder: Path, tmp_path: Path) -> None:
    for kill_at in ROWS[row][2]:
        trained(row, tmp_path / "run", kill_at)
    said = trained(row, tmp_path / "run")
    assert compare_runs(undisturbed(row, folder), tmp_path / "run") == []
    assert "resume differs" not in said[0]


RANDOM = [row for row in ROWS if "slow" in ROWS[row][1]]


def strike(row: str, run: Path, chosen: random.Random, struck: Counter[str]) -> None:
    """Start ranks that train, and strike all of them or one, at a time and in a way that are drawn."""
    how = chosen.choice(["kill one", "kill all", "SIGTERM one"])
    with started(*program(row, run, slow=0.02)) as processes:
        wait_until(lambda: [*run.glob("checkpoints/*")] or any(p.poll() is not None for p in processes), 120)
        Event().wait(chosen.random() * 1.5 + POLL)
        victims = processes if how == "kill all" else [chosen.choice(processes)]
        began = all(Path(f"{run}.{process.pid}").exists() for process in processes)
        for victim in victims:
            victim.send_signal(signal.SIGTERM if how == "SIGTERM one" else signal.SIGKILL)
        if not began:
            # before the ranks know each other only a launcher can end those that are left
            for process in processes:
                process.kill()
        said = ended(processes)
        codes = [process.returncode for process in processes]
    if any(victim.returncode for victim in victims):
        struck["signals" if how == "SIGTERM one" else "kills"] += 1
    if how == "SIGTERM one" and began and -signal.SIGTERM in codes:
        # the victim's loop had ended, so the signal ended it before the program's last lines, which meet
        assert RunJournal(run).ended() is not None, (how, codes, said)
    elif how == "SIGTERM one" and began and 0 not in codes:
        assert set(codes) == {143}, (how, codes, said)  # all ranks, with one checkpoint


@pytest.mark.parametrize("seed", range(12 * len(RANDOM)))
def test_struck_at_any_time_it_ends_as_if_never(seed: int, folder: Path, tmp_path: Path, tally: Any) -> None:
    chosen, row, struck = random.Random(seed), RANDOM[seed % len(RANDOM)], Counter[str]()
    for _ in range(2):
        strike(row, tmp_path / "run", chosen, struck)
    trained(row, tmp_path / "run")
    assert compare_runs(undisturbed(row, folder), tmp_path / "run") == []
    for kind, n in struck.items():
        tally(kind, n, phase="ranks, at any time", door=row)
