"""Ranks of a group as threads of this process, over a store in memory: one interleaving for each seed.

One thread runs at a time.  Another one may go on wherever the ranks can notice it: before each request of the
store, at each hazard, where a thread waits, and in the modules given as `lines` at any line.  The seed
chooses.  The clock stands while any thread can run, so a rank is late only where a test stops or kills it.

A rank that is killed never runs again: what it has in its `finally` happens after the simulation.  Globals of
a process are each rank's own.  All parts under test are the library's; only `time`, `threading` and `queue`
are the simulation's in the modules that wait.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from everstep import hazard, polling
from everstep.errors import StoreLostError
from everstep.group import StoreGroup, agreement, store_group

LEAST = 1e-3
"""Seconds that a sleep takes at least: a wait begins with sleeps of 0 s, and time has to pass."""
SLOW = 0.05
"""Seconds for which a thread may be held up at a line, or a request be on its way."""
MOST = 500_000
"""Number of switches after which a simulation does not end."""
GLOBALS: list[tuple[Any, str]] = [(hazard, "_action"), (store_group, "_last_group")]


class Over(BaseException):
    """Ends the threads of a simulation that is over."""


class StuckError(AssertionError):
    """No thread can ever go on, or they go on for ever."""


class Thread:
    """As `threading.Thread`, of the running rank."""

    def __init__(
        self, simulation: Simulation, target: Callable[..., object], args: Sequence[Any] = (), **given: Any
    ) -> None:
        self._simulation, self._target, self.name = simulation, partial(target, *args), given.get("name", "")
        self.rank, self.done, self.wakes = simulation.running.rank if simulation.threads else -1, False, 0.0
        self.ready: Callable[[], bool] = bool
        self.error: BaseException | None = None
        self.baton = threading.Semaphore(0)
        self.real = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._simulation.threads.append(self)
        self.real.start()

    def _run(self) -> None:
        self.baton.acquire()
        try:
            self._simulation.require_begun()
            sys.settrace(self._trace if self._simulation.lines else None)
            self._target()
        except Over:
            pass
        except BaseException as error:
            self.error = error
        sys.settrace(None)
        self.done = True
        self._simulation.leave()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._simulation.lines:
            return None
        if event == "line":
            self._simulation.interrupt(0.2, 0.005)
        return self._trace

    def join(self, timeout: float = math.inf) -> None:
        self._simulation.pause(timeout, lambda: self.done)


class Condition:
    """As `threading.Condition`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._rings = simulation, 0
        self._owner: Thread | None = None

    def __enter__(self) -> None:
        self._simulation.pause(math.inf, lambda: self._owner is None)
        self._owner = self._simulation.running

    def __exit__(self, *_: object) -> None:
        self._owner = None

    def wait_for(self, predicate: Callable[[], Any]) -> Any:
        while not (found := predicate()):
            self._owner, rings = None, self._rings
            self._simulation.pause(math.inf, lambda: self._rings > rings)  # noqa: B023
            self.__enter__()
        return found

    def notify_all(self) -> None:
        assert self._owner is self._simulation.running, "the condition is not held"
        self._rings += 1


class Queue:
    """As `queue.SimpleQueue`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._items = simulation, deque[Any]()
        self.put = self._items.append

    def get(self) -> Any:
        self._simulation.pause(math.inf, lambda: bool(self._items))
        return self._items.popleft()


class Store:
    """As `KeyValueStore`: a connection of the running rank to the store in memory."""

    def __init__(self, simulation: Simulation, prefix: str = "") -> None:
        self._simulation, self._prefix, self._keys = simulation, prefix, simulation.keys

    def clone(self) -> Store:
        return self.below("")

    def below(self, prefix: str) -> Store:
        return Store(self._simulation, self._prefix + prefix)

    def _request(self, name: str, *keys: str) -> list[str]:
        found, simulation = [self._prefix + key for key in keys], self._simulation
        simulation.requests[simulation.running.rank][name] += 1
        simulation.reach(name, lambda: simulation.lost or name != "block" or found[0] in self._keys)
        if simulation.lost:
            raise StoreLostError("the store of the simulation is gone")
        return found

    def set(self, key: str, value: str) -> None:
        self._keys[self._request("set", key)[0]] = value

    def set_all(self, keys: Sequence[str], value: str) -> None:
        self._keys.update(dict.fromkeys(self._request("set_all", *keys), value))

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._keys for key in self._request("has", *keys))

    def get(self, keys: Sequence[str]) -> list[str]:
        return [self._keys[key] for key in self._request("get", *keys)]

    def set_once(self, key: str, value: str) -> str:
        return self._keys.setdefault(self._request("set_once", key)[0], value)

    def delete(self, key: str) -> None:
        self._keys.pop(self._request("delete", key)[0], None)

    def block(self, key: str) -> None:
        self._request("block", key)


class Simulation:
    """A group of ranks; a context manager, in which what they have left can be looked at.

    Args:
        seed: chooses the interleaving.
        size: number of ranks.
        host: the rank with which the store ends; None: it outlives all, as torchrun's does.
        lines: modules in which a thread may be interrupted at any line.

    Attributes:
        now: seconds on the clock.
        keys: what the store holds.
        requests: numbers of requests by rank and kind.
        places: names of the places (requests and hazards) that each rank has reached.
    """

    def __init__(self, seed: int, size: int, host: int | None = None, lines: Sequence[ModuleType] = ()):
        self.seed, self.size, self.random, self._host = seed, size, Random(seed), host
        self.lines = {module.__file__ for module in lines}
        self.now, self.lost, self.dead = 0.0, False, set[int]()
        self.keys: dict[str, str] = {}
        self.requests = [Counter[str]() for _ in range(size)]
        self.places: list[list[str]] = [[] for _ in range(size)]
        self._strikes: dict[tuple[int, int], Callable[[], None]] = {}
        self._stopped = [0.0] * size
        self._stuck, self._switches, self._over = "", 0, False
        self.threads: list[Thread] = []
        self._controller = self.running = Thread(self, bool)
        self._mains: list[Thread] = []
        self._of_rank = [[self.reach, None] for _ in range(size)] + [[getattr(*each) for each in GLOBALS]]
        self.make_thread = partial(Thread, self)
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Simulation:
        time = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        threads = SimpleNamespace(Thread=self.make_thread, Condition=partial(Condition, self))
        self._patches.setattr(agreement, "threading", threads)
        self._patches.setattr(polling, "time", SimpleNamespace(monotonic=time.monotonic, sleep=self.poll))
        self._patches.setattr(agreement, "queue", SimpleNamespace(SimpleQueue=partial(Queue, self)))
        self._patches.setattr(store_group, "atexit", SimpleNamespace(register=bool))
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self.threads:
            thread.baton.release()
            thread.real.join()
        self._patches.undo()

    # -------------------------------------------------------------------------- for tests

    def group(self, limit: float = 30) -> StoreGroup:
        """Open the group, in the running rank."""
        return StoreGroup(self.running.rank, self.size, Store(self), limit)

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on all ranks to its end; return what it returned, None for ranks that were killed."""
        found: list[Any] = [None] * self.size

        def whole(rank: int) -> None:
            found[rank] = program(rank)
            store_group._note_end()

        self._mains = [Thread(self, whole, [rank], name=f"rank {rank}") for rank in range(self.size)]
        for rank, thread in enumerate(self._mains):
            thread.rank = rank
            thread.start()
        self._switch(self._controller)
        for thread in self.threads:
            if thread.error is not None:
                thread.error.add_note(f"in {thread.name}, seed {self.seed}")
                raise thread.error
        if self._stuck:
            raise StuckError(f"seed {self.seed}: {self._stuck}")
        return found

    def thread(self, target: Callable[[], object]) -> Thread:
        """Start a thread of the running rank."""
        thread = Thread(self, target)
        thread.start()
        return thread

    def left(self) -> list[str]:
        """Names of threads of living ranks that have not ended."""
        return [thread.name for thread in self.threads if not thread.done and thread.rank not in self.dead]

    def sleep(self, seconds: float) -> None:
        """Wait until no thread can run before that time."""
        self.pause(max(seconds, LEAST), lambda: False)

    def poll(self, seconds: float) -> None:
        """Wait; sometimes others run, and no time passes."""
        self.pause() if self.random.random() < 0.2 else self.sleep(seconds)

    def kill(self, rank: int) -> None:
        """Never let a rank go on."""
        self.dead.add(rank)
        self.lost = self.lost or rank == self._host
        if rank == self.running.rank:
            self.pause()

    def kill_at(self, rank: int, place: int) -> None:
        """Kill a rank at a place, of which the first one is 0."""
        self._strikes[rank, place] = partial(self.kill, rank)

    def stop_at(self, rank: int, place: int, seconds: float) -> None:
        """Let a rank stand still at a place, with all its threads, as SIGSTOP does."""
        self._strikes[rank, place] = lambda: self._stopped.__setitem__(rank, self.now + seconds)

    # ---------------------------------------------------------------------------- the scheduler

    def reach(self, name: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Come to a place of the running rank."""
        rank = self.running.rank
        self.places[rank].append(name)
        self._strikes.get((rank, len(self.places[rank]) - 1), bool)()
        self.interrupt(0, 0.1)
        self.pause(math.inf, ready)

    def pause(self, seconds: float = math.inf, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run; go on when `ready` says so, or after `seconds`."""
        self.require_begun()
        self.running.ready, self.running.wakes = ready, self.now + seconds
        self._switch(self.running)

    def interrupt(self, often: float, seldom: float) -> None:
        """Let others run, or even let time pass; with these probabilities."""
        drawn = self.random.random()
        if drawn < seldom:
            self.sleep(SLOW * self.random.random())
        elif drawn < often:
            self.pause()

    def require_begun(self) -> None:
        if self._over:
            raise Over

    def leave(self) -> None:
        """Let another thread run in place of the one that ends."""
        if not self._over:
            self._hand_over(self._next())

    def _switch(self, thread: Thread) -> None:
        if (following := self._next()) is not thread:
            self._hand_over(following)
            thread.baton.acquire()
            self.require_begun()

    def _hand_over(self, following: Thread) -> None:
        self._of_rank[self.running.rank] = [getattr(*each) for each in GLOBALS]
        for (module, name), value in zip(GLOBALS, self._of_rank[following.rank], strict=True):
            setattr(module, name, value)
        self.running = following
        following.baton.release()

    def _next(self) -> Thread:
        if all(main.done or main.rank in self.dead for main in self._mains):
            return self._controller
        self.lost = self.lost or (self._host is not None and self._mains[self._host].done)
        self._switches += 1
        alive = [thread for thread in self.threads if not thread.done and thread.rank not in self.dead]
        while not (able := [thread for thread in alive if self._may_run(thread)]):
            times = {*(thread.wakes for thread in alive), *self._stopped, math.inf}
            self.now = min(time for time in times if time > self.now)
            if self.now == math.inf:
                break
        if not able or self._switches > MOST:
            self._stuck = "it does not end" if able else f"{', '.join(self.left())} wait for ever"
            return self._controller
        return self.random.choice(able)

    def _may_run(self, thread: Thread) -> bool:
        return self.now >= self._stopped[thread.rank] and (self.now >= thread.wakes or thread.ready())
