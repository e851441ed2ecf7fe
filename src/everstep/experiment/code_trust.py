"""Trust in the code that a run's record names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.errors import TrustError
from everstep.experiment.config_layers import CALL
from everstep.experiment.import_paths import keep_out
from everstep.record import RunDir
from everstep.record.trust import TRUST_VARIABLE

_PATH = re.compile(r"[\w.]+:[\w.]+")
_MOST_NAMES = 8
"""Most names that a message lists."""


def admit(run_dir: Path, tree: Any, why: str, trust: bool, facts: Mapping[str, Any]) -> tuple[Path, ...]:
    """Print which code a run's record names, and refuse it unless it is this user's.

    Called before the import.  From then on this process finds modules in the code's folders that `facts`
    have, and imports nothing that a record names out of the run directory.

    Args:
        why: reason, in words, for which the code does not count as this user's; "" if it does.
        trust: whether the user said to use the code all the same.

    Returns:
        The folders of the code, without those in the run directory.
    """
    recorded, home = facts.get("code"), run_dir.resolve()
    folders = [Path(each) for each in recorded if isinstance(each, str)] if isinstance(recorded, list) else []
    code = tuple(folder for folder in folders if not folder.resolve().is_relative_to(home))
    run = RunDir.open(run_dir, create=False).id
    names = list(dict.fromkeys(_names(tree)))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    where = ", ".join(map(repr, map(str, code))) or "where Python finds it"
    what = f"imported and called: {', '.join(names[:_MOST_NAMES])}{more}, from {where}"
    if why and not trust:
        raise TrustError(
            f"the record of {run} in {run_dir} names code that would be {what}. It does not count as yours: "
            f"{why}. Look at it: everstep config RUN. If you trust whoever made it, pass --trust, or set "
            f"{TRUST_VARIABLE}=1 (docs/guide/trust.md)"
        )
    print(f"note: for the run {run} is {what}", file=sys.stderr)
    keep_out(home)
    findable(code)
    return code


def findable(folders: Iterable[Path]) -> None:
    """Let Python find modules in some folders, as it finds those beside a script."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _names(tree: Any) -> Iterator[str]:
    """Yield the import paths in a config, at any depth, as printable strings."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = str(value if key == CALL else key)
            if key == CALL or _PATH.fullmatch(path):
                yield path if path.isprintable() else ascii(path)
            yield from _names(value if key != CALL else None)
    elif isinstance(tree, list):
        for each in tree:
            yield from _names(each)
    elif isinstance(tree, str) and _PATH.fullmatch(tree):
        yield tree
