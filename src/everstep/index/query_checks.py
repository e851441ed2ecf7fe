"""Refusal of queries that no run can match, which most likely have a typing error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, select

from everstep.errors import ConfigError, nearest
from everstep.index.computed_columns import is_computed
from everstep.index.fields import ELEMENT, named
from everstep.index.mongo import Leaf
from everstep.index.run_facts import FACTS, STATUSES, TEXTS
from everstep.index.run_queries import is_metric, leads_here, require_known
from everstep.index.sql_tables import fields
from everstep.labels import NAMES as LABELS

_NUMBERS = re.compile(f"{ELEMENT}[0-9]+")


def require_there(connection: Connection, conditions: Iterable[Leaf], names: Iterable[str]) -> None:
    """Refuse names that no run has, except in conditions about missing values ($exists, null).

    Args:
        names: further names, to sort by or to show.

    Raises:
        ConfigError: no run has a name; names the nearest.
    """
    asked = [leaf.path for leaf in conditions if leaf.operator != "$exists" and None not in _values(leaf)]
    for name in dict.fromkeys([*asked, *names]):
        if name not in LABELS and not _kinds(connection, name):
            require_known(connection, name)
            if known := _beside(connection, named(name)):
                raise ConfigError(f"no run has {name!r}; {nearest(name, known)}")


def require_comparable(connection: Connection, conditions: Iterable[Leaf]) -> None:
    """Refuse unknown statuses, and strings where all runs have numbers.

    Raises:
        ConfigError: names the wrong value, and the nearest status.
    """
    for leaf in conditions:
        texts = [value for value in _values(leaf) if isinstance(value, str)]
        if not texts or len(texts) < len(_values(leaf)):
            continue
        if _kinds(connection, leaf.path) - {"null"} == {"number"}:
            raise ConfigError(f"{leaf.path} is a number; compare it with a number, not with {texts[0]!r}")
        unknown = [text for text in texts if text not in STATUSES]
        if leaf.path == "status" and leaf.operator in ("$eq", "$in") and unknown:
            raise ConfigError(f"there is no status {unknown[0]!r}; {nearest(unknown[0], STATUSES)}")


def _values(leaf: Leaf) -> list[Any]:
    return leaf.value if leaf.operator == "$in" else [leaf.value]


def _kinds(connection: Connection, name: str) -> set[str]:
    """Find the kinds of a name's values; see `fields.typed`."""
    if name in FACTS:
        return {"text" if name in TEXTS else "number"}
    if is_metric(connection, name):
        return {"number"}
    if is_computed(connection, name):
        return {"text" if name == "verified" else "number"}
    found = select(fields.c.kind).where(leads_here(connection, name)).distinct()
    return set(connection.execute(found).scalars())


def _beside(connection: Connection, path: str) -> set[str]:
    """Return known paths near a path that no run has; none below a value that is null, as git may be."""
    places = connection.execute(select(fields.c.path).distinct()).scalars()
    known = {_NUMBERS.sub("", place) for place in places}
    while path:
        path = path.rpartition(".")[0]
        if path and _kinds(connection, path) == {"null"}:
            return set()
        found = {one for one in known if one.startswith(f"{path}." if path else "")}
        if near := {one for one in found if "." not in one[len(path) + 1 :]}:
            return near
    return set()
