"""The beginning of a start: the state of a checkpoint is compared and restored, or made anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from everstep.checkpoint import Checkpoint
from everstep.errors import RestoreError, UsageError
from everstep.record import (
    OTHER_CONFIGURATION,
    OTHER_LAYOUT,
    OTHER_RANKS,
    EarlierSteps,
    Position,
    Rollback,
    StepComparison,
    read_earlier_steps,
)
from everstep.redaction import redacted
from everstep.state import dropped, isolated, restore, seed_all
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.checks.verification import incomparable
from everstep.supervisor.opening import comparing
from everstep.supervisor.opening.comparing import LimitsByName, changed_config, layout
from everstep.supervisor.opening.configuration import Difference, refusal, told
from everstep.supervisor.opening.open_run import OpenRun, ResumePoint
from everstep.supervisor.saving.rank_parts import another_number, for_rank
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
from everstep.supervisor.streams.generators import restore_given


def recover(run: OpenRun, user: UserState, board: ServiceBoard, limits: LimitsByName) -> ResumePoint:
    """Restore the chosen checkpoint, or initialise where there is none."""
    settings = run.settings
    comparing.require_same_start(run.group, settings, user, board, limits)
    for problem in run.history.problems:
        run.voice.say(f"journal: {problem}")
    # from here on each rank reads what it holds of a sharded state, and not more
    run.store.regions = user.regions()
    checkpoint = run.choose()
    point = _initialise(run, user) if checkpoint is None else _resume(run, checkpoint, user, board, limits)
    _require_ready(settings.ready, "before local_init_fn")
    if settings.local_init_fn is not None:
        settings.local_init_fn()
    _require_ready(settings.ready, "after local_init_fn")
    if unknown := comparing.uncompared(user.options(), board.controllers()):
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
    if settings.init_from is not None:
        source = settings.init_from.load(user, progress, run.voice.say)
        run.voice.say(f"initialised from {source}")
    return ResumePoint(progress, fingerprint=comparing.fingerprint(user.objects, run.group.data))


def _resume(
    run: OpenRun, checkpoint: Checkpoint, user: UserState, board: ServiceBoard, limits: LimitsByName
) -> ResumePoint:
    restore_given()
    tree, progress = _read(run, checkpoint, user)
    reopened_by = None
    if progress.stop is not None:
        controllers = saved_meta(checkpoint)["controllers"]
        reason = comparing.reason_to_reopen(progress.stop, limits, board, controllers)
        if reason is not None:
            reopened_by = progress.stop
            if checkpoint.partial:  # the epoch continues inside, as under the new limit from the start
                checkpoint = run.inside(checkpoint, reason)
                tree, progress = _read(run, checkpoint, user)
            progress.stop = None
    meta: Any = saved_meta(checkpoint)
    finished = progress.stop is not None and run.history.ended() is not None
    # before anything is changed: a state that does not fit is refused whole
    try:
        with reading(checkpoint.path, "user"):
            user.check(tree["user"], f"checkpoint {checkpoint.path}")
    except RestoreError as error:
        # a changed configuration may be why the state does not fit: that error says more
        touching = [each for each in changed_config(meta.get("config"), run.config) if not each.free]
        if touching and run.settings.on_change == "error":
            raise refusal(run.run_dir.path, touching) from error
        raise
    options, kept = _compare_settings(run, progress, board, user, meta, reopened_by)
    for name, entry in user.entries.items():
        if names := dropped(entry, tree["user"][name]):
            lacks = ", ".join(map(repr, names))
            run.voice.say(f"state {name!r}: the checkpoint has no {lacks}: dropped")
    with reading(checkpoint.path, "user"):
        user.load(tree, progress.updates)
    # after the load, which brings the stored options back
    user.use_options(options)
    if checkpoint.path != run.store.path(checkpoint.name):
        run.voice.say(f"{checkpoint.path} belongs to another run; this run continues from a copy")
        meta = {**meta, "journal": None, "rollbacks": []}
        run.rollbacks = []
    _remember_rollbacks(run, meta.get("rollbacks", []))
    # later checkpoints move at the first save: what refuses this start until then changes nothing
    run.store.continue_from(checkpoint)
    parent = None if meta["journal"] is None else Position(*meta["journal"])
    if parent is not None and (lost := run.history.lacks(parent)):
        run.voice.say(f"journal: {lost}")
    if parent is not None and parent.segment >= run.segment:  # its file is gone, and may be brought back
        run.segment = run.store.segment = parent.segment + 1
    here = comparing.fingerprint(user.objects, run.group.data)
    differing = comparing.changes(meta.get("fingerprint"), here)
    again = [] if parent is None else run.history.facts_since(parent.segment)
    same_before = not any(comparing.changes(facts.get("fingerprint"), here) for facts in again)
    one_fingerprint, ranks_before = meta.get("one_fingerprint", True), None
    if not finished:
        if differing:
            run.voice.warn(
                "the checkpoint was computed on another machine, or under other settings of it:"
                f"{told(differing).rstrip()}\nstate, samples and random state are restored bit for bit; "
                "results that are computed from here on may differ from those of an uninterrupted run"
            )
        ranks_before, laid_alike = _compare_ranks(run, checkpoint, parent, user, layout(here))
        one_fingerprint &= not differing and laid_alike
    _say_resumed(run, checkpoint, progress, finished)
    now, lines = random_parts(run.group.rank)
    return ResumePoint(
        progress=progress,
        checkpoint=str(checkpoint.name),
        digest=checkpoint.digest,
        tree={name: tree[name] for name in ("streams", "services", "wall")},
        meta=meta,
        random=tree["rng"][now],
        lines=tree["rng"][lines],
        parent=parent,
        comparison=_comparison(run, parent, progress, same_before and not differing),
        chosen=run.chosen,
        finished=finished,
        ranks_before=ranks_before,
        kept=kept,
        fingerprint=here,
        one_fingerprint=one_fingerprint,
    )


def _read(run: OpenRun, checkpoint: Checkpoint, user: UserState) -> tuple[dict[str, Any], Progress]:
    """Read the tree that this rank continues from, and its counters."""
    checkpoint = for_rank(checkpoint, run.group, user)
    tree = saved_tree(checkpoint)
    with reading(checkpoint.path, "progress"):
        progress = Progress.from_tree(tree["progress"])
    now, lines = random_parts(run.group.rank)
    # tried here, and taken back: random state that cannot be restored is refused before anything changes
    with reading(checkpoint.path, f"rng/{now}"), isolated():
        restore(tree["rng"][now])
    with reading(checkpoint.path, f"rng/{lines}"), isolated():
        for place in tree["rng"][lines].values():
            restore(place["global"])
    return tree, progress


def _compare_settings(
    run: OpenRun,
    progress: Progress,
    board: ServiceBoard,
    user: UserState,
    meta: Mapping[str, Any],
    reopened_by: StopRecord | None,
) -> tuple[Mapping[str, Collection[str]], dict[str, Any]]:
    """Compare what is given with what is stored, wherever it changes training, and say each difference.

    Returns the options to use as given, by entry of the state; and the facts that stay as stored.
    """
    settings = run.settings
    config = changed_config(meta.get("config"), run.config)
    stored = redacted(meta["controllers"])
    controllers = comparing.changed_controllers(stored, board.controllers(), reopened_by)
    skip = user.per_rank if run.group.rank else frozenset[str]()
    options = comparing.changed_options(redacted(meta["options"]), user, reopened_by, skip)
    if settings.seed is not None and settings.seed != progress.seed:
        config.append(Difference("seed", progress.seed, settings.seed))
    others = [*controllers, *(each for names in options.values() for each in names.values())]
    touching = [each for each in (*config, *others) if not each.free]
    if touching and settings.on_change == "error":
        raise refusal(run.run_dir.path, touching)
    if touching and progress.stop is not None:
        listed = told(touching).rstrip(". ")
        run.voice.say(f"no step is run, so this is neither used nor recorded:{listed}")
        facts = {name: meta.get(name) for name in ("config", "controllers")}
        return {}, {name: fact for name, fact in facts.items() if fact is not None}
    if touching or others:
        run.chosen = run.chosen or OTHER_CONFIGURATION
    if config or others:
        listed = told(sorted([*config, *others], key=lambda each: each.free)).rstrip(". \n")
        run.voice.say(f"changed since the checkpoint, and used as given:{listed}")
    if settings.seed is not None:
        progress.seed = settings.seed
    return options, {}


def _remember_rollbacks(run: OpenRun, stored: Sequence[Any]) -> None:
    """Add the rollbacks that the checkpoint knows and a damaged journal has lost."""
    known = {each.number: each for each in run.rollbacks}
    for each in Rollback.among(tuple(each) for each in stored):
        if each.number not in known:
            run.voice.say(f"journal: rollback {each.number} is missing; it is taken from the checkpoint")
            known[each.number] = each
    run.rollbacks = [known[number] for number in sorted(known)]


def _compare_ranks(
    run: OpenRun, checkpoint: Checkpoint, parent: Position | None, user: UserState, here: str
) -> tuple[int | None, bool]:
    """Say that the number of ranks, or the layout of the state, has changed; `here`: this start's layout.

    What other starts of another number or layout did in the next steps is set aside.  Returns the number of
    ranks that wrote the checkpoint, if this start has another; and whether steps have the same bits as there.
    """
    size, before = run.group.size, checkpoint.ranks
    meta: Any = checkpoint.meta
    was, exact = layout(meta.get("fingerprint")), user.exact_on_any_ranks()
    others: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        OTHER_RANKS: lambda facts: facts.get("ranks", before) != size,
        OTHER_LAYOUT: lambda facts: layout(facts.get("fingerprint")) != here,
    }
    for why, differ in others.items():
        if run.history.meets(differ, parent, checkpoint.step):
            run.chosen = run.chosen or why
    if before != size:
        run.voice.say(another_number(saved_data(checkpoint), run.group.data, exact=exact))
        return before, exact and was == here
    if was != here:
        whole = "whole on each rank"
        run.voice.say(
            f"the state was laid out as {was or whole}, and is {here or whole} in this start: samples, "
            "values and counters continue; from here on results are not bit-identical to those before"
        )
    return None, was == here


def _comparison(
    run: OpenRun, parent: Position | None, progress: Progress, same_numbers: bool
) -> StepComparison:
    """Make the comparison with what earlier executions found after the checkpoint."""
    if parent is None:
        return StepComparison(EarlierSteps(progress.step))
    tail, rank = progress.phase == "step", run.group.rank
    earlier = read_earlier_steps(run.history, parent, progress.step, tail=tail, rank=rank)
    if run.chosen:
        last = max(earlier.last, earlier.set_aside)
        earlier = EarlierSteps(progress.step, set_aside=last, why=[f"this start has {run.chosen}"])
    return StepComparison(earlier, partial(incomparable, same_numbers))


def _say_resumed(run: OpenRun, checkpoint: Checkpoint, progress: Progress, finished: bool) -> None:
    where = f"epoch {progress.epoch}, step {progress.step}" if progress.epoch else f"step {progress.step}"
    if finished and (stop := progress.stop) is not None:
        remedy = f"change or remove {stop.by!r}" if stop.kind == "service" else "raise a limit"
        run.voice.say(
            f"this run is finished at {where} ({stop.reason}); no step is run; to continue, {remedy}"
        )
    else:
        run.voice.say(f"resuming {where}, from {checkpoint.path}")
    if (start := run.settings.init_from) is not None:
        run.voice.say(f"init_from={str(start.path)!r} is not used: the run has its own checkpoint")
