"""The list of runs in a browser: filter, order, columns, keys, links, hostile names, new runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chromium import Opened, expect
from index_runs import train
from page_server import Page, running_page

from everstep.record import RunDir
from tiny_runs import Tiny

pytestmark = pytest.mark.campaign("machine")

if TYPE_CHECKING:
    from playwright.sync_api import Page as View

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;<b>"


def names(view: View) -> list[str]:
    return [name.rpartition("-")[0] for name in view.locator("tbody th a").all_inner_texts()]


def test_words_of_the_command_filter_it_and_the_address_keeps_them(page: Page, opened: Opened) -> None:
    view = opened(page)
    expect(view.locator(".count")).to_have_text("5 runs")
    view.get_by_label("Filter runs").fill("status=killed step>3")
    expect(view.locator(".count")).to_have_text("1 of 5 runs")
    assert names(view) == ["killed"]
    view.reload()
    expect(view.get_by_label("Filter runs")).to_have_value("status=killed step>3")
    expect(view.locator(".count")).to_have_text("1 of 5 runs")


def test_an_error_of_a_filter_stands_beside_it_and_the_list_stays(page: Page, opened: Opened) -> None:
    view = opened(page, "#/runs?where=status%3Dkilled")
    expect(view.locator(".count")).to_have_text("1 of 5 runs")
    view.get_by_label("Filter runs").fill("statu=killed")
    expect(view.get_by_role("alert")).to_contain_text("did you mean 'status'?")
    assert names(view) == ["killed"]
    view.get_by_label("Filter runs").fill("")
    expect(view.locator(".count")).to_have_text("5 runs")
    expect(view.get_by_role("alert")).to_have_count(0)


def test_a_click_on_a_column_sorts_and_another_turns_the_order(page: Page, opened: Opened) -> None:
    view = opened(page, "#/runs?columns=name,status,step,valid_loss")
    step = view.get_by_role("button", name="step")
    step.click()
    expect(view.locator("th[aria-sort=ascending]")).to_contain_text("step")
    expect(view.locator("tbody th a").first).to_contain_text("killed")
    up = [int(text) for text in view.locator("td.is-number:nth-of-type(3)").all_inner_texts()]
    assert up == sorted(up) and len(set(up)) > 1
    step.click()
    expect(view.locator("th[aria-sort=descending]")).to_contain_text("step")
    expect(view.locator("tbody th a").first).to_contain_text("long")


def test_columns_are_chosen(page: Page, opened: Opened) -> None:
    view = opened(page)
    view.get_by_role("button", name="Columns").click()
    view.get_by_label("Find a column").fill("config.optimizer.lr")
    view.locator(".choices").get_by_label("config.optimizer.lr", exact=True).check()
    expect(view.locator("thead th[title='config.optimizer.lr']")).to_be_visible()
    expect(view.locator("tbody tr").nth(1)).to_contain_text("0.1")
    assert "columns=" in view.url
    view.evaluate("location.hash = '#/runs'")  # typed anew
    view.wait_for_url("**columns=*")
    expect(view.locator("thead th[title='config.optimizer.lr']")).to_be_visible()
    view.get_by_role("button", name="Default columns").click()
    view.evaluate("location.hash = '#/runs?sort=name'")
    expect(view.locator("th[aria-sort=ascending]")).to_contain_text("name")
    assert "columns=" not in view.url


def test_what_cannot_be_read_is_told_in_the_header(tmp_path: Path, opened: Opened) -> None:
    Tiny(tmp_path / "a", max_epoch=1).train()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    with running_page(tmp_path) as page:
        view = opened(page)
        view.locator(".warnings summary").click()
        expect(view.locator(".warnings li").first).to_contain_text("run.json is damaged")


def test_it_is_used_without_a_mouse(page: Page, opened: Opened) -> None:
    view = opened(page, "#/runs?sort=name")
    expect(view.locator("tbody th a")).to_have_count(5)
    view.keyboard.press("?")
    expect(view.get_by_role("dialog")).to_contain_text("next, previous run")
    view.keyboard.press("Escape")
    expect(view.get_by_role("dialog")).to_have_count(0)
    for key in "jxjx":
        view.keyboard.press(key)
    expect(view.get_by_role("button", name="Compare 2")).to_be_enabled()
    assert [row.locator("a").inner_text()[:4] for row in view.locator("tr.picked").all()] == ["good", "kill"]
    view.keyboard.press("/")
    expect(view.get_by_label("Filter runs")).to_be_focused()


def test_runs_of_a_sweep_are_a_group(tmp_path: Path, opened: Opened) -> None:
    for name in ("rate-1", "rate-2"):
        train(tmp_path / name, EVERSTEP_SWEEP="rate")
    train(tmp_path / "other")
    with running_page(tmp_path) as page:
        view = opened(page)
        view.get_by_label("Groups").check()
        expect(view.locator("tbody td.sweep")).to_have_text(["rate", "", "no sweep"])
        view.get_by_role("button", name="name").click()
        view.get_by_role("button", name="name").click()
        expect(view.locator("th[aria-sort=descending]")).to_contain_text("name")
        expect(view.locator("tbody th a").first).to_contain_text("rate-2")
        assert names(view) == ["rate-2", "rate-1", "other"] and view.get_by_label("Groups").is_checked()


def test_a_setting_is_drawn_against_a_metric_of_all_runs_that_match(tmp_path: Path, opened: Opened) -> None:
    for i in range(5):
        Tiny(tmp_path / f"run{i}", max_epoch=1, seed=i, config={"lr": 0.1 * (i + 1)}).train()
    with running_page(tmp_path) as page:
        view = opened(page)
        view.get_by_role("button", name="Scatter").click()
        expect(view.locator(".chart-title")).to_have_text("best/loss against config.lr")
        expect(view.locator(".chart-reading")).to_have_text("5 runs")
        for key in "jx":  # of the table, which is not there
            view.keyboard.press(key)
        expect(view.get_by_role("button", name="Compare all")).to_be_visible()
        view.get_by_label("Filter runs").fill("config.lr>0.25")
        expect(view.locator(".chart-reading")).to_have_text("3 runs")
        view.get_by_label("y axis").select_option("step")
        view.reload()
        expect(view.locator(".chart-title")).to_have_text("step against config.lr")
        box: Any = view.locator(".card .u-over").bounding_box()
        view.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(view.locator(".chart-reading")).to_contain_text("run")
        view.get_by_label("Filter runs").fill("config.lr>")
        expect(view.get_by_role("alert")).to_have_count(1)


def test_a_name_is_never_markup_and_a_new_run_appears(tmp_path: Path, opened: Opened) -> None:
    train(tmp_path / "first")
    with running_page(tmp_path) as page:
        view = opened(page)
        expect(view.locator(".heard")).to_contain_text("live")
        expect(view.locator("tbody th a")).to_have_count(1)
        RunDir.open(tmp_path / "hostile", about={"id": HOSTILE})  # as a stranger may have written it
        train(tmp_path / "hostile")
        link = view.locator("tbody th a").filter(has_text="<img src=x")
        expect(link).to_have_text(HOSTILE)
        assert view.locator("tbody img, tbody b").count() == 0
