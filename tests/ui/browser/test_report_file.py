"""A report in a browser: opened from disk with the network off, verified, drawn, used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import expect
from click.testing import CliRunner
from page_server import TEXT, pictured

from everstep.cli.looking import report_command as command
from tiny_runs import Tiny

pytestmark = pytest.mark.campaign("machine")

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
FromDisk = Callable[..., Any]


@pytest.fixture(scope="module")
def report(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run that was killed and resumed, and of one that failed; no test changes it."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    arguments = ["long", "failed", "--index", str(made), "-o", str(out)]
    CliRunner().invoke(command, arguments, catch_exceptions=False)
    return out


@pytest.fixture
def from_disk(browser: Any) -> Iterator[FromDisk]:
    """Open a file with the network off; nothing else is asked for, and no script fails or is refused."""
    faults: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_it(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_offline(True)
        view = context.new_page()
        view.set_default_timeout(15_000)
        view.on("request", lambda request: asked.append(request.url))
        view.on("pageerror", lambda error: faults.append(str(error)))
        view.on("console", lambda message: message.type == "error" and faults.append(message.text))
        view.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        view.goto(path.as_uri())
        return view

    yield open_it
    for context in contexts:
        context.close()
    assert not faults
    assert not [url for url in asked if not url.startswith(("file:", "blob:"))]
    assert len([url for url in asked if url.startswith("file:")]) == len(contexts)


INK = """chart => {
    const canvas = chart.querySelector("canvas");
    const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let drawn = 0;
    for (let at = 3; at < bytes.length; at += 4) drawn += bytes[at] > 0;
    return drawn;
}"""


def test_it_opens_from_disk_as_a_comparison_with_a_page_per_run(report: Path, from_disk: FromDisk) -> None:
    view = from_disk(report)
    expect(view.locator(".card .chart-title")).to_have_text(["valid_loss", "epoch/loss", "step/loss"])
    for chart in view.locator(".card .chart-plot").all():
        assert chart.evaluate(INK) > 500
    view.get_by_text("Time", exact=True).click()
    expect(view.locator("footer")).to_contain_text("made by everstep")
    expect(view.locator("footer")).to_contain_text("✓ verified in this browser")
    view.locator("aside li a").first.click()
    expect(view.locator(".badge")).to_have_text(["verified"])
    expect(view.locator("main.run")).to_contain_text("killed at")
    view.get_by_role("tab", name="Checkpoints").click()
    expect(view.get_by_role("tabpanel")).to_contain_text("epoch-")
    view.get_by_role("link", name="Runs", exact=True).click()
    expect(view.locator("tbody tr")).to_have_count(2)
    names = view.locator("tbody th")
    names_before = names.all_inner_texts()  # "long" and "failed", as the command named them
    view.get_by_role("button", name="name").click()
    expect(names).to_have_text(names_before[::-1])
    view.get_by_role("button", name="Compare all 2").click()
    expect(view.locator("aside li")).to_have_text(names_before[::-1])
    result = view.locator("tbody tr", has_text="best/valid_loss").locator("td")
    expect(result).to_have_text(["1", "0.25"])


def test_data_that_were_changed_are_named(report: Path, tmp_path: Path, from_disk: FromDisk) -> None:
    changed = tmp_path / "changed.html"
    before, begin, data = report.read_text().partition('id="data">')
    changed.write_text(before + begin + data.replace('"step":', '"steq":', 1))
    expect(from_disk(changed).locator("footer")).to_contain_text("≠ the data were changed: they have ")


def test_it_shows_pictures_texts_histograms_and_the_log(tmp_path: Path, from_disk: FromDisk) -> None:
    run, out = pictured(tmp_path / "run"), tmp_path / "report.html"
    CliRunner().invoke(command, [str(run), "-o", str(out)], catch_exceptions=False)
    view = from_disk(out)
    view.get_by_role("tab", name="Images and text").click()
    image = view.get_by_label("seen/noise", exact=True).locator("img")
    expect(image).to_have_js_property("naturalWidth", 48)
    view.get_by_label("Step of seen/noise").fill("0")
    expect(image).to_have_attribute("alt", "seen/noise at step 4")
    expect(view.get_by_label("note", exact=True).locator("pre")).to_have_text(f"{TEXT}3")
    expect(view.locator(".histogram rect")).to_have_count(64)
    view.get_by_role("tab", name="Log").click()
    expect(view.locator("pre.log")).to_have_text((run / "logs" / "run.log").read_text())


def test_hostile_names_are_text(tmp_path: Path, from_disk: FromDisk) -> None:
    tail = lambda loop, epoch: loop.collect_metrics(**{HOSTILE: 1.0})  # noqa: E731
    Tiny(tmp_path / "odd", max_epoch=1, config={HOSTILE: HOSTILE}).train(tail=tail)
    out = tmp_path / "report.html"
    line = [str(tmp_path / "odd"), "-o", str(out), "--title", HOSTILE]
    CliRunner().invoke(command, line, catch_exceptions=False)
    view = from_disk(out, viewport={"width": 420, "height": 800}, color_scheme="dark")
    expect(view.locator("footer bdi")).to_have_text(HOSTILE)
    expect(view.locator(".card .chart-title").first).to_have_text(HOSTILE)
    view.get_by_role("tab", name="Config").click()
    expect(view.locator("[role=tabpanel] th[scope=row]")).to_have_text([HOSTILE])
    assert view.locator("img, script[src]").count() == 0


def test_its_policy_forbids_connections_and_foreign_scripts(report: Path, browser: Any) -> None:
    view = browser.new_page()
    view.goto(report.as_uri())
    refused = view.evaluate(
        """async () => {
            const refused = [];
            addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            await fetch("http://127.0.0.1:9/").catch(() => {});
            const script = document.createElement("script");
            script.textContent = "globalThis.ran = true";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/";
            document.body.append(image);
            await new Promise((done) => setTimeout(done, 200));
            return [...refused, globalThis.ran ?? "not run"];
        }"""
    )
    view.close()
    assert sorted(refused) == ["connect-src", "img-src", "not run", "script-src-elem"]
