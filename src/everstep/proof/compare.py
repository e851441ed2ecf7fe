"""Comparison of two runs: every leaf of the last state, every row, the best weights, the end."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from everstep.checkpoint import Checkpoint, Store, read_checkpoint
from everstep.record import ABSENT, Difference, RunDir, RunJournal
from everstep.record.journal_reader import Key, Value
from everstep.record.step_comparison import row_words
from everstep.state import leaves

_Facts: TypeAlias = dict[tuple[int, str], list[bytes]]
"""Facts of a run by (rank, path); a second value under a path is a difference."""


def compare_runs(a: Path, b: Path) -> list[Difference]:
    """Compare two runs bit for bit; an empty list says that they are the same run.

    Compared are the newest checkpoint's state tree outside `wall/`, the valid journal rows that do
    not depend on the clock (each key once), the best weights that the checkpoint speaks of, and how
    the run ended.

    Args:
        a, b: run directories; only read.

    Returns:
        The differences, sorted by their paths: "leaf/PATH" (of another rank than 0 "rank R/leaf/PATH"),
        "checkpoint", "ranks", "row/EPOCH/STEP/PHASE/NAME/SEQ", "best/METRIC/PATH" or "ended".
    """
    left, right = _facts(Path(a)), _facts(Path(b))
    differences = []
    for rank, path in sorted(left.keys() | right.keys()):
        one, other = left.get((rank, path), []), right.get((rank, path), [])
        if one != other or len(one) > 1:
            label = f"rank {rank}/{path}" if rank else path
            values = *_component(path), _format(one, other), _format(other, one)
            differences.append(Difference(*values, place="end", rank=rank, path=label))
    return differences


def differing_rows(
    expected: Mapping[Key, Value], rows: Iterable[tuple[Key, Value]], run: str = ""
) -> Iterator[Difference]:
    """Yield the rows that differ from the expected ones, or are new."""
    for key, value in rows:
        reference = expected.get(key)
        if reference == value:
            continue
        epoch, step, phase, name, _ = key
        component = "loss"
        if phase.startswith("eval/"):
            component, name = "service", phase.removeprefix("eval/")
        old, new = row_words(reference, value)
        if reference is None:
            component, name, old = "journal", f"row {key[3]}", ABSENT
        # the head of an epoch lies before its first step
        step, place = (step + 1, "before") if phase == "head" else (step, "epoch")
        place = phase if phase in ("step", "tail") else place
        yield Difference(component, name, old, new, step, epoch, place, run)


def state_leaves(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Path -> bytes of every leaf of a checkpoint's state tree, `wall/` included."""
    return {path: bytes(data) for path, data in leaves(checkpoint.tree)}


def _component(path: str) -> tuple[str, str]:
    """Return the component of a path, and the name in it."""
    kind, _, rest = path.partition("/")
    branch, _, name = rest.partition("/")
    name = name.removesuffix("#") or path
    if kind == "best":
        return "service", f"best {rest}"
    if kind != "leaf" or branch == "progress":
        return "journal", path
    if branch in ("services", "streams"):
        return "service" if branch == "services" else "samples", name.partition("/")[0]
    return {"rng": "random state", "gradients": "optimizer"}.get(branch, "state"), name


def _facts(run_dir: Path) -> _Facts:
    RunDir.open(run_dir, create=False)
    journal, store = RunJournal(run_dir), Store(run_dir)
    facts: _Facts = defaultdict(list)
    facts[0, "ended"] = [repr(journal.ended()).encode()]
    for key, value in journal.comparable():
        facts[0, f"row/{'/'.join(map(str, key))}"].append(struct.pack(">Qq", *value))
    if not (names := store.names()):
        return facts
    last = store.read(names[-1])
    facts[0, "checkpoint"], facts[0, "ranks"] = [str(last.name).encode()], [str(last.ranks).encode()]
    trees = [last.tree]
    trees += [store.read(last.name, rank).own for rank in range(1, last.ranks)]
    for rank, tree in enumerate(trees):
        for path, data in leaves(tree):
            if path.split("/")[0].removesuffix("#") != "wall":
                facts[rank, f"leaf/{path}"] = [bytes(data)]
    meta: Any = last.meta
    for metric, best_names in meta["kept"].items():
        for number, name in enumerate(best_names, 1):
            place = f"best/{metric}" + (f" ({number})" if number > 1 else "")
            best = read_checkpoint(run_dir / "best" / metric.replace("/", ".") / name)
            facts[0, place] = [name.encode()]
            for path, leaf in state_leaves(best).items():
                facts[0, f"{place}/{path}"] = [leaf]
    return facts


def _format(values: list[bytes], other: list[bytes]) -> str:
    """Show the first value (of long bytes, those around the first difference), and the number of values."""
    if not values:
        return ABSENT
    value, with_what = values[0], other[0] if other else b""
    at = next((i for i, (x, y) in enumerate(zip(value, with_what, strict=False)) if x != y), 0)
    at *= len(value) > 24  # a number is shown in full
    text = value[at : at + 24]
    shown = text.decode() if text.isascii() and text.decode().isprintable() else text.hex()
    place = f" at byte {at} of {len(value)}" if len(value) > 24 else ""
    return shown + place + (f" ({len(values)} times)" if len(values) > 1 else "")
