"""Experiments made from config files, or from the config that a run has recorded."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import xxhash

from everstep.checkpoint import Checkpoint, CheckpointName, Store, find_checkpoint
from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, NoCheckpointError
from everstep.experiment.calls import Call, argument_faults
from everstep.experiment.config import FREE, ExperimentConfig, Resolved, ServiceCall, resolve
from everstep.experiment.experiment import Experiment, RunResult, require_schedule
from everstep.experiment.import_paths import admit, findable, imported
from everstep.index.location import facts_at
from everstep.record import RunDir, RunJournal, located, to_read
from everstep.record.trust import distrust, distrust_config
from everstep.redaction import without_credentials
from everstep.services.replayed import plan_of_process
from everstep.supervisor import InitFrom
from everstep.supervisor.opening.configuration import (
    ChangedSetting,
    Configuration,
    changed_config,
    format_differences,
    refusal,
)
from everstep.supervisor.saving.state_tree import reading, saved_tree
from everstep.supervisor.saving.user_state import UserState
from everstep.trainer import Trainer

OnChange = Literal["error", "keep", "override", "fork"]


class Configured(Experiment):
    """The experiment that a config describes; `config` and `tree` are the config that is used."""

    def __init__(
        self,
        resolved: Resolved[ExperimentConfig],
        run_dir: Path,
        code: tuple[Path, ...],
        on_change: OnChange,
        trust: bool,
        git: Mapping[str, Any],
    ) -> None:
        self._on_change, self._code = on_change, code
        self._fork: Checkpoint | None = None
        """The checkpoint of another run with which a fork begins."""
        self._message = ""
        """What the training prints of the choice."""
        resolved, run_dir = self._choose(resolved, run_dir, trust)
        config = self.config = resolved.config
        self.tree, self._resolved = resolved.tree, resolved
        options = {name: value for name, value in vars(config.trainer).items() if value is not None}
        if isinstance(config.trainer.init_from, dict):
            options["init_from"] = InitFrom(**config.trainer.init_from)
        options |= _fork_options(run_dir, _digest(resolved.tree))
        if self._fork is not None:
            options["resume"] = str(self._fork.path)
        if self._fork is not None or on_change == "override":
            options["on_change"] = "override"
        options |= {"services": config.services, "seed": config.seed, **git}
        evaluated = {name: call for name, call in config.streams.items() if name != "train"}
        options["config"] = _configuration(resolved, code)
        super().__init__(config.task, config.streams["train"], evaluated, run_dir, **options)

    def _choose(
        self, resolved: Resolved[ExperimentConfig], run_dir: Path, trust: bool
    ) -> tuple[Resolved[ExperimentConfig], Path]:
        """Choose config and run directory; with "error" and "override" the run compares them at its entry."""
        if self._on_change not in ("error", "keep", "override", "fork"):
            raise ConfigError(f'on_change={self._on_change!r}: give "error", "keep", "override" or "fork"')
        if self._on_change in ("error", "override"):
            return resolved, run_dir
        home = located(run_dir)
        checkpoint = find_checkpoint(home, print)
        stored = _config_in(checkpoint)
        changes = training_changes(stored, resolved.tree, resolved.defaults) if stored else []
        if not changes or checkpoint is None:
            return resolved, run_dir
        if self._on_change == "keep":
            # Permission comes first, because `resolve` imports the code that the stored config names.
            admit(home, stored, "" if trust else distrust_config(home, stored), trust, {})
            self._message = _message("kept as stored", changes)
            return resolve(ExperimentConfig, base=_with_stored(stored, resolved.tree)), run_dir
        folder = _fork_of(run_dir, _digest(resolved.tree))
        if facts_at(located(folder)):
            self._message = f"resuming the fork {folder}"
        else:
            self._fork = checkpoint
            self._message = _message(f"forked from {checkpoint.path} into {folder}", changes)
        return resolved, folder

    def _build(self, task: Any) -> None:
        """Give the task the config's makers of its model, optimizer and scheduler, if there are any."""
        config = self.config
        optimizer = None if config.optimizer is None else partial(_parameters_first, config.optimizer)
        parts = {"model": config.model, "optimizer": optimizer, "scheduler": config.scheduler}
        makers = {name: make for name, make in parts.items() if make is not None}
        if not makers or not isinstance(task, Task):  # which no Trainer takes
            return
        if made := [name for name in makers if getattr(task, name, None) is not None]:
            raise ConfigError(
                f"{', '.join(made)} in the config: {type(task).__name__} has made one in __init__; make it "
                f"in build_{made[0]}, which the config replaces, or leave it out of the config"
            )
        lacks = [f"build_{name}" for name in makers if not hasattr(task, f"build_{name}")]
        lacks += [f"argument {name!r} of build()" for name, _ in argument_faults(task.build, [*makers])]
        if lacks:
            raise ConfigError(
                f"{', '.join(makers)} in the config: {type(task).__name__} has no {' and no '.join(lacks)}; "
                "leave that out of the config, or let build() take it and pass it to super().build()"
            )
        task.build(**makers)
        task.is_built = True

    def run(self, schedule: str, **arguments: Any) -> RunResult:
        """Run a schedule by its name; the arguments win over those of the config's `schedules`."""
        return super().run(schedule, **{**self.config.schedules.get(schedule, {}), **arguments})

    def _to_train(self) -> Trainer:
        trainer = super()._to_train()
        _require_optimizer(trainer.task)  # before a fork is made on the disk
        if self._fork is not None:
            self._begin(self._fork, trainer.task.state())
        if self._message:
            print(self._message)
        self._fork, self._message = None, ""
        return trainer

    def _begin(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Make a fork's directory; not for a state that the checkpoint does not fit."""
        user = UserState(state)
        with ExitStack() as stack, reading(checkpoint.path, "user"):
            user.open(stack)
            user.check(saved_tree(checkpoint, ("user",))["user"], f"checkpoint {checkpoint.path}")
        seed = RunDir.open(checkpoint.path.parents[1], create=False).seed
        about = {"parent": checkpoint.origin, "config": _digest(self.tree)}
        RunDir.open(self.run_dir, seed=seed, about=about)

    def check(self, schedule: str) -> str:
        """Make everything that a schedule needs; return what its training would print of a changed config."""
        require_schedule(schedule)
        _ = self.trainer
        if "train" not in schedule:
            return ""
        _require_optimizer(self.trainer.task)
        stored = _config_in(find_checkpoint(located(self.run_dir), print))
        if not stored:
            return self._message
        changes = training_changes(stored, self._resolved.tree, self._resolved.defaults)
        if changes and self._on_change == "error" and "on_change" not in self._options:
            raise refusal(Path(self.run_dir), changes)
        differences = changed_config(stored, _configuration(self._resolved))
        used = _message("changed since the checkpoint, and used as given", differences) if differences else ""
        return "\n".join(filter(None, (self._message, used)))

    def _code_folder(self) -> Path:
        return self._code[0] if self._code else super()._code_folder()


def _fork_of(run_dir: Path, digest: str) -> Path:
    """Return the directory of a run's fork with this config, RUN-fork-N, or the first that is free.

    A fork that has saved nothing goes on only if the parent still has the checkpoint with which it began.
    """
    run = RunDir.open(run_dir, create=False).id
    for number in itertools.count(1):
        folder = run_dir.with_name(f"{run_dir.name}-fork-{number}")
        facts = facts_at(located(folder)) or {}
        parent = facts.get("parent", {})
        is_this = (parent.get("run"), facts.get("config")) == (run, digest)
        if not facts or (is_this and (Store(located(folder)).names() or Path(parent["path"]).exists())):
            break
    return folder


def _fork_options(run_dir: Path, digest: str) -> dict[str, Any]:
    """Return the options of a fork that has saved nothing, or only the copy of its parent's checkpoint."""
    facts = facts_at(located(run_dir)) or {}
    if facts.get("parent") is None or facts.get("config") != digest:
        return {}
    names, parent = Store(located(run_dir)).names(), facts["parent"]
    if names and names[-1] > CheckpointName.parse(parent["checkpoint"]):
        return {}
    if not names and not Path(parent["path"]).exists():
        raise NoCheckpointError(
            f"the fork {run_dir} has saved nothing, and the checkpoint with which it begins is gone, by its "
            f"parent's retention: {parent['path']}; fork again from the config file, with --on-change fork"
        )
    return {"on_change": "override"} | ({} if names else {"resume": parent["path"]})


def _require_optimizer(task: Any) -> None:
    getattr(task, "require_optimizer", lambda: None)()  # torch tasks step one


def _parameters_first(call: Call, model: Any) -> Any:
    parameters = getattr(model, "parameters", None)
    return call(parameters() if callable(parameters) else model)


def open_config(
    files: Iterable[str | Path] | str | Path,
    overrides: Iterable[str] = (),
    *,
    run_dir: str | Path | None = None,
    on_change: OnChange = "error",
    profile: str | None = None,
    strict_git: bool = False,
    skip_check: bool = False,
    trust: bool = False,
) -> Configured:
    """Open the experiment of one or more config files; modules that they name may lie beside them.

        everstep.experiment.open_config("digits.yaml", ["optimizer.lr=3e-4"]).train()

    Args:
        files: one path, or several; a later file is laid over the earlier ones.
        overrides, profile: as for `resolve`.
        run_dir: run directory, instead of the config's.
        on_change: what to do if the config of the run in that directory differs in keys that change training:
            "error": show both and refuse; "keep": resume with the stored config; "override": resume with the
            given config; "fork": leave the run alone, and train from its newest checkpoint in a new run
            directory, RUN-fork-1, which the same call resumes.
        strict_git, skip_check: as for `Experiment`.
        trust: let "keep" import and call the code that the run names, even if the run is not marked as this
            user's; a `TrustError` otherwise.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if not paths:
        raise ConfigError("no config file is given; give one or more YAML files")
    code = tuple(dict.fromkeys(path.absolute().parent for path in paths))
    findable(code)  # before `resolve`, which imports the config's modules
    resolved = resolve(ExperimentConfig, paths, overrides, profile=profile)
    folder = Path(run_dir or default_run_dir(resolved.config, paths))
    git = {"strict_git": strict_git, "skip_check": skip_check}
    return Configured(resolved, folder, code, on_change, trust, git)


def default_run_dir(config: ExperimentConfig, files: Sequence[str | Path]) -> Path:
    return Path(config.run_dir or f"runs/{config.name or Path(files[-1]).stem}")


def open_run(
    run_dir: str | Path,
    overrides: Iterable[str] = (),
    *,
    on_change: OnChange = "error",
    profile: str | None = None,
    default_profile: str | None = None,
    strict_git: bool = False,
    skip_check: bool = False,
    trust: bool = False,
) -> Configured:
    """Open the experiment of a run, by the config that its newest start has recorded.

    Args:
        overrides, on_change, profile, strict_git, skip_check, trust: as for `open_config`.
        default_profile: used if `profile` is not given and the config has a profile of this name.
    """
    home = to_read(run_dir)
    facts, tree = _facts_and_config(home)
    code = admit(home, tree, distrust(home, facts) or distrust_config(home, tree), trust, facts)
    if profile is None and default_profile in (tree.get("profiles") or {}):
        profile = default_profile
    resolved = resolve(ExperimentConfig, (), overrides, base=tree, profile=profile)
    git = {"strict_git": strict_git, "skip_check": skip_check}
    # Trusted by now: `admit` has refused all other runs.
    return Configured(resolved, Path(run_dir), code, on_change, True, git)


def look(run_dir: str | Path, overrides: Iterable[str] = (), *, profile: str | None = None) -> dict[str, Any]:
    """Return a run's config as `open_run` would use it, without importing any of its code.

    Arguments of calls, also of those in overrides, are therefore neither checked nor completed.
    """
    _, tree = _facts_and_config(to_read(run_dir))
    return resolve(ExperimentConfig, (), overrides, base=tree, profile=profile, imports=False).tree


def _facts_and_config(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts of the newest start, and its config; that of the checkpoint if it saved nothing.

    Where steps are executed again, the start is the one whose steps these are.
    """
    journal, replayed = RunJournal(run_dir), getattr(plan_of_process(), "start", 0)
    start = next((each for each in journal.events("segment") if each.segment == replayed), None)
    start = start or journal.newest_start()
    facts: dict[str, Any] = {} if start is None else start.data.get("facts", {})
    tree: dict[str, Any] = without_credentials(facts.get("config") or {})
    if start is None or not isinstance(tree, dict) or not {"task", "streams"} <= tree.keys():
        raise ConfigError(f"the run in {run_dir} has no config of an experiment; start it by its own program")
    newest = Store(run_dir).facts()[-1:]
    if newest and newest[0].segment != start.segment != replayed:
        saved_tree = _config_in(find_checkpoint(run_dir, lambda _: None)) or tree
        if changes := training_changes(saved_tree, tree):
            note = _message("the newest start saved nothing, and what it changed is left out", changes)
            print(f"note: {note}", file=sys.stderr)
        tree = saved_tree
    return facts, tree


def _config_in(checkpoint: Any) -> dict[str, Any]:
    return {} if checkpoint is None else checkpoint.meta.get("config") or {}


def _configuration(resolved: Resolved[Any], code: tuple[Path, ...] = ()) -> Configuration:
    """Make the form of a config that runs record and compare."""
    return Configuration(resolved.tree, FREE, code, resolved.defaults, sections=("trainer",))


def training_changes(
    stored: Mapping[str, Any], tree: Mapping[str, Any], defaults: Iterable[str] = ()
) -> list[ChangedSetting]:
    """List the differences that can change the training; of the services only controllers count."""
    free = tuple(path for path in FREE if path != "services")
    of_trainer = tuple(path for path in defaults if not path.startswith("services."))
    with_controllers = {**tree, "services": _controllers(tree)}
    config = Configuration(with_controllers, free, (), of_trainer, sections=("trainer",))
    changes = changed_config({**stored, "services": _controllers(stored)}, config)
    return [each for each in changes if not each.free]


def _controllers(tree: Mapping[str, Any]) -> list[Any]:
    """List the controllers; a service that is not everstep's counts as one, and is not imported."""
    return [
        each
        for each in tree.get("services") or ()
        if ":" in (call := ServiceCall.of(each)).name or getattr(imported(call.call), "controller", True)
    ]


def _with_stored(stored: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Take the stored config, with the given values of keys that touch no step."""
    top = {path: tree[path] for path in FREE if "." not in path}
    if _controllers(stored) != _controllers(tree):
        del top["services"]
    inside = [path.removeprefix("trainer.") for path in FREE if path.startswith("trainer.")]
    trainer = {**stored["trainer"], **{name: tree["trainer"][name] for name in inside}}
    return {**stored, **top, "trainer": trainer}


def _digest(tree: dict[str, Any]) -> str:
    """Digest of the part of a config that touches the training."""
    leaves = [[each.path, each.given] for each in training_changes({}, tree)]
    return xxhash.xxh3_64_hexdigest(json.dumps(leaves, sort_keys=True, default=str).encode())


def _message(title: str, changes: list[ChangedSetting]) -> str:
    return title + ":" + format_differences(changes).rstrip(". \n")
