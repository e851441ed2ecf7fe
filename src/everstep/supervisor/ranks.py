"""Ranks of a run: what one of them knows alone, told to all at each boundary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from everstep import backends
from everstep.arguments import plain
from everstep.contracts.group import Group, require_same
from everstep.contracts.services import Action, Clock, Interrupt, Save, Service, Stop
from everstep.display.cells import with_leaves
from everstep.errors import ConfigError
from everstep.group import Agreement, Peers, StoreGroup, find_group, report
from everstep.services.recovery import Retry
from everstep.supervisor.data_ranks import require_alike
from everstep.supervisor.leaving.failures import FailureReporter
from everstep.supervisor.threads.signals import SignalWatch
from everstep.supervisor.threads.wakeups import Pending, Wakeups

_ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in (Stop, Interrupt, Save)}
"""Actions that one rank may ask for alone, by name; the others set values, which all ranks set alike."""


class Ranks:
    """The processes that train this run, each with an engine of its own; usually there is one.

    What only one rank knows (a signal, the clock, a thread's request, a finished write) is gathered at each
    boundary, so that all ranks decide from the same facts.
    """

    def __init__(self, signals: SignalWatch, wakeups: Wakeups, clock: Clock) -> None:
        self.group = Group()
        self.several = False
        self._signals, self._wakeups, self._clock = signals, wakeups, clock
        self.saves_are_done = True
        """Whether no rank was writing a checkpoint when the ranks met last."""
        self.writers_reason: str | None = None
        """The writer's reason for its stop, when the ranks met last."""
        self.times: list[dict[str, float]] = []
        """What each rank has measured of itself, if the ranks met last after an epoch."""
        self._now = 0.0
        self._signal: int | None = None
        self._actions: list[Pending] = []

    def join(self, stack: ExitStack) -> None:
        """Join the group of this process, and watch for ranks that are lost."""
        self.group = group = find_group()
        self.several = group.size > 1
        stack.callback(group.close)
        if isinstance(group, StoreGroup):
            stack.callback(Peers(group).close)

    def require_supported(self, retry: Retry | None) -> None:
        """Refuse a service that acts on this rank alone, before anything is opened; all ranks raise."""
        if self.several and retry is not None:
            raise ConfigError(
                f"Retry tries again in one process, and the other {self.group.size - 1} of {self.group.size} "
                "ranks would wait for it for ever; leave it out, and let the launcher start all ranks again: "
                "torchrun --max-restarts=3"
            )

    def agree_by_steps(self, stack: ExitStack, steps: Callable[[], int], reporter: FailureReporter) -> None:
        """Let all ranks stop at the same step for what one wishes; a thread watches over a lost group."""
        if isinstance(group := self.group, StoreGroup):
            lost, leaves = reporter.await_leaving, reporter.leaving.is_set
            agreement = Agreement(group, steps, self._wakeups.look, lost, leaves)
            stack.callback(agreement.close)
            self._wakeups.agree_by(agreement, keeps_time=group.writer)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the other ranks, which would wait, if the block fails."""
        try:
            yield
        except BaseException as error:
            report(self.group, error)
            raise

    def require_synchronised(self, objects: Mapping[str, Any]) -> None:
        """Raise for replicated objects of the state that each rank would train on its own."""
        if self.several:
            for backend in backends.active():
                backend.require_synchronised(objects, self.group.data)

    def prepare(self, objects: Mapping[str, Any]) -> None:
        """Make the training of replicated objects exact; called before the first step of each start."""
        if self.several:
            for backend in backends.active():
                backend.prepare_ranks(objects, self.group.data)

    def begin_clock(self) -> float:
        """Return the time at which all schedules in seconds begin, by the writer's clock."""
        self._now = self.group.share(self._clock(), "the beginning of the clock")
        return self._now

    def exchange_facts(
        self,
        where: str,
        *,
        saving: bool,
        reason: str | None,
        requests: Mapping[str, Any],
        batches: int | None,
        times: Mapping[str, float] | None,
    ) -> None:
        """Tell all ranks what this rank knows alone; what the programs have asked for must be the same."""
        pending = self._wakeups.actions
        own_facts = {
            "signal": self._signals.received,
            # counted once: a thread may append meanwhile
            "actions": [_plain(pending.popleft()[1]) for _ in range(len(pending))],
            "saving": saving,
            "now": self._clock(),
            "reason": reason,
            "asked": dict(requests),
            "batches": batches,
            "times": times and dict(times),
        }
        everyone = self.group.gather(own_facts, where)
        require_same(
            [each["asked"] for each in everyone],
            f"at {where}, what the programs have asked for (stop, save, set limits and add services on all "
            "ranks alike; loop.call_soon(everstep.Stop(...)) may be called on one)",
        )
        require_alike(self.group.data, [each["batches"] for each in everyone], f"the batches up to {where}")
        self._now, self.writers_reason = everyone[0]["now"], everyone[0]["reason"]
        self.times = [each["times"] for each in everyone if each["times"]]
        self.saves_are_done = not any(each["saving"] for each in everyone)
        self._signal = next((each["signal"] for each in everyone if each["signal"] is not None), None)
        self._actions += [
            (None, _ACTIONS[kind](**values)) for each in everyone for kind, values in each["actions"]
        ]

    def now(self) -> float:
        """The clock's time; of several ranks, by the writer's clock when they met last."""
        return self._now if self.several else self._clock()

    @property
    def signal(self) -> int | None:
        """Number of the first signal; of several ranks, of the signal that they know of together."""
        return self._signal if self.several else self._signals.received

    def take_pending(self) -> Iterator[Pending]:
        """Take the actions that threads have asked for; on one process also those that come meanwhile."""
        if self.several:
            actions, self._actions = self._actions, []
            yield from actions
        else:
            while self._wakeups.actions:
                yield self._wakeups.actions.popleft()

    def gather_actions(self, actions: list[Pending], services: Iterable[Service]) -> list[Pending]:
        """Return the actions of the services of all ranks; one rank's stop counts for all."""
        if not self.several:
            return actions
        acts = [[None if service is None else service.name, *_plain(action)] for service, action in actions]
        everyone = self.group.gather(acts, "the actions of the services")
        values = [[plain for plain in plains if plain[1] not in _ACTIONS] for plains in everyone]
        require_same(values, "what services set (decide by metrics, which are reduced over the ranks)")
        by_text = {json.dumps(plain): pending for plain, pending in zip(acts, actions, strict=True)}
        by_name = {service.name: service for service in services}
        united = list(everyone[0])
        for plains in everyone[1:]:  # in the order of ranks: the first reason of a stop counts
            united += [plain for plain in plains if plain[1] in _ACTIONS and plain not in united]
        return [
            by_text.get(json.dumps([name, kind, values])) or (by_name.get(name), _ACTIONS[kind](**values))
            for name, kind, values in united
        ]


def _plain(action: Action) -> tuple[str, dict[str, Any]]:
    return type(action).__name__, with_leaves(asdict(action), plain)
