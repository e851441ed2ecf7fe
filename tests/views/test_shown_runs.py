"""A run, and runs side by side, as a notebook shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.errors import ConfigError
from everstep.index.query import ask
from everstep.record import Block, Journal, RunDir
from everstep.views import describe_run
from tiny_runs import Tiny

HOSTILE = "</td><script>alert(1)</script>\u202e"
TAGS = {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "img"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its twin, and a run with other settings that was resumed; no test changes them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate, ends in (("a", 0.1, [2]), ("twin", 0.1, [2]), ("b", 0.2, [1, 3])):
        for end in ends:
            Tiny(folder / name, max_epoch=end, config={"lr": rate, "said": HOSTILE * (name == "b")}).train(
                tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
            )
    return folder


def charts(html: str) -> list[str]:
    """What each chart shows: its title, and its lines by their names without the digits."""
    legends = re.findall('<img align="top" alt="([^"]*)"', html)
    return [re.sub(r"-\w{6}: \d points, last [\d.e-]+", "", legend) for legend in legends]


def test_a_run_shows_its_starts_metrics_and_checkpoints(folder: Path) -> None:
    run = everstep.runs.show(folder / "b")
    assert re.fullmatch(r"<run b-\w{6}: finished, step 12, 2 starts>", repr(run))
    assert [one["from"] for one in run.starts] == [None, "epoch-0001-step-00000004"]
    assert [one["verified"] for one in run.starts] == [None, "nothing to verify"]
    assert {(one["phase"], one["name"]): one["last"] for one in run.metrics}["tail", "valid_loss"] == 1 / 3
    assert list(run.checkpoints.to_pandas()["step"])[-1] == 12
    text = run._repr_html_()
    for word in ("epoch-0003-step-00000012", "max_epoch 3 is reached", run.facts["digest"], "tail"):
        assert word in text
    captions = re.findall("<p><b>(.+?)</b></p>", text)
    assert captions == ["settings", "starts", "metrics", "checkpoints"], "those of the command"
    assert '<td align="left">lr</td>' in text and "<th>duration</th>" in text
    assert charts(text) == ["epoch/loss by step; b", "tail/valid_loss by step; b"]


def test_runs_side_by_side_show_where_they_differ(folder: Path) -> None:
    compared = everstep.runs.compare("a", "b", index=folder)
    a, b = compared.runs
    differing = compared.differing()
    assert differing["config.lr"] == {a: 0.1, b: 0.2} and differing["starts"] == {a: 1, b: 2}
    assert "seed" not in differing and "seed" in compared.facts
    assert compared.metrics["tail/valid_loss last"] == {a: 0.5, b: 1 / 3}
    assert compared.verdict() is None and f"{len(differing)} facts differ" in repr(compared)
    assert a in compared._repr_html_() and b in compared._repr_html_()
    shown = ["epoch/loss by step; a; b", "tail/valid_loss by step; a; b"]
    assert charts(compared._repr_html_()) == shown
    equal = everstep.runs.compare(folder / "a", folder / "twin")
    assert "equal to the bit" in str(equal.verdict())
    assert "equal to the bit" in equal._repr_html_()


def test_charts_of_too_many_values_are_not_read_to_their_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def counted(database: Any, collection: str, where: Any, limit: int) -> list[dict[str, Any]]:
        limits.append(limit)
        return ask(database, collection, where, limit=limit)

    monkeypatch.setattr(describe_run, "ask", counted)
    compared = everstep.runs.compare("a", "b", "twin", index=folder)
    monkeypatch.setattr(describe_run, "_MOST_DRAWN", 8)
    assert charts(compared._repr_html_()) == [] and limits == [8, 4]


def test_what_a_run_says_is_never_markup_and_moves_no_cursor(folder: Path, tmp_path: Path) -> None:
    runs = [everstep.runs.show(folder / "b"), everstep.runs.compare("a", "b", index=folder)]
    for text in (run._repr_html_() for run in runs):
        assert set(re.findall(r"<(\w+)", text)) <= TAGS and "\u202e" not in text
    assert "&lt;/td&gt;&lt;script&gt;" in runs[1]._repr_html_()
    evil = "\x1b]0;x\x07\nb\u202e"
    for number in (1, 2):
        run = RunDir.open(tmp_path / str(number), about={"id": f"{evil}{number}"})
        Journal.open(run.path, 1, None, {}).close()
    shown = [everstep.runs.show(tmp_path / "1"), everstep.runs.compare(tmp_path / "1", tmp_path / "2")]
    for text in map(repr, shown):
        assert text.isprintable() and r"\x1b]0;x\x07\nb\u202e1" in text


def test_a_run_without_epochs_shows_the_curves_of_its_steps(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "a")
    journal = Journal.open(run.path, 1, None, {})
    journal.append(Block(0, "step", "loss", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
    journal.close()
    assert charts(everstep.runs.show(run.path)._repr_html_()) == ["step/loss by step; a"]


def test_one_run_cannot_be_compared(folder: Path) -> None:
    with pytest.raises(ConfigError, match="two runs or more, not 1"):
        everstep.runs.compare("a", index=folder)
    with pytest.raises(ConfigError, match="there is no run 'digits'"):
        everstep.runs.show("digits", index=folder)
