"""What a query returns: a list that a notebook shows, and that becomes a frame."""

from __future__ import annotations

import base64
import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.display.html import Chart, Line, drawn
from everstep.errors import ConfigError
from everstep.index.query import Documents
from tiny_runs import Tiny

HOSTILE = "<img src=x onerror=alert(1)>\u202e&amp;"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with a hostile name; no test changes them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("plain", 0.1), (HOSTILE, 0.2)):
        config = {"optimizer": {"lr": rate, "betas": [0.9, 0.99]}, "said": HOSTILE}
        Tiny(folder / name, max_epoch=2, config=config).train(
            tail=lambda loop, epoch: loop.collect_metrics(**{"valid_loss": 1 / epoch, HOSTILE: epoch})
        )
    return folder


def query(folder: Path, collection: str, where: Any = None, **how: Any) -> Documents:
    return everstep.query(collection, where, index=folder, **how)


def charts(html: str) -> list[ET.Element]:
    """The charts, parsed as strict XML."""
    return [ET.fromstring(base64.b64decode(one)) for one in re.findall(r'svg\+xml;base64,([^"]+)"', html)]


def test_an_answer_is_a_list_of_dictionaries_and_a_frame_with_a_column_for_each_value(folder: Path) -> None:
    rows = query(folder, "metrics", {"name": "loss", "phase": "step"}, fields=["step", "value"])
    assert rows == [dict(one) for one in rows] and rows.columns == ("step", "value")
    frame = query(folder, "runs", sort="config.optimizer.lr").to_pandas()
    assert list(frame["config.optimizer.lr"]) == [0.1, 0.2]
    assert list(frame["step"]) == [8, 8] and list(frame["valid_loss"]) == [0.5, 0.5]
    assert list(frame.columns[:2]) == ["name", "status"] and "config" not in frame.columns
    assert frame["config.optimizer.betas"][0] == [0.9, 0.99]
    found = query(folder, "metrics", {"name": "loss"})
    frame = found.to_pandas()
    assert [x.hex() for x in frame["value"]] == [row["value"].hex() for row in found]
    assert frame.dtypes["step"] == "int64" and len(frame) == len(found) > 0


def test_polars_has_the_same_frame(folder: Path) -> None:
    found = query(folder, "metrics", {"name": "loss"})
    frame = found.to_polars()
    assert frame.columns == list(found.to_pandas().columns) and frame.height == len(found) > 0
    assert [x.hex() for x in frame["value"]] == [row["value"].hex() for row in found]
    runs = query(folder, "runs", sort="config.optimizer.lr")
    assert runs.to_polars()["config.optimizer.lr"].to_list() == [0.1, 0.2]
    assert runs.to_polars()["config.optimizer.betas"].to_list() == [[0.9, 0.99]] * 2
    mixed = Documents([{"a": 1}, {"a": 2.5, "b": 1}, {"b": "x"}]).to_polars()
    assert mixed["a"].to_list() == [1.0, 2.5, None] and mixed["b"].to_list() == [None, "1", "x"]


def test_no_documents_are_a_frame_with_the_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = query(folder, "metrics", {"name": "nothing"}, fields=["run", "value"])
    assert list(found.to_pandas().columns) == ["run", "value"]
    assert found._repr_html_() == "<p>no documents</p>"
    assert found.to_polars().columns == ["run", "value"]
    for package in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"not installed: pip install {package}"):
            getattr(found, f"to_{package}")()


def test_a_notebook_shows_tables_and_charts_of_metrics(folder: Path) -> None:
    html = query(folder, "runs", {"config.optimizer.lr": {"$gt": 0}})._repr_html_()
    assert html.count("<tr>") == 3 and "<img" not in html
    for text in ("plain-", "finished", "valid_loss", "config.optimizer.lr", "0.2"):
        assert text in html
    html = query(folder, "metrics")._repr_html_()
    titles = ["".join(chart.itertext()).split("loss")[0] for chart in charts(html)]
    assert titles[:2] == ["epoch/", "step/"] and len(titles) == 4
    drawn = [
        each for each in charts(html)[1].iter() if each.tag.endswith("path") and each.get("stroke-width")
    ]
    assert len(drawn) == 4, "a line and its mark in the legend, for each run"
    assert "step/loss by step" in html and "8 points, last" in html and "more rows" in html


def test_names_are_data_never_markup(folder: Path) -> None:
    for collection in ("runs", "metrics", "evaluations", "checkpoints"):
        html = query(folder, collection)._repr_html_()
        tags, attributes = re.findall(r"<(\w+)", html), re.findall(r"\s([\w-]+)=\"", html)
        assert set(tags) <= {"table", "thead", "tbody", "tr", "th", "td", "p", "b", "img"}
        assert set(attributes) <= {"align", "alt", "src"} and "\u202e" not in html
        assert collection == "checkpoints" or "&lt;img src=x onerror=alert(1)&gt;" in html
        for chart in charts(html):
            tags = [each.tag.rpartition("}")[2] for each in chart.iter()]
            assert set(tags) <= {"svg", "text", "path", "circle"}
            assert not {name for each in chart.iter() for name in each.attrib} & {"href", "onload", "style"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([math.nan, math.inf], "no finite value|a (2 not finite)"),
        ([1e308, -1e308], "-1e+308"),
        ([0.25], "0.25|0|step"),
        ([5e-324, 0.0], "a"),
        ([3.0, math.nan, 3.0], "a (1 not finite)"),
    ],
)
def test_any_value_can_be_drawn(values: list[float], said: str) -> None:
    svg = drawn(Chart("a", [Line("a", list(range(len(values))), values)]))
    assert said in "|".join(ET.fromstring(svg).itertext())
    assert not re.search("nan|inf", svg.replace("not finite", "").replace("no finite", ""))
