"""A run while this process holds it: directory, lock, choice of a checkpoint, journal and trail."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep import unattended
from everstep.checkpoint import Checkpoint, Store, names_inside, read_checkpoint, trial_write
from everstep.contracts.group import Group
from everstep.errors import DamagedCheckpointError, RestoreError, RunDirError
from everstep.metrics.collector import is_wall
from everstep.mirror import RunMirror, open_mirror
from everstep.record import (
    EarlierSteps,
    Journal,
    NoJournal,
    Position,
    Rollback,
    RunDir,
    RunJournal,
    RunLock,
    StepComparison,
    Trail,
    last_step,
    to_read,
    trust,
    user_path,
)
from everstep.redaction import without_credentials
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.opening.comparing import Fingerprint
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.saving.state_tree import Progress, reading
from everstep.supervisor.settings import Settings
from everstep.supervisor.streams.run_streams import Streams
from everstep.supervisor.voice import Voice


@dataclass
class ResumePoint:
    """Place at which this start begins, and what was restored there.

    Attributes:
        progress: the counters, which continue; those of a fresh run if `checkpoint` is None.
        step, epoch: step and epoch at which the start begins.
        mid_epoch: whether the start begins inside an epoch, which is then entered again.
        checkpoint: name of the checkpoint that is continued, None for a fresh start.
        digest: digest of its state.
        tree: its branches `streams`, `services` and `wall`; empty for a fresh start.
        meta: its facts.
        random: random state to put back at the resume point, None for a fresh start.
        lines: random state for the program's lines that run again before that point.
        parent: the journal's end as the checkpoint knows it.
        comparison: compares steps that run again with their earlier executions.
        chosen: a person's choice that rules out a comparison with earlier executions; else "".
        finished: whether the run was complete and nothing reopened it.
        ranks_before: number of ranks that wrote the checkpoint, if this start has another; else None.
        kept: facts that the record keeps as stored, because no step runs with what was given.
        fingerprint: the fingerprint of this start.
        one_fingerprint: whether all steps of the run, so far and from here on, have this fingerprint, this
            layout, and this number of ranks, or one on which they have the same bits.
    """

    progress: Progress
    checkpoint: str | None = None
    digest: str | None = None
    tree: dict[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    random: Any = None
    lines: dict[str, Any] = field(default_factory=dict)
    parent: Position | None = None
    comparison: StepComparison = field(default_factory=lambda: StepComparison(EarlierSteps(0)))
    chosen: str = ""
    finished: bool = False
    ranks_before: int | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)
    one_fingerprint: bool = True

    def __post_init__(self) -> None:
        self.step, self.epoch = self.progress.step, self.progress.epoch
        self.mid_epoch = self.checkpoint is not None and self.progress.phase == "step" and self.epoch > 0

    @property
    def wall(self) -> dict[str, Any]:
        wall: dict[str, Any] = self.tree.get("wall", {})
        return wall


class OpenRun:
    """The run directory while this process holds it.

    Attributes:
        run_dir, store: the directory and its checkpoints.
        history: the journal of the starts before this one.
        journal: that of this start, once it is open.
        mirror: what keeps the run elsewhere.
        lock: keeps other processes out; not taken where the user wants none.
        segment: number of this start, from 1.
        config: configuration that is compared at a resume: the writer's, as a rank's own may name its device.
        rollbacks: the rollbacks decided in the history that this start continues.
        chosen: a person's choice that rules out a comparison with earlier executions; else "".
        request: checkpoint that the program asks for, as the journal records it; None for the newest.
    """

    journal: Journal

    def __init__(self, settings: Settings, voice: Voice, stack: ExitStack, group: Group) -> None:
        self.settings, self.voice, self.group = settings, voice, group
        self.writer, self.config, self.mirror = group.writer, settings.config, RunMirror()
        self.rollbacks: list[Rollback] = []
        self.chosen = ""
        self.request: str | None = None
        if group.writer:
            where = settings.mirror, settings.mirror_wait, settings.path
            self.mirror = open_mirror(*where, voice.say, voice.warn)
            # a directory that is made for a mirrored run is of that run, with its seed
            self.run_dir = RunDir.open(settings.path, seed=settings.seed, about=self.mirror.facts)
            self.lock = RunLock(self.run_dir.path)
            if settings.lock:
                if taken_over := self.lock.acquire():
                    voice.say(taken_over)
                stack.callback(self.lock.release)
            # after the lock: another process may have removed or replaced the run before
            self.run_dir.require_same()
            self.mirror.join(self.run_dir)
            self.segment = self.run_dir.next_segment()
            unattended.tell("run", path=str(self.run_dir.path))
        self._meet()
        self.store = Store(
            self.run_dir.path,
            self.segment,
            voice.say,
            self.run_dir.id,
            lambda: self.run_dir.require_newest(self.segment),  # recovery may raise the number
        )
        if group.writer:
            self.store.clean()
            # before anything is restored: a directory that cannot be written to is found here
            trial_write(self.run_dir.path)
        saved_by = max((facts.segment for facts in self.store.facts()), default=None)
        self.history = RunJournal(self.run_dir.path, saved_by)

    def _meet(self) -> None:
        """Give the run of the writer to the other ranks."""
        mine, config = None, self.config
        if self.writer:
            mine = self.run_dir.id, self.segment, None if config is None else dict(config.tree)
        run_id, segment, tree = self.group.share(mine, "the opening of the run directory")
        if self.writer:
            return
        try:
            self.run_dir, self.segment = RunDir.open(self.settings.path, create=False), segment
            here = f"run {self.run_dir.id}"
        except RunDirError as error:
            here = f"no run ({error})"
        if here != f"run {run_id}":
            raise RunDirError(
                f"rank {self.group.rank} finds {here} in {self.settings.path}, and rank 0 trains run "
                f"{run_id}; give all ranks one directory, on a file system that all of them see"
            )
        if config is not None and tree is not None:
            self.config = replace(config, tree=tree)

    def choose(self) -> Checkpoint | None:
        """Choose a checkpoint, or follow the writer's choice; None where the run starts from nothing."""
        chosen = self._choose() if self.writer else None
        if self.group.size == 1:
            return chosen
        what = None if chosen is None else [self._place(chosen.path), chosen.digest]
        mine = [what, [rollback.stored() for rollback in self.rollbacks], self.chosen, self.request]
        what, rollbacks, why, request = self.group.share(mine, "the choice of a checkpoint")
        if self.writer:
            return chosen
        self.rollbacks = Rollback.among(tuple(each) for each in rollbacks)
        self.chosen, self.request = why, request
        if what is None:
            return None
        place, digest = what
        checkpoint = self._read(self.run_dir.path / place)
        if checkpoint.digest != digest:
            raise RestoreError(
                f"rank {self.group.rank} reads another state in {checkpoint.path} than rank 0 (digest "
                f"{checkpoint.digest}, not {digest}); give all ranks one directory, on a file system that "
                "all of them see"
            )
        return checkpoint

    def _place(self, path: Path) -> str:
        """Return a path as all ranks find it: below the run directory, which they may see elsewhere."""
        inside = path.is_relative_to(self.run_dir.path)
        return str(path.relative_to(self.run_dir.path) if inside else path.absolute())

    def _read(self, path: Path) -> Checkpoint:
        return read_checkpoint(path, self.group.rank, regions=self.store.regions)

    def _choose(self) -> Checkpoint | None:
        wanted = self.settings.resume
        if wanted is False:
            if self.store.names():
                self.store.continue_from(None)
                self.voice.say(
                    "resume=False: this run starts over; its checkpoints move to superseded/ when it saves"
                )
            return None
        self.rollbacks = self.history.rollbacks()
        # at whichever start comes next: a kill may have followed the decision at once
        for rollback in self.rollbacks:
            self.store.abandon(rollback.first, rollback.segment)
        if isinstance(wanted, str | Path) and Path(wanted).name != str(wanted):  # a path, not a name
            wanted = to_read(user_path(wanted, "resume"))
            # a path to a checkpoint of this run stands for its name: only another run's is copied
            if wanted.parent.resolve() == self.run_dir.checkpoints.resolve():
                wanted = wanted.name
        if wanted is not True:
            self.request = str(wanted.resolve() if isinstance(wanted, Path) else wanted)
        checkpoint, notes = self._followed() or self.store.find(wanted)
        for note in notes:
            self.voice.say(note)
        if checkpoint is not None and any(name > checkpoint.name for name in self.store.names()):
            self.chosen = "another checkpoint than the newest"
        return checkpoint

    def _followed(self) -> tuple[Checkpoint, list[str]] | None:
        """Find the newest checkpoint, if a start with the same `resume=` was the last to act; None if not.

        To act is to save a checkpoint, or to decide a rollback, which may lead to before the checkpoint that
        is asked for.  A program that is killed and started again continues, and does not go back twice.
        """
        starts = self.history.events("segment", valid=False)
        same = {e.segment for e in starts if e.data.get("facts", {}).get("resume") == self.request}
        if self.request is None or not same:
            return None
        newest, notes = self.store.find(True)
        if newest is None or max([newest.segment, *(each.segment for each in self.rollbacks)]) not in same:
            return None
        self.voice.say(
            f"resume={self.settings.resume!r} was followed before: the run continues from there; to go back "
            f"again, name the checkpoint in the first line of {self.run_dir.path / 'checkpoint'}"
        )
        return newest, notes

    def inside(self, closed: Checkpoint, reopened: str) -> Checkpoint:
        """Find the checkpoint inside the epoch that `closed` had cut short: at its last step, or one before.

        There is none where the program left the last step by `break`, or asked for the stop after the
        steps: then `closed` is returned.
        """
        why: object = "there is no checkpoint inside it"
        for path in (closed.path.with_name(str(name)) for name in names_inside(closed.name)):
            if path.exists():
                try:
                    inside = self._read(path)
                except DamagedCheckpointError as error:
                    why = error
                else:
                    self.voice.say(f"{reopened}: the epoch continues from {path.name}")
                    return inside
        self.voice.say(f"{reopened}: epoch {closed.epoch} stays cut short and the next one begins ({why})")
        return closed

    def streams(self, point: ResumePoint) -> Streams:
        """Make the run's streams, at their positions in the checkpoint."""
        streams = Streams(
            point.progress.seed,
            self.voice.say,
            declared=self.settings.streams,
            override=self.settings.on_change == "override",
            quarantined=[batch for rollback in self.rollbacks for batch in rollback.batches],
            same_data=self.settings.kind.same_data,
            group=self.group,
            uneven=self.settings.uneven,
        )
        heads = self.history.heads(point.step)
        where = self.run_dir.checkpoints / (point.checkpoint or "")
        with reading(where, "streams"):
            streams.load(point.tree.get("streams", {}), point.wall.get("streams", {}), heads, where)
        return streams

    def open_journal(
        self, point: ResumePoint, board: ServiceBoard, limits: Mapping[str, int | None]
    ) -> Journal:
        """Open this start's segment of the journal; the writer's, as other ranks record nothing."""
        if not self.writer:
            self.journal = NoJournal(self.segment)
            return self.journal
        config, data = self.settings.config or Configuration({}), self.group.data
        facts: dict[str, Any] = {
            **config.facts(point.progress.seed, board),
            "code": list(map(str, config.code)),
            "controllers": board.controllers(),
            **point.kept,
            "fingerprint": point.fingerprint,
            "resume": self.request,
            **({"starts_over": True} if self.settings.resume is False else {}),
            "resumed_from": point.checkpoint,
            "ranks": self.group.size,
            "limits": {name: limit for name, limit in limits.items() if limit is not None},
            **({"data_ranks": data.size} if data.shared else {}),
            **({} if point.ranks_before is None else {"ranks_before": point.ranks_before}),
            "parent": self.run_dir.facts.get("parent"),
            **({} if self.settings.lock else {"lock": False}),
        }
        # a trial that a person starts again is still one of its sweep, whose variable is then not set
        facts |= next(({"sweep": one["sweep"]} for one in self.history.facts_since(1) if "sweep" in one), {})
        facts = without_credentials(facts)
        # last: the mark is of the facts as they are recorded, without credentials
        facts[trust.MARK] = trust.mark(self.run_dir.id, facts)
        where = self.run_dir.path, self.segment, point.parent
        self.journal = journal = Journal.open(*where, facts, warn=self.voice.warn)
        if not self.settings.lock:
            journal.flush()  # nobody can ask the lock whether this runs
        # after recovery: a start that was refused until here has taken nothing from one that runs
        self.mirror.take(self.run_dir, self.store, self.segment)
        return journal

    def trail(self, point: ResumePoint) -> Trail:
        """Open this start's trail, and delete earlier trails that no resume can need."""
        folder = self.run_dir.journal
        for path in folder.glob("segment-*.trail"):
            last = last_step(path)
            if last is None or last < point.step:
                with suppress(OSError):
                    path.unlink()
        return Trail(
            self.run_dir.path,
            self.segment,
            point.step,
            is_wall,
            self.voice.warn,
            rank=self.group.rank,
            reduced=self.group.size > 1,
        )

    def where(self) -> dict[str, str]:
        """Return the paths of the run's parts, by name, for the user."""
        run = self.run_dir
        places = {name: getattr(run, name) for name in ("checkpoints", "best", "journal")}
        places = {"run": run.path, **places, "log": run.logs / "run.log"}
        return {name: str(path) for name, path in places.items() if path.exists()}
