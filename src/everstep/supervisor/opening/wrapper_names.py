"""Hints for names that do not fit: a prefix that a wrapper adds to all of them, a base under trainable()."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from everstep.contracts.state import BASE


def hint(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Write the `rename=` that makes names "ENTRY/NAME" fit, as the end of a sentence; or ""."""
    there, rename = _by_entry(unexpected), dict[str, str]()
    for entry, ours in _by_entry(missing).items():
        theirs = there.get(entry, set())
        if prefix := _prefix(theirs, ours):
            rename[f"^{re.escape(entry)}/{re.escape(prefix)}"] = f"{entry}/"
        elif prefix := _prefix(ours, theirs):
            rename[f"^{re.escape(entry)}/"] = f"{entry}/{prefix}"
        else:
            return ""
    what = "The names differ by what a wrapper adds, as DataParallel and DDP do"
    return f". {what}: InitFrom(..., rename={rename})" if rename else ""


def base_hint(trees: Mapping[str, Any], names: Iterable[str]) -> str:
    """Write a hint for names of weights of a base: the end of a sentence, or "".

    Args:
        trees: entry name to its tree, which describes the base.
        names: names "ENTRY/NAME" that do not fit, each with what may follow after a blank.
    """
    base = {
        f"{entry}/{name}"
        for entry, tree in trees.items()
        if isinstance(tree, Mapping)
        for name in tree.get(BASE, ())
    }
    found = sorted(name for name in (text.split(" ")[0] for text in names) if name in base)
    if not found:
        return ""
    some = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    entries = ", ".join(repr(entry) for entry in sorted({name.partition("/")[0] for name in found}))
    return (
        f". {entries}: no checkpoint has the base under trainable() ({some}): give it the same weights at "
        'each start, before the loop is entered, as by everstep.load(FILE, {"model": model}) before adapters '
        "are added"
    )


def _by_entry(names: Iterable[str]) -> dict[str, set[str]]:
    by_entry: dict[str, set[str]] = {}
    for name in names:
        entry, _, rest = name.partition("/")
        by_entry.setdefault(entry, set()).add(rest)
    return by_entry


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Find a prefix of all longer names that makes longer names of all shorter ones; "" without any."""
    first = min(shorter, default="")
    for name in sorted(longer):
        prefix = name.removesuffix(first)
        fits = first and name.endswith(f".{first}") and {prefix + each for each in shorter} <= longer
        if fits and all(f"{each}.".startswith(prefix) for each in longer):
            return prefix
    return ""
