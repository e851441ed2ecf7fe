"""Parts of a checkpoint, or of other weights: for a new run (`InitFrom`), for objects (`load`)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from everstep import backends
from everstep.arguments import checked_init, checked_keywords
from everstep.checkpoint import Checkpoint, Store, find_checkpoint, read_manifest
from everstep.checkpoint.format import MANIFEST
from everstep.contracts.state import BESIDE, Unread
from everstep.errors import ConfigError, DamagedCheckpointError, NoCheckpointError, RestoreError, nearest
from everstep.formats import DISTRIBUTED, Foreign, open_foreign
from everstep.record import RunJournal, to_read, user_path
from everstep.state import Encoded, split, within
from everstep.supervisor.leaving.exit import BestRecord
from everstep.supervisor.saving.state_tree import Progress, reading, saved_tree
from everstep.supervisor.saving.user_state import UserState, base_hint

Policy = Literal["error", "warn", "skip"]
Say = Callable[[str], None]
_RESETS = ("step", "optimizer", "lr")
_MISFITS = ("missing", "unexpected", "reshaped")


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
        rename: name in the checkpoint to name here: of an entry, of a part, or a regular expression.
        on_missing: action for a name that the checkpoint lacks: "error", "warn" or "skip" (keep it as it is).
        on_unexpected: action for a name of the checkpoint that is not here.
        on_reshaped: action for a name with another shape or dtype.
        reset: of {"step", "optimizer", "lr"}: start counting at 0, start the optimizer fresh, keep
            this program's learning rates.  The default is {"step"}; without "step" the counters continue,
            which takes a checkpoint: best weights have none.
        entry: entry for another program's weights that have names alone, as a `state_dict` has; default:
            the only entry that is a flat set of arrays.

    Raises:
        ConfigError: an argument is unknown; in use, if nothing of the checkpoint was chosen, or if two of its
            names become one.
        RestoreError: in use: names do not fit and are not allowed to; has the three lists of them.
        NoCheckpointError, CheckpointError: in use: `path` has no checkpoint, or it is damaged.
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
        for name in set(self.reset).difference(_RESETS):
            raise ConfigError(f"InitFrom(reset={set(self.reset)}): {name!r}: {nearest(name, _RESETS)}")
        patterns = [("include", self.include), ("exclude", self.exclude)]
        for name, pattern in [*patterns, *(("rename", old) for old in self.rename)]:
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ConfigError(
                    f"InitFrom({name}={getattr(self, name)!r}): {pattern!r}: {error}; give a regular "
                    "expression, or re.escape(name)"
                ) from error
        for name in (f"on_{kind}" for kind in _MISFITS):
            if getattr(self, name) not in ("error", "warn", "skip"):
                raise ConfigError(f'InitFrom({name}={getattr(self, name)!r}): give "error", "warn" or "skip"')

    @classmethod
    def of(cls, value: str | Path | Self | None) -> Self | None:
        return value if value is None or isinstance(value, cls) else cls(path=value)  # type: ignore[arg-type]

    def load(self, user: UserState, progress: Progress, say: Say) -> dict[str, Any] | None:
        """Load the chosen parts into the state of a new run; return the origin of what is a run's."""
        own = _rates(user)
        source = self.load_into(user, lambda text: say(f"init_from: {text}"))
        where = str(source.path)
        for name, rates in _rates(user).items():
            if rates != own[name] and "lr" not in self.reset:
                say(
                    f"init_from: {name!r} goes on with the learning rate of {where}, {_as_text(rates)}, and "
                    f"not with this program's, {_as_text(own[name])}; "
                    f"InitFrom(..., reset={sorted({'lr', *self.reset})}) keeps this program's"
                )
        if isinstance(source, Foreign):
            say(f"initialised from {where} ({source.kind})")
            return None
        if "step" not in self.reset:
            structure: Any = source.structure
            if "progress" not in structure:
                raise ConfigError(
                    f"InitFrom(reset={sorted(self.reset)}): the best weights {where} have no counters to "
                    f"go on from: add 'step', reset={sorted({'step', *self.reset})}"
                )
            saved = saved_tree(source, ("progress",))
            with reading(where, "progress"):
                counters = Progress.from_tree(saved["progress"])
            progress.step, progress.epoch = counters.step, counters.epoch
            progress.epoch_start = counters.step
        say(f"initialised from {where} (step {source.step})")
        return source.origin

    def load_into(self, user: UserState, say: Say, *, starts: bool = True) -> Checkpoint | Foreign:
        """Load the chosen parts into the objects; return their source.

        `starts`: whether a run starts: then entries that only the source has are unexpected; and of another
        program's weights optimizers are left out, and entries that a file with names alone does not know.
        False where each entry must be there.
        """
        path = to_read(user_path(self.path, "path"))
        # each entry as it is: the arrays of other entries are not read
        is_whole = not starts and self == InitFrom(self.path)
        names = [("user", name) for name in user.entries]
        select = within(names if is_whole else [("user",), ("progress",)])
        source = self._open_foreign(path, say) or find_checkpoint(path, say, select=select)
        if source is None:
            raise NoCheckpointError(
                f"{str(path)!r} is neither a checkpoint, nor best weights, nor a run with a "
                "checkpoint; check the path"
            )
        where = str(source.path)
        if isinstance(source, Foreign):
            saved, required = self._entries_of(source, user, say, starts)
            saved = self._merge(user, saved, where, say, starts, required)
        elif is_whole:
            _, own = split(Encoded(source.structure), names)
            saved = saved_tree(replace(source, structure=own.structure or {"user": {}}), ("user",))["user"]
        else:
            saved = saved_tree(source, ("user",))["user"]
            saved = self._merge(user, saved, where, say, starts, user.entries)
        is_read_late = isinstance(source, Foreign) and source.kind == DISTRIBUTED
        with reading(where, "user"):
            user.check(saved, where)
            user.load_or_put_back(saved, is_read_late=is_read_late)
        return source

    def _open_foreign(self, path: Path, say: Say) -> Foreign | None:
        """Open another program's weights; None if `path` is everstep's own, or nothing."""
        if (path / MANIFEST).exists() or (path / "run.json").exists():
            return None
        foreign = open_foreign(path, say)
        if foreign is not None and "step" not in self.reset:
            raise ConfigError(
                f'InitFrom(reset={set(self.reset)}): {path} has no counters: leave "step" in reset='
            )
        return foreign

    def _entries_of(
        self, foreign: Foreign, user: UserState, say: Say, starts: bool
    ) -> tuple[dict[str, Any], Collection[str]]:
        """Return the trees of other weights by entry, and the entries that must not miss a name."""
        saved = {name: tree for name, tree in foreign.tree.items() if not _is_optimizer(tree)}
        required: set[str] = set(user.entries)
        if starts:
            required = {name for name, entry in user.entries.items() if not _is_optimizer(entry.save())}
            if left := [name for name in user.entries if name in foreign.tree and name not in saved]:
                say(f"{', '.join(left)}: optimizers are only taken from everstep's checkpoints")
        if all(isinstance(value, Unread) for value in foreign.tree.values()):  # those of one object
            entry = self._entry_for(user, foreign)
            saved = {entry: next(iter(saved.values())) if "" in saved else saved}
            return saved, {entry} if starts else required
        if self.entry is not None:
            raise ConfigError(
                f"InitFrom(entry={self.entry!r}): {foreign.path} has names of its own for what it holds: "
                f"{', '.join(map(str, foreign.tree))}; choose with include= and rename="
            )
        return saved, required

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

    def _merge(
        self,
        user: UserState,
        saved: dict[str, Any],
        where: str,
        say: Say,
        starts: bool,
        required: Collection[str],
    ) -> dict[str, Any]:
        """Return the tree to load per entry: the program's own, with the chosen names of what is saved."""
        own = {name: entry.save() for name, entry in user.entries.items()}
        live = {path: value for name, tree in own.items() for path, value in _split(name, tree)}
        anew = {
            name for name, tree in (own | saved).items() if "optimizer" in self.reset and _is_optimizer(tree)
        }
        chosen = self._chosen_of({name: tree for name, tree in saved.items() if name not in anew}, where)
        missing = [
            path
            for path in live
            if path not in chosen and path not in anew and self._takes(path)
            if path.partition("/")[0] in required
        ]
        both = {path: _kinds(chosen[path], live[path]) for path in chosen if path in live}
        differing = {path: f"{path} {old} -> {new}" for path, (old, new) in both.items() if old != new}
        lists = {
            "missing": _untied(missing, live, chosen),
            "unexpected": [
                path for path in chosen if path not in live and (starts or path.partition("/")[0] in own)
            ],
            "reshaped": list(differing.values()),
        }
        about_base = base_hint(own, lists["unexpected"])
        refused = {kind: names for kind, names in lists.items() if getattr(self, f"on_{kind}") == "error"}
        if any(refused.values()):
            raise RestoreError(
                f"{where} does not fit; choose with include=, exclude=, rename=, or allow it with "
                f'on_missing=, on_unexpected=, on_reshaped="skip"{about_base}',
                **refused,
            )
        for kind, names in lists.items():
            if names and getattr(self, f"on_{kind}") == "warn":
                say(f"{kind}: {', '.join(names)}")
        if about_base:  # also for "skip", which was meant for names that nothing here needs
            say(about_base.removeprefix(". "))
        for path in (path for path in both if path not in differing):
            copies = user.entries[path.partition("/")[0]].copies
            live[path] = self._keep_lr(live[path], _read(chosen[path], live[path], copies))
        return {name: _join(name, tree, live) for name, tree in own.items()}

    def _chosen_of(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the chosen values of the checkpoint, under the names here."""
        chosen: dict[str, Any] = {}
        came_from: dict[str, str] = {}
        parts = {path: value for name, tree in saved.items() for path, value in _split(name, tree)}
        renamed = {path: self._renamed(path, saved) for path in parts}
        for path, new in renamed.items():
            if not self._takes(new):
                continue
            if new in chosen:
                raise ConfigError(
                    f"InitFrom(rename={dict(self.rename)!r}): {came_from[new]!r} and {path!r} would both be "
                    f"{new!r}; give a narrower pattern, or rename the other one, too"
                )
            chosen[new], came_from[new] = parts[path], path
        if not chosen:
            raise ConfigError(
                f"{self} selects nothing in {where}: give include= and exclude= that match the names "
                f"as they are here, after rename=: {', '.join(sorted(renamed.values())[:8])}, ..."
            )
        return chosen

    def _takes(self, path: str) -> bool:
        if self.include is not None and not re.search(self.include, path):
            return False
        return self.exclude is None or not re.search(self.exclude, path)

    def _renamed(self, path: str, entries: Collection[str]) -> str:
        for old, new in self.rename.items():
            if path == old or (old in entries and path.startswith(f"{old}/")):
                return new + path.removeprefix(old)
            if old in entries:  # its name alone: `actor` is no part of `actor_optimizer`
                continue
            try:
                changed = re.sub(old, new, path)
            except re.error as error:  # the replacement names a group that the pattern lacks
                raise ConfigError(
                    f"InitFrom(rename={{{old!r}: {new!r}}}): {error}; give a name, or groups of the pattern"
                ) from error
            if changed != path:
                return changed
        return path

    def _keep_lr(self, live: Any, saved: Any) -> Any:
        if "lr" not in self.reset or not _is_optimizer(saved):
            return saved
        keys = ("lr", "initial_lr")  # the second one is a schedule's
        groups = [
            {name: value for name, value in new.items() if name not in keys}
            | {name: old[name] for name in keys if name in old}
            for old, new in zip(live["param_groups"], saved["param_groups"], strict=False)
        ]
        return {**saved, "param_groups": groups}


def names_in(checkpoint: Checkpoint) -> list[str]:
    """List the names of the user's state in a checkpoint, as `InitFrom` writes them."""
    saved = saved_tree(checkpoint, ("user",))["user"]
    return [path for name, tree in saved.items() for path, _ in _split(name, tree)]


@dataclass(frozen=True)
class Loaded:
    """Source of loaded objects.

    Attributes:
        path: the checkpoint's folder, or the path of another program's weights, as a string.
        step, epoch: step and epoch of the run at the save; 0 for another program's weights.
        digest: digest of the checkpoint.
        seed: seed of the run; None for weights alone.
    """

    path: str
    step: int
    epoch: int
    digest: str = field(default="", compare=False)
    seed: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name of the checkpoint, or the end of the path of other weights."""
        parts = Path(self.path).parts
        return parts[-1] if parts[-2:-1] == ("checkpoints",) else "/".join(parts[-3:])


@checked_keywords
def load(source: str | Path | InitFrom, state: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Loaded:
    """Load objects from what a run has saved, as for inference; no run is opened, nothing is written.

        everstep.load("runs/digits/best/valid_loss", {"model": model})

    Entries that only the checkpoint has, such as the optimizer, are left out.

    Args:
        source: a run directory (its newest whole checkpoint), the folder of a checkpoint,
            `RUN/best/METRIC` (the best weights), another program's weights (safetensors, torch.save,
            torch.distributed.checkpoint), or an `InitFrom` that chooses and renames.
        state: name to object, under the names of the run's `state`.

    Raises:
        RestoreError: the checkpoint lacks an entry, or an entry does not fit; has the three lists, and
            nothing is loaded.
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    chosen = source if isinstance(source, InitFrom) else InitFrom(user_path(source, "source"))
    notes: list[str] = []
    saved = chosen.load_into(UserState(state), notes.append, starts=False)
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    where = str(saved.path)
    if isinstance(saved, Foreign):
        return Loaded(where, 0, 0)
    structure: Any = saved.structure
    # best weights have no counters
    counters = saved_tree(saved, ("progress",)) if "progress" in structure else {}
    seed = counters["progress"]["seed"] if counters else None
    return Loaded(where, saved.step, saved.epoch, saved.digest, seed)


@checked_keywords
def best(run_dir: str | Path) -> dict[str, BestRecord]:
    """Return the best weights of a run by metric, as its newest checkpoint names them.

        everstep.runs.best("runs/digits")["valid_loss"].value

    Raises:
        RunDirError: the path is not a run; names runs nearby.
    """
    store = Store(RunJournal(to_read(user_path(run_dir, "run_dir"))).run_dir)
    records = {}
    for metric, path in store.best().items():
        saved = read_manifest(path)
        value = (saved["meta"] or {}).get("value")
        if value is None:
            raise DamagedCheckpointError(
                f"checkpoint {path.name} is damaged: {path} does not say the value of {metric!r}"
            )
        records[metric] = BestRecord(metric, value, saved["step"], saved["epoch"], str(path))
    return records


def _rates(user: UserState) -> dict[str, list[float]]:
    """Return the learning rate of each optimizer's groups; where a schedule runs, that at its beginning.

    Rates that are no numbers, as the None of an optimizer that finds its own, are left out.
    """
    trees = {name: entry.save() for name, entry in user.entries.items()}
    rates = {
        name: [group.get("initial_lr", group.get("lr")) for group in tree["param_groups"]]
        for name, tree in trees.items()
        if _is_optimizer(tree)
    }
    return {
        name: [float(r) for r in values if isinstance(r, int | float) or getattr(r, "shape", None) == ()]
        for name, values in rates.items()
    }


def _as_text(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))


def _is_optimizer(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.keys() >= {"state", "param_groups"}


def _split(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Split a model's state by name, without the keys in `BESIDE`; leave any other tree whole."""
    named = {key: v for key, v in tree.items() if key not in BESIDE} if isinstance(tree, dict) else {}
    if named and all(hasattr(v, "shape") for v in named.values()):
        return [(f"{name}/{key}", value) for key, value in named.items()]
    return [(name, tree)]


def _join(name: str, tree: Any, parts: Mapping[str, Any]) -> Any:
    paths = [path for path, _ in _split(name, tree)]
    if paths == [name]:
        return parts[name]
    return {key: value if key in BESIDE else parts[f"{name}/{key}"] for key, value in tree.items()}


def _kinds(saved: Any, live: Any) -> tuple[str, str]:
    """Return shape and element type of both arrays; all values that are not arrays are of one kind."""
    if isinstance(saved, Unread):
        backend = backends.of(live)
        live_form = "no array" if backend is None else f"{tuple(live.shape)} {backend.facts(live).dtype}"
        return f"{saved.shape} {saved.dtype}", live_form
    old, new = (f"{tuple(v.shape)} {v.dtype}" if hasattr(v, "shape") else "no array" for v in (saved, live))
    return old, new


def _untied(missing: list[str], live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the missing names without those whose array is stored under another name (tied weights)."""

    def place(path: str) -> object:
        backend = backends.of(live[path])
        return None if backend is None else backend.facts(live[path]).place

    unread = (path for path, value in saved.items() if path in live and isinstance(value, Unread))
    stored = {place(path) for path in unread} - {None}
    return [path for path in missing if not stored or place(path) not in stored]


def _read(saved: Any, live: Any, copies: bool) -> Any:
    """Return a value to be loaded in place of ours; `copies`: whether its elements are copied at once."""
    if isinstance(saved, Unread):
        backend = backends.of(live)
        assert backend is not None  # `_kinds` tells it from ours
        return backend.late(saved) if copies else backend.from_host(saved.read())
    return _in_memory(saved)


def _in_memory(tree: Any) -> Any:
    """Return a tree with each unread array in the memory of the framework that wrote it."""
    if isinstance(tree, Unread):
        host = tree.read()
        return backends.get(host.backend).from_host(host)
    if isinstance(tree, dict):
        return type(tree)((key, _in_memory(value)) for key, value in tree.items())
    return type(tree)(map(_in_memory, tree)) if type(tree) in (list, tuple) else tree
