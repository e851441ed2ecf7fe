"""Configuration of a run, and what a start compares: with the checkpoint, and the ranks with each other."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import xxhash

from everstep import backends
from everstep.arguments import plain
from everstep.backends.describe_values import is_unknown
from everstep.contracts.group import DataRanks, Group
from everstep.contracts.services import Service
from everstep.contracts.state import Json
from everstep.display.cells import plural
from everstep.errors import ChangedError, ConfigError, DisagreementError, nearest
from everstep.record import facts as run_facts
from everstep.record import machine
from everstep.record.provenance import as_json
from everstep.redaction import redacted
from everstep.version import __version__

if TYPE_CHECKING:
    from everstep.supervisor.board import ServiceBoard
    from everstep.supervisor.saving.state_tree import StopRecord
    from everstep.supervisor.saving.user_state import UserState
    from everstep.supervisor.settings import Settings

LimitsByName: TypeAlias = Mapping[str, int | None]

NONE = "none"
"""Stands for a value that one of the two sides lacks."""
_MISSING = object()

_EPOCHS = {"epoch", "epochs", "max_epoch", "max_epochs", "num_epochs", "total_epochs", "num_train_epochs"}
_LOADING = {
    *("workers", "num_workers", "prefetch", "prefetch_factor", "pin_memory"),
    *("log_every", "log_freq", "log_interval", "print_every", "print_freq"),
    *("out_dir", "output_dir", "run_dir", "save_dir", "log_dir", "checkpoint_dir"),
    *("run_name", "exp_name", "experiment_name", "wandb_name", "wandb_run_name", "timestamp"),
}
FREE = _LOADING | {
    *_EPOCHS,
    *("steps", "max_step", "max_steps", "total_steps", "total_timesteps", "total_iterations"),
    *("num_train_steps", "train_num_steps", "max_train_steps", "total_frames", "max_time", "time_limit"),
    *("resume", "verbose"),
}
"""Settings of a program that change no bit of the steps that are made, by their usual names: limits, how data
is loaded, where results go and under which name.  What follows from them (the length of a schedule) is
compared on its own.  `num_steps` is not one of them: it may be the length of a rollout.  In sections only the
first two sets count, and epochs only of the training: those of `warmup` or `ppo` change what is trained."""


_TIME = re.compile(
    r"(?<!\d)(?:(20\d\d)\D?(\d\d)\D?(\d\d)\D{0,2}(\d\d)\D?(\d\d)(?:\D?\d\d(?:\.\d+)?)?|(1\d{9})(?:\.\d+)?)(?!\d)"
)
"""Date with hour and minute, and perhaps seconds, or seconds since 1970."""
_NEAR = timedelta(minutes=15)


@dataclass(frozen=True)
class Configuration:
    """A run's configuration.

    Attributes:
        tree: a dictionary of JSON values, without credentials; queries find them as `config.NAME`.
        free: dotted paths of values that may change without touching the training: shown, and used as given.
        code: folders of the program: recorded, with the git state of the first; none: the script's folder.
        defaults: dotted paths of defaults, which the record of an earlier program may lack.
        sections: names of dictionaries in the tree in which a missing key is None.
    """

    tree: Mapping[str, Json]
    free: tuple[str, ...] = ()
    code: tuple[Path, ...] = ()
    defaults: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", redacted(self.tree))  # so it is compared as it is recorded

    @classmethod
    def of(cls, config: Any, free: Iterable[str] = ()) -> Configuration | None:
        if config is None or isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(f"config={config!r}: give a dictionary, as vars(parser.parse_args()) is one")
        tree = {str(name): _json(value, f"config[{name!r}]") for name, value in config.items()}
        free = [free] if isinstance(free, str) else list(free)
        if unknown := [name for name in free if name.split(".")[0] not in tree]:
            raise ConfigError(
                f"config_free={free}: config has no {unknown[0]!r}; {nearest(unknown[0], tree)}"
            )
        return cls(tree, (*free, *(FREE & tree.keys()), *_free_inside(tree)))

    def facts(self, seed: int, services: Iterable[Service]) -> dict[str, Any]:
        """Provenance of a start, or an evaluation (`everstep.record.facts`), with its services."""
        services = list(services)
        frameworks = {backend.name: backend.describe() for backend in backends.active()}
        observers = {s.name: s.config() for s in services if not s.controller}
        shown = {name: redacted(as_json(config)) for name, config in observers.items() if config is not None}
        return {
            **run_facts(sys.argv, self.tree, seed, frameworks, next(iter(self.code), None)),
            "services": list(map(repr, services)),
            "observers": shown,
        }

    def is_free(self, path: str) -> bool:
        """Whether a change at a dotted path touches no step of the training."""
        return _is_below(path, self.free)

    def changes(self, stored: Mapping[str, Json]) -> list[ChangedSetting]:
        """List the `differences` from a stored tree, without those of a default that is not stored."""
        listed = differences(redacted(stored), self.tree, self.sections)
        return [each for each in listed if each.stored != NONE or not _is_below(each.path, self.defaults)]


def _free_inside(section: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of such settings inside sections, as in `train.epochs`."""
    is_training = path.split(".")[-2:-1] in (["train"], ["training"], ["trainer"])
    for name, value in section.items() if isinstance(section, dict) else ():
        if path and name in (_EPOCHS | _LOADING if is_training else _LOADING):
            yield f"{path}{name}"
        yield from _free_inside(value, f"{path}{name}.")


def _is_below(path: str, places: Iterable[str]) -> bool:
    """Whether a dotted path is one of `places`, or inside one of them."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


class ChangedSetting(NamedTuple):
    """A value that differs from the stored one; where it is `free`, nobody has to choose between the two."""

    path: str
    stored: object
    given: object
    free: bool = False

    def __str__(self) -> str:
        return f"{self.path}: stored {self.stored}, given {self.given}"


def format_differences(differences: Iterable[ChangedSetting]) -> str:
    """Write differences to follow a colon: a single one in the line, several in lines of their own."""
    lines = list(map(str, differences))
    return f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"


def refusal(
    run_dir: Path, differences: Collection[ChangedSetting], config: Configuration | None = None
) -> ChangedError:
    """Make the error for given values that differ from the run's, where nobody has chosen between them.

    `config`: the program's, if the program can free its values.
    """
    tree = {} if config is None or config.sections else config.tree
    paths = [each.path.removeprefix("config.") for each in differences if each.path.startswith("config.")]
    paths = [path for path in paths if path.split(".")[0] in tree]
    freed = f", or config_free={paths} if that changes no step (a limit, a path)" if paths else ""
    return ChangedError(
        f"this differs from the run in {run_dir}:{format_differences(differences)}",
        f'Give what is stored, or pass on_change="override" to continue with what is given{freed}, or use '
        "another directory for another run",
    )


def differences(
    stored: Mapping[str, Json], current: Mapping[str, Json], sections: Collection[str] = ()
) -> list[ChangedSetting]:
    """List the places in which two trees differ; 1, 1.0, true and "1" are four different values."""

    def compare(old: Any, new: Any, place: tuple[object, ...]) -> Iterator[ChangedSetting]:
        before, now = _parts(old, new), _parts(new, old)
        if before is None or now is None or not (before or now):
            if (left := _as_text(old)) != (right := _as_text(new)):
                yield ChangedSetting(
                    ".".join(_as_text(part) if "." in str(part) else str(part) for part in place), left, right
                )
            return
        are_settings = not place or (len(place) == 1 and place[0] in sections)
        for name in {**before, **now}:
            both = before.get(name, _MISSING), now.get(name, _MISSING)
            if not (are_settings and all(value is None or value is _MISSING for value in both)):
                yield from compare(*both, (*place, name))

    return list(compare(stored, current, ()))


def _parts(value: Any, other: Any) -> Mapping[Any, Any] | None:
    """Return the items of a dictionary or list to compare, if the other value is of that type or missing."""
    if isinstance(value, Mapping) and (other is _MISSING or isinstance(other, Mapping)):
        return value
    if isinstance(value, list) and (other is _MISSING or isinstance(other, list)):
        return dict(enumerate(value))
    return {} if value is _MISSING and isinstance(other, Mapping | list) else None


def _as_text(value: object) -> str:
    return NONE if value is _MISSING else json.dumps(value, ensure_ascii=False, default=str)


def _json(value: Any, where: str) -> Json:
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}, which JSON lacks; give None or a string")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json(part, f"{where}[{name!r}]") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(f"{where} is {value!r}; give numbers, strings, and lists and dictionaries of them")


# ------------------------------------------------------------------------- what a start compares


def changed_config(stored: Mapping[str, Json] | None, current: Configuration | None) -> list[ChangedSetting]:
    """Compare configurations, where both are known.

    Changes at `Configuration.free` places are free, and those of the time at which a start began.
    """
    if stored is None or current is None:
        return []
    return [
        each._replace(path=f"config.{each.path}", free=current.is_free(each.path) or _differs_in_time(each))
        for each in current.changes(stored)
    ]


def _differs_in_time(setting: ChangedSetting) -> bool:
    """Whether two names differ in a time alone, and the given one is now, here or in UTC.

    A number alone may be a seed that was made of the time.
    """
    stored, given = str(setting.stored), str(setting.given)
    if re.fullmatch(r'"?[\d.]+"?', given) or _TIME.sub("TIME", stored) != _TIME.sub("TIME", given):
        return False
    with suppress(ValueError):  # 20261340 is no date
        times = [
            datetime.fromtimestamp(int(match[6]))
            if match[6]
            else datetime.strptime("".join(match.groups()[:5]), "%Y%m%d%H%M")
            for match in _TIME.finditer(given)
        ]
        present = datetime.now(), datetime.now(UTC).replace(tzinfo=None)
        return bool(times) and all(any(abs(time - now) < _NEAR for now in present) for time in times)
    return False


def changed_controllers(
    stored: Mapping[str, Json], live: Mapping[str, Json], reopened_by: StopRecord | None
) -> list[ChangedSetting]:
    """Compare the configurations of controllers; the controller whose change reopens the run may differ."""
    reason = None if reopened_by is None else (reopened_by.kind, reopened_by.by)
    both = {name: (stored.get(name, NONE), live.get(name, NONE)) for name in sorted(stored.keys() | live)}
    return [
        ChangedSetting(f"service {name!r}", old, new, reason == ("service", name))
        for name, (old, new) in both.items()
        if differences({name: old}, {name: new}, sections=[name])
    ]


def changed_options(
    stored: Mapping[str, Mapping[str, str]],
    user: UserState,
    reopened_by: StopRecord | None,
    skip: Collection[str],
) -> dict[str, dict[str, ChangedSetting]]:
    """Compare options by entry; with a raised limit, step counts may grow; `skip`: stored by another rank."""
    changed: dict[str, dict[str, ChangedSetting]] = {}
    raised = reopened_by is not None and reopened_by.kind != "service"
    current = user.options()
    # an entry whose options are all gone has changed, too
    for entry in [*current, *sorted(stored.keys() & user.entries.keys() - current.keys())]:
        options = current.get(entry, {})
        before = options if entry in skip else stored.get(entry, {})
        for name in [*options, *(before.keys() - options.keys())]:
            old, new = before.get(name, NONE), options.get(name, NONE)
            if old != new:
                follows = raised and user.in_schedule(entry, name) and _grew(old, new)
                difference = ChangedSetting(f"state {entry!r}: {name}", old, new, follows)
                changed.setdefault(entry, {})[name] = difference
    return changed


def _grew(old_text: str, new_text: str) -> bool:
    """Whether two strings hold integers in the same form, and none is smaller now."""
    if not all(re.fullmatch(r"[\[\], \d]+", text) for text in (old_text, new_text)):
        return False
    before, after = (list(map(int, re.findall(r"\d+", text))) for text in (old_text, new_text))
    same_form = re.sub(r"\d+", "n", old_text) == re.sub(r"\d+", "n", new_text)
    return same_form and all(old <= new for old, new in zip(before, after, strict=True))


def limits_set(limits: LimitsByName, meta: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the limits at a checkpoint, as its program had set them; not those given otherwise now."""
    stored = meta.get("limits", {}).items()
    return {name: limit for name, (given_then, limit) in stored if limits[name] == given_then}


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
"""Facts by name, under "machine" and each framework in use; see `Ending.one_fingerprint`."""


def fingerprint(objects: Mapping[str, Any], data: DataRanks) -> Fingerprint:
    """Take the fingerprint of this process, now; of the devices only those count on which the objects lie."""
    facts = {"machine": machine(), **{each.name: each.fingerprint(objects) for each in backends.active()}}
    if not data.in_order:
        read = ", ".join(map(str, data.of))
        by = "" if list(data.of) == sorted(data.of) else f" (ranks read the parts {read})"
        facts["data"] = {_LAYOUT: f"batches in {plural(data.size, 'part')}{by}"}
    return facts


def changes(stored: Fingerprint | None, current: Fingerprint) -> list[ChangedSetting]:
    """List facts that differ, but for the layout; a framework in one alone may have computed nothing."""
    stored = stored or {}
    return [
        ChangedSetting(f"{who}.{name}", old, new)
        for who in stored.keys() & current.keys()
        for name in sorted((stored[who].keys() | current[who].keys()) - {_LAYOUT})
        if (old := stored[who].get(name, NONE)) != (new := current[who].get(name, NONE))
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
    arguments = {
        "everstep": __version__,
        "python": platform.python_version(),
        **{name: facts.get(name, NONE) for name, facts in frameworks.items()},
        "program": _program(),
        "seed": settings.seed,
        "resume": str(settings.resume),
        "on_change": settings.on_change,
        "uneven": settings.uneven,
        "config": {} if settings.config is None else dict(settings.config.tree),
        "state": user.describe(),
        "services": {service.name: type(service).__name__ for service in board},
        "controllers": board.controllers(),
        **limits,
    }
    first, *others = group.gather(arguments, "the arguments of the loop")
    differing = [
        (rank, each)
        for rank, own in enumerate(others, 1)
        for each in differences(first, own)
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
