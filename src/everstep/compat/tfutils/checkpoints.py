"""Places of runs that parameters name, and the parts of checkpoints that they load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from everstep.checkpoint import Store, find_checkpoint
from everstep.compat.tfutils.params import Load, Place
from everstep.errors import ConfigError, NoCheckpointError, nearest
from everstep.record import located, to_read
from everstep.supervisor import InitFrom
from everstep.supervisor.opening.init_from import names_in

_COUNTER = "global_step"
"""State entry that is restored with the counters, not by the names that are chosen."""


def folder_of(place: Place, exp_id: str | None = None) -> Path:
    """Return CACHE_DIR/DBNAME/COLLNAME, and below it the folder of a run."""
    parts = [part for part in (place.dbname, place.collname, exp_id) if part is not None]
    for part in parts:
        if "/" in part or part in (".", ".."):
            raise ConfigError(f"{part!r} names a folder; give a string that has no '/'")
    return Path(place.cache_dir or "runs", *parts)


def run_dir_of(place: Place) -> Path:
    """Return the run directory: CACHE_DIR/DBNAME/COLLNAME/EXP_ID."""
    if place.exp_id is None:
        raise ConfigError("save_params.exp_id is missing; give the run a name, or do_save=False")
    return folder_of(place, place.exp_id)


def index_of(place: Place, section: str) -> str | None:
    """Return the URL of the database that `host` and `port` name; None for the file beside the runs."""
    host, port = place.host, place.port
    if host is None and port is None:
        return None
    if host is None or port == 27017 or ("://" in host and port is not None):
        raise ConfigError(
            f"{section}: port={port} with host={host!r}; give a PostgreSQL's host beside its port (27017 "
            "is MongoDB's), or a URL as host, or neither: then the index is a file beside the runs"
        )
    return host if "://" in host else f"postgresql://{host}:{port or 5432}/everstep"


def source(load: Load, save: Place | None) -> Path | None:
    """Return the checkpoint, or the run, that `load_params` name; None if they name the run that saves."""
    if load.from_ckpt is not None:
        return Path(load.from_ckpt)
    place, own = load, None
    if save is not None:
        lacking = {n for n in Place.model_fields if n != "exp_id" and getattr(load, n) is None}
        place = load.model_copy(update={name: getattr(save, name) for name in lacking})
        own = None if save.exp_id is None else run_dir_of(save)
    there = None if load.exp_id is None else run_dir_of(place)
    if load.query is None:
        return None if there == own else there
    if own is not None and there == own:
        raise ConfigError(
            f"loading pointlessly: load_params.query asks for {there}, where this run saves, and from "
            "where it resumes by itself; leave the query out, or save elsewhere"
        )
    return _queried(place)


def _queried(place: Load) -> Path:
    """Return the newest run that a query finds, or its newest checkpoint if the query asks for a step."""
    from everstep.index.location import id_at
    from everstep.index.query import query as ask

    query = place.query or {}
    index = index_of(place, "load_params") or located(folder_of(place))
    where = {name: value for name, value in query.items() if name != "step"}
    for run in reversed(ask("runs", where, index=index)):
        path = Path(str(run["path"]))
        # The index may name a folder in which another run lies by now.
        if place.exp_id not in (None, path.name) or id_at(path) != run["name"]:
            continue
        if "step" not in query:
            if Store(path).names():
                return path
            continue
        at = {"run": run["name"], "step": query["step"]}
        for checkpoint in reversed(ask("checkpoints", at, index=index)):
            if (folder := path / "checkpoints" / str(checkpoint["name"])).is_dir():
                return folder
    raise NoCheckpointError(
        f"load_params.query {query!r} finds no checkpoint in {folder_of(place)}; change it; everstep runs "
        "--where tries one"
    )


def chosen(path: Path, load: Load, *, entry: str | None = None) -> tuple[InitFrom, int]:
    """Choose what to load, `entry` or all but the counter; returns the choice and the checkpoint's step."""
    checkpoint = find_checkpoint(to_read(path), print)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} has no checkpoint to load; check load_params")
    known = [name for name in names_in(checkpoint) if name != _COUNTER]
    known = [name for name in known if entry in (None, name.partition("/")[0])]
    include, exclude = (None, f"^{_COUNTER}$") if entry is None else (f"^{re.escape(entry)}(?:/|$)", None)
    wanted = None
    rename: dict[str, str] = {}
    if load.load_param_dict is not None:
        wanted = []
        for old, new in load.load_param_dict.items():
            old = _complete(old, known)
            top, slash, _ = old.partition("/")  # a new name without an entry gets the old one's
            wanted.append(f"{top}/{new}" if slash and not new.startswith(f"{top}/") else new)
            rename[f"^{re.escape(old)}$"] = wanted[-1].replace("\\", r"\\")
    elif (choice := load.to_restore) is not None:
        if isinstance(choice, str | re.Pattern):
            wanted = [name for name in known if re.search(choice, name)]
        else:
            names: Iterable[str] = choice(list(known)) if callable(choice) else choice
            wanted = [_complete(name, known) for name in names]
        if not wanted:
            raise ConfigError(f"load_params.to_restore chooses nothing of {path}; known: {', '.join(known)}")
    if wanted is not None:
        include, exclude = f"^(?:{'|'.join(map(re.escape, wanted))})$", None
    reset = () if load.restore_global_step else ("step",)
    return InitFrom(path, include=include, exclude=exclude, rename=rename, reset=reset), checkpoint.step


def _complete(name: str, known: list[str]) -> str:
    """Complete a name to a name in the checkpoint; names of the model may leave out "model/"."""
    for each in (name, f"model/{name}"):
        if each in known:
            return each
    raise ConfigError(f"load_params: the checkpoint has no {name!r}; {nearest(name, known)}")
