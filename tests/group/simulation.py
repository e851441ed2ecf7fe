"""Ranks of a group as threads of this process, over a store in memory: one interleaving for each seed.

One thread runs at a time.  Another one may go on wherever the ranks can notice it: before each request of the
store, at each hazard, where a thread waits, and in the files given as `lines` at any line.  The seed chooses.
The clock stands while any thread can run, so a rank is late only where a test stops or kills it.

A rank that is killed never runs again: what it has in its `finally` happens after the simulation.  Globals of
a process are each rank's own.  The parts of the library under test are those of the library; only `time`,
`threading` and `queue` are the simulation's in the modules that wait.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from everstep import hazard, polling
from everstep.contracts.group import KeyValueStore
from everstep.errors import StoreLostError
from everstep.group import StoreGroup, agreement, ended, whereabouts
from everstep.testing import group_checks

LEAST = 1e-3
"""Seconds that a sleep takes at least: a wait begins with sleeps of 0 s, and time has to pass."""
MOST = 500_000
"""Number of switches after which a simulation does not end."""


class Killed(BaseException):
    """Ends the threads of a simulation that is over."""


class StuckError(AssertionError):
    """No thread can ever go on, or they go on for ever."""


def always() -> bool:
    return True


def never() -> bool:
    return False


class Thread:
    """A thread of the running rank; as `threading.Thread`."""

    def __init__(
        self,
        simulation: Simulation,
        target: Callable[..., object],
        name: str = "",
        daemon: bool = True,
        args: Sequence[Any] = (),
    ) -> None:
        self._simulation, self._target, self.name = simulation, lambda: target(*args), name
        self.rank = -1
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = always
        self.wakes = math.inf
        self.done = False
        self.error: BaseException | None = None
        self._real = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, rank: int | None = None) -> None:
        self.rank = self._simulation.running.rank if rank is None else rank
        self._simulation.threads.append(self)
        self._real.start()

    def _run(self) -> None:
        self.baton.acquire()
        try:
            self._simulation.go_on()
            if self._simulation.lines:
                sys.settrace(self._trace)
            self._target()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        sys.settrace(None)
        self.done = True
        self._simulation.leave()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._simulation.lines:
            return None
        if event == "line" and self._simulation.random.random() < 0.2:
            self._simulation.pause()
        return self._trace

    def join(self, timeout: float = math.inf) -> None:
        self._simulation.pause(lambda: self.done, timeout)

    def end(self) -> None:
        """Let it end by `Killed`, when its simulation is over."""
        if not self.done:
            self.baton.release()
        self._real.join()


class Condition:
    """As `threading.Condition`, for one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._owner, self._rings = simulation, None, 0

    _owner: Thread | None

    def __enter__(self) -> None:
        self._simulation.pause(lambda: self._owner is None)
        self._owner = self._simulation.running

    def __exit__(self, *_: object) -> None:
        self._owner = None

    def wait_for(self, predicate: Callable[[], Any]) -> Any:
        while not (found := predicate()):
            self._owner, rings = None, self._rings
            self._simulation.pause(lambda: self._rings > rings and self._owner is None)  # noqa: B023
            self._owner = self._simulation.running
        return found

    def notify_all(self) -> None:
        assert self._owner is self._simulation.running, "the condition is not held"
        self._rings += 1


class Queue:
    """As `queue.SimpleQueue`, for one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._items = simulation, deque[Any]()

    def put(self, item: object) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._simulation.pause(lambda: bool(self._items))
        return self._items.popleft()


class Store:
    """A connection of the running rank to the store in memory; as `KeyValueStore`."""

    def __init__(self, simulation: Simulation, prefix: str = "") -> None:
        self._simulation, self._prefix = simulation, prefix

    def clone(self) -> Store:
        return self.below("")

    def below(self, prefix: str) -> Store:
        return Store(self._simulation, self._prefix + prefix)

    def _request(self, name: str, keys: Sequence[str], ready: Callable[[], bool] = always) -> list[str]:
        self._simulation.requests[self._simulation.running.rank][name] += 1
        self._simulation.reach(name, lambda: self._simulation.lost or ready())
        if self._simulation.lost:
            raise StoreLostError("the store of the simulation is gone")
        return [self._prefix + key for key in keys]

    def set(self, key: str, value: str) -> None:
        self._simulation.keys[self._request("set", [key])[0]] = value

    def set_all(self, keys: Sequence[str], value: str) -> None:
        self._simulation.keys.update(dict.fromkeys(self._request("set_all", keys), value))

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._simulation.keys for key in self._request("has", keys))

    def get(self, keys: Sequence[str]) -> list[str]:
        return [self._simulation.keys[key] for key in self._request("get", keys)]

    def set_once(self, key: str, value: str) -> str:
        return self._simulation.keys.setdefault(self._request("set_once", [key])[0], value)

    def delete(self, key: str) -> None:
        self._simulation.keys.pop(self._request("delete", [key])[0], None)

    def block(self, key: str) -> None:
        self._request("block", [key], lambda: self._prefix + key in self._simulation.keys)


class Simulation:
    """A group of ranks; a context manager, in which what they have left can be looked at.

    Args:
        seed: chooses the interleaving.
        size: number of ranks.
        host: the rank with which the store ends; None: it outlives all, as torchrun's does.
        lines: modules in which a thread may be interrupted at any line.

    Attributes:
        now: seconds on the clock.
        keys: the store.
        requests: numbers of requests by rank and kind.
        at: what happens where a rank reaches its n-th place (a request or a hazard), by rank and n.
        places: names of the places that each rank has reached.
    """

    def __init__(self, seed: int, size: int, host: int | None = None, lines: Sequence[ModuleType] = ()):
        self.seed, self.size, self.random = seed, size, Random(seed)
        self.lines = {str(module.__file__) for module in lines}
        self.now, self.keys, self.lost, self._host = 0.0, dict[str, str](), False, host
        self.requests: list[Counter[str]] = [Counter() for _ in range(size)]
        self.at: dict[tuple[int, int], Callable[[], None]] = {}
        self.places: list[list[str]] = [[] for _ in range(size)]
        self.threads: list[Thread] = []
        self._mains: list[Thread] = []
        self.dead: set[int] = set()
        self._stopped = [0.0] * size
        self._stuck, self._switches, self._over = "", 0, False
        self._controller = self.running = Thread(self, lambda: None)
        self._globals: list[tuple[Any, str]] = [(hazard, "_action"), (ended, "_last")]
        self._of_rank: dict[int, list[Any]] = {rank: [self.reach, None] for rank in range(size)}
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Simulation:
        time = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        polls = SimpleNamespace(monotonic=lambda: self.now, sleep=self.poll)
        threads = SimpleNamespace(
            Thread=lambda **given: Thread(self, **given), Condition=lambda: Condition(self)
        )
        for module, its in ((polling, polls), (whereabouts, time), (group_checks, time)):
            self._patches.setattr(module, "time", its)
        for module in (agreement, group_checks):
            self._patches.setattr(module, "threading", threads)
        self._patches.setattr(agreement, "queue", SimpleNamespace(SimpleQueue=lambda: Queue(self)))
        self._patches.setattr(ended, "atexit", SimpleNamespace(register=lambda function: None))
        self._of_rank[-1] = [getattr(*each) for each in self._globals]
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self.threads:
            thread.end()
        self._patches.undo()

    # -------------------------------------------------------------------------- for tests

    def store(self) -> KeyValueStore:
        return Store(self)

    def group(self, limit: float = 30) -> StoreGroup:
        """Open the group, in the running rank."""
        return StoreGroup(self.running.rank, self.size, self.store(), limit)

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on all ranks to its end; return what it returned, None for ranks that were killed."""
        found: list[Any] = [None] * self.size

        def whole(rank: int) -> None:
            found[rank] = program(rank)
            ended._say_so()

        self._mains = [
            Thread(self, lambda rank=rank: whole(rank), f"rank {rank}")  # type: ignore[misc]
            for rank in range(self.size)
        ]
        for rank, thread in enumerate(self._mains):
            thread.start(rank)
        self._switch(self._controller)
        for thread in self.threads:
            if thread.error is not None:
                thread.error.add_note(f"in {thread.name}, seed {self.seed}")
                raise thread.error
        if self._stuck:
            raise StuckError(f"seed {self.seed}: {self._stuck}")
        return found

    def left(self) -> list[str]:
        """Names of threads of living ranks that have not ended."""
        return [thread.name for thread in self._alive()]

    def thread(self, target: Callable[[], object]) -> Thread:
        """Start a thread of the running rank."""
        thread = Thread(self, target, "a thread of a test")
        thread.start()
        return thread

    def sleep(self, seconds: float) -> None:
        """Wait until no thread can run before that time."""
        self.pause(never, max(seconds, LEAST))

    def poll(self, seconds: float) -> None:
        """Wait; sometimes others run, and no time passes."""
        if self.random.random() < 0.2:
            self.pause()
        else:
            self.sleep(seconds)

    def kill(self, rank: int) -> None:
        """Never let a rank go on."""
        self.dead.add(rank)
        self.lost = self.lost or rank == self._host
        if rank == self.running.rank:
            self.pause()

    def kill_after(self, rank: int, places: int) -> None:
        """Kill a rank at the place after so many more."""
        self.at[rank, len(self.places[rank]) + places + 1] = lambda: self.kill(rank)

    def stop(self, rank: int, seconds: float) -> None:
        """Let a rank stand still: with all its threads, as SIGSTOP does."""
        self._stopped[rank] = self.now + seconds
        if rank == self.running.rank:
            self.pause()

    # ---------------------------------------------------------------------------- the scheduler

    def reach(self, name: str, ready: Callable[[], bool] = always) -> None:
        """Come to a place of the running rank."""
        rank = self.running.rank
        self.places[rank].append(name)
        if (happens := self.at.get((rank, len(self.places[rank])))) is not None:
            happens()
        self.pause(ready)

    def pause(self, ready: Callable[[], bool] = always, seconds: float = math.inf) -> None:
        """Let others run; go on when `ready` says so, or after `seconds`."""
        thread = self.running
        thread.ready, thread.wakes = ready, self.now + seconds
        self._switch(thread)

    def go_on(self) -> None:
        if self._over:
            raise Killed

    def leave(self) -> None:
        """Let another thread run in place of the one that ends."""
        if not self._over:
            self._hand_over(self._next())

    def _switch(self, thread: Thread) -> None:
        self.go_on()
        if (following := self._next()) is not thread:
            self._hand_over(following)
            thread.baton.acquire()
            self.go_on()

    def _hand_over(self, following: Thread) -> None:
        if following.rank != self.running.rank:
            self._of_rank[self.running.rank] = [getattr(*each) for each in self._globals]
            for (module, name), value in zip(self._globals, self._of_rank[following.rank], strict=True):
                setattr(module, name, value)
        self.running = following
        following.baton.release()

    def _alive(self) -> Iterator[Thread]:
        return (thread for thread in self.threads if not thread.done and thread.rank not in self.dead)

    def _next(self) -> Thread:
        if all(main.done or main.rank in self.dead for main in self._mains):
            return self._controller
        if self._host is not None and self._mains[self._host].done:
            self.lost = True
        self._switches += 1
        alive = list(self._alive())
        while not (able := [thread for thread in alive if self._may_run(thread)]):
            times = [time for time in (*(thread.wakes for thread in alive), *self._stopped) if time > self.now]
            if min(times, default=math.inf) == math.inf:
                self._stuck = f"{', '.join(thread.name for thread in alive)} wait for ever"
                return self._controller
            self.now = min(times)
        if self._switches > MOST:
            self._stuck = "it does not end"
            return self._controller
        return self.random.choice(able)

    def _may_run(self, thread: Thread) -> bool:
        return self.now >= self._stopped[thread.rank] and (self.now >= thread.wakes or thread.ready())

