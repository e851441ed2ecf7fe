"""Lists that several commands share: the checkpoints and the best weights of a run on disk."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep.checkpoint import CheckpointName, Store, is_interim, read_manifest
from everstep.checkpoint.format import check_sizes, size
from everstep.errors import CheckpointError

BEST = ("metric", "rank", "value", "step", "epoch", "path")
"""Columns of a table of best weights."""


def checkpoints_of(run_dir: Path) -> list[dict[str, Any]]:
    """List a dictionary per checkpoint, oldest first, from the manifests alone.

    Tables leave out interim checkpoints ("interim" is true): only the next start needs these.
    """
    store = Store(run_dir)
    pins, next_name = set[CheckpointName](), ""
    with contextlib.suppress(CheckpointError):  # the next start reports it
        pins = store.pins()
    rows = [_describe(store, name, name in pins) for name in store.names()]
    with contextlib.suppress(CheckpointError):
        next_name = store.chosen_by_hand()
    next_name = next_name or newest_whole(rows).get("name", "")
    return [{**one, "next": one["name"] == next_name} for one in rows]


def _describe(store: Store, name: CheckpointName, pinned: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": str(name), "step": name.step, "epoch": name.epoch}
    row |= {"pinned": pinned, "next": False, "interim": False, "path": str(store.path(name))}
    try:
        body = read_manifest(store.path(name))
        check_sizes(store.path(name), body)
    except CheckpointError as error:
        return row | {"whole": False, "problem": str(error)}
    meta, created = body["meta"] or {}, None
    with contextlib.suppress(ValueError, OverflowError):
        created = datetime.fromisoformat(body["created"]).timestamp()
    return row | {
        "whole": True,
        **{key: body[key] for key in ("epoch", "phase", "partial", "digest")},
        "interim": is_interim(body["meta"]),
        "bytes": size(body),
        "ranks": len(body["ranks"]),
        "created": created,
        "metrics": meta.get("metrics", {}),
        "one_fingerprint": meta.get("one_fingerprint", True),
        "options": meta.get("options", {}),
    }


def asked_for(checkpoints: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the checkpoints that a schedule, an interruption or a person (by a pin) asked for."""
    return [one for one in checkpoints if one["pinned"] or not one["interim"]]


def newest_whole(checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the newest whole checkpoint of a list: its "digest", as `Ending.digest`; {} without one."""
    return next((one for one in reversed(checkpoints) if one["whole"]), {})


def best_weights(run_dir: Path) -> list[dict[str, Any]]:
    """List the folders of best weights: metric, rank, value, step, epoch and path, as far as known.

    The rank is that in the newest checkpoint, 1 is the best; None for weights that only an older one knows.
    """
    best_paths = Store(run_dir).kept_best().values()
    ranks = {path: rank for paths in best_paths for rank, path in enumerate(paths, 1)}
    best = run_dir / "best"
    metrics = [path for path in best.glob("*") if not (best.is_symlink() or path.is_symlink())]
    folders = [path for metric in metrics for path in metric.glob("*") if path.is_dir()]
    rows = []
    for path in sorted(folders, key=lambda path: (path.parent.name, ranks.get(path, len(folders)))):
        weights: dict[str, Any] = {"metric": path.parent.name, "rank": ranks.get(path)}
        with contextlib.suppress(CheckpointError):
            body = read_manifest(path)
            weights |= {name: value for name, value in (body["meta"] or {}).items() if name != "run"}
            weights |= {"step": body["step"], "epoch": body["epoch"]}
        rows.append({**weights, "path": str(path)})
    return rows
