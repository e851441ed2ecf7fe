"""Ranks of a run: what one of them knows alone, told to all at each boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from everstep.contracts.group import Group
from everstep.contracts.services import Action, Clock, Interrupt, Save, Service, Stop
from everstep.group import Agreement, Peers, Single, find_group, report
from everstep.supervisor.threads.signals import SignalWatch
from everstep.supervisor.threads.wakeups import Wakeups

Pending = tuple[Service | None, Action]

_ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in (Stop, Interrupt, Save)}
"""Actions that a thread may ask for, by name."""


class Ranks:
    """The processes that train this run, each with an engine of its own; usually there is one.

    Every rank makes the same calls in the same order.  What only one rank knows (a signal, the clock, a
    thread's request, a finished write) is gathered at each boundary, so that all ranks decide from the same
    facts.  On one process the facts are read where they are used.

    Args:
        signals, wakeups, clock: this process's own.

    Attributes:
        group: the group; a `Single` until `join`.
        several: whether the run has more than one rank.
        saves_are_done: whether no rank was writing a checkpoint when the ranks met last.
    """

    def __init__(self, signals: SignalWatch, wakeups: Wakeups, clock: Clock) -> None:
        self.group: Group = Single()
        self.several = False
        self._signals, self._wakeups, self._clock = signals, wakeups, clock
        self.saves_are_done = True
        self._now = 0.0
        self._signal: int | None = None
        self._actions: list[Pending] = []

    @property
    def writer(self) -> bool:
        """Whether this process owns the run directory."""
        return self.group.writer

    def join(self, stack: ExitStack) -> None:
        """Join the group of this process, and watch for ranks that are lost.

        Raises:
            GroupError: ranks are missing, or cannot be reached.
        """
        self.group = find_group()
        self.several = self.group.size > 1
        stack.callback(self.group.close)
        if self.several:
            stack.callback(Peers(self.group).close)  # type: ignore[arg-type]

    def agree_by_steps(
        self, stack: ExitStack, steps: Callable[[], int], lost: Callable[[BaseException], None]
    ) -> None:
        """Let all ranks stop at the same step for what one of them wishes.

        Args:
            steps: tells the number of completed steps.
            lost: takes, in a thread, the error by which the group is lost.
        """
        if self.several:
            agreement = Agreement(self.group, steps, self._wakeups.look, lost)  # type: ignore[arg-type]
            stack.callback(agreement.close)
            self._wakeups.agree_by(agreement, keeps_time=self.writer)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks, which would wait, if the block fails."""
        try:
            yield
        except BaseException as error:
            report(self.group, error)
            raise

    # ------------------------------------------------------------------------- at a boundary

    def meet(self, *, saving: bool) -> None:
        """Tell all ranks what this rank knows alone; called first at each boundary.

        Args:
            saving: whether this rank is writing a checkpoint.
        """
        if not self.several:
            return
        mine = {
            "signal": self._signals.received,
            "actions": [_told(action) for action in _taken(self._wakeups)],
            "saving": saving,
            "now": self._clock(),
        }
        found = self.group.gather(mine, "a boundary")
        self._now = found[0]["now"]
        self.saves_are_done = not any(each["saving"] for each in found)
        self._signal = next((each["signal"] for each in found if each["signal"] is not None), None)
        self._actions += [(None, _action(*told)) for each in found for told in each["actions"]]

    def now(self) -> float:
        """The clock's time; of several ranks, by the writer's clock when they met last."""
        return self._now if self.several else self._clock()

    @property
    def signal(self) -> int | None:
        """Number of the first signal; of several ranks, of the signal that they know of together."""
        return self._signal if self.several else self._signals.received

    def pending(self) -> Sequence[Action]:
        """List the actions that threads have asked for, and that are not applied yet."""
        if self.several:
            return [action for _, action in self._actions]
        return [action for _, action in list(self._wakeups.actions)]

    def take_pending(self) -> Iterator[Pending]:
        """Take the actions that threads have asked for; on one process also those that come meanwhile."""
        if self.several:
            taken, self._actions = self._actions, []
            yield from taken
        else:
            while self._wakeups.actions:
                yield self._wakeups.actions.popleft()

    def together(self, actions: list[Pending]) -> list[Pending]:
        """Return the actions of services on all ranks; what one rank alone asks for counts for all.

        Raises:
            DisagreementError: services of two ranks set one target to different values.
        """
        mine = [[None if s is None else s.name, *_told(a)] for s, a in actions]
        everyone = self.group.gather(mine, "the actions of the services")
        known = [[name, *rest] for name, *rest in mine]
        for theirs in everyone:
            for name, kind, values in theirs:
                if [name, kind, values] not in known and kind in _ACTIONS:
                    known.append([name, kind, values])
                    actions.append((None, _action(kind, values)))
        return actions


def _taken(wakeups: Wakeups) -> list[Action]:
    # counted once: a thread may append meanwhile
    return [wakeups.actions.popleft()[1] for _ in range(len(wakeups.actions))]


def _told(action: Action) -> tuple[str, dict[str, Any]]:
    return type(action).__name__, asdict(action)


def _action(kind: str, values: dict[str, Any]) -> Action:
    return _ACTIONS[kind](**values)
