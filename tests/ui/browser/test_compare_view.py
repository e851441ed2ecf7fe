"""Runs side by side in a browser: an overlay of 200, settings with differences marked, a scatter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
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
    for i in range(N):
        config = {"optimizer": {"lr": 0.01 * (1 + i % 3), "name": "momentum"}}
        Tiny(folder / f"trial-{i:03d}", max_epoch=2, seed=i, config=config).train(tail=_measure)
    with running_page(folder) as page:
        yield page


def _measure(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=1 / epoch)


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


def test_settings_stand_side_by_side_and_differences_are_marked(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 4, "&tab=settings"))
    row = view.locator("tr").filter(has_text="config.optimizer.lr")
    expect(row.locator("td")).to_have_text(["0.01", "≠0.02", "≠0.03", "0.01"])
    expect(view.locator("tr").filter(has_text="config.optimizer.name")).to_have_count(0)
    view.keyboard.press("d")
    expect(view.locator("tr").filter(has_text="config.optimizer.name")).to_have_count(1)


def test_facts_of_the_runs_are_no_settings(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 3, "&tab=settings"))
    rate = view.locator("tr").filter(has_text="config.optimizer.lr")
    expect(rate.locator("td.other")).to_have_count(3)  # all differ
    expect(view.locator(".bar")).to_contain_text("settings and")
    rows = view.locator("table.side tbody tr")
    heading = rows.all_inner_texts().index("facts of the runs")
    paths = rows.filter(has_text="path")
    assert 0 < heading < [row.split()[0] for row in rows.all_inner_texts()].index("≠path")
    expect(paths.locator("td.other")).to_have_count(0)
    assert all("trial-00" in cell for cell in paths.first.locator("td").all_inner_texts()), (
        "their end is seen"
    )


def test_the_command_that_sends_a_comparison_is_copied(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 3, "&tab=metrics"), permissions=["clipboard-read", "clipboard-write"])
    view.get_by_role("button", name="Copy").click()
    expect(view.get_by_role("button", name="Copied")).to_have_count(1)
    words = view.evaluate("navigator.clipboard.readText()").split()
    assert words[:2] == ["everstep", "report"] and words[-2:] == ["-o", "comparison.html"]
    assert [Path(word).name for word in words[2:-2]] == ["trial-000", "trial-001", "trial-002"]


def test_a_setting_is_drawn_against_a_metric(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 30, "&tab=scatter"))
    expect(view.locator(".chart-title")).to_contain_text("against config.optimizer.lr")
    expect(view.locator(".chart-reading")).to_have_text("30 runs")
    view.get_by_label("x axis").select_option("step/loss")
    expect(view.locator(".chart-title")).to_contain_text("against step/loss")
    assert "sx=step" in view.url


def test_a_run_is_left_out_by_a_click(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 5, "&find=step/loss"))
    expect(view.locator(".chart-reading")).to_have_text("5 runs")
    view.locator("aside input").nth(1).uncheck()
    expect(view.locator(".chart-reading")).to_have_text("4 runs")


def test_the_values_of_all_runs_stand_beside_the_pointer(sweep: Page, opened: Opened) -> None:
    for runs, rows in ((3, 3), (12, 10)):
        view = opened(sweep, address(sweep, runs, "&find=loss"))
        expect(view.locator(".card .u-over")).to_have_count(3)
        box: Any = view.locator(".card[aria-label='step/loss'] .u-over").bounding_box()
        view.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
        listed = view.locator(".chart-list:visible")
        expect(listed).to_have_count(1)  # and none in the chart that follows the pointer
        expect(listed).to_contain_text("step ")
        expect(listed.locator(".chart-name")).to_have_count(rows)
        assert ("and 2 runs more" in listed.inner_text()) is (runs == 12)
        readings = view.locator(".chart-reading")
        (line,) = {text.split(" ")[0] for text in readings.all_inner_texts() if "step" in text}
        assert line.startswith("trial-"), "all charts tell of the line that is pointed at"
        view.mouse.move(1, 1)
        expect(listed).to_have_count(0)


def test_a_larger_chart_is_in_sight(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 3), height=700)
    card = view.locator(".card").last
    card.get_by_role("button", name="Larger").click()
    expect(card.locator(".chart-head")).to_be_in_viewport(ratio=1)
    expect(card.get_by_role("button", name="Smaller")).to_be_in_viewport(ratio=1)


def test_a_table_that_goes_on_shows_that_it_does(sweep: Page, opened: Opened) -> None:
    view = opened(sweep, address(sweep, 12, "&tab=settings"), width=800)
    table = view.locator(".wide-table.goes-on")
    expect(table).to_have_count(1)
    table.evaluate("one => { one.scrollLeft = one.scrollWidth }")
    expect(table).to_have_count(0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Page]:
    """The page over a run without `valid_loss` and one that has it."""
    Tiny(tmp_path / "a", max_epoch=1).train()
    Tiny(tmp_path / "b", max_epoch=2).train(tail=_measure)
    with running_page(tmp_path) as page:
        yield page


def test_a_click_opens_the_run_of_the_line(two: Page, opened: Opened) -> None:
    view = opened(two, address(two, 2, "&find=valid_loss"))
    expect(view.locator(".chart-reading")).to_contain_text("step 8")
    box: Any = view.locator(".card .u-over").bounding_box()
    view.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    view.mouse.down()
    view.mouse.up()
    view.wait_for_url("**#/run/b-*")


def test_a_metric_that_comes_later_gets_a_chart(two: Page, opened: Opened, tmp_path: Path) -> None:
    view = opened(two, address(two, 1))
    expect(view.locator(".card")).not_to_have_count(0)
    expect(view.locator(".card[aria-label*=valid_loss]")).to_have_count(0)
    Tiny(tmp_path / "a", max_epoch=2).train(tail=_measure)
    expect(view.locator(".card[aria-label*=valid_loss]")).to_have_count(1)
