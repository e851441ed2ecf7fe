"""The suite for sinks: the built-in ones hold what the journal holds, and broken ones are found."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep import Every, Service
from everstep.services import CSV, JSONLines, Sink, TensorBoard
from everstep.testing import check_sink
from everstep.testing.sink_checks import Value

KEYS = ("step", "epoch", "phase")


def metrics_of(line: dict[str, Any]) -> Iterator[Value]:
    return ((int(line["step"]), n, float(v)) for n, v in line.items() if n not in KEYS and v != "")


def json_lines(run_dir: Path) -> Iterator[Value]:
    for line in (run_dir / "logs/metrics.jsonl").read_text().splitlines():
        yield from metrics_of(json.loads(line))


def table(run_dir: Path) -> Iterator[Value]:
    with open(run_dir / "logs/metrics.csv", newline="") as file:
        for line in csv.DictReader(file):
            yield from metrics_of(line)


def points(run_dir: Path) -> Iterator[Value]:
    events = EventAccumulator(str(run_dir / "logs/tensorboard"), {"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield event.step, tag.removeprefix("epoch/"), event.value


BUILT_IN: dict[str, tuple[Callable[[], Service], Callable[[Path], Iterable[Value]]]] = {
    "JSONLines": (lambda: JSONLines(every=Every(steps=1)), json_lines),
    "CSV": (lambda: CSV(), table),
    "TensorBoard": (lambda: TensorBoard(every=Every(steps=2)), points),
}


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sinks_hold_what_the_journal_holds(name: str) -> None:
    check_sink(*BUILT_IN[name])


@pytest.mark.campaign("long")
def test_a_sink_that_leaves_out_rows_says_which() -> None:
    check_sink(lambda: CSV(metrics=["loss"]), table, takes=lambda row: row.name == "loss")


class Plain(Sink):
    """Correct: a JSON object per line."""

    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        for line in self.lines(items):
            file.write(json.dumps(line) + "\n")


class DropsEarlierStarts(Plain):
    def begin(self, older: Any) -> None:
        super().begin(iter(()))


class WritesTwice(Plain):
    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        items = list(items)
        super().write(file, items)
        super().write(file, items)


class KeepsSupersededRows(Plain):
    """Appends to the file of the start before, whatever a resume has superseded."""

    def begin(self, older: Any) -> None:
        self._file = open(self.path, "a")  # noqa: SIM115


class Rounds(Plain):
    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        for line in self.lines(items):
            file.write(json.dumps({n: round(v, 2) if n == "loss" else v for n, v in line.items()}) + "\n")


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            DropsEarlierStarts,
            "interrupted in step 1 and started again, .*'loss' at step 1 it has .*earlier starts",
        ),
        (WritesTwice, "undisturbed, .*'loss' at step 1 it has .*write each row once"),
        (KeepsSupersededRows, "started again, .*superseded"),
        (Rounds, "undisturbed, .*each value as it is"),
    ],
)
def test_a_broken_sink_is_found(kind: Callable[[str], Sink], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sink(lambda: kind("logs/metrics.jsonl"), json_lines)


@pytest.mark.campaign("long")
def test_a_sink_of_one_method_passes() -> None:
    check_sink(lambda: Plain("logs/metrics.jsonl"), json_lines)
