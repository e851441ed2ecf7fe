"""`check_sink`: a check that what a sink holds is what the journal holds, for authors of sinks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from everstep.contracts.services import Service
from everstep.record import Row, RunJournal
from everstep.testing.service_checks import check_in_runs

Value: TypeAlias = tuple[int, str, float]
"""Step, name of the metric, value."""

_Values: TypeAlias = dict[tuple[int, str], list[float]]


def check_sink(
    make_sink: Callable[[], Service],
    read: Callable[[Path], Iterable[Value]],
    *,
    metrics: Sequence[str] = (),
    takes: Callable[[Row], bool] = lambda row: True,
) -> None:
    """Check a sink as `check_service` does, and compare what it holds with the journal after each run.

    The runs are those of `check_service`: one undisturbed, and for each place in them one that is interrupted
    there and one that crashes there.  After each, the sink must hold every valid row once, and no other row.

    Args:
        make_sink: makes the sink as a new process would make it; called many times.
        read: reads what the sink holds; called with the run directory, returns (step, name, value) of each
            row in any order, the name as it was collected.  Values may be rounded to float32.
        metrics: names of more metrics to collect after each epoch.
        takes: whether the sink writes a row, for a sink that leaves out rows.

    Raises:
        AssertionError: says which rows are missing, or which are there too often, and after what.
    """

    def inspect(run_dir: Path, where: str) -> None:
        rows = filter(takes, RunJournal(run_dir).rows())
        _require_equal(
            _sorted(read(run_dir)), _sorted((row.step, row.name, row.value) for row in rows), where
        )

    check_in_runs(make_sink, metrics, inspect)


def _sorted(rows: Iterable[Value]) -> _Values:
    """Return the values of each metric at each step: an epoch's mean is at its last step."""
    found: _Values = defaultdict(list)
    for step, name, value in rows:
        found[int(step), name].append(float(value))
    return {key: sorted(found[key], key=lambda value: (math.isnan(value), value)) for key in sorted(found)}


def _require_equal(held: _Values, expected: _Values, where: str) -> None:
    for key in dict.fromkeys([*expected, *held]):
        ours, right = held.get(key, []), expected.get(key, [])
        if len(ours) != len(right) or not all(map(_is_same, ours, right)):
            step, name = key
            raise AssertionError(
                f"{where}, the sink has other rows than the journal: of {name!r} at step {step} it has "
                f"{ours}, the journal {right}; {_advice(ours, right)}"
            )


def _is_same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def _advice(ours: list[float], right: list[float]) -> str:
    if len(ours) < len(right):
        return "write all rows, those of earlier starts included"
    if len(ours) > len(right):
        return "write each row once, and none that a resume has superseded"
    return "write each value as it is"
