"""Choice between the config of a run and a different given config: keep, override, or fork."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from everstep.checkpoint import find_checkpoint
from everstep.errors import ConfigError
from everstep.experiment.code_trust import admit
from everstep.experiment.config import Resolved, free, resolve
from everstep.experiment.experiment_config import ExperimentConfig, ServiceCall
from everstep.experiment.forks import Fork, facts_of, is_as_begun
from everstep.experiment.import_paths import imported
from everstep.record import RunDir, located
from everstep.record.trust import distrust_config
from everstep.supervisor.opening.configuration import Configuration, Difference, refusal, told

OnChange = Literal["error", "keep", "override", "fork"]


@dataclass(frozen=True)
class Choice:
    """Decision about which config is used, in which run directory.

    Attributes:
        resolved: the config to use.
        run_dir: the run directory to use.
        options: arguments of the Trainer that follow from the decision.
        says: message for the user; "" if there is nothing to say.
        fork: the fork to begin in the run directory before the training.
    """

    resolved: Resolved[ExperimentConfig]
    run_dir: Path
    options: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    fork: Fork | None = None


def configuration(resolved: Resolved[ExperimentConfig], code: tuple[Path, ...] = ()) -> Configuration:
    """Make the form of a config that runs record and compare."""
    paths = tuple(free(ExperimentConfig))
    return Configuration(resolved.tree, paths, code, resolved.defaults, sections=("trainer",))


def choose(
    resolved: Resolved[ExperimentConfig], run_dir: Path, on_change: OnChange, *, trust: bool = False
) -> Choice:
    """Decide between the given config and that of a run's newest checkpoint; nothing is written.

    With "error" and "override" the run itself compares the configs, when it is entered.

    Args:
        trust: whether code that the run names may be imported even if the run does not count as this user's.
    """
    if on_change not in ("error", "keep", "override", "fork"):
        raise ConfigError(f'on_change={on_change!r}: give "error", "keep", "override" or "fork"')
    checkpoint = find_checkpoint(located(run_dir), print) if on_change in ("keep", "fork") else None
    meta: Any = None if checkpoint is None else checkpoint.meta
    if checkpoint is not None and meta.get("config"):
        why = "" if trust else distrust_config(located(run_dir), meta["config"])
        # A comparison may import the stored services: not those of a run that is not this user's.
        changes = touching(meta["config"], resolved, imports=not why)
        # Permission comes first, because `resolve` imports the code that the stored config names.
        if changes and on_change == "keep":
            run = RunDir.open(located(run_dir), create=False)
            admit(run.path, run.id, meta["config"], (), why, trust)
            kept = resolve(ExperimentConfig, base=kept_tree(meta["config"], resolved.tree))
            says = _listed("kept as stored", changes)
            return Choice(kept, run_dir, _inherited(run_dir, kept), says)
        if changes:
            fork = Fork(run_dir, checkpoint, resolved.tree, _digest(resolved))
            folder, is_there = fork.place()
            if is_there:
                return Choice(resolved, folder, _inherited(folder, resolved), f"resuming the fork {folder}")
            says = _listed(f"forked from {checkpoint.path} into {folder}", changes)
            return Choice(resolved, folder, {"on_change": "override"}, says, fork)
    options = {"on_change": "override"} if on_change == "override" else _inherited(run_dir, resolved)
    return Choice(resolved, run_dir, options)


def require_unchanged(choice: Choice, on_change: OnChange) -> str:
    """Return the message of a training about changes since the newest checkpoint; "" if there is none."""
    checkpoint = find_checkpoint(located(choice.run_dir), print)
    meta: Any = None if checkpoint is None else checkpoint.meta
    if meta is None or not meta.get("config"):
        return choice.says
    is_own = not distrust_config(located(choice.run_dir), meta["config"])
    changes = touching(meta["config"], choice.resolved, imports=is_own)
    # Options here mean a fresh fork, whose config differs from its parent's on purpose.
    if changes and on_change == "error" and not choice.options:
        raise refusal(choice.run_dir, _of_config(changes))
    shown = configuration(choice.resolved).changes(meta["config"])
    said = [_listed("changed since the checkpoint, and used as given", _of_config(shown))] if shown else []
    return "\n".join(([choice.says] if choice.says else []) + said)


def _of_config(changes: list[Difference]) -> list[Difference]:
    return [each._replace(path=f"config.{each.path}") for each in changes]


def _listed(what: str, changes: list[Difference]) -> str:
    return what + ":" + told(changes).rstrip(". \n")


def touching(
    stored: Mapping[str, Any], given: Resolved[ExperimentConfig], *, imports: bool = True
) -> list[Difference]:
    """Differences between two configs that can change the training; of the services only controllers count.

    Args:
        imports: False to import no services but everstep's own: all others count as controllers.
    """
    config = configuration(given)
    # The list of services is free, but the controllers in it are compared.
    config = replace(
        config,
        tree={**given.tree, "services": _controllers(given.tree, imports)},
        free=tuple(path for path in config.free if path != "services"),
    )
    changes = config.changes({**stored, "services": _controllers(stored, imports)})
    return [each for each in changes if not config.is_free(each.path)]


def _controllers(tree: Mapping[str, Any], imports: bool) -> list[Any]:
    """Controllers among the services of a config, every default filled in; other services are left out."""
    found = [ServiceCall.of(each) for each in tree.get("services") or () if _controls(each, imports)]
    # filling in imports the calls among the arguments, also of everstep's own services
    return [(each.completed((), []) if imports else each).tree() for each in found]


def _controls(service: Any, imports: bool) -> bool:
    call = ServiceCall.of(service)
    return not _is_known(call, imports) or bool(getattr(imported(call.call), "controller", True))


def _is_known(call: ServiceCall, imports: bool) -> bool:
    """Whether the service may be imported: importing a module runs its code."""
    return imports or ":" not in call.name


def kept_tree(stored: Mapping[str, Any], given: Mapping[str, Any], *, imports: bool = True) -> dict[str, Any]:
    """Take the stored config, with the given values of keys that affect no step; services in the given order.

    Args:
        imports: as for `touching`.
    """
    tree = copy.deepcopy(dict(stored))
    for path in free(ExperimentConfig):
        *above, name = path.split(".")
        ours, theirs = tree, given
        for part in above:
            ours, theirs = ours.setdefault(part, {}), theirs[part]
        ours[name] = theirs[name]
    # Controllers are paired by their order: the given list decides only the position of the stored ones.
    controlling = iter(_controllers(stored, imports))
    services = [
        next(controlling, None) if _controls(each, imports) else each for each in given.get("services") or ()
    ]
    tree["services"] = [each for each in (*services, *controlling) if each is not None]
    return tree


def _inherited(run_dir: Path, resolved: Resolved[ExperimentConfig]) -> dict[str, Any]:
    """Arguments of the Trainer for a fork that has saved nothing yet; none for other runs."""
    facts = facts_of(run_dir)
    is_fork = facts.get("parent") is not None and facts.get("config") == _digest(resolved)
    return {"on_change": "override"} if is_fork and is_as_begun(run_dir, facts) else {}


def _digest(resolved: Resolved[ExperimentConfig]) -> str:
    """Digest of the part of a config that touches the training."""
    leaves = [[str(each.path), each.given] for each in touching({}, replace(resolved, defaults=()))]
    return xxhash.xxh3_64_hexdigest(json.dumps(leaves, sort_keys=True, default=str).encode())
