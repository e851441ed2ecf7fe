"""Runs side by side: their facts, settings and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from everstep.display.cells import cell, flat, in_line
from everstep.display.html import notebook_html
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import newest_facts, summaries
from everstep.record.trust import MARK
from everstep.redaction import without_credentials
from everstep.views.checkpoint_tables import asked_for, checkpoints_of, newest_whole
from everstep.views.find_run import Found

_NOT_COMPARED = {"pid", "name", "created", "heartbeat", MARK}
"""Facts that always differ, and tell nobody anything."""

SideBySide: TypeAlias = dict[str, dict[str, Any]]
"""Name of a fact -> title of a run -> value; None where a run lacks the fact."""


class Compared(NamedTuple):
    """Runs side by side: titles, facts (`config.optimizer.lr`), last and best metrics."""

    runs: list[str]
    facts: SideBySide
    metrics: SideBySide

    def differing(self) -> SideBySide:
        """Return the facts that differ."""
        return {
            name: values for name, values in self.facts.items() if len(set(map(str, values.values()))) > 1
        }

    def verdict(self) -> str | None:
        """Say whether the newest checkpoints are equal to the bit, or why they cannot be; else None."""
        digests, seeds = (set(self.facts[name].values()) for name in ("digest", "seed"))
        if len(digests) == 1 and None not in digests:
            return f"the newest checkpoints are equal to the bit: digest {digests.pop()}"
        if len(digests) > 1 and len(seeds) > 1:
            return "the runs have different seeds: give both the same seed= to compare them to the bit"
        return None

    def __repr__(self) -> str:
        return f"<{', '.join(map(in_line, self.runs))}: {len(self.differing())} facts differ>"

    def _repr_html_(self) -> str:
        tables = {"facts that differ": self.differing(), "metrics": self.metrics}
        rows = {
            title: [
                {"": name, **{run: cell(name, value) for run, value in values.items()}}
                for name, values in each.items()
            ]
            for title, each in tables.items()
        }
        shown = [(title, each, ("", *self.runs)) for title, each in rows.items()]
        return notebook_html(self.verdict() or repr(self), (), shown)


def compare(given: Sequence[str], found: list[Found]) -> Compared:
    """Put runs side by side."""
    titles = titles_of(given, found)
    facts, metrics = zip(*map(_told, found), strict=True)

    def side_by_side(each: Sequence[dict[str, Any]]) -> SideBySide:
        names = dict.fromkeys(name for one in each for name in one)
        return {name: {t: one.get(name) for t, one in zip(titles, each, strict=True)} for name in names}

    return Compared(titles, side_by_side(facts), side_by_side(metrics))


def titles_of(given: Sequence[str], found: Sequence[Found]) -> list[str]:
    """Return the names of the runs, or the given strings where names are equal, as of copies of a run."""
    names = [str(run.facts["name"]) for run in found]
    return names if len(set(names)) == len(names) else list(given)


def _told(run: Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return name -> value of a run's facts, and "PHASE/NAME last" and "PHASE/NAME best" -> value."""
    with run.database.read() as connection:
        recorded = without_credentials(newest_facts(connection, [run.id]).get(run.id, {}))
        measured = summaries(connection, run.id)
    facts = {name: run.facts[name] for name in FACTS}
    newest = {} if run.is_gone else newest_whole(asked_for(checkpoints_of(run.path)))
    facts["digest"] = newest.get("digest")
    facts = {**_flat({**recorded, **newest.get("options", {})}), **facts}
    metrics = {}
    for one in measured:
        for what in ("last", "best"):
            if one[what] is not None:
                metrics[f"{one['phase']}/{one['name']} {what}"] = one[what]
    return {name: value for name, value in facts.items() if name not in _NOT_COMPARED}, metrics


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each path in a tree to its value, also in lists of mappings."""
    found: dict[str, Any] = {}
    for path, value in flat(tree):
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            found |= _flat({f"{path}.{at}": part for at, part in enumerate(value)})
        else:
            found[path] = value
    return found
