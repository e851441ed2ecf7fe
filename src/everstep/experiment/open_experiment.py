"""Experiments made from config files, or from the config that a run has recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store, find_checkpoint
from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call, misfits
from everstep.experiment.code_trust import admit, code_of
from everstep.experiment.config import Resolved, resolve
from everstep.experiment.config_choice import (
    OnChange,
    choose,
    configuration,
    kept_tree,
    require_unchanged,
    touching,
)
from everstep.experiment.experiment import SCHEDULES, Experiment, RunResult
from everstep.experiment.experiment_config import ExperimentConfig
from everstep.record import RunDir, RunJournal, to_read
from everstep.record.trust import distrust, distrust_config
from everstep.redaction import without_credentials
from everstep.supervisor import InitFrom
from everstep.supervisor.opening.configuration import told
from everstep.trainer import Trainer


class Configured(Experiment):
    """The experiment that a config describes.

    Args:
        resolved: the config.
        run_dir: the run's directory.
        code: folders of the config files.
        on_change, trust: as for `open_config`.
        checks: strict_git and skip_check, as for `Experiment`.

    Attributes:
        config, tree: the config that is used, as an object and as JSON values.
    """

    def __init__(
        self,
        resolved: Resolved[ExperimentConfig],
        run_dir: Path,
        code: tuple[Path, ...],
        on_change: OnChange,
        trust: bool,
        **checks: Any,
    ) -> None:
        # Chosen first: the config that counts may be the stored one.
        chosen = choose(resolved, run_dir, on_change, trust=trust)
        self.config: ExperimentConfig = chosen.resolved.config
        self.tree = chosen.resolved.tree
        self._chosen, self._on_change = chosen, on_change
        self._code = code
        config = self.config
        settings = {name: value for name, value in vars(config.trainer).items() if value is not None}
        if isinstance(config.trainer.init_from, dict):
            settings["init_from"] = InitFrom(**config.trainer.init_from)
        super().__init__(
            config.task,
            config.streams["train"],
            {name: call for name, call in config.streams.items() if name != "train"},
            chosen.run_dir,
            services=config.services,
            seed=config.seed,
            config=configuration(chosen.resolved, code),
            **chosen.options,
            **settings,
            **checks,
        )

    def _build(self, task: Any) -> None:
        """Give the task the config's makers of its model, optimizer and scheduler, if there are any."""
        config = self.config
        optimizer = None if config.optimizer is None else partial(_parameters_first, config.optimizer)
        parts = {"model": config.model, "optimizer": optimizer, "scheduler": config.scheduler}
        given = {name: make for name, make in parts.items() if make is not None}
        if not given or not isinstance(task, Task):
            return
        kind = type(task).__name__
        for name in given:
            if not hasattr(task, f"build_{name}"):
                raise ConfigError(f"{name}: {kind} has no build_{name}; leave {name} out of the config")
        for name, _ in misfits(task.build, [*given]):
            raise ConfigError(
                f"{name}: {kind}.build() has no argument {name!r}; add the argument, and pass it to "
                "super().build()"
            )
        task.build(**given)
        task.is_built = True

    def run(self, schedule: str, **arguments: Any) -> RunResult:
        """Run a schedule by its name.

        Args:
            arguments: arguments of the schedule's method; they win over those of the config's `schedules`.
        """
        return super().run(schedule, **{**self.config.schedules.get(schedule, {}), **arguments})

    def _to_train(self) -> Trainer:
        trainer = super()._to_train()
        self._require_optimizer()  # before a fork is made on the disk
        if self._chosen.fork is not None:
            self._chosen.fork.begin(self._chosen.run_dir, trainer.task.state())
        if self._chosen.says:
            print(self._chosen.says)
        self._chosen = replace(self._chosen, says="", fork=None)
        return trainer

    def check(self, schedule: str) -> str:
        """Make everything that a schedule needs; return its message about a changed config."""
        if schedule not in SCHEDULES:
            raise ConfigError(f"there is no schedule {schedule!r}; {nearest(schedule, SCHEDULES)}")
        _ = self.trainer
        if "train" not in schedule:
            return ""
        self._require_optimizer()
        return require_unchanged(self._chosen, self._on_change)

    def _require_optimizer(self) -> None:
        """Refuse a task that steps an optimizer, as torch tasks do, and has none."""
        required = getattr(self.trainer.task, "require_optimizer", lambda: None)
        try:
            required()
        except ConfigError as error:
            if self.config.optimizer is not None:
                raise
            raise ConfigError(
                f"{error}; or give the config the key `optimizer`, as in "
                "optimizer: {call: torch.optim:AdamW, lr: 1e-3}"
            ) from error

    def _code_folder(self) -> Path:
        return self._code[0] if self._code else super()._code_folder()


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
        overrides: PATH=VALUE each, as in `resolve`.
        run_dir: run directory, instead of the config's.
        on_change: what to do if the config of the run in that directory differs in keys that change training:
            "error": show both and refuse; "keep": resume with the stored config; "override": resume with the
            given config; "fork": leave the run alone, and train from its newest checkpoint in a new run
            directory, RUN-fork-1, which the same call resumes.
        profile: name of a profile in the config, laid over the rest.
        strict_git, skip_check: as for `Experiment`.
        trust: let "keep" import and call the code that the run names, even if the run is not marked as this
        user's.

    Raises:
        TrustError: "keep" would do so, and `trust` is not given.
        ConfigError: the config has mistakes: file, line, key, value, and the remedy of each.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if not paths:
        raise ConfigError("no config file is given; give one or more YAML files")
    code = tuple(dict.fromkeys(path.absolute().parent for path in paths))
    # The config's modules lie beside its files, and `resolve` imports them.
    findable(code)
    resolved = resolve(ExperimentConfig, paths, overrides, profile=profile)
    config = resolved.config
    folder = run_dir or config.run_dir or f"runs/{config.name or paths[-1].stem}"
    checks = {"strict_git": strict_git, "skip_check": skip_check}
    return Configured(resolved, Path(folder), code, on_change, trust, **checks)


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
        overrides, on_change, profile, strict_git, skip_check: as for `open_config`.
        default_profile: used if `profile` is not given and the config has a profile of this name.
        trust: import and call the code that the run names, even if the run is not marked as this user's: see
            docs/guide/trust.md.

    Raises:
        TrustError: the run does not count as this user's, and `trust` is not given.
        ConfigError: the run has no config: it was not made by an experiment.
    """
    tree, code = stored(run_dir, trust)
    if profile is None and default_profile in (tree.get("profiles") or {}):
        profile = default_profile
    resolved = resolve(ExperimentConfig, (), overrides, base=tree, profile=profile)
    checks = {"strict_git": strict_git, "skip_check": skip_check}
    # Trusted by now: `stored` has refused all other runs.
    return Configured(resolved, Path(run_dir), code, on_change, True, **checks)


def stored(run_dir: str | Path, trust: bool = False) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Return the config of a run's newest start and its code folders, in which Python now finds modules.

    If that start has saved nothing, its changes count only where they touch no step: the newest checkpoint
    was trained with the config stored there.
    """
    run_dir = to_read(run_dir)
    recorded, tree, saved = _recorded(run_dir)
    # Nothing of the run is imported before `admit`; `_trained` may import it.
    code = code_of(recorded, run_dir)
    why = distrust(run_dir, recorded) or ("" if saved is None else distrust_config(run_dir, saved))
    admit(run_dir, RunDir.open(run_dir, create=False).id, [tree, saved], code, why, trust)
    findable(code)
    return _trained(tree, saved, run_dir), code


def look(run_dir: str | Path, overrides: Iterable[str] = (), *, profile: str | None = None) -> dict[str, Any]:
    """Return a run's config as `open_run` would use it, without importing any of its code.

    Arguments of calls, also of those in overrides, are therefore neither checked nor completed.
    """
    run_dir = to_read(run_dir)
    _, tree, saved = _recorded(run_dir)
    tree = _trained(tree, saved, run_dir, imports=False)
    return resolve(ExperimentConfig, (), overrides, base=tree, profile=profile, imports=False).tree


def _recorded(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Return the facts of the newest start, the config in them, and the newest checkpoint's config.

    The checkpoint's config is None if that start itself has saved the newest checkpoint.
    """
    start = RunJournal(run_dir).newest_start()
    recorded: dict[str, Any] = {} if start is None else start.data.get("facts", {})
    tree: dict[str, Any] = without_credentials(recorded.get("config") or {})
    if start is None or not isinstance(tree, dict) or not {"task", "streams"} <= tree.keys():
        raise ConfigError(
            f"the run in {run_dir} has no config of an experiment; start it by its own program, or from "
            "its config file: everstep train FILE"
        )
    newest = Store(run_dir).facts()[-1:]
    # If the newest start has saved, its own config is the trained one.
    if not newest or newest[0].segment == start.segment:
        return recorded, tree, None
    checkpoint = find_checkpoint(run_dir, lambda _: None)
    meta: Any = None if checkpoint is None else checkpoint.meta
    return recorded, tree, (meta or {}).get("config") or None


def _trained(
    tree: dict[str, Any], saved: dict[str, Any] | None, run_dir: Path, *, imports: bool = True
) -> dict[str, Any]:
    """Return the newest start's config, with the newest checkpoint's values of keys that change training."""
    if saved is None:
        return tree
    given = resolve(ExperimentConfig, base=tree, imports=imports)
    changes = touching(saved, given, imports=imports)
    if not changes:
        return tree
    print(
        f"note: the newest start of {run_dir} saved nothing, and what it changed is left out:"
        f"{told(changes).rstrip('. ')}",
        file=sys.stderr,
    )
    return kept_tree(saved, tree, imports=imports)


def findable(folders: Iterable[Path]) -> None:
    """Let Python find modules in some folders, as it finds those beside a script."""
    for folder in folders:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
