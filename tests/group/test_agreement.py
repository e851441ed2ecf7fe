"""The agreement of ranks that are steps apart, and what becomes of it when one dies: in simulations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from simulation import Simulation

from everstep.errors import GroupError
from everstep.group import Agreement, StoreGroup, agreement
from everstep.supervisor.threads import wakeups
from everstep.supervisor.threads.wakeups import Wakeups
from gate import share

NEVER = 10**9


class Loop:
    """The part of an engine that the agreement needs, with a meeting every `every` steps."""

    def __init__(self, simulation: Simulation, group: StoreGroup, every: int = NEVER) -> None:
        self.simulation, self.group, self.every = simulation, group, every
        self.steps = 0
        self.wished: list[str] = []
        self.heard: list[tuple[str, int]] = []
        self.met: list[int] = []
        self.wakeups = Wakeups(lambda: simulation.now)
        self.lost: list[BaseException] = []
        self.alone = True
        self.agreement = Agreement(group, self.count, self.wakeups.look, self.lost.append, lambda: self.alone)
        self.wakeups.agree_by(self.agreement, keeps_time=False)
        self.wakeups.plan(0, every, None)

    def count(self) -> int:
        """Tell the number of steps; before it is heard, others run."""
        steps = self.steps
        self.simulation.poll(0.02)
        return steps

    def wish(self, what: str) -> None:
        self.wished.append(what)
        self.wakeups.wish()

    def complete(self) -> None:
        """End a step; how far the ranks are apart is chosen by the simulation."""
        self.simulation.poll(0.01)
        self.steps += 1
        if self.steps < self.wakeups.next_due or not self.wakeups.is_due(self.steps):
            return
        self.wakeups.begin_boundary()
        self.meet()
        self.wakeups.plan(self.steps, (self.steps // self.every + 1) * self.every, None)

    def meet(self) -> None:
        wished, self.wished = self.wished, []
        self.met.append(self.steps)
        for step, found in self.group.gather([self.steps, wished], "a meeting"):
            assert step == self.steps, (step, self.steps)
            self.heard += [(what, step) for what in found]

    def close(self) -> None:
        self.agreement.close()
        self.group.close()

    def until_it_fails(self) -> tuple[str, tuple[int, ...], float]:
        """Train on; the error, the ranks that it names, and when it came."""
        try:
            while self.simulation.now < 60:
                self.complete()
        except GroupError as error:
            return type(error).__name__, error.ranks, self.simulation.now
        raise AssertionError("nothing has failed")


def simulated(simulation: Simulation, play: Any, every: int = NEVER, limit: float = 30) -> list[Any]:
    """Let each rank play with a loop; no thread may be left."""

    def program(rank: int) -> Any:
        loop = Loop(simulation, simulation.group(limit), every)
        loop.group.barrier("all have begun")
        found = play(loop, rank)
        loop.close()
        return found

    found = simulation.run(program)
    assert simulation.left() == [], f"seed {simulation.seed}"
    return found


def interrupted(seed: int, size: int, host: int | None = None) -> Simulation:
    return Simulation(seed, size, host, [agreement, wakeups])


@pytest.mark.campaign("long", gate="share")
def test_ranks_that_are_steps_apart_stop_at_the_same_steps() -> None:
    """Wishes of all ranks, overlapping, by threads of their own; with and without boundaries by number."""

    def play(loop: Loop, rank: int) -> Any:
        simulation = loop.simulation

        def wish() -> None:
            for number in range(2):
                for _ in range(simulation.random.randrange(60)):
                    simulation.pause()
                loop.wish(f"{number} of {rank}")

        wishes = simulation.thread(wish)
        while loop.steps < 80:
            loop.complete()
        wishes.join()
        loop.meet()
        return loop.met, loop.heard

    agreed = 0
    seeds = share(range(1500), 30)
    for seed in seeds:
        size, every = 2 + seed % 2, NEVER if seed % 3 else 5
        with interrupted(seed, size) as simulation:
            found = simulated(simulation, play, every)
        assert all(each == found[0] for each in found), f"seed {seed}: {found}"
        met, heard = found[0]
        assert len(set(heard)) == len(heard) == 2 * size, f"seed {seed}: {heard}"
        agreed += sum(step % every != 0 for step in met[:-1])
    assert agreed > len(seeds) // 2  # Pythons draw other pauses


@pytest.mark.campaign("long", gate="share")
def test_where_steps_suddenly_take_a_hundred_times_as_long_a_stop_waits_for_two_of_them_at_most() -> None:
    """Each step has a collective; one rank wishes when the steps have become slow, or when they become it."""
    slow = 10.0

    def play(loop: Loop, rank: int) -> tuple[list[int], int, float]:
        simulation, wished = loop.simulation, [0, 0.0]

        def wish() -> None:
            simulation.pause(math.inf, lambda: loop.steps >= sudden)
            simulation.sleep(2 * slow * simulation.random.random())
            wished[:] = loop.steps, simulation.now
            loop.wish("a stop")

        if rank == seed % simulation.size:
            simulation.thread(wish)
        while not loop.heard:
            entered[rank] += 1
            simulation.pause(math.inf, lambda: min(entered) >= entered[rank])
            simulation.sleep(slow if loop.steps >= sudden else slow / 100)
            loop.complete()
        return loop.met, loop.heard[0][1] - int(wished[0]), simulation.now - wished[1]

    for seed in share(range(2000), 30):
        with interrupted(seed, 2 + seed % 3) as simulation:
            entered, sudden = [0] * simulation.size, simulation.random.randrange(5, 40)
            found = simulated(simulation, play, NEVER if seed % 3 else 50)
        met, steps, seconds = found[seed % len(found)]
        assert all(each[0] == met for each in found), (seed, found)
        assert 0 < steps <= 2 and seconds < 2 * slow + 2, (seed, found)


def test_a_step_with_nothing_due_makes_no_request_and_agreements_leave_no_keys() -> None:
    def play(loop: Loop, rank: int) -> None:
        simulation, requests = loop.simulation, loop.simulation.requests[rank]
        loop.group.barrier("both have begun")
        simulation.sleep(1)  # the threads of the agreements wait
        before = requests.total()
        for _ in range(500):
            loop.complete()
        assert requests.total() == before
        loop.group.barrier("both have counted")
        for number in range(5):
            if rank == number % 2:
                loop.wish("to meet")
            while len(loop.heard) == number:
                loop.complete()

    for seed in range(5):
        with interrupted(seed, 2) as simulation:
            simulated(simulation, play)
        left = sorted(key.split("/", 1)[1] for key in simulation.keys if "/pass/" in key or "/wish/" in key)
        assert left == ["pass/4/0", "pass/4/1", "pass/5/0", "pass/5/1", "wish/4", "wish/5"]


@pytest.mark.campaign("long", gate="share")
def test_a_rank_that_dies_at_any_place_is_named_within_the_limit() -> None:
    places = set()
    for seed in share(range(800), 45):
        lost = 2 * (seed % 2)
        with interrupted(seed, 3) as simulation:

            def play(loop: Loop, rank: int) -> Any:
                if rank == lost:  # noqa: B023
                    loop.simulation.kill_at(rank, len(loop.simulation.places[rank]) + seed // 2 % 20)  # noqa: B023
                if rank == 1:
                    loop.wish("to save")
                return loop.until_it_fails()

            found = simulated(simulation, play, every=200, limit=5)
            places.add(simulation.places[lost][-1])
        for rank, (kind, ranks, seconds) in ((r, each) for r, each in enumerate(found) if r != lost):
            assert kind == "MissingRankError" and (ranks == (lost,) or (lost == 0 and ranks == ())), (
                f"seed {seed}: rank {rank} says {found[rank]}"
            )
            assert seconds < 12, (seed, found)  # 200 steps are 2 s, the limit is 5 s
    assert places >= {"delete", "get", "has", "set"}


def test_when_the_store_dies_a_loop_with_nothing_due_learns_it() -> None:
    def play(loop: Loop, rank: int) -> Any:
        loop.simulation.sleep(1)
        if rank == 0:
            loop.simulation.kill(0)
        return loop.until_it_fails()

    for seed in range(20):
        with interrupted(seed, 2, host=0) as simulation:
            found = simulated(simulation, play)
        assert found[1][:2] == ("StoreLostError", ()) and found[1][2] < 2, (seed, found)


def test_a_failure_that_a_rank_reports_reaches_a_loop_with_nothing_due() -> None:
    """Each rank's watch hears of it once; that of the rank itself only where it leaves the others."""

    def play(loop: Loop, rank: int) -> Any:
        if rank == 1:
            loop.alone = False
            loop.group.fail("ValueError: no such file")
            loop.simulation.sleep(5)
            assert not loop.lost
            loop.alone = True
            loop.group.fail("ValueError: no such file")
            loop.simulation.pause(math.inf, lambda: bool(loop.lost))
            return [repr(error) for error in loop.lost]
        failure = loop.until_it_fails()
        loop.simulation.pause(math.inf, lambda: bool(loop.lost))
        return failure if len(loop.lost) == 1 else loop.lost

    for seed in range(20):
        with interrupted(seed, 3) as simulation:
            found = simulated(simulation, play)
        for rank in (0, 2):
            assert found[rank][:2] == ("PeerFailedError", (1,)) and found[rank][2] < 2, (seed, found)
        assert found[1] == ["GroupError('ValueError: no such file')"], (seed, found)
