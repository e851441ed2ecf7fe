"""Columns of runs that are computed from all starts and rows: starts, kills, verified, best/METRIC."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, RowMapping, func, select

from everstep.contracts.metrics import better_when
from everstep.errors import ConfigError
from everstep.index.run_facts import COUNTS
from everstep.index.run_queries import badges_of, by_phase, finite, is_metric, named_series, valid
from everstep.index.sql_tables import metrics, runs, segments, series
from everstep.index.stored_json import stored
from everstep.index.translate import one_of

if TYPE_CHECKING:
    from everstep.record.badges import Start

BEST = "best/"
"""Beginning of the names of columns of best values: "best/valid_loss", "best/tail/valid_loss" for a phase."""

_WORST_FIRST = ("diverged", "not verified", "verified")

Best = dict[int, dict[tuple[str, str], float]]
"""Run -> (phase, name) -> best value, the phase of lowest rank first."""


def is_computed(connection: Connection, name: str) -> bool:
    """Whether a name is that of a computed column; a metric of that name comes before it.

    Raises:
        ConfigError: the best of a metric is meant whose name does not tell which value is better.
    """
    if name in COUNTS or not name.startswith(BEST):
        return name in COUNTS
    metric = name.removeprefix(BEST)
    if not is_metric(connection, metric):
        return False
    if better_when(metric) is None:
        raise ConfigError(
            f"the name does not tell whether a smaller or a larger {metric!r} is better; "
            f"names that end in loss, acc or accuracy do: give {metric!r} for the last value"
        )
    return True


def computed(connection: Connection, name: str) -> dict[int, Any]:
    """Return run -> value of a computed column."""
    if name in COUNTS:
        return {run: told[name] for run, told in counts(connection).items() if name in told}
    found = best_of(connection, metric=name.removeprefix(BEST))
    return {run: next(iter(values.values())) for run, values in found.items()}


def add_computed(connection: Connection, found: Iterable[dict[str, Any]], names: Iterable[str]) -> None:
    """Give some runs their values of computed columns."""
    for name in names:
        values = computed(connection, name)
        for run in found:
            if run["id"] in values:
                run[name] = values[run["id"]]


def counts(connection: Connection, of: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """Return run -> {starts, kills, verified}, for all runs or some.

    `verified` is the worst that is known of the run's resumes: diverged, not verified, verified; without a
    resume that executed a step it is missing.
    """
    begun = select(*(segments.c[name] for name in ("run", "number", "status", "step", "facts")))
    begun = begun.add_columns(runs.c.status.label("now")).join(runs, runs.c.id == segments.c.run)
    begun = begun.where(segments.c.begun == 1, func.coalesce(segments.c.status, "") != "accepted")
    if of is not None:
        begun = begun.where(one_of(connection, segments.c.run, of))
    reported = badges_of(connection, of)
    found: dict[int, list[RowMapping]] = {}
    for row in connection.execute(begun.order_by(segments.c.run, segments.c.number)).mappings():
        found.setdefault(row["run"], []).append(row)
    return {run: _counted(starts, reported.get(run, {})) for run, starts in found.items()}


def _counted(begun: list[RowMapping], reported: Mapping[int, Any]) -> dict[str, Any]:
    from everstep.record.badges import judged

    ends = [start["status"] or "killed" for start in begun[:-1]] + [begun[-1]["status"] or begun[-1]["now"]]
    known = [_known(start, end) for start, end in zip(begun, ends, strict=True)]
    if ends[-1] == "killed":
        known[-1] = known[-1]._replace(reached=None)  # a trail in its directory may tell; the index does not
    kinds = {badge.kind for _, badge in judged(known, reported)}
    told: dict[str, Any] = {"starts": len(begun), "kills": ends.count("killed")}
    worst = next((kind for kind in _WORST_FIRST if kind in kinds), None)
    return told if worst is None else {**told, "verified": worst}


def _known(start: RowMapping, end: str) -> Start:
    from everstep.record.badges import Start
    from everstep.record.segment_file import step_of

    came = stored(start["facts"]).get("resumed_from")
    began = None if came is None else step_of(came)
    return Start(start["number"], began, start["step"], end == "running")


def best_of(connection: Connection, of: Collection[int] | None = None, metric: str | None = None) -> Best:
    """Return the best finite value of each metric whose name tells which value is better.

    Metrics of single steps are left out: they do not measure a run.

    Args:
        of: keys of the runs; None for all.
        metric: a metric, or "PHASE/NAME"; None for all.
    """
    least, most = (function(metrics.c.value).filter(finite()) for function in (func.min, func.max))
    chosen = select(series.c.run, series.c.phase, series.c.name, least.label("min"), most.label("max"))
    chosen = chosen.join(metrics, metrics.c.series == series.c.id)
    chosen = chosen.join(segments, valid() & (segments.c.run == series.c.run))
    chosen = chosen.where(series.c.phase.not_in(("step", "head"))).group_by(series.c.id)
    if of is not None:
        chosen = chosen.where(one_of(connection, series.c.run, of))
    if metric is not None:
        chosen = chosen.where(named_series(metric))
    found: Best = {}
    for row in sorted(connection.execute(chosen), key=lambda row: by_phase(row.phase)):
        better = better_when(row.name)
        if better is not None and row.min is not None:
            found.setdefault(row.run, {})[row.phase, row.name] = row.min if better == "min" else row.max
    return found
