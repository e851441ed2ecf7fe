"""The engine under every loop: it opens a run, counts its steps, and walks each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

from everstep import backends
from everstep.arguments import integer
from everstep.checkpoint import CheckpointName, Phase, forecast
from everstep.contracts.data import Cursor
from everstep.contracts.services import Moment, RunView
from everstep.errors import ProgressError, ServiceError, UsageError, some
from everstep.group import write_error_file
from everstep.metrics.collector import Collector
from everstep.record import CHOSEN, WARNED, FailurePages, StepComparison, read_earlier_steps, traceback_lines
from everstep.services.console import Voice
from everstep.services.replayed import Replayed
from everstep.services.witness import Witness, drill_services
from everstep.state import Encoded, decode, restore
from everstep.supervisor.board import ServiceBoard, find_service
from everstep.supervisor.boundaries import Boundaries, Decisions
from everstep.supervisor.checks.program_variables import ProgramVariables
from everstep.supervisor.checks.sanity_checks import ProgramChecks, Rounds, WatchedMetrics, Work
from everstep.supervisor.checks.verification import Recording, Verifier
from everstep.supervisor.data_ranks import begin_random, divide
from everstep.supervisor.leaving.exit import BestRecord, Ending
from everstep.supervisor.leaving.failures import FailureReporter, HangThread
from everstep.supervisor.leaving.undoing import Retries, Rollbacks
from everstep.supervisor.opening.configuration import limits_set
from everstep.supervisor.opening.open_run import OpenRun, ResumePoint, recover
from everstep.supervisor.ranks import Ranks
from everstep.supervisor.saving.saver import Saver, take_snapshot
from everstep.supervisor.saving.state_tree import Progress, reading
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.settings import LoopDriver, Settings
from everstep.supervisor.streams.generators import RngMarks
from everstep.supervisor.threads.signals import SignalWatch, exit_error
from everstep.supervisor.threads.wakeups import GRACE, PeriodicThreads, Wakeups
from everstep.timing import Estimator, TimeSpent


class Engine:
    """A start of a run, from entry to exit: it counts steps, and calls its parts, which own the state.

    Attributes:
        view, loop: the object that the program calls, and what drives its steps; set by that object.
    """

    view: RunView
    loop: LoopDriver

    def __init__(self, settings: Settings, user: UserState) -> None:
        clock = settings.clock
        self.settings, self.user, self.clock = settings, user, clock
        self.kind, self.limits = settings.kind, settings.limits
        self.status: Literal["new", "open", "closed"] = "new"
        self.begun = False
        """Whether the program has reached the place at which the run begins or resumes."""
        self.limits_given: dict[str, int | None] = {}
        """The limits when the program first reaches a loop; it may set others from there on."""
        self.segment = 0
        self.progress = Progress(seed=settings.seed or 0)
        self.recovered = ResumePoint(self.progress)
        self.voice = Voice()
        self.collector = Collector(lambda: self.progress.epoch)
        self.board = ServiceBoard(self.collector, self.voice)
        for service in (*settings.services, *drill_services(lambda: user.save()["user"])):
            self.board.add(service)
        if (plan := settings.replay) is not None:
            self.board.add(Replayed(plan, user.objects, self._tree, lambda: self.comparison))
        self.voice.console = settings.console
        if settings.console is not None:
            settings.console.bests = lambda: self.board.bests
        self.estimator, self.spent = Estimator(clock), TimeSpent(clock)
        self.wakeups = Wakeups(clock)
        self.signals = SignalWatch(self.wakeups.wish)
        self.ranks = Ranks(self.signals, self.wakeups, clock)
        self.threads = PeriodicThreads(self.wakeups.fail)
        self.variables = ProgramVariables(user, self.board, self.warn_once)
        self.watched = WatchedMetrics(self.board, self.voice)
        self.restored: BestRecord | None = None
        """The best weights that were loaded into the objects at the end."""
        self.ending: Ending | None = None
        self._verifies_nothing = False
        """Whether no step is executed again in this start, which is said at the resume point."""
        self.polls = 0
        """How often a tail, an evaluation or a service that waits has asked for an interruption."""
        self._resume_state: Encoded | None = None
        """The state at entry, until the resume point is reached."""
        self.boundaries = Boundaries(self)

    @property
    def step(self) -> int:
        """Number of the step whose body is running, else of the last completed one; from 0."""
        return self.collector.open_step or self.progress.step

    def seconds(self) -> float:
        """Wall time of the whole run in seconds, over all its starts."""
        return float(self.recovered.wall.get("seconds", 0.0)) + self.spent.seconds

    def enter(self) -> None:
        if self.status != "new":
            raise UsageError(f"this {self.kind.name} was entered before; make a new one to run again")
        try:
            with ExitStack() as stack:
                stack.callback(setattr, self, "status", "closed")  # if it fails to open
                self.ranks.join(stack)
                self.ranks.require_supported(self.settings.retry)
                with self.ranks.reporting_errors():
                    divide(self.ranks.group, self.settings.data_ranks)
                    self._open(stack)
                    self.board.fire(Moment.ENTER_LOOP)
                    if self.recovered.checkpoint is not None:
                        self.board.fire(Moment.AFTER_CHECKPOINT, self.recovered.checkpoint)
                self.resources = stack.pop_all()
        except Exception as error:  # before there is a run with pages
            write_error_file(f"{type(error).__name__}: {error}", traceback_lines(error))
            raise
        finally:
            self.voice.release()

    def _open(self, stack: ExitStack) -> None:
        """Take each resource in this order; all are given back in reverse, also if a later one fails."""
        self.opening = opening = OpenRun(self.settings, self.voice, stack, self.ranks.group)
        log = None if self.ranks.group.writer else f"rank-{self.ranks.group.rank:05d}.log"
        if (replayed := find_service(Replayed, self.board)) is not None:
            replayed.require(opening.run_dir.id, opening.run_dir.path)
            log = "replay.log"
        if log is not None:
            # a message, an export or a row of TensorBoard would be the run's second
            self.board.leave_reports_out()
            self.voice.speak_to(opening.run_dir.path / "logs" / log)
        # before anything is restored: from here on a signal only asks for a save
        self.signals.install()
        stack.callback(self.signals.restore)
        stack.callback(self.wakeups.close)
        self.user.open(stack, opening.run_dir.id)
        self.user.require_whole()
        self.ranks.require_synchronised(self.user.replicated)
        self.recovered = recovered = recover(opening, self.user, self.board, self.limits.tree())
        self.segment = opening.segment
        for target in (target for service in self.board for target in service.sets):
            self.user.numbers(target)  # which refuses what is not there
        self.progress = recovered.progress
        self.streams = opening.streams(recovered)
        stack.callback(self.streams.close)
        self.streams.generators.keep(self.user.objects.values())
        # after recovery: the segment's first record names the checkpoint from which this start continues
        limits = self.limits.tree()
        limits |= limits_set(limits, recovered.meta)
        self.journal = opening.open_journal(recovered, self.board, limits)
        stack.callback(self.journal.close)
        stack.callback(opening.mirror.close)

        self.streams.noticed, self.streams.warn_once = self._note_head, self.warn_once
        # the writer has made the folders by now
        self.ranks.group.barrier("the opening of the journal")
        pages = FailurePages(opening.run_dir.path, self.segment, rank=self.ranks.group.rank)
        self.reporter = reporter = FailureReporter(
            pages, self.ranks.group, self.progress, self.journal, self.voice, self.signals.give_up
        )
        self._open_verifier(stack)
        self.rollbacks = Rollbacks(opening, self.streams)
        self.retries = Retries(opening, self.streams, lambda: self.ranks.signal is not None)
        if (recovery := self.settings.recovery) is not None:
            self.streams.drew = lambda *batch: recovery.drew(self.progress.step + 1, *batch)
        self.saver = Saver(self)
        stack.callback(self.saver.close)
        if self.settings.replay is None:
            # before training: a disk without room for two checkpoints is refused
            arrays = self.saver.encode(self.user.save()).arrays.values()
            forecast(opening.run_dir.path, 2 * sum(array.nbytes for array in arrays) + (1 << 16))
        self.recording = Recording(
            self.journal, self.verifier, self.progress, recovered, self.streams, self.board
        )
        self.collector.emit = self.recording.add
        if self.ranks.several:
            self.collector.across = self.ranks.group
        self.program_checks = ProgramChecks(
            self.user, self.progress, recovered.step, self.voice, self.warn_once
        )
        self.variables.report = self.program_checks.report
        self.decisions = Decisions(self)
        self.board.progress, self.board.apply = self.progress, self.decisions.apply
        self.board.gather_actions = self.ranks.gather_actions
        for backend in backends.active():
            stack.enter_context(backend.shapes_watched(self.user.objects, self.warn_once))
        self.ranks.agree_by_steps(stack, lambda: self.progress.step, reporter)
        stack.callback(reporter.has_left.set)
        self.estimator.start(self.progress.step)
        # before services open: they may call what is refused outside the with block
        self.status = "open"
        self._rounds = Rounds(lambda: Work(self.user.updates, self.loop.batches()[0]))
        self.spent.begin()
        if (watch := self.settings.hang_watch) is not None:
            marks = {"the loop has not moved": self._moved, "a save has not ended": lambda: self.saver.job}
            stack.callback(HangThread(watch, self._position, marks, reporter).close)
        # before they open: those that did are closed if a later one fails
        stack.callback(self._close_services)
        stack.callback(reporter.leaving.set)
        # before they open: a service may read its state there
        self.board.begin()
        if recovered.checkpoint is not None:
            where, services = opening.run_dir.checkpoints / recovered.checkpoint, recovered.tree["services"]
            with reading(where, "services/metrics"):
                self.collector.load(services.pop("metrics")["state"])
            self.board.load(services, where)
        self.board.open(self.view, self.ranks.begin_clock())
        self.voice.release()
        self.services_changed()
        if recovered.checkpoint is not None:
            # kept, because the program's lines up to the resume point may change the state again
            user = self.user.save()
            self.user.sharing_warnings(user["user"])  # what the program shares from the start is no news
            self._resume_state = self.saver.encode_apart(user)
            self.saver.tidy()
        # last: what is drawn from here on is drawn by the program's lines, which a resume runs again
        self.rng_marks = RngMarks(self.user, recovered.lines)

    def _note_head(self, stream: str, head: dict[str, Any]) -> None:
        self.journal.event("head", {"stream": stream, "step": self.progress.step, **head})
        self.journal.flush()  # a kill may follow

    def _open_verifier(self, stack: ExitStack) -> None:
        recovered = self.recovered
        if why := self.opening.not_compared:
            self.journal.event("decision", {"what": CHOSEN, "why": why, "step": recovered.step})
            self.journal.flush()  # a later start must not compare with what is left behind
        # by a drill or a replay, which find what differs and how far
        observed = find_service(Witness, self.board) is not None or self.settings.replay is not None
        on_divergence = "warn" if observed else self.settings.on_divergence
        self.comparison = comparison = recovered.comparison
        if self.settings.replay is not None:  # also from nothing, and on another machine
            tail = recovered.progress.phase == "step"
            earlier = read_earlier_steps(self.opening.history, recovered.parent, recovered.step, tail=tail)
            self.comparison = comparison = StepComparison(earlier)
        trail = self.opening.trail(recovered)
        stack.callback(trail.close)
        # a rank that was killed later has more to compare; the boundaries must be the same on all
        own_last = 0 if comparison.done else comparison.last
        last = max(self.ranks.group.gather(own_last, "the steps that run again"))
        self.verifier = Verifier(
            trail,
            comparison,
            on_divergence,
            self.collector,
            self.journal,
            self.voice,
            self.streams.by_name,
            self.user.update_digest,
            self.warn_once,
            last=last,
        )
        if self.ranks.group.data.shared:
            self.verifier.batches_digest = 0
        self.streams.changed = self.verifier.stop_comparing
        if not recovered.finished:
            self.streams.compared = self.verifier.note_other_data
        self._verifies_nothing = comparison.done and not recovered.finished

    def _tree(self, phase: Phase) -> Encoded:
        return take_snapshot(self, CheckpointName(self.progress.step), phase).draft.common

    def warn_once(self, message: str) -> None:
        """Warn, unless a start of this run has done so."""
        earlier = self.opening.history.events(WARNED, valid=False)
        if all(event.data["message"] != message for event in earlier):
            self.journal.event(WARNED, {"message": message}, wall=True)
            self.journal.flush()  # a kill may follow
            self.voice.warn(message)

    def _moved(self) -> tuple[int, ...]:
        """Counters of which one rises while the loop moves; read by another thread."""
        current = self.progress
        drawn, _ = self.loop.batches()
        return current.step, current.epoch, drawn, self._rounds.count, self.polls, self.saver.job or 0

    def _position(self) -> int:
        """The place of the main thread, as a number that never falls; read by another thread."""
        drawn, completed = self.loop.batches()
        return 2 * self.progress.step + (self.collector.open_step != 0 or drawn != completed)

    def services_changed(self) -> None:
        if self.status == "open":
            self.board.services_changed()
        self.wakeups.wake()

    def set_limit(self, name: str, value: int | None) -> None:
        """Set a limit; a stop that the old limit decided is taken back, if the new limit is not reached."""
        setattr(self.limits, name, integer(name, value, none="for no limit"))
        if self.status == "open":
            self.decisions.limits_changed()
        self.wakeups.wake()

    def begin(self) -> None:
        """Begin the run with the checkpoint of step 0, or resume, at this place of the program."""
        self.begun = True
        self.reach_loop()
        if self.recovered.checkpoint is None:
            self.ranks.prepare(self.user.replicated)
            # here and not earlier: the objects were made with equal generators on all ranks
            begin_random(self.ranks.group, self.progress.seed)
            self.saver.save_first()
            if self.progress.step:
                self.voice.warn(
                    f"the steps are counted on from {self.step}, the step of the weights that were loaded"
                )
            return
        self._bring_limits_back()
        self.decisions.check_limits(False)
        self.resume()

    def reach_loop(self) -> None:
        """Note the limits as they are given to this start, unless it has reached a loop before."""
        self.limits_given = self.limits_given or self.limits.tree()

    def _bring_limits_back(self) -> None:
        """Set the limits as the program had set them; lines that have run again may have set others."""
        for name, limit in limits_set(self.limits_given, self.recovered.meta).items():
            if limit != self.limits.tree()[name]:
                self.voice.say(f"{name} is {limit or 'no limit'}, as the program had set it since its start")
                self.set_limit(name, limit)

    def resume(self) -> None:
        """Restore state, streams and random state; what the lines up to here have done again is undone."""
        assert self._resume_state is not None
        self._bring_limits_back()
        self.user.load(decode(self._resume_state), self.progress.updates)
        self._resume_state = None
        self.ranks.prepare(self.user.replicated)
        at_epoch_end = self.progress.phase == "epoch"
        self.streams.open_bound(at_epoch_end=at_epoch_end)
        if lost := self.lost_variables(at_epoch_end):
            self.voice.warn(lost)
        if self._verifies_nothing:  # no step, and of the data what was drawn again just now
            self.verifier.report()
        restore(self.recovered.random)  # last: opening a stream may draw random numbers
        self.recovered.random = None
        if unrun := self.recovered.meta.get("open"):
            # first of all: an interruption left this boundary before these services had run
            self.boundaries.run(Moment.AFTER_EPOCH if at_epoch_end else Moment.AFTER_STEP, unrun=unrun)

    def lost_variables(self, at_epoch_end: bool = False) -> str:
        """Name the program's variables that are not as at the checkpoint, with a remedy; "" without any."""
        lost = self.variables.lost(self.recovered.wall.get("variables"), at_epoch_end=at_epoch_end)
        self.comparison.lost = [*lost]
        if not lost:
            return ""
        return (
            f"{some([f'{name} ({how})' for name, how in lost.items()], 8)}: this variable of your program is "
            "not as it was at the checkpoint, as the state does not save it; put what is read later into the "
            "state, or into a state_dict() of your data or service (docs/guide/exactness.md)"
        )

    def collect(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step, for the record and for observers."""
        metrics = self.board.without_outputs(step, values) if self.board.looked_at else values
        if self.collector.across is not None and (weight := self.streams.weight) != 1.0:
            self.collector.weights[step] = weight
        self.collector.add(step, metrics)
        if self.board.synchronous:
            self.board.announce(Moment.METRICS_COLLECTED, values)

    def complete_step(self, batch: Any, can_save: bool = True) -> None:
        """Count a complete step; `can_save`: not where `break` has left its body."""
        current, wakeups = self.progress, self.wakeups
        current.step = step = current.step + 1
        self.verifier.step_done(step, current.epoch)
        if self.program_checks.looks_left:
            self.spent.begin_boundary()  # it is not the program's step that takes this time
            self.program_checks.look()
            self.spent.end_boundary()
        # the comparison comes first: a step with nothing due makes no further call
        if step >= wakeups.next_due and wakeups.is_due(step):
            self.boundaries.run(Moment.AFTER_STEP, batch, can_save=can_save)

    def count_round(self, never_done: str, remedy: str) -> None:
        """Notice a loop that asks and never completes a step; a signal ends it at the last checkpoint."""
        current = self.progress
        spent_on = self._rounds.note_round((current.step, current.epoch))
        if spent_on is not None:
            rounds = f"{self._rounds.count:,} rounds of the loop"
            raise ProgressError(f"{never_done} in {rounds}, {spent_on}; {remedy}")
        if self.ranks.signal is not None and self._rounds.in_vain and not self.collector.open_step:
            self.decisions.notice_signal()
            self.voice.say(
                f"no step was completed after step {current.step}: what the loop has done since is not saved"
            )
            self.announce_leaving()
            self.leave()

    def note_evaluation(self, seconds: float) -> None:
        self.spent.in_evaluation(seconds)
        self.estimator.exclude(seconds)

    def killed_by_signal(self, cursor: Cursor | None) -> bool:
        """Whether a signal to the whole process group, as Ctrl-C, has killed the workers: then notice it."""
        if cursor is None or not cursor.fetch_error_may_be_signal or self.ranks.several:
            return False
        if not self.signals.received_within(1.0):
            return False
        self.decisions.notice_signal()
        return True

    def announce_leaving(self, *, is_followed: bool = False) -> None:
        """Wait until the last save is committed, and announce that an interruption ends this start.

        `is_followed`: by one step more, which a resume executes again, so that it has something to compare.
        """
        interruption = self.decisions.interruption
        assert interruption is not None
        # first: an interrupted start is left only with its state on disk
        self.saver.await_commit()
        checkpoint = self.saver.last_commit
        where = "nothing new to save" if checkpoint is None else f"saved {checkpoint.path}"
        facts = {"reason": interruption.reason, "step": self.progress.step, "status": interruption.code}
        self.journal.event("interrupted", facts, wall=True)
        rest = "; at most one more step follows, which the resume repeats and compares" if is_followed else ""
        self.voice.say(f"{interruption.reason}: {where}{rest}; start again to continue")

    def leave(self) -> None:
        """Leave the body of the loop by an error, as an interruption asks."""
        interruption = self.decisions.interruption
        assert interruption is not None
        raise exit_error(interruption.code, interruption.reason)

    def _close_services(self) -> None:
        late = ", ".join(self.threads.stop())
        self.board.close()
        if late:
            raise ServiceError(f"{late} did not return within {GRACE:g} s after the loop; make it return")

    def require_open(self, what: str) -> None:
        if self.status == "new":
            raise UsageError(
                f"{what}() before the with block; enter it first: with {self.kind.name}(...) as loop:"
            )
        if self.status == "closed":
            raise UsageError(
                f"{what}() after the with block has ended; make a new {self.kind.name} to continue"
            )

    def require_entered(self, what: str) -> None:
        """Refuse a fact that is known only once the run is entered."""
        if self.status == "new":
            raise UsageError(f".{what} is not known before the loop is entered; use it in its with block")
