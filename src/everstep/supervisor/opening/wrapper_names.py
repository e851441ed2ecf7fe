"""Names that differ by what a wrapper adds to them: DataParallel's `module.`, torch.compile's `_orig_mod.`"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from everstep.contracts.state import BASE

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that wrappers give the module inside; each may stand anywhere in a name."""


def rename_for(missing: Iterable[str], unexpected: Iterable[str]) -> dict[str, str]:
    """Find the `rename=` of `InitFrom` that makes names fit; empty where there is none.

    Args:
        missing: names "ENTRY/NAME" that are here and not in the checkpoint.
        unexpected: names of the checkpoint that are not here.
    """
    here, there = _by_entry(missing), _by_entry(unexpected)
    found = [_of_entry(entry, here[entry], there.get(entry, set())) for entry in here]
    return {old: new for rename in found for old, new in rename.items()} if all(found) else {}


def hint(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Write a hint for the error about names that do not fit: the end of a sentence, or ""."""
    rename = rename_for(missing, unexpected)
    if not rename:
        return ""
    what = "The names differ by what a wrapper adds, as DataParallel and DDP do"
    return f". {what}: InitFrom(..., rename={rename})"


def base_hint(trees: Mapping[str, Any], names: Iterable[str]) -> str:
    """Write a hint for the error about weights of a base: the end of a sentence, or "".

    Args:
        trees: entry name to its tree, which describes the base.
        names: names "ENTRY/NAME" that do not fit, each with what may follow after a blank.
    """
    entries = sorted({name.partition("/")[0] for name in _of_base(trees, names)})
    if not entries:
        return ""
    return (
        f". {', '.join(map(repr, entries))}: no checkpoint has the base under trainable(): give it the same "
        'weights at each start, before the loop is entered, as by everstep.load(FILE, {"model": model}) '
        "before adapters are added"
    )


def base_left_out(trees: Mapping[str, Any], names: Iterable[str]) -> str:
    """Say which weights of a base a program that skips unexpected names does not take; "" for none.

    Args:
        trees, names: as in `base_hint`.
    """
    left = sorted(_of_base(trees, names))
    if not left:
        return ""
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return (
        f"{', '.join(left[:3])}{more} are not taken: they are of the base under trainable(), which stays as "
        "the program has made it; load them before adapters are added, if they differ"
    )


def _of_base(trees: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    base = {
        f"{entry}/{name}"
        for entry, tree in trees.items()
        if isinstance(tree, Mapping)
        for name in tree.get(BASE, ())
    }
    return [name for name in names if name.split(" ")[0] in base]


def _by_entry(names: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        entry, _, rest = name.partition("/")
        found.setdefault(entry, set()).add(rest)
    return found


def _of_entry(entry: str, here: set[str], there: set[str]) -> dict[str, str]:
    if prefix := _prefix(there, here):
        return {f"^{re.escape(entry)}/{re.escape(prefix)}": f"{entry}/"}
    if prefix := _prefix(here, there):
        return {f"^{re.escape(entry)}/": f"{entry}/{prefix}"}
    for wrapper in _WRAPPERS:
        pattern = rf"\b{wrapper}\."
        wrapped = all(re.search(pattern, f"{name}.") for name in there)
        if wrapped and here <= {re.sub(pattern, "", name) for name in there}:
            return {pattern: ""}
    return {}


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Find a prefix of all longer names that makes longer names of all shorter ones; "" without any."""
    first = min(shorter, default="")
    for name in sorted(longer):
        prefix = name.removesuffix(first)
        fits = first and name.endswith(f".{first}") and {prefix + each for each in shorter} <= longer
        if fits and all(f"{each}.".startswith(prefix) for each in longer):
            return prefix
    return ""
