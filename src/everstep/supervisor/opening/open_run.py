"""A run while this process holds it: directory, lock and journal; and its state, restored or made anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from everstep import unattended
from everstep.checkpoint import Checkpoint, Store, read_checkpoint, trial_write
from everstep.contracts.group import Group
from everstep.errors import NoCheckpointError, RestoreError, RunDirError, UsageError, some
from everstep.metrics.collector import is_clocked
from everstep.mirror import RunMirror, open_mirror
from everstep.record import (
    OTHER_CONFIGURATION,
    OTHER_LAYOUT,
    OTHER_RANKS,
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
    read_earlier_steps,
    to_read,
    trust,
    user_path,
)
from everstep.redaction import redacted, without_credentials
from everstep.services.console import Voice
from everstep.state import isolated, keys_to_drop, restore, seed_all
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.checks.verification import incomparable
from everstep.supervisor.opening import configuration
from everstep.supervisor.opening.configuration import (
    ChangedSetting,
    Configuration,
    Fingerprint,
    LimitsByName,
    changed_config,
    format_differences,
    layout,
    refusal,
)
from everstep.supervisor.saving.rank_parts import for_rank, ranks_message
from everstep.supervisor.saving.state_tree import (
    Progress,
    StopRecord,
    random_parts,
    reading,
    saved_data,
    saved_meta,
    saved_tree,
)
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.settings import Settings
from everstep.supervisor.streams.all_streams import Streams
from everstep.supervisor.streams.generators import restore_first_states


@dataclass
class ResumePoint:
    """Place at which this start begins, and what was restored there.

    Attributes:
        step, epoch, mid_epoch: where the start begins; inside an epoch, which is then entered again.
        checkpoint, digest, meta: name of the checkpoint that is continued, None for a fresh start; its facts.
        tree: its branches `streams`, `services` and `wall`; empty for a fresh start.
        random, lines: random state for the resume point, and for lines that run again before it.
        parent: the journal's end as the checkpoint knows it.
        finished: whether the run was complete and nothing reopened it.
        ranks_before: number of ranks that wrote the checkpoint, if this start has another; else None.
        partial: whether a stop has cut a pass of its epoch short.
        stored_facts: facts that the record keeps as stored: `parent`, with whose weights this run began; and
            those of a run that is finished, because no step runs with what was given.
        one_fingerprint: as in `Ending`.
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
    finished: bool = False
    ranks_before: int | None = None
    partial: bool = False
    stored_facts: dict[str, Any] = field(default_factory=dict)
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
        history, journal: the journal of the starts before this one, and that of this start, once it is open.
        segment: number of this start, from 1.
        config: configuration that is compared at a resume: the writer's, as a rank's own may name its device.
        rollbacks: the rollbacks decided in the history that this start continues.
        not_compared: why steps that run again are not compared with earlier executions; "" if they are.
        request: checkpoint that the program asks for, as the journal records it; None for the newest.
    """

    journal: Journal

    def __init__(self, settings: Settings, voice: Voice, stack: ExitStack, group: Group) -> None:
        self.settings, self.voice, self.group = settings, voice, group
        self.writer, self.config, self.mirror = group.writer, settings.config, RunMirror()
        self.rollbacks: list[Rollback] = []
        self.not_compared = ""
        self.request: str | None = None
        if group.writer:
            where = settings.mirror, settings.checkpoints.mirror_wait, settings.path
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
        self._share_run()
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

    def _share_run(self) -> None:
        """Give the run of the writer to the other ranks."""
        facts, config = None, self.config
        if self.writer:
            facts = self.run_dir.id, self.segment, None if config is None else dict(config.tree)
        run_id, segment, tree = self.group.share(facts, "the opening of the run directory")
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
        what = None
        if chosen is not None:
            # as all ranks find it: below the run directory, which they may see elsewhere
            inside, top = chosen.path.is_relative_to(self.run_dir.path), self.run_dir.path
            where = chosen.path.relative_to(top) if inside else chosen.path.absolute()
            what = [str(where), chosen.digest]
        choice = [what, [rollback.stored() for rollback in self.rollbacks], self.not_compared, self.request]
        what, rollbacks, why, request = self.group.share(choice, "the choice of a checkpoint")
        if self.writer:
            return chosen
        self.rollbacks = Rollback.among(tuple(each) for each in rollbacks)
        self.not_compared, self.request = why, request
        if what is None:
            return None
        place, digest = what
        checkpoint = read_checkpoint(self.run_dir.path / place, self.group.rank, regions=self.store.regions)
        if checkpoint.digest != digest:
            raise RestoreError(
                f"rank {self.group.rank} reads another state in {checkpoint.path} than rank 0 (digest "
                f"{checkpoint.digest}, not {digest}); give all ranks one directory, on a file system that "
                "all of them see"
            )
        return checkpoint

    def _choose(self) -> Checkpoint | None:
        resume = self.settings.resume
        if resume is False:
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
        if isinstance(resume, str | Path) and Path(resume).name != str(resume):  # a path, not a name
            resume = to_read(user_path(resume, "resume"))
            # a path to a checkpoint of this run stands for its name: only another run's is copied
            if resume.parent.resolve() == self.run_dir.checkpoints.resolve():
                resume = resume.name
        if resume is not True:
            self.request = str(resume.resolve() if isinstance(resume, Path) else resume)
        checkpoint, notes = self._followed_request() or self.store.find(resume)
        for note in notes:
            self.voice.say(note)
        if checkpoint is None:
            self._require_none_lost()
        elif any(name > checkpoint.name for name in {*self.store.names()} - self.store.damaged):
            self.not_compared = "another checkpoint than the newest"
        return checkpoint

    def _require_none_lost(self) -> None:
        """Refuse to begin anew where the journal knows of checkpoints: somebody has taken them away."""
        starts = [each for each in self.history.segments() if each.started]
        # one that began from nothing has set aside what was committed before, also where a kill came then
        first = max((each.number for each in starts if each.parent is None), default=0)
        committed = [e for e in self.history.events("checkpoint", valid=False) if e.segment >= first]
        if committed and self.settings.replay is None:
            raise NoCheckpointError(
                f"{self.store.folder} has no checkpoint, and the newest in the journal of this run is "
                f"{committed[-1].data['name']}: restore it from a copy, or give resume=False to start from "
                "nothing"
            )

    def _followed_request(self) -> tuple[Checkpoint, list[str]] | None:
        """Find the newest checkpoint, if a start with the same `resume=` was the last to save or to go back.

        So a program that is killed and started again does not go back twice.
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
            "parent": self.run_dir.facts.get("parent"),
            **point.stored_facts,
            "fingerprint": point.fingerprint,
            "resume": self.request,
            **({"starts_over": True} if self.settings.resume is False else {}),
            "resumed_from": point.checkpoint,
            "ranks": self.group.size,
            "limits": {name: limit for name, limit in limits.items() if limit is not None},
            **({"data_ranks": data.size} if data.shared else {}),
            **({} if point.ranks_before is None else {"ranks_before": point.ranks_before}),
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
        self.mirror.take_over(self.run_dir, self.store, self.segment)
        return journal

    def trail(self, point: ResumePoint) -> Trail:
        """Open this start's trail, and delete earlier trails that no resume can need."""
        for path in (self.run_dir.path / "journal").glob("segment-*.trail"):
            last = last_step(path)
            if last is None or last < point.step:
                with suppress(OSError):
                    path.unlink()
        return Trail(
            self.run_dir.path,
            self.segment,
            point.step,
            is_clocked,
            self.voice.warn,
            rank=self.group.rank,
            reduced=self.group.size > 1,
        )

    def where(self) -> dict[str, str]:
        """Return the paths of the run's parts, by name, for the user."""
        run = self.run_dir
        places = {name: run.path / name for name in ("checkpoints", "best", "journal")}
        places = {"run": run.path, **places, "log": run.path / "logs/run.log"}
        return {name: str(path) for name, path in places.items() if path.exists()}


# --------------------------------------------------------------------------------- the state of a start


def recover(run: OpenRun, user: UserState, board: ServiceBoard, limits: LimitsByName) -> ResumePoint:
    """Restore the chosen checkpoint, or initialise where there is none."""
    settings = run.settings
    configuration.require_same_start(run.group, settings, user, board, limits)
    for problem in run.history.problems:
        run.voice.say(f"journal: {problem}")
    # from here on each rank reads what it holds of a sharded state, and not more
    run.store.regions = user.regions()
    checkpoint = run.choose()
    if checkpoint is None:
        point = _initialise(run, user)
    else:
        point = _Resume(run, checkpoint, user, board, limits).point()
    _require_ready(settings.ready, "before local_init_fn")
    if settings.local_init_fn is not None:
        settings.local_init_fn()
    _require_ready(settings.ready, "after local_init_fn")
    if unknown := configuration.uncompared(user.options(), board.controllers()):
        run.voice.say(f"not compared at a resume, so keep it unchanged: {', '.join(unknown)}")
    return point


def _require_ready(ready: Callable[[], object] | None, when: str) -> None:
    lacks = None if ready is None else ready()
    if lacks is None or lacks is True or (isinstance(lacks, Sequence) and not lacks):
        return
    what = "ready() returned False" if lacks is False else f"not ready: {lacks}"
    raise UsageError(f"{what} ({when}); initialise it in init_fn or local_init_fn")


def _initialise(run: OpenRun, user: UserState) -> ResumePoint:
    settings = run.settings
    if settings.seed is not None:
        seed_all(settings.seed)  # before init_fn, which may draw from the seeded generators
    if settings.init_fn is not None:
        settings.init_fn()
    progress = Progress(seed=run.run_dir.seed if settings.seed is None else settings.seed)
    origin = settings.init_from and settings.init_from.load(user, progress, run.voice.say)
    machine = configuration.fingerprint(user.objects, run.group.data)
    return ResumePoint(progress, fingerprint=machine, stored_facts={"parent": origin} if origin else {})


class _Resume:
    """The resume from a checkpoint: what is given is compared with what is stored, then the state is loaded.

    What refuses the start comes first, before anything of the program is changed.
    """

    def __init__(
        self, run: OpenRun, checkpoint: Checkpoint, user: UserState, board: ServiceBoard, limits: LimitsByName
    ) -> None:
        restore_first_states()
        self.run, self.user, self.board = run, user, board
        self._read(checkpoint)
        self.reopened_by = self._reopen(limits)
        self.finished = self.progress.stop is not None and run.history.ended() is not None
        self.stored_facts: dict[str, Any] = {}

    def _read(self, checkpoint: Checkpoint) -> None:
        """Read the tree that this rank continues from, its counters and facts."""
        self.checkpoint = checkpoint
        self.tree = tree = saved_tree(for_rank(checkpoint, self.run.group, self.user))
        with reading(checkpoint.path, "progress"):
            self.progress = Progress.from_tree(tree["progress"])
        now, lines = random_parts(self.run.group.rank)
        # tried here, and taken back: random state that cannot be restored is refused before anything changes
        with reading(checkpoint.path, f"rng/{now}"), isolated():
            self.random = tree["rng"][now]
            restore(self.random)
        with reading(checkpoint.path, f"rng/{lines}"), isolated():
            self.lines = tree["rng"][lines]
            for place in self.lines.values():
                restore(place["global"])
        self.meta = saved_meta(checkpoint)

    def _reopen(self, limits: LimitsByName) -> StopRecord | None:
        """Remove the stop of a run that was ending, and return it, if a change lets the run continue."""
        stop, checkpoint, run = self.progress.stop, self.checkpoint, self.run
        if stop is None:
            return None
        limits = {**limits, **configuration.limits_set(limits, self.meta)}
        reason = configuration.reason_to_reopen(stop, limits, self.board, self.meta["controllers"])
        if reason is None:
            return None
        if checkpoint.partial:  # the epoch continues inside, as under the new limit from the start
            # not where the program left the last step by `break`, or asked for the stop after the steps
            inside, why = run.store.inside_epoch(checkpoint, run.group.rank)
            how = f"epoch {checkpoint.epoch} stays cut short and the next one begins ({why})"
            if inside is not None:
                how = f"the epoch continues from {inside.name}"
                self._read(inside)
            run.voice.say(f"{reason}: {how}")
        self.progress.stop = None
        return stop

    def point(self) -> ResumePoint:
        """Restore the state, and return where the run continues."""
        run, checkpoint, progress = self.run, self.checkpoint, self.progress
        options = self._compare_settings()
        for name, entry in self.user.entries.items():
            if names := keys_to_drop(entry, self.tree["user"][name]):
                run.voice.say(
                    f"state {name!r}: the checkpoint has no {some([*map(repr, names)], 8)}: dropped"
                )
        with reading(checkpoint.path, "user"):
            self.user.load(self.tree, progress.updates)
        # after the load, which brings the stored options back
        self.user.use_options(options)
        if is_foreign := checkpoint.path != run.store.path(checkpoint.name):
            run.voice.say(f"{checkpoint.path} belongs to another run; this run continues from a copy")
            self.meta |= {"journal": None, "rollbacks": []}
            run.rollbacks = []
        self._add_rollbacks()
        # later checkpoints move at the first save: what refuses this start until then changes nothing
        run.store.continue_from(checkpoint)
        parent = None if self.meta["journal"] is None else Position(*self.meta["journal"])
        if parent is not None and (lost := run.history.lacks(parent)):
            run.voice.say(f"journal: {lost}")
        if parent is not None and parent.segment >= run.segment:  # its file is gone, and may be brought back
            run.segment = run.store.segment = parent.segment + 1
        machine = configuration.fingerprint(self.user.objects, run.group.data)
        differing = configuration.changes(self.meta.get("fingerprint"), machine)
        starts = [] if parent is None else run.history.facts_since(parent.segment)
        # known to the start that wrote the checkpoint; a copy that nothing followed is of the newest start
        writer = next(iter(starts or run.history.facts_since(1)[-1:]), run.run_dir.facts)
        self.stored_facts["parent"] = checkpoint.origin if is_foreign else writer.get("parent")
        same_before = not any(configuration.changes(facts.get("fingerprint"), machine) for facts in starts)
        one_fingerprint = self.meta.get("one_fingerprint", True)
        if not self.finished:
            if differing:
                run.voice.warn(
                    "the checkpoint was computed on another machine, or under other settings of it:"
                    f"{format_differences(differing).rstrip()}\nstate, samples and random state are restored "
                    "bit for bit; results that are computed from here on may differ from those of an "
                    "uninterrupted run"
                )
            one_fingerprint &= self._compare_ranks(parent, layout(machine)) and not differing
        self._say_resumed()
        return ResumePoint(
            progress=progress,
            checkpoint=str(checkpoint.name),
            digest=checkpoint.digest,
            tree={name: self.tree[name] for name in ("streams", "services", "wall")},
            meta=self.meta,
            random=self.random,
            lines=self.lines,
            parent=parent,
            comparison=self._comparison(parent, same_before and not differing),
            finished=self.finished,
            ranks_before=None if self.finished or checkpoint.ranks == run.group.size else checkpoint.ranks,
            partial=checkpoint.partial,
            stored_facts=self.stored_facts,
            fingerprint=machine,
            one_fingerprint=one_fingerprint,
        )

    def _compare_settings(self) -> Mapping[str, Collection[str]]:
        """Compare what is given with what is stored, wherever it changes training, and say each difference.

        Returns the options to use as given, by entry of the state.
        """
        run, user, meta, progress = self.run, self.user, self.meta, self.progress
        config, on_change = changed_config(meta.get("config"), run.config), run.settings.on_change
        saved, entries = self.tree["user"], self._changed_entries()
        if entries and on_change == "override":
            config += entries
            self.tree["user"] = user.amended(saved)
        # before anything is changed: a state that does not fit is refused whole
        try:
            with reading(self.checkpoint.path, "user"):
                user.check(self.tree["user"], f"checkpoint {self.checkpoint.path}")
        except RestoreError as error:
            # a changed configuration may be why the state does not fit: that error says more
            if (touching := [each for each in config if not each.free]) and on_change == "error":
                raise refusal(run.run_dir.path, touching, run.config) from error
            if on_change == "error" and entries and len(entries) == len([*error.missing, *error.unexpected]):
                each = "; ".join(f"{entry.path} is {entry.given}" for entry in entries)
                error.add_note(f'or continue this run with on_change="override": {each}')
            raise
        stored, current = redacted(meta["controllers"]), self.board.controllers()
        controllers = configuration.changed_controllers(stored, current, self.reopened_by)
        skip = {*(user.per_rank if run.group.rank else ()), *(user.entries.keys() - saved.keys())}
        options = configuration.changed_options(redacted(meta["options"]), user, self.reopened_by, skip)
        if (seed := run.settings.seed) is not None and seed != progress.seed:
            config.append(ChangedSetting("seed", progress.seed, seed))
        others = [*controllers, *(each for names in options.values() for each in names.values())]
        touching = [each for each in (*config, *others) if not each.free]
        if touching and on_change == "error":
            raise refusal(run.run_dir.path, touching, run.config)
        if touching and progress.stop is not None:
            lines = format_differences(touching).rstrip(". ")
            run.voice.say(f"no step is run, so this is neither used nor recorded:{lines}")
            facts = {name: meta.get(name) for name in ("config", "controllers")}
            self.stored_facts |= {name: fact for name, fact in facts.items() if fact is not None}
            return {}
        if touching or others:
            run.not_compared = run.not_compared or OTHER_CONFIGURATION
        if config or others:
            lines = format_differences(sorted([*config, *others], key=lambda each: each.free)).rstrip(". \n")
            run.voice.say(f"changed since the checkpoint, and used as given:{lines}")
        progress.seed = progress.seed if seed is None else seed
        return options

    def _changed_entries(self) -> list[ChangedSetting]:
        """List entries that the program or the checkpoint has alone; none where one may be another's name.

        None, too, where a new one holds another, as a scheduler its optimizer: it has changed that already.
        """
        saved, live = self.tree["user"], self.user.entries
        old_ids = {id(each) for name, each in self.user.objects.items() if name in saved}
        fresh = [each for name, each in self.user.objects.items() if name not in saved]
        if any(id(part) in old_ids for each in fresh for part in getattr(each, "__dict__", {}).values()):
            return []
        new = [
            ChangedSetting(f"state {n!r}", "nothing", "as the program made it")
            for n in live
            if n not in saved
        ]
        gone = [ChangedSetting(f"state {n!r}", "a value", "nothing") for n in saved if n not in live]
        return [] if new and gone else [*new, *gone]

    def _add_rollbacks(self) -> None:
        """Add the rollbacks that the checkpoint knows and a damaged journal has lost."""
        rollbacks = {each.number: each for each in self.run.rollbacks}
        for each in Rollback.among(tuple(each) for each in self.meta.get("rollbacks", [])):
            if each.number not in rollbacks:
                self.run.voice.say(
                    f"journal: rollback {each.number} is missing; it is taken from the checkpoint"
                )
                rollbacks[each.number] = each
        self.run.rollbacks = [rollbacks[number] for number in sorted(rollbacks)]

    def _compare_ranks(self, parent: Position | None, here: str) -> bool:
        """Say that the number of ranks, or the layout of the state, has changed; `here`: this start's layout.

        Returns whether steps have the same bits as before.
        """
        run, size, before = self.run, self.run.group.size, self.checkpoint.ranks
        was, exact = layout(self.meta.get("fingerprint")), self.user.exact_on_any_ranks()
        others: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            OTHER_RANKS: lambda facts: facts.get("ranks", before) != size,
            OTHER_LAYOUT: lambda facts: layout(facts.get("fingerprint")) != here,
        }
        for why, differ in others.items():
            if run.history.meets(differ, parent, self.checkpoint.step):
                run.not_compared = run.not_compared or why
        if before != size:
            run.voice.say(ranks_message(saved_data(self.checkpoint), run.group.data, exact=exact))
            return exact and was == here
        if was != here:
            whole = "whole on each rank"
            run.voice.say(
                f"the state was laid out as {was or whole}, and is {here or whole} in this start: samples, "
                "values and counters continue; from here on results are not bit-identical to those before"
            )
        return was == here

    def _comparison(self, parent: Position | None, same_numbers: bool) -> StepComparison:
        """Make the comparison with what earlier executions found after the checkpoint."""
        run, step = self.run, self.progress.step
        if parent is None:
            return StepComparison(EarlierSteps(step))
        tail, rank = self.progress.phase == "step", run.group.rank
        earlier = read_earlier_steps(run.history, parent, step, tail=tail, rank=rank)
        if run.not_compared:
            last = max(earlier.last, earlier.set_aside)
            earlier = EarlierSteps(step, set_aside=last, reasons=[f"this start has {run.not_compared}"])
        return StepComparison(earlier, partial(incomparable, same_numbers))

    def _say_resumed(self) -> None:
        run, progress = self.run, self.progress
        where = f"epoch {progress.epoch}, step {progress.step}" if progress.epoch else f"step {progress.step}"
        if self.finished and (stop := progress.stop) is not None:
            remedy = f"change or remove {stop.by!r}" if stop.kind == "service" else "raise a limit"
            run.voice.say(
                f"this run is finished at {where} ({stop.reason}); no step is run; to continue, {remedy}"
            )
        else:
            run.voice.say(f"resuming {where}, from {self.checkpoint.path}")
        if (start := run.settings.init_from) is not None:
            run.voice.say(f"init_from={str(start.path)!r} is not used: the run has its own checkpoint")
