"""Decisions at boundaries: stops, interruptions, values that are set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from everstep.contracts.services import Action, Interrupt, Save, Service, SetValue, Stop
from everstep.errors import UsageError
from everstep.metrics.collector import Collector
from everstep.record import Journal
from everstep.redaction import without_credentials
from everstep.services.stop_after import StopAfter
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.progress import Limits, Progress, StopRecord
from everstep.supervisor.saves import Saves
from everstep.supervisor.signals import SignalWatch, describe
from everstep.supervisor.user_state import UserState
from everstep.supervisor.voice import Voice
from everstep.supervisor.wakeups import Wakeups


class Decisions:
    """Applies the actions that services and threads ask for, and the run's own limits.

    Args:
        undo: called before a failed stop is decided; raises where the step is undone instead.

    Attributes:
        interruption: why this start is to be left at the next boundary; None while it is not.
    """

    def __init__(
        self,
        progress: Progress,
        limits: Limits,
        saves: Saves,
        board: ServiceBoard,
        user: UserState,
        collector: Collector,
        journal: Journal,
        wakeups: Wakeups,
        signals: SignalWatch,
        voice: Voice,
        undo: Callable[[Stop], None],
    ) -> None:
        self._progress, self._limits, self._saves, self._board = progress, limits, saves, board
        self._user, self._collector, self._journal = user, collector, journal
        self._wakeups, self._signals, self._voice, self._undo = wakeups, signals, voice, undo
        self.interruption: Interrupt | None = None
        self._targets: set[str] = set()
        """Targets of `SetValue` that services have set in this start."""

    def apply(self, actions: Iterable[tuple[Service | None, Action]]) -> None:
        """Apply actions in the given order."""
        for service, action in actions:
            if isinstance(action, Stop):
                if action.failed:
                    # first: it raises where a rollback takes the place of this stop
                    self._undo(action)
                by = None if service is None else service.name
                self.stop(action.reason, "service", by, failed=action.failed, code=action.code)
                if action.failed:
                    self._user.taint()
            elif isinstance(action, Interrupt):
                self.interruption = self.interruption or action
            elif isinstance(action, Save):
                self._saves.ask()
            elif isinstance(action, SetValue) and service is not None:
                self._set_value(service, action)
            else:
                raise UsageError(f"{action!r} cannot be applied here; give Stop, Interrupt, Save or SetValue")

    def apply_pending(self) -> None:
        """Apply the actions that threads asked for, including those that come meanwhile."""
        while self._wakeups.actions:
            self.apply([self._wakeups.actions.popleft()])

    def stop(
        self, reason: str, kind: str, by: str | None = None, *, failed: bool = False, code: int = 0
    ) -> None:
        """End the run.  The first reason counts, unless a later one is a failure or has a higher exit status.

        Args:
            kind, by, failed, code: as in `StopRecord`.
        """
        stop, reason = self._progress.stop, without_credentials(reason)
        if stop is None or (failed, code) > (stop.failed, stop.code):
            self._progress.stop = StopRecord(reason, kind, by, self._limits.tree(), failed, code)
            step = self._collector.open_step or self._progress.step
            self._journal.event("stop", {"reason": reason, "kind": kind, "by": by, "step": step})
            self._saves.ask()  # so that a restart ends the same way
            self._wakeups.wake()

    def reopen(self) -> None:
        """Take back the stop, whose reason does not hold any more."""
        self._progress.stop = None

    def check_limits(self, at_epoch_end: bool) -> None:
        """Stop where a limit is reached."""
        step, epoch = self._limits.max_step, self._limits.max_epoch
        if step is not None and self._progress.step >= step:
            self.stop(f"max_step {step} is reached", "max_step")
        if at_epoch_end and epoch is not None and self._progress.epoch >= epoch:
            self.stop(f"max_epoch {epoch} is reached", "max_epoch")

    def limits_changed(self) -> None:
        """Take back a stop that the old limit decided, if the new limit is not reached."""
        stop = self._progress.stop
        if stop is not None and stop.kind in ("max_step", "max_epoch"):
            now = self._limits.tree()[stop.kind]
            count = self._progress.step if stop.kind == "max_step" else self._progress.epoch
            if now is None or now > count:
                self.reopen()

    def notice_signal(self) -> None:
        """Turn a signal that has come into an interruption."""
        number = self._signals.received
        if number is not None and self.interruption is None:
            self.interruption = Interrupt(describe(number), 128 + number)

    def notice_interruption(self) -> None:
        """Look for an interruption inside a boundary: a signal, a thread's action or the time budget."""
        self.notice_signal()
        asked = [action for _, action in self._wakeups.actions if isinstance(action, Interrupt)]
        asked += [late for s in self._board.all(StopAfter) if (late := s.overtime()) is not None]
        self.interruption = self.interruption or next(iter(asked), None)

    def _set_value(self, service: Service, action: SetValue) -> None:
        """Set a value and record it as rows: superseded and compared like other rows when steps run again."""
        for name, value in self._user.set_value(action):
            self._collector.outside(
                f"eval/{service.name}", self._progress.step, name, value, wall=service.schedule.wall
            )
        if action.target not in self._targets:
            self._targets.add(action.target)
            for scheduler in self._user.recomputing(action.target):
                self._voice.warn(
                    f"service {service.name!r} sets {action.target}, and {scheduler} computes it anew from "
                    "the step's number: at its next step the value is undone; take one of the two"
                )
