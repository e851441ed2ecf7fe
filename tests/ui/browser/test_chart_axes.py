"""Axes of charts in a browser: every range of numbers has its ticks, and none freezes the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from everstep.ui import STATIC
from everstep.ui.report import bundle

pytestmark = pytest.mark.campaign("machine")

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as View

DRAWN = """async ([values, options]) => {
    const box = document.body.appendChild(document.createElement("div"));
    const series = [{ label: "run", x: values.map((_, i) => i), last: values }];
    lineChart(box, { title: "loss", x: "step", series, marks: [] }, options);
    await new Promise((later) => setTimeout(later, 50));  // it draws when this script has ended
    const canvas = box.querySelector("canvas");
    return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean);
}"""


def with_charts(browser: Browser) -> View:
    names = ("words", "dom", "looks", "axes", "drawing", "chart_frame", "charts")
    charts = f"{bundle(names)}\nconst {{ lineChart }} = modules.charts;"
    view = browser.new_page(viewport={"width": 500, "height": 400})
    view.set_content("<!doctype html><body></body>")
    view.add_script_tag(path=STATIC / "vendor" / "uPlot.iife.min.js")
    view.add_script_tag(content=charts)
    return view


@pytest.mark.parametrize(("values", "options"), [
    ([0.3, 0.30000000000000004], {"logY": True}),
    ([1e-200, 1e200], {"logY": True}),
    ([5e-324, 1.7e308], {"logY": True}),
    ([1e6, 1000000.0000000001], {}),
    ([-1.7e308, 1.7e308], {}),
    ([1.5e308, 1.7e308], {}),
    ([1, 2], {"logX": True, "from": 0, "to": 1}),
    ([1, 2], {"from": 1e18, "to": 1e18 + 256}),
    ([1, 2], {"from": 1e300, "to": 1e308}),
])  # fmt: skip
def test_every_range_is_drawn(values: list[float], options: dict[str, object], browser: Browser) -> None:
    view = with_charts(browser)
    # Unlike `evaluate`, it ends where the page does not answer.
    view.wait_for_function(f"() => ({DRAWN})({json.dumps([values, options])})", timeout=5_000)
    view.close()


PRESSED = """async (options) => {
    const box = document.body.appendChild(document.createElement("div"));
    const seen = [];
    const series = [{ label: "run", x: [1, 10, 1000], last: [1, 2, 3] }];
    const onZoom = (from, to) => seen.push(to / from);
    lineChart(box, { title: "loss", x: "step", series, marks: [] }, { ...options, onZoom });
    await new Promise((later) => setTimeout(later, 50));
    const plot = box.querySelector("[tabindex]");
    for (const key of ["-", "ArrowLeft", "ArrowRight"]) {
        plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
        await new Promise((later) => setTimeout(later, 50));
    }
    return seen;
}"""


def test_keys_move_a_log_axis_by_equal_ratios(browser: Browser) -> None:
    view = with_charts(browser)
    ratios = view.evaluate(PRESSED, {"logX": True, "from": 1, "to": 1000})
    assert ratios == pytest.approx([1000**1.6] * 3)
    view.close()


TIMELINE = """([starts, rollbacks]) => {
    const box = document.body.appendChild(document.createElement("div"));
    drawTimeline(box, { name: "run", step: 20, starts, rollbacks });
    return box.querySelectorAll(".timeline-row").length;
}"""


@pytest.mark.parametrize(("start", "rollback"), [
    ({"step": 1e308}, {"step": "Infinity", "to": 1}),
    ({"from_step": "1", "again": "e400"}, {"step": 3, "to": None}),
    ({"from_step": 5, "again": [1e308]}, {"step": 1e300, "to": -1e300}),
])  # fmt: skip
def test_a_timeline_of_any_values_is_drawn(start: Any, rollback: Any, browser: Browser) -> None:
    names = ("words", "dom", "looks", "icons", "timeline")
    view = browser.new_page()
    view.set_content("<!doctype html><body></body>")
    view.add_script_tag(content=f"{bundle(names)}\nconst {{ drawTimeline }} = modules.timeline;")
    first = {"number": 1, "started": 0, "last": None, "from_step": 0, "step": 20, "status": "killed"}
    starts = [{**first, "badge": "first"}, {**first, **start, "badge": "verified"}]
    view.wait_for_function(f"() => ({TIMELINE})({json.dumps([starts, [rollback]])}) === 4", timeout=5_000)
    view.close()


def test_a_name_is_no_formula_and_turns_no_text(browser: Browser) -> None:
    names = ("words", "dom", "looks", "icons", "drawing", "chart_frame")
    view = browser.new_page()
    view.set_content("<!doctype html><body></body>")
    view.add_script_tag(
        content=f"{bundle(names)}\nconst {{ csv }} = modules.chart_frame, {{ made }} = modules.dom;"
    )
    cells = ["x;=1+1", "x\t=1+1", "\uff1d1+1", "\n=1+1", "=1+1", " @a", 'a";=1;"', "step/loss", -1.5]
    saved = view.evaluate("(cells) => csv([cells]).text()", cells)
    quoted = ['"x;=1+1"', '"x\t=1+1"', '"\'\uff1d1+1"', '"\n\'=1+1"', '"\'=1+1"', '"\' @a"', '"a"";=1;"""']
    assert saved == ",".join([*quoted, "step/loss", "-1.5"]) + "\r\n"
    assert view.evaluate("made('p', '', ['best\\u202e', ' 0.129']).textContent") == "best\\u202e 0.129"
    view.close()
