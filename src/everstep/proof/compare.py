"""Comparison of two runs: every leaf of the last state, every row, the best weights, the end."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeAlias

from everstep.checkpoint import Checkpoint, Store, read_checkpoint
from everstep.record import ABSENT, Difference, RunDir, RunJournal
from everstep.state import Encoded, leaves

_Facts: TypeAlias = dict[str, list[bytes]]
"""Facts of a run by path; a second value under a path is a difference."""


def compare_runs(a: Path, b: Path, *, shared: bool = False) -> list[Difference]:
    """Compare two runs bit for bit; an empty list says that they are the same run.

    Compared are the newest checkpoint's state tree outside `wall/`, the valid journal rows that do
    not depend on the clock (each key once), the best weights that the checkpoint speaks of, and how
    the run ended.

    Args:
        a, b: run directories; only read.
        shared: leave out values that only one run has, as for runs with different services.

    Returns:
        The differences, sorted by their paths: "leaf/PATH" (of another rank than 0 "rank R/leaf/PATH"),
        "checkpoint", "ranks", "row/EPOCH/STEP/PHASE/NAME/SEQ", "best/METRIC/PATH" or "ended".

    Raises:
        RunDirError: a path is not a run directory.
        DamagedCheckpointError: the newest checkpoint, or the best weights, are damaged.
    """
    left, right = _facts(Path(a)), _facts(Path(b))
    found = []
    for path in sorted(left.keys() | right.keys()):
        one, other = left.get(path, []), right.get(path, [])
        if (one != other or len(one) > 1) and not (shared and [] in (one, other)):
            head, _, rest = path.partition("/")
            own = head.startswith("rank ")
            rank = int(head.removeprefix("rank ")) if own else 0
            component, name = _of_path(rest if own else path)
            values = _shown(one, other), _shown(other, one)
            found.append(Difference(component, name, *values, place="end", rank=rank, path=path))
    return found


def _of_path(path: str) -> tuple[str, str]:
    """Return the component of a path, and the name in it."""
    kind, _, rest = path.partition("/")
    branch, _, name = rest.partition("/")
    name = name.removesuffix("#") or path
    if kind == "best":
        return "service", f"best {rest}"
    if kind != "leaf" or branch == "progress":
        return "journal", path
    if branch == "services":
        return "service", name.partition("/")[0]
    if branch == "streams":
        return "samples", name.partition("/")[0]
    if branch == "rng":
        return "random state", name
    return ("optimizer" if branch == "gradients" else "state"), name


def state_leaves(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Path -> bytes of every leaf of a checkpoint's state tree, `wall/` included."""
    encoded = Encoded(checkpoint.structure, checkpoint.arrays)
    return {path: bytes(data) for path, data in leaves(encoded)}


def _facts(run_dir: Path) -> _Facts:
    RunDir.open(run_dir, create=False)
    facts = {**_rows(run_dir), "ended": [repr(RunJournal(run_dir).ended()).encode()]}
    store = Store(run_dir)
    names = store.names()
    if not names:
        return facts
    last = store.read(names[-1])
    facts["checkpoint"] = [str(last.name).encode()]
    facts["ranks"] = [str(last.ranks).encode()]
    facts |= _leaves("leaf", Encoded(last.structure, last.arrays))
    for rank in range(1, last.ranks):
        facts |= _leaves(f"rank {rank}/leaf", store.read(last.name, rank).own)
    return facts | _best(run_dir, last)


def _leaves(where: str, tree: Encoded) -> _Facts:
    """Return the leaves of a tree outside `wall/`, each below `where`."""
    return {
        f"{where}/{path}": [bytes(data)]
        for path, data in leaves(tree)
        if path.split("/")[0].removesuffix("#") != "wall"
    }


def _rows(run_dir: Path) -> _Facts:
    rows: _Facts = defaultdict(list)
    for key, value in RunJournal(run_dir).comparable():
        rows[f"row/{'/'.join(map(str, key))}"].append(struct.pack(">Qq", *value))
    return rows


def _best(run_dir: Path, last: Checkpoint) -> _Facts:
    meta: Any = last.meta
    facts: _Facts = {}
    for metric, names in meta["kept"].items():
        for rank, name in enumerate(names, 1):
            place = f"best/{metric}" + (f" ({rank})" if rank > 1 else "")
            saved = read_checkpoint(run_dir / "best" / metric.replace("/", ".") / name)
            facts[place] = [name.encode()]
            facts |= {f"{place}/{path}": [data] for path, data in state_leaves(saved).items()}
    return facts


def _shown(values: list[bytes], other: list[bytes]) -> str:
    """Show the first value (of long bytes, those around the first difference), and the number of values."""
    if not values:
        return ABSENT
    value, with_what = values[0], other[0] if other else b""
    at = next((i for i, (x, y) in enumerate(zip(value, with_what, strict=False)) if x != y), 0)
    text = value[at : at + 16]
    shown = text.decode() if text.isascii() and text.decode().isprintable() else text.hex()
    place = f" at byte {at} of {len(value)}" if len(value) > 16 else ""
    return shown + place + (f" ({len(values)} times)" if len(values) > 1 else "")
