"""The list of runs in a browser: filter, order, columns, links, hostile names, new runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import Opened, expect
from index_runs import train
from page_server import Page, running_page

from everstep.record import RunDir
from tiny_runs import Tiny

pytestmark = pytest.mark.campaign("machine")

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;<b>"


def names(view: Any) -> list[str]:
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
    expect(view.locator("tbody th a").last).to_contain_text("long")
    up = [int(text) for text in view.locator("td.is-number:nth-of-type(3)").all_inner_texts()]
    assert up == sorted(up) and len(set(up)) > 1
    step.click()
    expect(view.locator("th[aria-sort=descending]")).to_contain_text("step")
    expect(view.locator("tbody th a").first).to_contain_text("long")


def test_columns_are_named_and_runs_compared(page: Page, opened: Opened) -> None:
    view = opened(page, "#/runs?sort=name")
    view.get_by_label("Columns").fill("name,status,config.optimizer.lr")
    expect(view.locator("thead th[title='config.optimizer.lr']")).to_be_visible()
    expect(view.locator("tbody tr").nth(1)).to_contain_text("0.1")
    assert "columns=" in view.url
    for row in (1, 2):
        view.locator("tbody tr").nth(row).get_by_role("checkbox").check()
    view.get_by_role("button", name="Compare 2").click()
    expect(view.locator("aside li")).to_have_count(2)
    expect(view.locator(".card .uplot").first).to_be_visible()


def test_what_cannot_be_read_is_told_in_the_header(tmp_path: Path, opened: Opened) -> None:
    Tiny(tmp_path / "a", max_epoch=1).train()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    with running_page(tmp_path) as page:
        view = opened(page)
        view.locator(".warnings summary").click()
        expect(view.locator(".warnings li").first).to_contain_text("run.json is damaged")


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
