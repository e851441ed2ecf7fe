"""Runs side by side in a browser: an overlay of 200, and the settings that differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Opened, expect
from page_server import Page, running_page

from tiny_runs import Tiny

pytestmark = pytest.mark.campaign("machine")

N = 200


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page over 200 runs of three rates and one that differs in nothing else."""
    folder = tmp_path_factory.mktemp("sweep")
    tail = lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)  # noqa: E731
    for i in range(N):
        config = {"optimizer": {"lr": 0.01 * (1 + i % 3), "name": "momentum"}}
        Tiny(folder / f"trial-{i:03d}", max_epoch=2, seed=i, config=config).train(tail=tail)
    with running_page(folder) as page:
        yield page


def address(page: Page, n: int, query: str = "") -> str:
    rows = page.get("/api/runs", sort="name", desc=0, limit=n).json["rows"]
    return f"#/compare?runs={','.join(row['id'] for row in rows)}{query}"


def test_two_hundred_runs_are_one_chart(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, N, "&find=step/loss"))
    begun = time.monotonic()
    expect(view.locator(".chart-reading")).to_have_text(f"{N} runs")
    assert time.monotonic() - begun < 10  # bench/page.py measures; this finds what became slow by an order
    expect(view.locator("aside li")).to_have_count(N)
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
