"""Places of runs that parameters name, and the parts of checkpoints that they load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store, find_checkpoint
from everstep.compat.tfutils.params import Params
from everstep.errors import ConfigError, NoCheckpointError, nearest
from everstep.record import located, to_read
from everstep.supervisor import InitFrom
from everstep.supervisor.opening.init_from import names_in

_COUNTER = "global_step"
"""State entry that is restored with the counters, not by the names that are chosen."""
_PARTS = ("host", "port", "dbname", "collname", "exp_id", "cache_dir")


def folder_of(params: Params, *names: str) -> Path:
    """Return CACHE_DIR/DBNAME/COLLNAME, and below it the folder of some keys, such as "exp_id"."""
    parts = [part for name in ("dbname", "collname", *names) if (part := params[name]) is not None]
    for part in parts:
        if "/" in part or part in (".", ".."):
            raise ConfigError(f"{part!r} names a folder; give a string that has no '/'")
    return Path(params["cache_dir"] or "runs", *parts)


def run_dir_of(params: Params) -> Path:
    """Return the run directory: CACHE_DIR/DBNAME/COLLNAME/EXP_ID."""
    if params["exp_id"] is None:
        raise ConfigError("save_params.exp_id is missing; give the run a name, or do_save=False")
    return folder_of(params, "exp_id")


def index_of(params: Params, place: str) -> str | None:
    """Return the URL of the database that `host` and `port` name; None for the file beside the runs."""
    host, port = params["host"], params["port"]
    if host is None and port is None:
        return None
    if host is None or ("://" in host and port is not None):
        raise ConfigError(
            f"{place}: port={port} with host={host!r}; give the host of a PostgreSQL beside the port, or a "
            "URL as host without it, or neither"
        )
    if port == 27017:
        raise ConfigError(
            f"{place}: port 27017 is that of MongoDB, which is not used; give host and port of a "
            "PostgreSQL, or leave both out: then the index is a file beside the runs"
        )
    return host if "://" in host else f"postgresql://{host}:{port or 5432}/everstep"


def source(load: Params, save: Params | None) -> Path | None:
    """Return the checkpoint, or the run, that `load_params` name; None if they name the run itself.

    Args:
        save: gives the parts of the place that `load` lacks, except the run's name.
    """
    if load["from_ckpt"] is not None:
        return Path(load["from_ckpt"])
    place = {name: (save or {}).get(name) if load[name] is None else load[name] for name in _PARTS}
    place["exp_id"] = load["exp_id"]
    own = None if save is None or save["exp_id"] is None else run_dir_of(save)
    there = None if load["exp_id"] is None else run_dir_of(place)
    if load["query"] is None:
        return None if there == own else there
    if own is not None and there == own:
        raise ConfigError(
            f"loading pointlessly: load_params.query asks for {there}, where this run saves, and from "
            "where it resumes by itself; leave the query out, or save elsewhere"
        )
    return _queried(load["query"], place)


def _queried(query: Params, place: Params) -> Path:
    """Return the newest run that a query finds, or its newest checkpoint if the query asks for a step."""
    from everstep.index.location import id_at
    from everstep.index.query import query as ask

    folder = folder_of(place)
    index = index_of(place, "load_params") or located(folder)
    where = {name: value for name, value in query.items() if name != "step"}
    for run in reversed(ask("runs", where, index=index)):
        path = Path(str(run["path"]))
        # The index may name a folder in which another run lies by now.
        if place["exp_id"] not in (None, path.name) or id_at(path) != run["name"]:
            continue
        if "step" not in query:
            if Store(path).names():
                return path
            continue
        at = {"run": run["name"], "step": query["step"]}
        for checkpoint in reversed(ask("checkpoints", at, index=index)):
            if (found := path / "checkpoints" / str(checkpoint["name"])).is_dir():
                return found
    raise NoCheckpointError(
        f"load_params.query {dict(query)!r} finds no checkpoint in {folder}; "
        "change it; everstep runs --where tries one"
    )


def chosen(path: Path, load: Params, *, entry: str | None = None) -> tuple[InitFrom, int]:
    """Choose the parts of a checkpoint to load; returns the choice and the checkpoint's step.

    Args:
        entry: the entry of the state to load; None for all but the counter.
    """
    checkpoint = find_checkpoint(to_read(path), print)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} has no checkpoint to load; check load_params")
    known = [name for name in names_in(checkpoint) if name != _COUNTER]
    if entry is not None:
        known = [name for name in known if name.partition("/")[0] == entry]
    include = exclude = wanted = None
    rename: dict[str, str] = {}
    if load["load_param_dict"] is not None:
        pairs = {}
        for old, new in load["load_param_dict"].items():
            old = _complete(old, known)
            top, slash, _ = old.partition("/")  # a new name without an entry gets the old one's
            pairs[old] = f"{top}/{new}" if slash and not new.startswith(f"{top}/") else new
        rename = {f"^{re.escape(old)}$": new.replace("\\", r"\\") for old, new in pairs.items()}
        wanted = list(pairs.values())
    elif load["to_restore"] is not None:
        wanted = _matching(load["to_restore"], known)
        if not wanted:
            raise ConfigError(f"load_params.to_restore chooses nothing of {path}; known: {', '.join(known)}")
    if wanted is not None:
        include = f"^(?:{'|'.join(map(re.escape, wanted))})$"
    elif entry is not None:
        include = f"^{re.escape(entry)}(?:/|$)"
    else:
        exclude = f"^{_COUNTER}$"
    reset = () if load["restore_global_step"] else ("step",)
    return InitFrom(path, include=include, exclude=exclude, rename=rename, reset=reset), checkpoint.step


def _matching(choice: Any, known: list[str]) -> list[str]:
    if isinstance(choice, str | re.Pattern):
        return [name for name in known if re.search(choice, name)]
    names: Iterable[str] = choice(list(known)) if callable(choice) else choice
    return [_complete(name, known) for name in names]


def _complete(name: str, known: list[str]) -> str:
    """Complete a name to a name in the checkpoint; names of the model may leave out "model/"."""
    for each in (name, f"model/{name}"):
        if each in known:
            return each
    raise ConfigError(f"load_params: the checkpoint has no {name!r}; {nearest(name, known)}")
