"""What a report holds of some runs: everything that the page shows of them, and their curves, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everstep.contracts.metrics import better_when
from everstep.display.cells import finite, with_leaves
from everstep.ui.curves import Asked, curves
from everstep.ui.one_run import one_run
from everstep.ui.report_summaries import carried_logs, carried_summaries
from everstep.ui.stored_rows import StoredRows
from everstep.views.compare_runs import compare
from everstep.views.find_run import Found

POINTS = 1000
"""Most points of a line, if a person chooses no other number."""

MOST_POINTS, FEWEST_POINTS = 100_000, 10
"""Most points of all lines together, about 8 MB, and the points that a line has even so."""

_KEPT = (
    *("name", "status", "reason", "steps", "epoch", "created", "directory", "parent", "seed"),
    *("config_changed", "checkpoints", "starts", "rollbacks", "failures", "tags", "note"),
)
"""Parts of a run's description that a report shows."""

_TOLD = ("status", "reason", "step", "epoch", "started", "starts", "diverged", "resumed_from", "resume")
"""Facts that the table of runs and the timeline tell."""

_LATE = ("epoch", "step", "head")
"""Phases whose metrics come last: they do not measure the run."""

_MOST_METRICS = 4
"""Most metrics in the table of runs."""

_DIGITS = 3
"""Digits of a time after the point: milliseconds."""


def report_data(given: Sequence[str], found: Sequence[Found], points: int = POINTS) -> dict[str, Any]:
    """Return the data of a report, as JSON values; equal runs give equal data.

    Args:
        given: strings by which a person named the runs, titles where names are equal.
        points: most points of a line, 10 or more; a point has the least, largest and last of its values.
    """
    told = [one_run(run.database, run.facts) for run in found]
    compared = compare(given, list(found))
    charts, most = _charts(found, told, points)
    summaries, left_out = carried_summaries(found)
    settings = {name: values for name, values in compared.facts.items() if name.startswith("config.")}
    facts = {name: values for name, values in compared.facts.items() if name not in (*settings, *_TOLD)}
    data = {
        "runs": [
            {**{name: one.get(name) for name in _KEPT}, "name": title}
            for one, title in zip(told, compared.runs, strict=True)
        ],
        "metrics": _rows(dict(sorted(compared.metrics.items(), key=_last_or_best)[:_MOST_METRICS])),
        "settings": _rows({name.removeprefix("config."): values for name, values in settings.items()}),
        "facts": _rows(facts),
        "charts": charts,
        "points": most,
        "values": sum(line["n"] for chart in charts for line in chart["series"]),
        "summaries": summaries,
        "summaries_left_out": left_out,
        "logs": carried_logs(found),
    }
    plain: dict[str, Any] = with_leaves(data, _as_json)
    return plain


def _rows(values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each name of which a run has a value."""
    rows = [{"name": name, "values": list(each.values())} for name, each in values.items()]
    return [row for row in rows if any(value not in (None, [], "") for value in row["values"])]


def _measuring_first(metric: str) -> tuple[int, bool]:
    """Return a key that sorts "PHASE/NAME": evaluations, and losses and accuracies, come first."""
    phase = metric.partition("/")[0]
    return _LATE.index(phase) + 1 if phase in _LATE else 0, better_when(metric) is None


def _last_or_best(told: tuple[str, Any]) -> tuple[int, bool]:
    """Return the key of "PHASE/NAME last" or "PHASE/NAME best"."""
    return _measuring_first(told[0].rpartition(" ")[0])


def _charts(
    found: Sequence[Found], told: Sequence[Mapping[str, Any]], points: int
) -> tuple[list[dict[str, Any]], int]:
    """Return a chart for each metric, with a line for each run that has it; and the points of a line."""
    having: dict[tuple[str, str], list[int]] = {}
    for at, one in enumerate(told):
        for stream in one["streams"]:
            for metric in stream["metrics"]:
                having.setdefault((stream["stream"], metric), []).append(at)
    keys = sorted(having, key=lambda key: (_measuring_first("/".join(key)), key))
    lines = sum(map(len, having.values()))
    most = max(FEWEST_POINTS, min(points, MOST_POINTS // max(1, lines)))
    stored = StoredRows()
    charts = []
    for stream, metric in keys:
        asked = Asked(stream, metric, points=most, superseded=True, timed=True)
        series = [_line(stored, found[at], asked, at, _zero(told[at])) for at in having[stream, metric]]
        charts.append({"title": f"{stream}/{metric}", "series": series})
    return charts, most


def _line(stored: StoredRows, run: Found, asked: Asked, at: int, zero: float) -> dict[str, Any]:
    """Return a line over the steps; the time of each of its points is seconds since `zero`."""
    (line,) = curves(stored, run.database, [run.facts], asked)["series"]
    line["times"] = np.round(line["times"] - zero, _DIGITS)
    for name in ("superseded", "nonfinite"):
        line[name] = [[x, value, round(time - zero, _DIGITS)] for x, value, time in line.get(name, [])]
    return {**line, "run": at}


def _zero(run: Mapping[str, Any]) -> float:
    """Return the time from which a run's time axis counts, as the page has it."""
    return float(run["starts"][0]["began"] if run["starts"] else run["created"] or 0.0)


def _as_json(value: Any) -> Any:
    return list(map(finite, value.tolist())) if isinstance(value, np.ndarray) else finite(value)
