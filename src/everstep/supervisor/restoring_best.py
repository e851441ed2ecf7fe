"""Restoring of the best weights that are whole into the live objects, after a clean end."""

from __future__ import annotations

from everstep.checkpoint import Store, read_checkpoint
from everstep.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, RestoreError
from everstep.services.best import Best, Place
from everstep.supervisor.ending import BestRecord
from everstep.supervisor.tree import reading, saved_tree
from everstep.supervisor.user_state import UserState
from everstep.supervisor.voice import Voice


def restore_best(service: Best, store: Store, user: UserState, voice: Voice) -> BestRecord | None:
    """Load the weights of the best value; where they are lost, of the next best value.

    Weights that cannot be loaded give a warning: the run has ended by then, and an error would come again at
    every start.

    Returns:
        The record of the loaded weights; None if the objects still have the last weights.
    """
    lost: list[str] = []
    for place in service.places:
        what = f"{place.value:.6g}, step {place.step}"
        try:
            found = _load(service, place, store, user)
        except (CheckpointError, RestoreError) as error:
            lost.append(f"those of {what}: {error}")
            continue
        if lost:
            voice.warn(
                f"{service.name!r}: restore_at_end loaded the next best weights by {service.metric} "
                f"({what}); not {'; '.join(lost)}"
            )
        else:
            part = "" if service.part is None else f" into {', '.join(map(repr, service.part))}"
            voice.say(f"the best weights by {service.metric} ({what}) are loaded{part}")
        return found
    why = "; ".join(lost) or "no value of it has come"
    voice.warn(f"{service.name!r}: restore_at_end restored nothing: {why}; the last weights stay")
    return None


def _load(service: Best, place: Place, store: Store, user: UserState) -> BestRecord:
    if place.name is None:
        raise NoCheckpointError("they were not kept; leave save=True, and measure after the last step")
    path = store.best_folder(service.metric) / place.name
    if not path.exists():
        raise NoCheckpointError(f"they are not in {path} any more; give them back from a copy")
    try:
        saved = read_checkpoint(path)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}; {store.set_aside_best(path)}") from error
    tree = saved_tree(saved, ("user",))["user"]
    with reading(path, "user"):
        user.check(tree, str(path))
        user.load_user(tree, service.part)
    return BestRecord(service.metric, place.value, place.step, place.epoch, str(path))
