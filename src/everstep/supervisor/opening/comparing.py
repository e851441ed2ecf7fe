"""Comparison of configuration, controllers, limits and options of the state's objects with a checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.backends.describe_values import is_unknown
from everstep.contracts.state import Json
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.opening.configuration import NONE, Configuration, Difference, differences
from everstep.supervisor.saving.state_tree import StopRecord
from everstep.supervisor.saving.user_state import UserState


@dataclass
class Changes:
    """Differences between what is stored and what is given.

    Attributes:
        touching: differences that touch the training, so that a person must choose.
        free: differences that follow from the reason to continue the run: a raised limit, another stopper.
        by_entry: names of the options that differ, by entry.
    """

    touching: list[Difference] = field(default_factory=list)
    free: list[Difference] = field(default_factory=list)
    by_entry: dict[str, list[str]] = field(default_factory=dict)


def changed_config(stored: Mapping[str, Json] | None, given: Configuration | None) -> Changes:
    """Compare configurations, where both are known; changes at `Configuration.free` places are free."""
    found = Changes()
    if stored is None or given is None:
        return found
    for each in given.changes(stored):
        listed = found.free if given.is_free(each.path) else found.touching
        listed.append(each._replace(path=f"config.{each.path}"))
    return found


def changed_controllers(
    stored: Mapping[str, Json], given: Mapping[str, Json], reopened_by: StopRecord | None
) -> Changes:
    """Compare the configurations of controllers; the controller whose change reopens the run may differ."""
    found = Changes()
    for name in sorted(stored.keys() | given.keys()):
        was, now = stored.get(name, NONE), given.get(name, NONE)
        if differences({name: was}, {name: now}, sections=[name]):
            is_reason = reopened_by is not None and reopened_by.kind == "service" and reopened_by.by == name
            listed = found.free if is_reason else found.touching
            listed.append(Difference(f"service {name!r}", was, now))
    return found


def changed_options(
    stored: Mapping[str, Mapping[str, str]],
    user: UserState,
    reopened_by: StopRecord | None,
    skip: Collection[str] = (),
) -> Changes:
    """Compare options of optimizers and other entries; with a raised limit, step counts may grow.

    Args:
        skip: names of entries of which the stored options are another rank's.
    """
    found = Changes()
    raised = reopened_by is not None and reopened_by.kind != "service"
    given = user.options()
    # an entry whose options are all gone has changed, too
    for entry in [*given, *sorted(stored.keys() & user.entries.keys() - given.keys())]:
        options = given.get(entry, {})
        before = options if entry in skip else stored.get(entry, {})
        for name in [*options, *(before.keys() - options.keys())]:
            was, now = before.get(name, NONE), options.get(name, NONE)
            place = f"state {entry!r}: {name}"
            if was == now:
                continue
            follows = raised and user.entries[entry].in_schedule(name) and _grew(was, now)
            (found.free if follows else found.touching).append(Difference(place, was, now))
            found.by_entry.setdefault(entry, []).append(name)
    return found


def _grew(was: str, now: str) -> bool:
    """Whether two strings hold integers in the same form, and none is smaller now."""
    if not all(re.fullmatch(r"[\[\], \d]+", text) for text in (was, now)):
        return False
    before, after = (list(map(int, re.findall(r"\d+", text))) for text in (was, now))
    same_form = re.sub(r"\d+", "n", was) == re.sub(r"\d+", "n", now)
    return same_form and all(old <= new for old, new in zip(before, after, strict=True))


def reason_to_reopen(
    stop: StopRecord, limits: Mapping[str, int | None], board: ServiceBoard, stored: Mapping[str, Json]
) -> str | None:
    """Say why a run that was ending continues; None if it does not."""
    if stop.kind == "service" and stop.by is not None:  # a service decided: only its change reopens the run
        present = any(service.name == stop.by for service in board)
        if present and board.controllers().get(stop.by) == stored.get(stop.by):
            return None
        return f"{stop.by!r} was {'changed' if present else 'removed'}"
    for name, old in stop.limits.items():
        new = limits[name]
        if old is not None and (new is None or new > old):
            return f"{name} was raised from {old} to {'no limit' if new is None else new}"
    return None


def uncompared(options: Mapping[str, Mapping[str, str]], controllers: Mapping[str, Json]) -> list[str]:
    """List places whose value cannot be compared at a resume, each with a description of the value."""
    places = [
        (f"state {entry!r}: {name}", text) for entry, texts in options.items() for name, text in texts.items()
    ]
    places += [
        (f"service {name!r}: {path}", text)
        for name, config in controllers.items()
        for path, text in _leaves(config)
    ]
    return [f"{place} ({text.partition(', ')[2]})" for place, text in places if is_unknown(text)]


def _leaves(config: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping):
        for name, part in config.items():
            yield from _leaves(part, str(name))
    else:
        yield path, str(config)
