"""A run in a browser: its timeline with badges, its charts with marks, a point that comes while one looks."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened, expect
from index_runs import start, train
from page_server import TEXT, Page, pictured, running_page
from test_recovery import finish
from test_verified_resume import crashed, differing
from test_verified_resume import start as twelve_steps

pytestmark = pytest.mark.campaign("machine")

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page over a run that was killed and resumed, one that diverged, and one that was rolled back."""
    folder = tmp_path_factory.mktemp("told")
    train(folder / "long", 4, 11, "SIGKILL")
    train(folder / "long", 4)
    crashed(folder / "diverged")
    odd = {"note": HOSTILE, HOSTILE: 1}
    differing(twelve_steps(folder / "diverged", config=odd)).train()
    finish(folder / "back", {(0, 12)}, save=4)
    with running_page(folder) as page:
        yield page


def at(page: Page, name: str, query: str = "") -> str:
    """Address of the run whose name begins so."""
    runs = page.get("/api/runs").json["rows"]
    return f"#/run/{next(run['id'] for run in runs if run['name'].startswith(name))}{query}"


SIGNS = ["superseded by a later start", "resumed (a dot in charts)", "killed", "finished"]


def painted(view: Any) -> int:
    """How many pixels of the first chart are not its background."""
    return int(
        view.locator(".card canvas:not(.chart-over)").first.evaluate(
            """canvas => {
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              let found = 0;
              for (let i = 3; i < data.length; i += 4) found += data[i] > 0;
              return found;
            }"""
        )
    )


def test_the_timeline_tells_of_a_kill_and_of_its_resume(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "long"))
    rows = view.locator(".timeline-row[role=listitem]")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("Start 1 killed at ")
    expect(rows.nth(1)).to_contain_text("Start 2 finished at 16")
    badge = rows.nth(1).locator(".badge")
    expect(badge).to_contain_text("verified")
    assert badge.locator("path").count() == 1  # a shape, too
    assert rows.nth(1).locator(".timeline-how").inner_text()
    assert rows.nth(0).locator(".timeline-bad path").count() == 1
    legend = view.locator(".timeline-legend > span")
    expect(legend).to_have_text(["steps that count", "executed again", *SIGNS])
    lost: Any = rows.nth(0).locator(".timeline-lost").bounding_box()
    cross: Any = rows.nth(0).locator(".timeline-mark .icon").bounding_box()
    centre = cross["x"] + cross["width"] / 2
    assert lost["width"] >= 9 and lost["x"] - 1 <= centre <= lost["x"] + lost["width"] + 1
    assert cross["y"] + cross["height"] <= lost["y"] + 1, "the cross hides no dash"


def test_a_divergence_is_told_with_its_step(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "diverged"))
    expect(view.locator(".badge-diverged")).to_have_text("diverged at 7")
    verified = opened(told, at(told, "long")).locator(".badge path").get_attribute("d")
    assert view.locator(".badge path").get_attribute("d") != verified


def test_every_metric_is_a_chart_and_its_look_is_in_the_address(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "long"))
    expect(view.locator(".card .uplot")).not_to_have_count(0)
    streams = told.get(f"/api/runs/{at(told, 'long')[6:]}").json["streams"]
    expect(view.locator(".card")).to_have_count(sum(len(stream["metrics"]) for stream in streams))
    assert painted(view) > 500
    view.get_by_text("log y").click()
    view.get_by_role("button", name="Time", exact=True).click()
    view.get_by_text("superseded points").click()
    assert all(word in view.url for word in ("logy=1", "x=time", "superseded=1"))
    view.get_by_label("Find a chart").fill("valid_loss")
    expect(view.locator(".card")).to_have_count(1)
    view.reload()
    expect(view.locator(".card")).to_have_count(1)
    expect(view.get_by_label("log y")).to_be_checked()
    expect(view.locator(".card .uplot")).to_have_count(1)
    assert painted(view) > 100


def test_a_drag_zooms_and_a_button_shows_all_again(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "back", "?find=step/loss"))
    plot = view.locator(".card .u-over").first
    expect(plot).to_be_visible()
    box: Any = plot.bounding_box()
    view.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    view.mouse.down()
    view.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=4)
    view.mouse.up()
    view.wait_for_url("**from=*")
    view.get_by_role("button", name="Whole axis").click()
    expect(view.get_by_role("button", name="Whole axis")).to_have_count(0)


def test_keys_do_what_a_drag_does(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "back", "?find=step/loss"))
    expect(view.locator(".card .uplot")).to_have_count(1)
    view.keyboard.press("/")
    expect(view.get_by_label("Find a chart")).to_be_focused()
    view.keyboard.type("/")
    expect(view.get_by_label("Find a chart")).to_have_value("step/loss/")
    view.keyboard.press("Backspace")
    view.locator(".card .chart-plot").focus()
    view.keyboard.press("+")
    view.wait_for_url("**from=*")
    zoomed = view.url
    view.keyboard.press("ArrowRight")
    view.wait_for_url(lambda address: "from=" in address and address != zoomed)
    view.keyboard.press("0")
    view.wait_for_url(lambda address: "from=" not in address)


def test_colours_follow_the_system(told: Page, opened: Opened) -> None:
    backs = [
        opened(told, at(told, "long"), color_scheme=scheme)
        .locator("html")
        .evaluate("html => getComputedStyle(html).backgroundColor")
        for scheme in ("light", "dark")
    ]
    light, dark = (sum(map(int, re.findall(r"\d+", back)[:3])) for back in backs)
    assert light > 600 and dark < 150


def test_a_chart_is_saved_as_a_picture_and_as_a_table(told: Page, opened: Opened, tmp_path: Path) -> None:
    view = opened(told, at(told, "long", "?find=step/loss"))
    with view.expect_download() as table:
        view.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(Path(table.value.path()).read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 17))
    with view.expect_download() as picture:
        view.locator(".card").get_by_role("button", name="PNG").click()
    assert picture.value.suggested_filename.endswith("-step-loss.png")
    with view.expect_download() as timeline:
        view.get_by_title("Save the timeline as PNG").click()
    assert timeline.value.suggested_filename.endswith("-timeline.png")
    assert Path(timeline.value.path()).read_bytes().startswith(b"\x89PNG")
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")


def test_pictures_texts_and_histograms_are_shown(tmp_path: Path, opened: Opened) -> None:
    pictured(tmp_path / "run")
    with running_page(tmp_path) as page:
        view = opened(page, at(page, "run", "?tab=summaries"))
        image = view.get_by_label("seen/noise", exact=True).locator("img")
        expect(image).to_have_js_property("naturalWidth", 48)
        expect(image).to_have_attribute("alt", "seen/noise at step 12")
        newest = image.get_attribute("src")
        view.get_by_label("Step of seen/noise").fill("0")
        expect(image).to_have_attribute("alt", "seen/noise at step 4")
        expect(image).to_have_js_property("naturalWidth", 48)
        assert image.get_attribute("src") != newest
        expect(view.get_by_label("note", exact=True).locator("pre")).to_have_text(f"{TEXT}3")
        assert view.locator("img[src=x]").count() == 0, "a text is not markup"
        histogram = view.get_by_label("seen/weights", exact=True).locator(".histogram")
        expect(histogram.locator("rect")).to_have_count(64)
        expect(histogram).to_contain_text("1,000 values")
        heights = histogram.locator("rect").evaluate_all("bars => bars.map(bar => bar.height.baseVal.value)")
        assert max(heights) == 160 and heights[32] > heights[0]


def test_each_tab_shows_what_was_recorded_and_nothing_is_markup(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "diverged"))
    expect(view.locator(".card .uplot").first).to_be_visible()
    shown = {}
    for tab in view.get_by_role("tab").all():
        tab.click()
        view.wait_for_timeout(150)
        shown[tab.inner_text()] = view.get_by_role("tabpanel").inner_text()
    assert len(shown) == 6
    assert shown["Config"].count(HOSTILE) == 2
    assert "python" in shown["Code and machine"].lower()
    assert "step-00000012" in shown["Checkpoints"]
    assert view.locator("img[src=x]").count() == 0


def test_a_point_is_seen_soon_after_it_was_measured(tmp_path: Path, opened: Opened) -> None:
    training = start(tmp_path / "live", 4, 2, "ask")  # it asks within a step, and saves after it

    def one_more_step() -> None:
        training.stdout.readline()
        training.stdin.write("\n")
        training.stdin.flush()

    try:
        one_more_step()
        with running_page(tmp_path) as page:
            view = opened(page, at(page, "live", "?find=step/loss"))
            reading = view.locator(".chart-reading")
            expect(reading).to_contain_text("step 2")
            asked = time.monotonic()
            one_more_step()
            expect(reading).to_contain_text("step 3")
            assert time.monotonic() - asked < 10  # 2 s, where nothing else runs
            expect(view.locator(".facts .status")).to_contain_text("running")
    finally:
        training.kill()
        training.communicate()


def test_a_run_tells_how_to_share_it(told: Page, opened: Opened) -> None:
    view = opened(told, at(told, "long"))
    view.get_by_text("Share", exact=True).click()
    command = re.compile(r"^everstep report \S*long\S* -o report\.html$")
    expect(view.locator(".share pre")).to_have_text(command)
    view.get_by_role("button", name="Copy link").click()
    expect(view.locator(".share [role=status]")).to_contain_text("The link is")
