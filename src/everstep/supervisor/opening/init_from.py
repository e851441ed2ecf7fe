"""Warm start and partial restore: parts of a checkpoint, for a run without one of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from everstep.arguments import checked_init
from everstep.checkpoint import Checkpoint, find_checkpoint
from everstep.checkpoint.manifest import MANIFEST
from everstep.contracts.state import BESIDE
from everstep.errors import ConfigError, NoCheckpointError, RestoreError, nearest
from everstep.formats import Foreign, open_foreign
from everstep.record import to_read, user_path
from everstep.supervisor.opening import unread
from everstep.supervisor.opening.wrapper_names import base_hint, base_left_out, hint
from everstep.supervisor.saving.state_tree import Progress, reading, saved_tree
from everstep.supervisor.saving.user_state import UserState

Policy = Literal["error", "warn", "skip"]
_RESETS = ("step", "optimizer", "lr")


@checked_init
@dataclass(frozen=True)
class InitFrom:
    """Choice of the parts of a checkpoint, or of another program's weights, to start from.

    Names are "ENTRY/NAME", as in "model/encoder.0.weight"; an entry that is not a flat set of arrays
    (an optimizer, a scheduler) is taken or left as a whole, by its entry's name.

    Args:
        path: a run directory (its newest whole checkpoint), the folder of a checkpoint, or
            `RUN/best/METRIC`: the best weights.  Or another program's weights: a safetensors file, a
            folder as Hugging Face writes it, a file of torch.save (weights only), or a folder of
            torch.distributed.checkpoint (tensors only).
        include, exclude: regular expressions searched in names, after `rename`; include None takes all.
        rename: name in the checkpoint to name here; a regular expression also works.
        on_missing: action for a name that the checkpoint lacks: "error", "warn" or "skip" (keep it as it is).
        on_unexpected: action for a name of the checkpoint that is not here.
        on_reshaped: action for a name with another shape or dtype.
        reset: of {"step", "optimizer", "lr"}: start counting at 0, start the optimizer fresh, keep
            this program's learning rates.  Without "step" the counters continue.
        entry: entry for another program's weights that have names alone, as a `state_dict` has; default:
            the only entry that is a flat set of arrays.

    Raises:
        ConfigError: an argument is unknown; in use, if nothing of the checkpoint was chosen.
    """

    path: str | Path
    include: str | None = None
    exclude: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    on_missing: Policy = "error"
    on_unexpected: Policy = "error"
    on_reshaped: Policy = "error"
    reset: Collection[str] = ("step",)
    entry: str | None = None

    def __post_init__(self) -> None:
        user_path(self.path, "path")
        for name in self.reset:
            if name not in _RESETS:
                raise ConfigError(f"InitFrom(reset={set(self.reset)}): {name!r}: {nearest(name, _RESETS)}")
        patterns = [("include", self.include), ("exclude", self.exclude)]
        patterns += [("rename", old) for old in self.rename]
        for name, pattern in patterns:
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ConfigError(
                    f"InitFrom({name}={getattr(self, name)!r}): {pattern!r}: {error}; give a regular "
                    "expression, or re.escape(name)"
                ) from error
        for name in ("on_missing", "on_unexpected", "on_reshaped"):
            if getattr(self, name) not in ("error", "warn", "skip"):
                raise ConfigError(f'InitFrom({name}={getattr(self, name)!r}): give "error", "warn" or "skip"')

    @classmethod
    def of(cls, given: str | Path | Self | None) -> Self | None:
        """Make an InitFrom of an `init_from=` argument."""
        return given if given is None or isinstance(given, cls) else cls(path=given)  # type: ignore[arg-type]

    def load(self, user: UserState, progress: Progress, say: Callable[[str], None]) -> str:
        """Load the chosen parts; return in words what was used.

        Raises:
            RestoreError: names do not fit and are not allowed to; has the three lists of them.
            NoCheckpointError: `path` has no checkpoint.
        """
        foreign = self.open_foreign(lambda note: say(f"init_from: {note}"))
        if foreign is not None:
            user.load_user(self.merge_foreign(user, foreign, say))
            return f"{foreign.path} ({foreign.kind})"
        checkpoint = self.read(lambda note: say(f"init_from: {note}"), in_user)
        saved = saved_tree(checkpoint, ("user",) if "step" in self.reset else ("user", "progress"))
        where = str(checkpoint.path)
        merged = self.merge(user, saved["user"], where, say)
        with reading(where, "user"):
            user.check(merged, where)
            user.load_user(merged)
        if "step" not in self.reset:
            with reading(where, "progress"):
                counters = Progress.from_tree(saved["progress"])
            progress.step, progress.epoch = counters.step, counters.epoch
            progress.epoch_start = counters.step
        return f"{checkpoint.path} (step {checkpoint.step})"

    def read(self, say: Callable[[str], None], wanted: Callable[[str], bool]) -> Checkpoint:
        """Read the checkpoint; nothing there is changed.

        Args:
            wanted: whether an array is read, by its name in the checkpoint.

        Raises:
            NoCheckpointError: `path` has no checkpoint.
        """
        path = to_read(user_path(self.path, "path"))
        found = find_checkpoint(path, say, wanted=wanted)
        if found is None:
            raise NoCheckpointError(
                f"{str(path)!r} is neither a checkpoint, nor best weights, nor a run with a "
                "checkpoint; check the path"
            )
        return found

    def open_foreign(self, say: Callable[[str], None]) -> Foreign | None:
        """Open another program's weights; None if `path` is everstep's own, or nothing.

        Raises:
            CheckpointError: a file is damaged, or has what cannot be read; says what to do.
            ConfigError: counters are wanted, which only a checkpoint has.
        """
        path = to_read(user_path(self.path, "path"))
        if (path / MANIFEST).exists() or (path / "run.json").exists():
            return None
        found = open_foreign(path, say)
        if found is not None and "step" not in self.reset:
            raise ConfigError(
                f'InitFrom(reset={set(self.reset)}): {path} has no counters: leave "step" in reset='
            )
        return found

    def merge_foreign(
        self, user: UserState, foreign: Foreign, say: Callable[[str], None], *, strangers: bool = True
    ) -> dict[str, Any]:
        """Return the tree to load per entry, as `merge`, with the chosen names of another program's weights.

        Args:
            strangers: whether a run starts: then optimizers, and entries of which a file with names alone
                knows nothing, are left as they are.  False where each entry must be there.
        """
        saved = {name: tree for name, tree in foreign.tree.items() if not _is_optimizer(tree)}
        asked: set[str] = set(user.entries)
        if strangers:
            asked = {name for name, entry in user.entries.items() if not _is_optimizer(entry.save())}
            if left := [name for name in user.entries if name in foreign.tree and name not in saved]:
                say(f"init_from: {', '.join(left)}: optimizers are only taken from everstep's checkpoints")
        if foreign.is_flat:
            entry = self._entry_for(user, foreign)
            saved = {entry: next(iter(saved.values())) if "" in saved else saved}
            asked = {entry} if strangers else asked
        elif self.entry is not None:
            raise ConfigError(
                f"InitFrom(entry={self.entry!r}): {foreign.path} has names of its own for what it holds: "
                f"{', '.join(map(str, foreign.tree))}; choose with include= and rename="
            )
        where = str(foreign.path)
        merged = self.merge(user, saved, where, say, strangers=strangers, asked=asked)
        user.check(merged, where)
        return merged

    def _entry_for(self, user: UserState, foreign: Foreign) -> str:
        """Return the name of the entry that weights without an entry's name belong to."""
        if self.entry is not None:
            user.require_entries("InitFrom(entry=)", [self.entry])
            return self.entry
        flat = [name for name, entry in user.entries.items() if _split(name, entry.save())[0][0] != name]
        if len(flat) != 1:
            raise ConfigError(
                f"{foreign.path} names no entry of the state, and {len(flat)} entries have named arrays "
                f"({', '.join(flat) or 'none'}): choose with InitFrom(..., entry={[*flat, 'model'][0]!r})"
            )
        return flat[0]

    def merge(
        self,
        user: UserState,
        saved: dict[str, Any],
        where: str,
        say: Callable[[str], None],
        *,
        strangers: bool = True,
        asked: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the tree to load per entry: the program's own, with the chosen names from the checkpoint.

        Args:
            saved: the checkpoint's `user` branch.
            strangers: False to ignore entries that only the checkpoint has.
            asked: the entries that must not miss a name; None for all.

        Raises:
            RestoreError: names do not fit and are not allowed to; has the three lists of them.
        """
        old = {name: entry.save() for name, entry in user.entries.items()}
        left = {
            name for name, tree in (old | saved).items() if "optimizer" in self.reset and _is_optimizer(tree)
        }
        ours = {path: value for name, tree in old.items() for path, value in _split(name, tree)}
        theirs = self._theirs({name: tree for name, tree in saved.items() if name not in left})
        if not theirs:
            named = [p for name, tree in saved.items() for p, _ in _split(name, tree)]
            renamed = ", ".join(sorted(map(self._renamed, named))[:8])
            raise ConfigError(
                f"{self} takes nothing of {where}: give include= and exclude= that are searched in the names "
                f"as they are here, after rename=: {renamed}, ..."
            )
        missing = [p for p in ours if p not in theirs and p not in left and self._chosen(p)]
        missing = [p for p in missing if asked is None or p.partition("/")[0] in asked]
        missing = unread.untied(missing, ours, theirs)
        unexpected = [p for p in theirs if p not in ours and (strangers or p.partition("/")[0] in old)]
        both = {path: unread.kinds(theirs[path], ours[path]) for path in theirs if path in ours}
        reshaped = {path: f"{path} {old} -> {new}" for path, (old, new) in both.items() if old != new}
        self._refuse(where, missing, unexpected, list(reshaped.values()), say, base_hint(old, unexpected))
        if left_out := base_left_out(old, unexpected):
            # also for "skip", which was meant for names that nothing here needs
            say(f"init_from: {left_out}")
        for path in theirs:
            if path in ours and path not in reshaped:
                copies = user.entries[path.partition("/")[0]].copies
                ours[path] = self._keep_lr(ours[path], unread.taken(theirs[path], ours[path], copies))
        return {name: _join(name, tree, ours) for name, tree in old.items()}

    def _theirs(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the chosen values of the checkpoint, under the names here."""
        theirs: dict[str, Any] = {}
        came_from: dict[str, str] = {}
        for path, value in (part for name, tree in saved.items() for part in _split(name, tree)):
            new = self._renamed(path)
            if not self._chosen(new):
                continue
            if new in theirs:
                raise ConfigError(
                    f"InitFrom(rename={dict(self.rename)!r}): {came_from[new]!r} and {path!r} would both be "
                    f"{new!r}; give a narrower pattern, or rename the other one, too"
                )
            theirs[new], came_from[new] = value, path
        return theirs

    def _chosen(self, path: str) -> bool:
        if self.include is not None and not re.search(self.include, path):
            return False
        return self.exclude is None or not re.search(self.exclude, path)

    def _renamed(self, path: str) -> str:
        for old, new in self.rename.items():
            if path == old:
                return new
            try:
                changed = re.sub(old, new, path)
            except re.error as error:  # the replacement names a group that the pattern lacks
                raise ConfigError(
                    f"InitFrom(rename={{{old!r}: {new!r}}}): {error}; give a name, or groups of the pattern"
                ) from error
            if changed != path:
                return changed
        return path

    def _keep_lr(self, ours: Any, theirs: Any) -> Any:
        if "lr" not in self.reset or not _is_optimizer(theirs):
            return theirs
        groups = [
            {**new, "lr": old["lr"]}
            for old, new in zip(ours["param_groups"], theirs["param_groups"], strict=False)
        ]
        return {**theirs, "param_groups": groups}

    def _refuse(
        self,
        where: str,
        missing: list[str],
        unexpected: list[str],
        reshaped: list[str],
        say: Callable[[str], None],
        about_base: str,
    ) -> None:
        lists = {"missing": missing, "unexpected": unexpected, "reshaped": reshaped}
        refused = {kind: names for kind, names in lists.items() if getattr(self, f"on_{kind}") == "error"}
        if any(refused.values()):
            raise RestoreError(
                f"{where} does not fit; choose with include=, exclude=, rename=, or allow it with "
                'on_missing=, on_unexpected=, on_reshaped="skip"'
                f"{hint(missing, unexpected)}{about_base}",
                **refused,
            )
        for kind, names in lists.items():
            if names and getattr(self, f"on_{kind}") == "warn":
                say(f"init_from: {kind}: {', '.join(names)}")


def in_user(name: str) -> bool:
    """Whether an array of a checkpoint belongs to the user's state or the counters, by its name."""
    return name.startswith(("user/", "progress/"))


def names_in(checkpoint: Checkpoint) -> list[str]:
    """List the names of the user's state in a checkpoint, as `InitFrom` writes them."""
    saved = saved_tree(checkpoint, ("user",))["user"]
    return [path for name, tree in saved.items() for path, _ in _split(name, tree)]


def _is_optimizer(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.keys() >= {"state", "param_groups"}


def _split(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Split a model's state by name, without the keys in `BESIDE`; leave any other tree whole."""
    named = {key: v for key, v in tree.items() if not _beside(key)} if isinstance(tree, dict) else {}
    if named and all(hasattr(v, "shape") for v in named.values()):
        return [(f"{name}/{key}", value) for key, value in named.items()]
    return [(name, tree)]


def _beside(key: Any) -> bool:
    return isinstance(key, str) and key in BESIDE


def _join(name: str, tree: Any, parts: Mapping[str, Any]) -> Any:
    split = _split(name, tree)
    if len(split) == 1 and split[0][0] == name:
        return parts[name]
    beside = {key: value for key, value in tree.items() if _beside(key)}
    return {path[len(name) + 1 :]: parts[path] for path, _ in split} | beside
