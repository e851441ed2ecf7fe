"""Checkpoints that parameters name, and the parts of them that are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store, find_checkpoint
from everstep.errors import ConfigError, NoCheckpointError, nearest
from everstep.record import located, to_read
from everstep.supervisor import InitFrom
from everstep.supervisor.opening.init_from import names_in
from everstep.tfutils.params_schema import Load, Location

ROOT = "runs"
"""Folder of runs if `cache_dir` is not given."""

_COUNTER = "global_step"
"""State entry that is restored with the counters, not by the names that are chosen."""


def folder_of(params: Location) -> Path:
    """Return the folder of a collection: CACHE_DIR/DBNAME/COLLNAME."""
    parts = [name for name in (params.dbname, params.collname) if name is not None]
    for part in parts:
        _require_name(part)
    return Path(params.cache_dir or ROOT, *parts)


def run_dir_of(params: Location) -> Path:
    """Return the run directory: CACHE_DIR/DBNAME/COLLNAME/EXP_ID."""
    assert params.exp_id is not None
    _require_name(params.exp_id)
    return folder_of(params) / params.exp_id


def _require_name(name: str) -> None:
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"{name!r} names a folder; give a string that is not empty and has no '/'")


def index_of(params: Location, place: str) -> str | None:
    """Return the URL of the database that `host` and `port` name; None for the file beside the runs.

    Raises:
        ConfigError: `host` and `port` name no database.
    """
    host, port = params.host, params.port
    if host is None:
        if port is not None:
            raise ConfigError(
                f"{place}.port={port} without a host; give the host of a PostgreSQL server, or leave both out"
            )
        return None
    if "://" in host:
        if port is not None:
            raise ConfigError(f"{place}.port={port}: the host is a URL; put the port into the URL")
        return host
    if port == 27017:
        raise ConfigError(
            f"{place}: port 27017 is that of MongoDB, which is not used; give host and port of a "
            "PostgreSQL, or leave both out: then the index is a file beside the runs"
        )
    return f"postgresql://{host}:{port or 5432}/everstep"


def source(load: Load, save: Location | None) -> Path | None:
    """Return the checkpoint, or the run, that `load_params` name; None if they name the run itself.

    Args:
        save: gives the parts of the place that `load` lacks, except the run's name.

    Raises:
        ConfigError: a query can only find the run itself.
        NoCheckpointError: a query finds no checkpoint.
    """
    if load.from_ckpt is not None:
        return Path(load.from_ckpt)
    own = None if save is None or save.exp_id is None else run_dir_of(save)
    asked = Location.of({**_place(save), **_place(load), "exp_id": load.exp_id})
    there = None if load.exp_id is None else run_dir_of(asked)
    if load.query is None:
        return None if there is None or there == own else there
    if own is not None and there == own:
        raise ConfigError(
            f"loading pointlessly: load_params.query asks for {there}, where this run saves, and from "
            "where it resumes by itself; leave the query out, or save elsewhere"
        )
    return _asked(load.query, folder_of(asked), load.exp_id, index_of(asked, "load_params"))


def _place(params: Location | None) -> dict[str, Any]:
    """Return the parts of a place that are given."""
    parts = {name: getattr(params, name, None) for name in Location.model_fields}
    return {name: part for name, part in parts.items() if part is not None}


def _asked(query: Mapping[str, Any], folder: Path, exp_id: str | None, index: str | None) -> Path:
    """Return the newest run that a query finds, or its newest checkpoint if the query asks for a step."""
    where = {name: value for name, value in query.items() if name != "step"}
    asked = index or located(folder)
    from everstep.index.query import query as ask
    from everstep.index.readers import id_at

    for run in reversed(ask("runs", where, index=asked)):
        path = Path(str(run["path"]))
        # The index may name a folder in which another run lies by now.
        if (exp_id is not None and path.name != exp_id) or id_at(path) != run["name"]:
            continue
        if "step" not in query:
            if Store(path).names():
                return path
            continue
        for found in reversed(ask("checkpoints", {"run": run["name"], "step": query["step"]}, index=asked)):
            if (checkpoint := path / "checkpoints" / str(found["name"])).is_dir():
                return checkpoint
    raise NoCheckpointError(
        f"load_params.query {dict(query)!r} finds no checkpoint in {folder}; "
        "change it; everstep runs --where tries one"
    )


def chosen(path: Path, load: Load, *, entries: Iterable[str] | None = None) -> tuple[InitFrom, int]:
    """Choose the parts of a checkpoint to load; returns the choice and the checkpoint's step.

    Args:
        entries: entries of the state to load; None for all but the counter.

    Raises:
        NoCheckpointError: there is no checkpoint.
        ConfigError: the checkpoint lacks a name; names the nearest.
    """
    checkpoint = find_checkpoint(to_read(path), print)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} has no checkpoint to load; check load_params")
    known = [name for name in names_in(checkpoint) if name != _COUNTER]
    if entries is not None:
        known = [name for name in known if name.partition("/")[0] in entries]
    rename: dict[str, str] = {}
    if load.load_param_dict is not None:
        pairs = {_full(old, known): new for old, new in load.load_param_dict.items()}
        rename = {f"^{re.escape(old)}$": _like(old, new).replace("\\", r"\\") for old, new in pairs.items()}
        wanted = [_like(old, new) for old, new in pairs.items()]
    elif load.to_restore is not None:
        wanted = _restored(load.to_restore, known)
        if not wanted:
            raise ConfigError(f"load_params.to_restore chooses nothing of {path}; known: {', '.join(known)}")
    include = exclude = None
    if load.load_param_dict is not None or load.to_restore is not None:
        include = f"^(?:{'|'.join(map(re.escape, wanted))})$"
    elif entries is not None:
        include = f"^(?:{'|'.join(map(re.escape, entries))})(?:/|$)"
    else:
        exclude = f"^{_COUNTER}$"
    reset = () if load.restore_global_step else ("step",)
    return InitFrom(path, include=include, exclude=exclude, rename=rename, reset=reset), checkpoint.step


def _restored(choice: Any, known: list[str]) -> list[str]:
    if callable(choice):
        named: Callable[[list[str]], Iterable[str]] = choice
        return [_full(name, known) for name in named(list(known))]
    if isinstance(choice, str | re.Pattern):
        return [name for name in known if re.search(choice, name)]
    return [_full(name, known) for name in choice]


def _full(name: str, known: list[str]) -> str:
    """Complete a name to a name in the checkpoint; names of the model may leave out "model/"."""
    for each in (name, f"model/{name}"):
        if each in known:
            return each
    raise ConfigError(f"load_params: the checkpoint has no {name!r}; {nearest(name, known)}")


def _like(old: str, new: str) -> str:
    """Complete a name of this state: without an entry, it gets the entry of the checkpoint's name."""
    entry, slash, _ = old.partition("/")
    return f"{entry}/{new}" if slash and not new.startswith(f"{entry}/") else new
