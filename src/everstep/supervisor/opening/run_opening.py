"""Entering a run: its directory and lock, the choice of a checkpoint, initialise or recover."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from everstep import unattended
from everstep.checkpoint import Checkpoint, Store, forecast, trial_write
from everstep.contracts.group import Group
from everstep.durable import TMP, discard
from everstep.errors import RestoreError, RunDirError, UsageError
from everstep.metrics.collector import is_wall
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
    trail_path,
    trust,
)
from everstep.redaction import redacted, without_credentials
from everstep.state import Encoded, dropped, isolated, restore, seed_all
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.checks.verification import incomparable
from everstep.supervisor.opening.choice import Choice
from everstep.supervisor.opening.comparing import (
    changed_config,
    changed_controllers,
    changed_options,
    reason_to_reopen,
    uncompared,
)
from everstep.supervisor.opening.configuration import Configuration, Difference, refusal, told
from everstep.supervisor.opening.machine import (
    Fingerprint,
    changes,
    fingerprint,
    layout,
    other_layout,
    warning,
)
from everstep.supervisor.opening.same_start import require_same_start
from everstep.supervisor.opening.start import Recovered
from everstep.supervisor.saving.other_ranks import another_number
from everstep.supervisor.saving.rank_parts import for_rank
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
from everstep.supervisor.streams import reused_data
from everstep.supervisor.streams.run_streams import Streams
from everstep.supervisor.voice import Voice


class Opening:
    """The run directory while this process holds it.

    Args:
        start: the arguments of this start.
        voice: tells the user.
        stack: gives everything back when it closes.
        group: the ranks of the run; the writer alone changes the directory.

    Attributes:
        run_dir, store: the directory and its checkpoints.
        mirror: what keeps the run elsewhere.
        lock: keeps other processes out; not taken where the user wants none.
        segment: number of this start, from 1.
    """

    def __init__(self, settings: Settings, voice: Voice, stack: ExitStack, group: Group) -> None:
        self._settings, self._voice, self._group = settings, voice, group
        self.writer = group.writer
        self._config = settings.config
        """Configuration that is compared at a resume: the writer's, as a rank's own may name its device."""
        self.mirror = RunMirror()
        if group.writer:
            self.mirror = open_mirror(
                settings.mirror, settings.mirror_wait, settings.path, voice.say, voice.warn
            )
            # a directory that is made for a mirrored run is of that run, with its seed
            self.run_dir = RunDir.open(settings.path, seed=settings.seed, about=self.mirror.facts)
            for note in self.run_dir.notes:
                voice.say(note)
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
        self._journal = RunJournal(self.run_dir.path, saved_by)
        self._choice = Choice(settings, self.run_dir, self.store, self._journal, voice, group)

    @property
    def rollbacks(self) -> list[Rollback]:
        """The rollbacks decided in the history that this start continues."""
        return self._choice.rollbacks

    def _meet(self) -> None:
        """Give the run of the writer to the other ranks.

        Raises:
            RunDirError: this rank finds no run, or another run, in its run directory.
        """
        mine, config = None, self._config
        if self._group.writer:
            mine = self.run_dir.id, self.segment, None if config is None else dict(config.tree)
        theirs, segment, tree = self._group.share(mine, "the opening of the run directory")
        if self._group.writer:
            return
        try:
            self.run_dir, self.segment = RunDir.open(self._settings.path, create=False), segment
            found = f"run {self.run_dir.id}"
        except RunDirError as error:
            found = f"no run ({error})"
        if config is not None and tree is not None:
            self._config = replace(config, tree=tree)
        if found != f"run {theirs}":
            raise RunDirError(
                f"rank {self._group.rank} finds {found} in {self._settings.path}, and rank 0 trains run "
                f"{theirs}; give all ranks one directory, on a file system that all of them see"
            )

    # -------------------------------------------------------------------------------- recovery

    def recover(
        self,
        user: UserState,
        board: ServiceBoard,
        limits: Mapping[str, int | None],
    ) -> Recovered:
        """Restore the newest whole checkpoint, or initialise where there is none.

        Raises:
            CheckpointError, RestoreError, ConfigError: the start cannot be made as asked for.
        """
        require_same_start(self._group, self._settings, user, board, limits)
        for problem in self._journal.problems:
            self._voice.say(f"journal: {problem}")
        # from here on each rank reads what it holds of a sharded state, and not more
        self.store.regions = user.regions()
        checkpoint = self._choice.checkpoint()
        if checkpoint is None:
            recovered = self._initialise(user)
            recovered.fingerprint = fingerprint(user.objects, self._group.data)
        else:
            recovered = self._resume(checkpoint, user, board, limits)
        self._get_ready()
        if unknown := uncompared(user.options(), board.controllers()):
            self._voice.say(f"not compared at a resume, so keep it unchanged: {', '.join(unknown)}")
        return recovered

    def _compare_fingerprint(self, meta: Any, given: Fingerprint, *, finished: bool) -> dict[str, Any]:
        """Warn where this start has another fingerprint than the checkpoint.

        Returns:
            The attributes of `Recovered` about fingerprints.
        """
        found = changes(meta.get("fingerprint"), given)
        if found and not finished:
            self._voice.warn(warning(found))
        parent = meta["journal"]
        again = [] if parent is None else self._journal.facts_since(parent[0])
        others = [facts for facts in again if changes(facts.get("fingerprint"), given)]
        return {
            "fingerprint": given,
            "same_numbers": not found and not others,
            "one_fingerprint": meta.get("one_fingerprint", True) and (finished or not found),
        }

    def _initialise(self, user: UserState) -> Recovered:
        settings = self._settings
        seed = self.run_dir.seed if settings.seed is None else settings.seed
        if settings.seed is not None:
            # before init_fn, which may draw from the seeded generators
            seed_all(settings.seed)
        if settings.init_fn is not None:
            settings.init_fn()
        progress = Progress(seed=seed)
        if settings.init_from is not None:
            source = settings.init_from.load(user, progress, self._voice.say)
            self._voice.say(f"initialised from {source}")
        return Recovered(progress)

    def _resume(
        self,
        checkpoint: Checkpoint,
        user: UserState,
        board: ServiceBoard,
        limits: Mapping[str, int | None],
    ) -> Recovered:
        # first: data that an earlier start left in this process is as the program gave it
        reused_data.restore()
        tree, progress = self._saved(checkpoint, user)
        stored = saved_meta(checkpoint)
        stop, reopened = progress.stop, None
        ended_by = stop
        if stop is not None:
            reopened = reason_to_reopen(stop, limits, board, stored["controllers"])
            # the epoch is cut short no more: it continues inside, as under the new limit from the start
            if reopened is not None and checkpoint.partial:
                checkpoint = self._choice.inside(checkpoint, reopened)
                tree, progress = self._saved(checkpoint, user)
            if reopened is not None:
                progress.stop = stop = None
        meta = saved_meta(checkpoint)
        finished = stop is not None and self._journal.ended() is not None
        given = fingerprint(user.objects, self._group.data)
        about_numbers = self._compare_fingerprint(meta, given, finished=finished)
        # before anything is changed: a state that does not fit is refused whole
        try:
            with reading(checkpoint.path, "user"):
                user.check(tree["user"], f"checkpoint {checkpoint.path}")
        except RestoreError as error:
            # a changed configuration may be why the state does not fit: that error says more
            config = changed_config(meta.get("config"), self._config)
            if config.touching and self._settings.on_change == "error":
                raise refusal(self.run_dir.path, config.touching) from error
            raise
        changed, kept = self._compare(progress, board, user, meta, ended_by if reopened else None)
        for name, entry in user.entries.items():
            if names := dropped(entry, tree["user"][name]):
                lacks = ", ".join(map(repr, names))
                self._voice.say(f"state {name!r}: the checkpoint has no {lacks}: dropped")
        with reading(checkpoint.path, "user"):
            user.load(tree, progress.updates)
        # after the load, which brings the stored options back
        user.use_options(changed)
        if checkpoint.path != self.store.path(checkpoint.name):
            self._voice.say(f"{checkpoint.path} belongs to another run; this run continues from a copy")
            meta = {**meta, "journal": None, "rollbacks": []}
            self._choice.rollbacks = []
        self._remember_rollbacks(meta)
        # later checkpoints move at the first save: what refuses this start until then changes nothing
        self.store.continue_from(checkpoint)
        parent = None if meta["journal"] is None else Position(*meta["journal"])
        ranks_before = None
        if not finished:
            exact = user.exact_on_any_ranks()
            ranks_before = self._compare_ranks(checkpoint, parent, layout(given), exact=exact)
            laid_alike = layout(given) == layout(meta.get("fingerprint"))
            about_numbers["one_fingerprint"] &= (ranks_before is None or exact) and laid_alike
        if parent is not None and (lost := self._journal.lacks(parent)):
            self._voice.say(f"journal: {lost}")
        if parent is not None and parent.segment >= self.segment:  # its file is gone, and may be brought back
            self.segment = self.store.segment = parent.segment + 1
        self._say_resumed(checkpoint, progress, finished)
        if self._settings.init_from is not None:
            self._voice.say(
                f"init_from={str(self._settings.init_from.path)!r} is not used: the run has its own "
                "checkpoint"
            )
        return Recovered(
            progress=progress,
            checkpoint=str(checkpoint.name),
            random=tree["rng"][random_parts(self._group.rank)[0]],
            lines=tree["rng"][random_parts(self._group.rank)[1]],
            parent=parent,
            comparison=self._earlier(parent, progress, same_numbers=about_numbers["same_numbers"]),
            chosen=self._choice.chosen,
            collector=tree["services"]["metrics"]["state"],
            services={name: saved for name, saved in tree["services"].items() if name != "metrics"},
            streams=tree["streams"],
            finished=finished,
            digest=checkpoint.digest,
            ranks_before=ranks_before,
            last_values=meta["metrics"],
            last_steps=meta.get("metric_steps", {}),
            wall=tree["wall"],
            open=meta.get("open", []),
            kept=kept,
            **about_numbers,
        )

    def _saved(self, checkpoint: Checkpoint, user: UserState) -> tuple[dict[str, Any], Progress]:
        """Read the tree that this rank continues from, and its counters."""
        rank = self._group.rank
        checkpoint = for_rank(checkpoint, self._group, user)
        tree = saved_tree(checkpoint, rank=rank)
        with reading(checkpoint.path, "progress"):
            progress = Progress.from_tree(tree["progress"])
        now, again = random_parts(rank)
        # tried here, and taken back: random state that cannot be restored is refused before anything changes
        with reading(checkpoint.path, f"rng/{now}"), isolated():
            restore(tree["rng"][now])
        with reading(checkpoint.path, f"rng/{again}"), isolated():
            for place in tree["rng"][again].values():
                restore(place["global"])
        return tree, progress

    def _compare_ranks(
        self, checkpoint: Checkpoint, parent: Position | None, laid_out: str, *, exact: bool
    ) -> int | None:
        """Say that the number of ranks, or the layout of the state, has changed.

        What other starts of another number or layout found in the next steps is set aside.

        Args:
            laid_out: the layout of this start.
            exact: whether steps have the same bits on any number of ranks.

        Returns:
            The number of ranks that wrote the checkpoint, if this start has another.
        """
        size, before = self._group.size, checkpoint.ranks
        meta: Any = checkpoint.meta
        was = layout(meta.get("fingerprint"))
        others: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            OTHER_RANKS: lambda facts: facts.get("ranks", before) != size,
            OTHER_LAYOUT: lambda facts: layout(facts.get("fingerprint")) != laid_out,
        }
        for why, differ in others.items():
            if self._journal.meets(differ, parent, checkpoint.step):
                self._choice.chosen = self._choice.chosen or why
        if before != size:
            self._voice.say(another_number(saved_data(checkpoint), self._group.data, exact=exact))
            return before
        if was != laid_out:
            self._voice.say(other_layout(was, laid_out))
        return None

    def _earlier(self, parent: Position | None, progress: Progress, *, same_numbers: bool) -> StepComparison:
        """Make the comparison with what earlier executions found after the checkpoint."""
        if parent is None:
            return StepComparison(EarlierSteps(progress.step))
        tail, rank = progress.phase == "step", self._group.rank
        found = read_earlier_steps(self._journal, parent, progress.step, tail=tail, rank=rank)
        if self._choice.chosen:
            last = max(found.last, found.set_aside)
            found = EarlierSteps(progress.step, set_aside=last, why=[f"this start has {self._choice.chosen}"])
        return StepComparison(found, partial(incomparable, same_numbers))

    def _remember_rollbacks(self, meta: Any) -> None:
        """Add the rollbacks that the checkpoint knows and a damaged journal has lost."""
        known = {each.number: each for each in self._choice.rollbacks}
        stored = Rollback.among(tuple(each) for each in meta.get("rollbacks", []))
        forgotten = [each for each in stored if each.number not in known]
        for each in forgotten:
            self._voice.say(f"journal: rollback {each.number} is gone; the checkpoint has it, and it counts")
        self._choice.rollbacks = sorted([*self._choice.rollbacks, *forgotten], key=lambda each: each.number)

    def _compare(
        self,
        progress: Progress,
        board: ServiceBoard,
        user: UserState,
        meta: Any,
        reopened_by: StopRecord | None,
    ) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """Compare what is given with what is stored, wherever it changes training, and say each difference.

        Args:
            reopened_by: the stop that does not hold any more.

        Returns:
            The options to use as given, by entry of the state; and the facts that stay as stored.
        """
        config = changed_config(meta.get("config"), self._config)
        found = list(config.touching)
        if self._settings.seed is not None and self._settings.seed != progress.seed:
            found.append(Difference("seed", progress.seed, self._settings.seed))
        controllers = changed_controllers(redacted(meta["controllers"]), board.controllers(), reopened_by)
        skip = user.per_rank if self._group.rank else frozenset[str]()
        options = changed_options(redacted(meta["options"]), user, reopened_by, skip)
        found += [*controllers.touching, *options.touching]
        free = [*config.free, *controllers.free, *options.free]
        if found and self._settings.on_change == "error":
            raise refusal(self.run_dir.path, found)
        if found and progress.stop is not None:
            self._voice.say(
                f"no step is run, so this is neither used nor recorded:{told(found).rstrip('. ')}"
            )
            stored_facts = {name: meta.get(name) for name in ("config", "controllers")}
            return {}, {name: fact for name, fact in stored_facts.items() if fact is not None}
        if found or controllers.free or options.free:
            self._choice.chosen = self._choice.chosen or OTHER_CONFIGURATION
        if found or free:
            changes = told([*found, *free]).rstrip(". \n")
            self._voice.say(f"changed since the checkpoint, and used as given:{changes}")
        if self._settings.seed is not None:
            progress.seed = self._settings.seed
        return options.by_entry, {}

    def _say_resumed(self, checkpoint: Checkpoint, progress: Progress, finished: bool) -> None:
        where = f"epoch {progress.epoch}, step {progress.step}" if progress.epoch else f"step {progress.step}"
        if finished:
            assert progress.stop is not None
            stop = progress.stop
            remedy = f"change or remove {stop.by!r}" if stop.kind == "service" else "raise a limit"
            self._voice.say(
                f"this run is finished at {where} ({stop.reason}); no step is run; to continue, {remedy}"
            )
        else:
            self._voice.say(f"resuming {where}, from {checkpoint.path}")

    def _get_ready(self) -> None:
        ready = self._settings.ready
        if ready is not None:
            _require_ready(ready, "before local_init_fn")
        if self._settings.local_init_fn is not None:
            self._settings.local_init_fn()
        if ready is not None:
            _require_ready(ready, "after local_init_fn")

    # ------------------------------------------------------------------------- what comes with it

    def streams(self, recovered: Recovered, *, same_data: bool) -> Streams:
        """Make the run's streams, which stand where the checkpoint stood."""
        override = self._settings.on_change == "override"
        quarantined = [batch for rollback in self._choice.rollbacks for batch in rollback.batches]
        seed = recovered.progress.seed
        streams = Streams(
            seed,
            self._voice.say,
            override=override,
            quarantined=quarantined,
            same_data=same_data,
            group=self._group,
            uneven=self._settings.uneven,
        )
        heads = self._journal.heads(recovered.step)
        where = self.run_dir.checkpoints / (recovered.checkpoint or "")
        with reading(where, "streams"):
            streams.load(recovered.streams, recovered.wall.get("streams", {}), heads, where)
        return streams

    def journal(self, recovered: Recovered, board: ServiceBoard, limits: Mapping[str, int | None]) -> Journal:
        """Open this start's segment of the journal; the writer's, as other ranks record nothing."""
        if not self._group.writer:
            return NoJournal(self.segment)
        config = self._settings.config or Configuration({})
        facts = config.facts(recovered.progress.seed, board)
        facts["code"], facts["controllers"] = list(map(str, config.code)), board.controllers()
        facts |= recovered.kept
        facts["fingerprint"] = recovered.fingerprint
        facts["resume"], facts["resumed_from"] = self._choice.request, recovered.checkpoint
        facts["ranks"] = self._group.size
        facts["limits"] = {name: limit for name, limit in limits.items() if limit is not None}
        if self._group.data.shared:
            facts["data_ranks"] = self._group.data.size
        if recovered.ranks_before is not None:
            facts["ranks_before"] = recovered.ranks_before
        facts["parent"] = self.run_dir.facts.get("parent")
        # a trial that a person starts again is still one of its sweep, whose variable is then not set
        facts |= next(({"sweep": one["sweep"]} for one in self._journal.facts_since(1) if "sweep" in one), {})
        if not self._settings.lock:
            facts["lock"] = False
        facts = without_credentials(facts)
        # last: the marks are of the facts as they are recorded, without credentials
        facts |= trust.marks(self.run_dir.id, facts)
        journal = Journal.open(
            self.run_dir.path, self.segment, recovered.parent, facts, warn=self._voice.warn
        )
        if not self._settings.lock:
            journal.flush()  # nobody can ask the lock whether this runs
        # after recovery: a start that was refused until here has taken nothing from one that runs
        self.mirror.take(self.run_dir, self.store, self.segment)
        return journal

    def trail(self, recovered: Recovered) -> Trail:
        """Open this start's trail, and delete earlier trails that no resume can need."""
        folder = self.run_dir.journal
        for path in folder.glob("segment-*.trail"):
            last = last_step(path)
            if last is None or last < recovered.step:
                with suppress(OSError):
                    path.unlink()
        # What an earlier start was making when it was killed.  If its journal was lost, it had the number of
        # this start, too; files with that number may belong to other ranks, which make their trails now.
        others = f"{TMP}{trail_path(self.run_dir.path, self.segment).stem}."
        own = f"{TMP}{trail_path(self.run_dir.path, self.segment, self._group.rank).name}-"
        for path in folder.glob(f"{TMP}segment-*.trail-*"):
            if path.name.startswith(own) or not path.name.startswith(others):
                discard(path, "trail")
        return Trail(
            self.run_dir.path,
            self.segment,
            recovered.step,
            is_wall,
            self._voice.warn,
            rank=self._group.rank,
            reduced=self._group.size > 1,
        )

    def check_disk(self, encoded: Encoded) -> None:
        """Refuse to start where two checkpoints of the current state would not fit on the disk.

        Raises:
            RunDirError: names the path, the needed and the free bytes.
        """
        size = sum(array.nbytes for array in encoded.arrays.values())
        forecast(self.run_dir.path, 2 * size + (1 << 16))

    def where(self) -> dict[str, str]:
        """Return the paths of the run's parts, by name, for the user."""
        places = {
            "run": self.run_dir.path,
            "checkpoints": self.run_dir.checkpoints,
            "best": self.run_dir.best,
            "journal": self.run_dir.journal,
            "log": self.run_dir.logs / "run.log",
        }
        return {name: str(path) for name, path in places.items() if path.exists()}


def _require_ready(ready: Callable[[], object], when: str) -> None:
    found = ready()
    if found is None or found is True or (isinstance(found, Sequence) and not found):
        return
    what = "ready() returned False" if found is False else f"not ready: {found}"
    raise UsageError(f"{what} ({when}); initialise it in init_fn or local_init_fn")
