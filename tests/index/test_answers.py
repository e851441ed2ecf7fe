"""What a query returns: a list that a notebook shows, and that becomes a frame."""

from __future__ import annotations

import base64
import math
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
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
        config = {
            "optimizer": {"lr": rate, "betas": [0.9, 0.99]},
            "mixed": rate if rate > 0.1 else "no",
            "said": HOSTILE,
        }
        Tiny(folder / name, max_epoch=2, config=config).train(
            tail=lambda loop, epoch: loop.collect_metrics(**{"valid_loss": 1 / epoch, HOSTILE: epoch})
        )
    return folder


class Page(HTMLParser):
    """Elements, attributes and text of HTML, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[ET.Element]:
        """The charts, parsed as strict XML."""
        start = "data:image/svg+xml;base64,"
        assert all(source.startswith(start) for source in self.attributes.get("src", ()))
        sources = self.attributes.get("src", ())
        return [ET.fromstring(base64.b64decode(source.removeprefix(start))) for source in sources]


def query(folder: Path, collection: str, where: Any = None, **how: Any) -> Documents:
    return everstep.query(collection, where, index=folder, **how)


def test_an_answer_is_a_list_of_dictionaries(folder: Path) -> None:
    found = query(folder, "metrics", {"name": "loss", "phase": "step"}, fields=["step", "value"])
    assert found == [dict(one) for one in found] and repr(found) == repr(list(found))
    assert found.columns == ("step", "value")


def test_a_frame_has_a_column_for_each_value(folder: Path) -> None:
    found = query(folder, "runs", sort="config.optimizer.lr")
    frame = found.to_pandas()
    assert list(frame["config.optimizer.lr"]) == [0.1, 0.2]
    assert list(frame["step"]) == [8, 8] and list(frame["valid_loss"]) == [0.5, 0.5]
    assert list(frame.columns[:2]) == ["name", "status"]
    assert "config" not in frame.columns
    assert frame["config.optimizer.betas"][0] == [0.9, 0.99]


def test_rows_of_metrics_keep_their_bits_and_kinds(folder: Path) -> None:
    found = query(folder, "metrics", {"name": "loss"})
    frame = found.to_pandas()
    assert [x.hex() for x in frame["value"]] == [row["value"].hex() for row in found]
    assert frame.dtypes["step"] == "int64" and len(frame) == len(found) > 0


def test_no_documents_are_a_frame_with_the_columns(folder: Path) -> None:
    found = query(folder, "metrics", {"name": "nothing"}, fields=["run", "value"])
    assert list(found.to_pandas().columns) == ["run", "value"]
    assert found._repr_html_() == "<p>no documents</p>"
    assert isinstance(found.to_pandas(), pd.DataFrame)


def test_a_frame_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        Documents([{"a": 1}]).to_pandas()


def test_a_notebook_shows_runs_as_a_table(folder: Path) -> None:
    page = Page(query(folder, "runs", {"config.optimizer.lr": {"$gt": 0}})._repr_html_())
    assert page.tags.count("tr") == 3 and "img" not in page.tags
    for text in ("plain-", "finished", "valid_loss", "config.optimizer.lr", "0.2"):
        assert text in page.text


def test_a_notebook_shows_metrics_as_charts_and_a_table(folder: Path) -> None:
    page = Page(query(folder, "metrics")._repr_html_())
    charts = page.pictures()
    titles = ["".join(chart.itertext()) for chart in charts]
    assert [title.split("loss")[0] for title in titles[:2]] == ["epoch/", "step/"] and len(titles) == 4
    paths = [each for each in charts[1].iter() if each.tag.endswith("path") and each.get("fill") == "none"]
    assert len(paths) == 4, "a line and its mark in the legend, for each run"
    assert "step/loss by step" in page.attributes["alt"][1] and "8 points, last" in page.attributes["alt"][1]
    assert "more rows" in page.text


def test_names_are_data_never_markup(folder: Path) -> None:
    for collection in ("runs", "metrics", "evaluations", "checkpoints"):
        text = query(folder, collection)._repr_html_()
        page = Page(text)
        assert set(page.tags) <= {"table", "thead", "tbody", "tr", "th", "td", "p", "b", "img"}
        assert set(page.attributes) <= {"align", "alt", "src"}
        assert "\u202e" not in text
        assert collection == "checkpoints" or re.search(r"&lt;img src=x onerror=alert\(1\)&gt;", text)
        for chart in page.pictures():
            tags = {each.tag.rpartition("}")[2] for each in chart.iter()}
            assert tags <= {"svg", "text", "path", "circle"}
            assert not {name for each in chart.iter() for name in each.attrib} & {"href", "onload", "style"}


# ---------------------------------------------------------------------------------------- charts


def words(chart: Chart) -> str:
    return "|".join(ET.fromstring(drawn(chart)).itertext())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([math.nan, math.inf], "no finite value|a (2 not finite)"),
        ([1e308, -1e308], "-1e+308"),
        ([0.25], "0.24|0.26"),
        ([5e-324, 0.0], "a"),
        ([3.0, math.nan, 3.0], "a (1 not finite)"),
    ],
)
def test_any_value_can_be_drawn(values: list[float], said: str) -> None:
    chart = Chart("a", [Line("a", list(range(len(values))), values)])
    assert said in words(chart)
    assert "nan" not in drawn(chart).replace("not finite", "") and "inf" not in re.sub(
        "finite", "", drawn(chart)
    )
