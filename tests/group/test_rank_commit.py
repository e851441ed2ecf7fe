"""One checkpoint of several ranks: whole or absent, and every save ends alike on all of them.

The ranks are simulated; six kills are of real processes.
"""

from __future__ import annotations

import errno
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ended, started
from rank_saves import STEPS, Rank, common_of, own_of, require_whole, step_of
from simulation import Simulation

from everstep import hazard
from everstep.checkpoint import CheckpointName, Draft, Store, read_checkpoint
from everstep.errors import RunLockedError
from everstep.state import encode
from gate import share
from tiny_runs import Tiny


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def simulated(simulation: Simulation, run_dir: Path, play: Any, limit: float | None = None) -> list[Any]:
    """What each rank returns; None for those that were killed."""

    def program(rank: int) -> Any:
        mine = Rank(run_dir, simulation.group(), limit)
        found = play(mine)
        mine.group.close()
        return found

    return simulation.run(program)


# --------------------------------------------------------------------------------- how saves end
def a_row_of_saves(mine: Rank) -> dict[str, Any]:
    """What a rank says of each of them."""
    rank, found = mine.group.rank, dict[str, Any]()

    def attempt(what: str, step: int, *given: Any, armed: str | None = None, **more: Any) -> None:
        before = hazard._action
        if armed:
            hazard.arm(armed)
        found[what] = mine.attempt(step, *given, **more)
        hazard._action = before

    def at(who: int, error: Exception) -> Callable[[], None]:
        def act() -> None:
            if rank == who:
                raise error

        return act

    attempt("first", 10)
    attempt("full", 20, armed="ENOSPC:checkpoint.write:1" if rank == 2 else None)
    attempt("after", 20)
    attempt("rename", 30, armed="EIO:checkpoint.rename:1" if rank == 0 else None)
    attempt("again", 20)
    bad = encode({"rng": {"x": np.array([np.nan if rank == 1 else 1.0])}})
    attempt("nan", 30, own=bad, guarded={"rng/x"})
    attempt("diverged", 30, replicated={"user/v": "same", "user/w": str(rank // 2)})
    attempt("memory", 30, at(1, MemoryError("no memory for it")))
    attempt("bug", 30, at(1, KeyError("a bug")))
    attempt("the writer's bug", 30, at(0, KeyError("a bug")))
    attempt("overlap", 30, own=encode({"user": {"w": 1}}) if rank == 2 else own_of(30, rank))
    for what, error in (("best", OSError(errno.ENOSPC, "No space left on device", "best")), ("well", None)):
        try:
            with mine.exchange.save():
                if rank == 0 and error is not None:
                    raise error
            found[what] = "well"
        except Exception as common:
            found[what] = f"{type(common).__name__} {common}"
    attempt("last", 40)
    mine.group.barrier("all have left the last save")
    return found


def test_every_save_ends_alike_on_all_ranks(tmp_path: Path) -> None:
    for seed in range(8):
        run_dir = tmp_path / str(seed)
        with Simulation(seed, 3) as simulation:
            said = simulated(simulation, run_dir, a_row_of_saves)
        for what in ("bug", "the writer's bug"):
            failed = int(what == "bug")
            for rank, text in enumerate(each.pop(what) for each in said):
                told = f"PeerFailedError rank {failed} has failed in a save (KeyError: 'a bug')"
                assert text == "KeyError 'a bug' " if rank == failed else text.startswith(told)
        assert said[0] == said[1] == said[2], f"seed {seed}"
        for what, words in ENDS.items():
            assert re.search(words, said[0][what]), f"seed {seed}, {what}: {said[0][what]}"
        assert said[0]["again"] == f"saved 0 True {said[0]['after'].split()[-1]}", "an equal one is kept"
        assert names(run_dir) == [f"step-000000{step}" for step in (10, 20, 40)]
        for name in names(run_dir):
            found = Store(run_dir).read(CheckpointName.parse(name))
            assert step_of(found, 3) == found.step
        assert found.digest in said[0]["last"]
        kept = [key.partition("saves/")[2] for key in simulation.keys if "saves/" in key]
        assert sorted(kept) == [f"14/{name}" for name in ("done", "folder", "part/1", "part/2", "verdict")], (
            "keys of earlier saves are deleted"
        )
        assert not list(run_dir.rglob(".tmp-*"))


SAVED = r"^saved \d\d+ False [0-9a-f]{32}$"
ENDS = {
    **dict.fromkeys(("first", "after", "last"), SAVED),
    "full": r"RankSaveError \[Errno 28\] rank 2: No space left.* free space \(2,\)$",
    "rename": r"RankSaveError \[Errno 5\] rank 0: Input/output error",
    "nan": "^NonFiniteError rank 1: after step 30, NaN or infinity in rng/x",
    "diverged": "^DivergedRanksError 'user/w' is not the same .*: rank 2 and the writer.*PerRank.* \\(2,\\)$",
    "memory": r"RankSaveError \[Errno 12\] rank 1: MemoryError no memory for it",
    "overlap": "^CheckpointError rank 2: a rank cannot save as its own",
    "best": r"RankSaveError \[Errno 28\] rank 0: No space left on device \(best\)",
    "well": "^well$",
}


# --------------------------------------------------------------------------------- late and lost ranks
Place = tuple[int, int, int, str]
MESSAGES = ("tell_", "heard_", "verdict")
ENDED, REPORTED = "rank 0 did not end the save within 5 s", "rank {} did not report its part within 5 s"
LATE = {
    ("writer", "tell_folder"): "rank 0 did not begin the save within 5 s",
    ("writer", "heard_part"): ENDED, ("writer", "verdict"): ENDED, ("writer", "tell_done"): "",
    ("rank", "heard_folder"): f"{REPORTED}|{ENDED}", ("rank", "tell_part"): f"{REPORTED}|{ENDED}",
    ("rank", "heard_done"): "",
}  # fmt: skip
"""How a save fails in which a rank stands still before a message, longer than the limit; "": it does not."""


def three_saves(mine: Rank, after: Callable[[Rank], object] = Rank.retain) -> list[str]:
    said = []
    for step in STEPS:
        said.append(mine.attempt(step))
        after(mine)
    return said


def three_saves_together(mine: Rank) -> list[str]:
    return three_saves(mine, lambda mine: mine.group.barrier("all have left the save"))


def places(run_dir: Path, seed: int, size: int, play: Callable[[Rank], Any]) -> list[Place]:
    """Size, rank, number and name of each place in the saves of an undisturbed simulation."""
    within: dict[int, tuple[int, int]] = {}

    def played(mine: Rank) -> None:
        reached = simulation.places[mine.group.rank]
        first = len(reached)
        assert all(text.startswith("saved") for text in play(mine))
        within[mine.group.rank] = first, len(reached)

    with Simulation(seed, size) as simulation:
        simulated(simulation, run_dir, played, 5)
        at = [(rank, number) for rank in range(size) for number in range(*within[rank])]
        names = (simulation.places[rank][number].removeprefix("checkpoint.") for rank, number in at)
        return [(size, *place, name) for place, name in zip(at, names, strict=True)]


@pytest.mark.campaign("long", gate="share")
def test_a_rank_that_is_late_at_any_message_fails_the_save_on_all_or_on_none(tmp_path: Path) -> None:
    """It stands still for 8 s, where the limit is 5 s; the next save succeeds."""
    for seed in share(range(3), 1):
        strikes: Counter[tuple[int, str]] = Counter()
        for _, rank, number, name in places(tmp_path / f"whole-{seed}", seed, 3, three_saves_together):
            if (at := ("rank" if rank else "writer", name)) not in LATE:
                continue
            fails = LATE[at].format(rank)
            run_dir = tmp_path / f"{seed}-{rank}-{number}"
            with Simulation(seed, 3) as simulation:
                simulation.stop_at(rank, number, 8)
                said = simulated(simulation, run_dir, three_saves_together, 5)
            assert all(other == said[0] for other in said), (seed, rank, number, name, said)
            late = strikes[rank, name]
            for save, text in enumerate(said[0]):
                wanted = rf"RankSaveError \[Errno 110\] ({fails})" if fails and save == late else "saved"
                assert re.match(wanted, text), (seed, rank, number, name, said)
            saved = [step for save, step in enumerate(STEPS) if save != late or not fails]
            assert names(run_dir) == [f"step-000000{step}" for step in saved]
            assert not list(run_dir.rglob(".tmp-*"))
            strikes[rank, name] += 1
        assert len(strikes) == 4 + 2 * 3 and set(strikes.values()) == {3}


def test_a_rank_that_is_slow_to_read_hears_how_each_save_ended(tmp_path: Path) -> None:
    """The writer's disk fails several saves at once, before the other ranks have read of the first."""

    def play(mine: Rank) -> list[str]:
        said = []
        for number in range(4):
            try:
                with mine.exchange.save():
                    if mine.group.writer:
                        raise OSError(errno.ENOSPC, "No space left on device", f"best {number}")
            except Exception as error:
                said.append(str(error))
        return [*said, mine.attempt(20)]

    for seed in range(40):
        with Simulation(seed, 3) as simulation:
            said = simulated(simulation, tmp_path / str(seed), play)
        assert said[0] == said[1] == said[2] and said[0][-1].startswith("saved"), (seed, said)
        for number, text in enumerate(said[0][:-1]):
            said_of_disk = f"No space left on device (best {number}); the disk is full: free space"
            assert text == f"[Errno 28] rank 0: {said_of_disk}", (seed, text)


def test_a_failure_that_a_rank_has_reported_ends_the_wait(tmp_path: Path) -> None:
    def play(mine: Rank) -> tuple[str, float]:
        if mine.group.rank == 2:
            mine.group.fail("its data is gone")
            return "", 0
        return mine.attempt(10), simulation.now

    for seed in range(20):
        with Simulation(seed, 3) as simulation:
            said = simulated(simulation, tmp_path / str(seed), play)
        for text, seconds in said[:2]:
            assert text.startswith("RankSaveError [Errno 103] rank 2 has failed (its data is gone)"), text
            assert seconds < 3, (seed, seconds)
        assert names(tmp_path / str(seed)) == []


# --------------------------------------------------------------------------------- kills
@pytest.mark.campaign("long", gate="share")
def test_killed_anywhere_in_a_save_it_is_the_newest_or_the_previous_whole(tmp_path: Path) -> None:
    kills = [kill for size in (2, 3) for kill in places(tmp_path / f"whole-{size}", 0, size, three_saves)]
    of_messages = [kill for kill in kills if kill[3].startswith(MESSAGES)]
    for size, rank, number, _ in sorted({*of_messages, *share(kills, 30)}):
        run_dir = tmp_path / f"{size}-{rank}-{number}"
        ranks: list[Rank] = []

        def play(mine: Rank) -> list[str]:
            ranks.append(mine)  # noqa: B023
            return three_saves(mine)

        with Simulation(0, size) as simulation:
            simulation.kill_at(rank, number)
            said = simulated(simulation, run_dir, play, 5)
            saved, begun = (max([-1, *(getattr(r, at) for r in ranks)]) for at in ("saved", "begun"))
            require_whole(run_dir, size, saved, begun)
        living = [each for each in said if each is not None]
        assert said[rank] is None and all(each == living[0] for each in living), (size, rank, number, said)


@pytest.mark.parametrize(("rank", "spec"), [
    (0, "kill:checkpoint.tell_folder:2"), (0, "kill:checkpoint.heard_part:2"),
    (0, "kill:checkpoint.rename:2"), (0, "kill:checkpoint.tell_done:2"), (1, "kill:checkpoint.write:4"),
    (1, "kill:checkpoint.tell_part:2"),
])  # fmt: skip
def test_a_real_rank_killed_in_a_save_leaves_a_whole_checkpoint(tmp_path: Path, rank: int, spec: str) -> None:
    program = f"""
from pathlib import Path
from rank_saves import STEPS, Rank
from everstep import hazard
from everstep.group import Peers
group = find_group()
peers = Peers(group)
mine = Rank(Path({str(tmp_path / "run")!r}), group)
group.barrier("all are here")
hazard.arm({spec!r} if rank == {rank} else None)
for step in STEPS:
    say("begin", step)
    if "saved" not in mine.attempt(step):
        break
    say("end", step)
    mine.retain()
os._exit(0)
"""
    with started(program, 2) as processes:
        lines = re.findall(r"^\d: (begin|end) (\d+)$", "".join(ended(processes)), re.M)
        assert processes[rank].returncode == -signal.SIGKILL and processes[1 - rank].returncode == 0
    saved, begun = (max(int(step) for what, step in lines if what == each) for each in ("end", "begin"))
    assert saved == 20
    require_whole(tmp_path / "run", 2, saved, begun)


# --------------------------------------------------------------------------------- an older start
def test_a_start_that_was_replaced_saves_no_more(tmp_path: Path) -> None:
    """It was stopped in a step, and has lost its lock: another start has trained the run to its end."""
    run_dir, whole = tmp_path / "run", Tiny(tmp_path / "whole", max_epoch=3).train()

    def replaced(loop: object, step: int) -> None:
        if step == 6:
            later.append(Tiny(run_dir, max_epoch=3, lock=False).train())

    later: list[Tiny] = []
    first = Tiny(run_dir, max_epoch=3, lock=False)
    with pytest.raises(RunLockedError, match=r"start 2 of the run in .* has taken over .* start 1"):
        first.train(inside=replaced)
    assert later[0].result() == whole.result()
    newest = max((run_dir / "checkpoints").iterdir())
    assert read_checkpoint(newest).segment == 2 and read_checkpoint(newest).digest == whole.result()[1]
    assert not list(run_dir.rglob(".tmp-*"))


def test_a_save_that_begins_before_a_later_start_and_ends_after_it_is_refused(tmp_path: Path) -> None:
    taken_over = False

    def require_newest() -> None:
        if taken_over:
            raise RunLockedError("a later start")

    store = Store(tmp_path, 1, require_newest=require_newest)
    common = common_of(10)
    store.commit(Draft(CheckpointName(10), common, "d"))
    taken_over = True
    with pytest.raises(RunLockedError, match="a later start"):
        store.commit(Draft(CheckpointName(20), common, "d"))
    with pytest.raises(RunLockedError, match="a later start"):  # nor is the old one moved away
        store.commit(Draft(CheckpointName(10), common, "e"))
    assert names(tmp_path) == ["step-00000010"] and store.find(True)[0] is not None
