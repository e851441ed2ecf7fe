"""Many runs in a browser: ten thousand in a list, in parts; two hundred side by side, in one chart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Opened, expect
from page_server import Page, running_page
from sqlalchemy import Table, insert, update

from everstep.index.database import Database
from everstep.index.sql_tables import facts, metrics, runs, segments, series
from tiny_runs import Tiny

pytestmark = pytest.mark.campaign("machine")

N, SIDE_BY_SIDE = 10_000, 200


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page over an index of 10,000 runs whose directories are gone."""
    folder = tmp_path_factory.mktemp("many")
    made = range(1, N + 1)
    shared = {"status": "finished", "step": 1, "epoch": 1}
    rows: dict[Table, Iterator[dict[str, Any]]] = {
        runs: (
            {"id": i, "name": f"digits-{i:06d}", "path": str(folder / str(i)), "created": i} for i in made
        ),
        segments: ({"run": i, "number": 1, "valid_to": 1 << 40, "size": 1, "started": i} for i in made),
        facts: ({"run": i, "value": json.dumps({"lr": i / N, "width": i % 7})} for i in made),
        series: ({"id": i, "run": i, "name": "loss", "phase": "epoch"} for i in made),
        metrics: ({"series": i, "segment": 1, "value": i * 7919 % N / N} for i in made),
    }
    more: dict[Table, dict[str, Any]] = {
        runs: shared,
        segments: {**shared, "begun": 1, "zero": 0, "facts": "{}", "problems": "[]"},
        facts: {"name": "config"},
        metrics: dict.fromkeys(("offset", "row", "epoch", "step", "seq", "count", "wall"), 1),
    }
    with Database(folder / "everstep.db").write() as connection:
        for table, each in rows.items():
            connection.execute(insert(table), [{**row, **more.get(table, {})} for row in each])
        connection.execute(update(runs).values(started=runs.c.created, step=runs.c.id % 997))
    with running_page(folder) as page:
        yield page


def test_ten_thousand_runs_are_shown_in_parts_sorted_and_filtered(many: Page, opened: Opened) -> None:
    view = opened(many, "#/runs?columns=name,step,loss,config.lr&sort=loss")
    expect(view.locator(".count")).to_have_text("10,000 runs")
    expect(view.locator("tbody th a").first).to_have_text(f"digits-{N:06d}")
    assert view.locator("tbody tr").count() == 200
    view.get_by_role("button", name="Show more").click()
    expect(view.locator("tbody tr")).to_have_count(1200)
    last = next(i for i in range(1, N + 1) if i * 7919 % N == 1199)
    expect(view.locator("tbody th a").last).to_have_text(f"digits-{last:06d}")
    times = []
    for sort in ("config.lr", "step", "loss", "name"):
        begun = time.monotonic()
        view.locator(f"thead th[title='{sort}'] button").click()
        expect(view.locator("th[aria-sort=ascending]")).to_have_attribute("title", sort)
        times.append(time.monotonic() - begun)
    view.get_by_label("Filter runs").fill("loss<0.01 config.width=3")
    expect(view.locator(".count")).to_contain_text(" of 10,000 runs")
    expected = sum(i * 7919 % N < N / 100 and i % 7 == 3 for i in range(1, N + 1))
    expect(view.locator(".count")).to_have_text(f"{expected} of 10,000 runs")
    assert max(times) < 5, times  # bench/page.py measures; this finds what became slow by an order


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page over 200 runs of three rates and one that differs in nothing else."""
    folder = tmp_path_factory.mktemp("sweep")
    tail = lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)  # noqa: E731
    for i in range(SIDE_BY_SIDE):
        config = {"optimizer": {"lr": 0.01 * (1 + i % 3), "name": "momentum"}}
        Tiny(folder / f"trial-{i:03d}", max_epoch=2, seed=i, config=config).train(tail=tail)
    with running_page(folder) as page:
        yield page


def address(page: Page, n: int, query: str = "") -> str:
    rows = page.get("/api/runs", sort="name", desc=0, limit=n).json["rows"]
    return f"#/compare?runs={','.join(row['id'] for row in rows)}{query}"


def test_two_hundred_runs_are_one_chart(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, SIDE_BY_SIDE, "&find=step/loss"))
    begun = time.monotonic()
    expect(view.locator(".chart-reading")).to_have_text(f"{SIDE_BY_SIDE} runs")
    assert time.monotonic() - begun < 10  # bench/page.py measures; this finds what became slow by an order
    expect(view.locator("aside li")).to_have_count(SIDE_BY_SIDE)
    canvas = view.locator(".card canvas:not(.chart-over)")
    colours = canvas.evaluate(
        """canvas => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert colours > 100
    box: Any = view.locator(".card .u-over").bounding_box()
    view.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(view.locator(".chart-reading")).to_contain_text("trial-")


def test_settings_that_differ_stand_side_by_side(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 4))
    row = view.locator("tr").filter(has_text="config.optimizer.lr")
    expect(row.locator("td")).to_have_text(["0.01", "0.02", "0.03", "0.01"])
    expect(view.locator("tr").filter(has_text="config.optimizer.name")).to_have_count(0)
