"""A model of the agreement (docs/several_processes.md), and a search through all that can happen in it.

Each rank has a main thread and a watcher; between any two of their actions any other rank may act, wish or
die.  The parts of `Agreement` and of its owner that take several instructions without a lock are several
actions here.  A variant with a known mistake has the name of the mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

NEVER = 99
MISTAKES = {
    "the minimum": 0,
    "a promise of s": 0,
    "a lock that is held inside a step": 0,
    "main threads that answer": 0,
    "a number that stays": 2,
    "no lock around count and promise": 2,
    "a plan that forgets to look again": 0,
    "a plan that looks before it writes": 0,
    "a watcher that does not wait for its main thread": 2,
}
"""Name of a mistake -> how far apart the ranks are when the search finds it."""


class Rank(NamedTuple):
    """A rank: its main thread's place and numbers, and its watcher's."""

    steps: int = 0
    main: str = "step"
    next_due: int = NEVER
    number: int = 1
    begun: bool = False
    promise: int | None = None
    agreed: int | None = None
    watcher: str = "idle"
    wished: bool = False
    """Something is wished that no meeting has heard of."""
    token: bool = False
    """A wish is in the queue of the thread that sends."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    wishes: frozenset[int] = frozenset()
    """Numbers of the agreements that somebody has wished for."""
    promises: frozenset[tuple[int, int, int]] = frozenset()
    """Number of the agreement, rank, step."""
    wishes_left: int = 0
    deaths_left: int = 0
    agreements: int = 0


class Wrong(Exception):
    """Something that must never happen."""


class Model(NamedTuple):
    """The facts that stay.

    `apart`: how many steps a rank may be ahead of another one's last collective; 0: it waits in each step.
    `due`: a step after which all ranks meet by number.
    """

    size: int
    last: int
    apart: int
    due: int = NEVER
    mistake: str = ""

    def next_states(self, state: State) -> Iterator[State]:
        for index, rank in enumerate(state.ranks):
            if rank.main in ("dead", "failed"):
                continue
            for changed in (*self.main(state, rank), *self.watcher(state, index, rank)):
                yield self.with_rank(state, index, changed)
            yield from self.shared(state, index, rank)
        yield from self.meetings(state)

    @staticmethod
    def with_rank(state: State, index: int, rank: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:index], rank, *state.ranks[index + 1 :]))

    # ------------------------------------------------------------------------ main thread

    def main(self, state: State, rank: Rank) -> Iterator[Rank]:
        if rank.main == "step":
            if lost(state):
                yield rank._replace(main="failed")  # the framework's own time limit
            if all(entered(other) >= rank.steps + 1 - self.apart for other in state.ranks):
                yield self.completed(rank)
        elif rank.main == "compare":
            yield rank._replace(main="ask") if rank.steps >= rank.next_due else self.gone_on(rank)
        elif rank.main == "ask" and self.unlocked(rank):
            yield self.asked(rank)
        elif rank.main == "plan":
            by_number = self.due if rank.steps < self.due else NEVER
            if self.mistake == "a plan that looks before it writes":
                yield rank._replace(main=f"write {min(by_number, next_ask(rank))}")
            else:
                yield rank._replace(next_due=by_number, main="look again")
        elif rank.main.startswith("write "):
            yield self.gone_on(rank._replace(next_due=int(rank.main.split()[1])))
        elif rank.main == "look again" and self.unlocked(rank):
            if self.mistake != "a plan that forgets to look again":
                rank = rank._replace(next_due=min(rank.next_due, next_ask(rank)))
            yield self.gone_on(rank)

    def completed(self, rank: Rank) -> Rank:
        steps = rank.steps + 1
        if rank.promise is not None and steps > rank.promise and rank.agreed is None:
            raise Wrong("a main thread has passed its promise")
        if rank.agreed is not None and steps > rank.agreed:
            raise Wrong("a main thread has passed the agreed step")
        return rank._replace(steps=steps, main="compare")

    def gone_on(self, rank: Rank) -> Rank:
        return rank._replace(main="step" if rank.steps < self.last else "end")

    def unlocked(self, rank: Rank) -> bool:
        inside = rank.watcher == "looked" or rank.watcher.startswith("counted ")
        return not inside or self.mistake == "no lock around count and promise"

    def asked(self, rank: Rank) -> Rank:
        if rank.agreed is not None and rank.steps > rank.agreed:
            raise Wrong("the agreed step lies behind")
        if rank.steps == rank.promise and rank.agreed is None:
            return rank  # waits
        if self.mistake == "main threads that answer" and rank.watcher == "looked":
            return rank._replace(promise=rank.steps, watcher="promised")
        if rank.steps == rank.agreed:
            number = rank.number + (self.mistake != "a number that stays")
            return rank._replace(number=number, begun=False, promise=None, agreed=None, main="meet agreed")
        return rank._replace(main="meet due" if rank.steps == self.due else "plan")

    # ---------------------------------------------------------------------------- watcher

    def watcher(self, state: State, index: int, rank: Rank) -> Iterator[Rank]:
        free = rank.agreed is None or self.mistake == "a watcher that does not wait for its main thread"
        number = rank.number + (rank.agreed is not None)
        if rank.watcher == "idle" and number in state.wishes and free:
            yield rank._replace(begun=True, next_due=0, watcher="looked")
        elif rank.watcher == "looked" and self.may_count(rank):
            yield rank._replace(watcher=f"counted {rank.steps}")
        elif rank.watcher.startswith("counted "):
            promise = int(rank.watcher.split()[1]) + (self.mistake != "a promise of s")
            yield rank._replace(promise=promise, agreed=None, watcher="promised")
        elif rank.watcher == "published":
            promised = {who: step for number, who, step in state.promises if number == rank.number}
            if len(promised) == self.size:
                choose = min if self.mistake == "the minimum" else max
                yield rank._replace(agreed=choose(promised.values()), watcher="idle")
            elif any(is_lost(other) and i not in promised for i, other in enumerate(state.ranks)):
                yield rank._replace(main="failed")  # the group's time limit, which names the rank

    def may_count(self, rank: Rank) -> bool:
        if self.mistake == "a lock that is held inside a step":
            return rank.main != "step"
        return self.mistake != "main threads that answer"

    def shared(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        """What changes more than the rank: promises, wishes, death."""
        if rank.watcher == "promised":
            assert rank.promise is not None
            promises = state.promises | {(rank.number, index, rank.promise)}
            yield self.with_rank(state._replace(promises=promises), index, rank._replace(watcher="published"))
        if rank.token:
            wishes = state.wishes | {rank.number}
            yield self.with_rank(state._replace(wishes=wishes), index, rank._replace(token=False))
        if state.wishes_left and rank.main not in ("end", "done"):
            left = state._replace(wishes_left=state.wishes_left - 1)
            yield self.with_rank(left, index, rank._replace(wished=True, token=True))
        if state.deaths_left and rank.main != "done":
            left = state._replace(deaths_left=state.deaths_left - 1)
            yield self.with_rank(left, index, rank._replace(main="dead"))

    # --------------------------------------------------------------------------- meetings

    def meetings(self, state: State) -> Iterator[State]:
        """First each rank reads what it wishes, then all go on at once."""
        for index, rank in enumerate(state.ranks):
            if rank.main in ("meet agreed", "meet due"):
                yield self.with_rank(state, index, rank._replace(wished=False, main=f"in {rank.main}"))
            if rank.main.startswith("in ") and lost(state):
                yield self.with_rank(state, index, rank._replace(main="failed"))
            if rank.main == "end" and lost(state):
                yield self.with_rank(state, index, rank._replace(main="failed"))
        places = {(rank.main, rank.steps) for rank in state.ranks}
        mains = {main for main, _ in places}
        if mains == {"end"}:
            ranks = (rank._replace(main="done", wished=False, token=False) for rank in state.ranks)
            yield state._replace(ranks=tuple(ranks))
        elif all(main.startswith("in ") for main in mains):
            if len({steps for _, steps in places}) > 1:
                raise Wrong("the ranks stop at different steps")
            ranks = (rank._replace(main="plan") for rank in state.ranks)
            yield state._replace(
                ranks=tuple(ranks), agreements=state.agreements + ("in meet agreed" in mains)
            )


def entered(rank: Rank) -> int:
    """The last step whose collective the rank has joined; a rank that is lost joins no further one."""
    return rank.steps + (rank.main == "step")


def is_lost(rank: Rank) -> bool:
    return rank.main in ("dead", "failed")


def lost(state: State) -> bool:
    return any(is_lost(rank) for rank in state.ranks)


def next_ask(rank: Rank) -> int:
    if rank.begun and rank.promise is None:
        return rank.steps + 1
    known = rank.promise if rank.agreed is None else rank.agreed
    return NEVER if known is None else known


class Found(NamedTuple):
    """What a search has seen: the number of states, and the most agreements of one history."""

    states: int
    agreements: int


def search(model: Model, wishes: int, deaths: int = 0) -> Found:
    """Go through everything that can happen.

    Raises:
        Wrong: in some history a promise is passed, ranks stop at different steps or stop for ever, or a wish
            is never heard of.
    """
    first = State((Rank(),) * model.size, wishes_left=wishes, deaths_left=deaths)
    first = first._replace(ranks=tuple(rank._replace(next_due=model.due) for rank in first.ranks))
    seen, open_states, most = {first}, [first], 0
    while open_states:
        state = open_states.pop()
        most = max(most, state.agreements)
        following = [each for each in model.next_states(state) if each != state]
        if not any(moves(state, each) for each in following):
            require_end(state)
        for each in following:
            if each not in seen:
                seen.add(each)
                open_states.append(each)
    return Found(len(seen), most)


def moves(state: State, following: State) -> bool:
    """Whether a program does something, rather than the world: wishes and deaths end no deadlock."""
    return (state.wishes_left, state.deaths_left) == (following.wishes_left, following.deaths_left)


def require_end(state: State) -> None:
    for rank in state.ranks:
        if rank.main not in ("done", "dead", "failed"):
            raise Wrong(f"deadlock: a main thread stays for ever at {rank.main!r}, step {rank.steps}")
        if rank.main == "done" and rank.wished:
            raise Wrong("a wish that nobody has heard of")
