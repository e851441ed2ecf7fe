"""What a start compares: its settings and machine with the checkpoint's, and the ranks with each other."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from everstep import backends
from everstep.backends.describe_values import is_unknown
from everstep.contracts.group import DataRanks, Group
from everstep.contracts.state import Json
from everstep.errors import DisagreementError
from everstep.record import machine
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.opening.configuration import NONE, Configuration, Difference, differences
from everstep.supervisor.saving.state_tree import StopRecord
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.settings import Settings

LimitsByName: TypeAlias = Mapping[str, int | None]


def changed_config(stored: Mapping[str, Json] | None, given: Configuration | None) -> list[Difference]:
    """Compare configurations, where both are known; changes at `Configuration.free` places are free."""
    if stored is None or given is None:
        return []
    return [
        each._replace(path=f"config.{each.path}", free=given.is_free(each.path))
        for each in given.changes(stored)
    ]


def changed_controllers(
    stored: Mapping[str, Json], given: Mapping[str, Json], reopened_by: StopRecord | None
) -> list[Difference]:
    """Compare the configurations of controllers; the controller whose change reopens the run may differ."""
    reason = None if reopened_by is None else (reopened_by.kind, reopened_by.by)
    both = {name: (stored.get(name, NONE), given.get(name, NONE)) for name in sorted(stored.keys() | given)}
    return [
        Difference(f"service {name!r}", was, now, reason == ("service", name))
        for name, (was, now) in both.items()
        if differences({name: was}, {name: now}, sections=[name])
    ]


def changed_options(
    stored: Mapping[str, Mapping[str, str]],
    user: UserState,
    reopened_by: StopRecord | None,
    skip: Collection[str] = (),
) -> dict[str, dict[str, Difference]]:
    """Compare options of optimizers and other entries; with a raised limit, step counts may grow.

    `skip` names the entries of which the stored options are another rank's.  Returns entry to option to
    difference.
    """
    changed: dict[str, dict[str, Difference]] = {}
    raised = reopened_by is not None and reopened_by.kind != "service"
    given = user.options()
    # an entry whose options are all gone has changed, too
    for entry in [*given, *sorted(stored.keys() & user.entries.keys() - given.keys())]:
        options = given.get(entry, {})
        before = options if entry in skip else stored.get(entry, {})
        for name in [*options, *(before.keys() - options.keys())]:
            was, now = before.get(name, NONE), options.get(name, NONE)
            if was != now:
                follows = raised and user.entries[entry].in_schedule(name) and _grew(was, now)
                difference = Difference(f"state {entry!r}: {name}", was, now, follows)
                changed.setdefault(entry, {})[name] = difference
    return changed


def _grew(was: str, now: str) -> bool:
    """Whether two strings hold integers in the same form, and none is smaller now."""
    if not all(re.fullmatch(r"[\[\], \d]+", text) for text in (was, now)):
        return False
    before, after = (list(map(int, re.findall(r"\d+", text))) for text in (was, now))
    same_form = re.sub(r"\d+", "n", was) == re.sub(r"\d+", "n", now)
    return same_form and all(old <= new for old, new in zip(before, after, strict=True))


def reason_to_reopen(
    stop: StopRecord, limits: LimitsByName, board: ServiceBoard, stored: Mapping[str, Json]
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

    def unknown(config: Any, place: str) -> list[str]:
        if isinstance(config, Mapping):
            return [text for name, part in config.items() for text in unknown(part, str(name))]
        text = str(config)
        return [f"{place} ({text.partition(', ')[2]})"] if is_unknown(text) else []

    kinds = {"state": options, "service": controllers}
    return [
        f"{kind} {name!r}: {text}"
        for kind, configs in kinds.items()
        for name, config in configs.items()
        for text in unknown(config, "")
    ]


_LAYOUT = "layout"
"""Name of the fact that does not depend on the machine, see `Backend.fingerprint`."""

Fingerprint: TypeAlias = Mapping[str, Mapping[str, str]]
"""Facts by name, under "machine" and under the name of each framework in use.

State, samples and random state come back to the bit on any machine.  Results computed from them are equal
only where processor, libraries, threads and flags are the same.
"""


def fingerprint(objects: Mapping[str, Any], data: DataRanks) -> Fingerprint:
    """Take the fingerprint of this process, now; of the devices only those count on which the objects lie."""
    facts = {"machine": machine(), **{each.name: each.fingerprint(objects) for each in backends.active()}}
    if not data.in_order:
        read = ", ".join(map(str, data.of))
        by = "" if list(data.of) == sorted(data.of) else f" (ranks read the parts {read})"
        facts["data"] = {_LAYOUT: f"batches in {data.size} part{'s' if data.size > 1 else ''}{by}"}
    return facts


def changes(stored: Fingerprint | None, given: Fingerprint) -> list[Difference]:
    """List facts that differ between two fingerprints, as "torch.threads", but for the layout.

    A framework in only one of the fingerprints is ignored: it may have been imported without computing.
    """
    stored = stored or {}
    return [
        Difference(f"{who}.{name}", was, now)
        for who in stored.keys() & given.keys()
        for name in sorted((stored[who].keys() | given[who].keys()) - {_LAYOUT})
        if (was := stored[who].get(name, NONE)) != (now := given[who].get(name, NONE))
    ]


def layout(fingerprint: Fingerprint | None) -> str:
    """Return how the state was divided among the ranks; "" where each rank had all of it."""
    return "; ".join(facts[_LAYOUT] for facts in (fingerprint or {}).values() if _LAYOUT in facts)


_OWN = frozenset({"rank", "local_rank", "node_rank", "device", "gpu"})
"""Names in a configuration whose values are a rank's own."""


def require_same_start(
    group: Group, settings: Settings, user: UserState, board: ServiceBoard, limits: LimitsByName
) -> None:
    """Require that all ranks were started with the same program and arguments."""
    if group.size == 1:
        return
    frameworks = {backend.name: backend.describe() for backend in backends.active()}
    mine = {
        "everstep": version("everstep"),
        "python": platform.python_version(),
        **{name: facts.get(name, NONE) for name, facts in frameworks.items()},
        "program": _program(),
        "seed": settings.seed,
        "resume": str(settings.resume),
        "on_change": settings.on_change,
        "uneven": settings.uneven,
        "config": {} if settings.config is None else dict(settings.config.tree),
        "state": user.described(),
        "services": {service.name: type(service).__name__ for service in board},
        "controllers": board.controllers(),
        **limits,
    }
    first, *others = group.gather(mine, "the arguments of the loop")
    differing = [
        (rank, each)
        for rank, theirs in enumerate(others, 1)
        for each in differences(first, theirs)
        if each.path.split(".")[-1] not in _OWN
    ]
    if differing:
        lines = "\n  ".join(f"{d.path}: rank 0 has {d.stored}, rank {r} has {d.given}" for r, d in differing)
        raise DisagreementError(
            f"the ranks were started differently:\n  {lines}\nstart all of them again, and give them the "
            "same program, arguments and versions",
            ranks=sorted({rank for rank, _ in differing}),
        )


def _program() -> str:
    """Return the name and the digest of the program's first file; of a prompt or notebook its name alone."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return str(sys.argv[0])
    return f"{Path(path).name} ({xxhash.xxh3_64_hexdigest(Path(path).read_bytes())})"
