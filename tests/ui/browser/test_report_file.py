"""A report in a browser: opened from disk with the network off, verified, drawn, used."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chromium import expect
from click.testing import CliRunner
from pictured_run import TEXT, pictured
from test_run_page import block, written, wrote

from everstep.checkpoint.manifest import MANIFEST
from everstep.cli.looking import report_command as command
from everstep.labels import add_tags, set_note
from everstep.ui.report_page import STATIC
from tiny_runs import Boom, Tiny, boom_at

pytestmark = pytest.mark.campaign("machine")

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as View

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
FromDisk = Callable[..., "View"]


@pytest.fixture(scope="module")
def report(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run that was killed and resumed, and of one that failed; no test changes it."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    arguments = ["long", "failed", "--index", str(made), "-o", str(out)]
    CliRunner().invoke(command, arguments, catch_exceptions=False)
    return out


@pytest.fixture
def from_disk(browser: Browser) -> Iterator[FromDisk]:
    """Open a file with the network off; nothing else is asked for, and no script fails or is refused."""
    faults: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_it(path: Path, **options: Any) -> View:
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


def order_of(view: View) -> list[str]:
    """Ids of the sections, from the top."""
    found: list[str] = view.locator("section").evaluate_all("each => each.map((one) => one.id)")
    return found


def test_it_opens_from_disk_verified_and_drawn(report: Path, from_disk: FromDisk) -> None:
    view = from_disk(report)
    told = view.locator("#verified")
    expect(told).to_contain_text("the data are as they were when the report was made")
    assert "verified" not in told.inner_text(), "that is a word for resumes"
    embedded = view.locator("#data").text_content() or ""
    expect(told).to_contain_text(hashlib.sha256(embedded.encode()).hexdigest())
    expect(view.locator("#charts .chart-title")).to_have_text(["tail/valid_loss", "epoch/loss", "step/loss"])
    for chart in view.locator("#charts .chart-plot").all():
        assert chart.evaluate(INK) > 500
    expect(view.locator("#timeline .badge")).to_have_text(["verified"])
    expect(view.locator("#timeline")).to_contain_text("killed at")
    expect(view.locator("#config tr.differs")).to_have_count(0)
    expect(view.locator("#environment tr.differs:visible").first).to_contain_text("path")
    assert order_of(view).index("timeline") < order_of(view).index("charts")
    line = view.locator("#environment tr").filter(has=view.locator("th", has_text="argv")).locator("td").first
    assert "\n" not in line.inner_text() and line.inner_text().startswith("-c ")
    expect(view.locator("#charts > p")).to_contain_text("tail/ after an epoch's steps")
    expect(view.locator("#failures")).to_contain_text("ValueError")
    expect(view.locator("#checkpoints tbody tr").first).to_contain_text("epoch-")


def test_changed_data_are_told(report: Path, tmp_path: Path, from_disk: FromDisk) -> None:
    text = report.read_text()
    assert '"lr"' not in text and '"name":"optimizer.lr","values":[0.1' in text
    changed = tmp_path / "changed.html"
    changed.write_text(
        text.replace('"name":"optimizer.lr","values":[0.1', '"name":"optimizer.lr","values":[0.2')
    )
    view = from_disk(changed)
    expect(view.get_by_role("alert")).to_contain_text("the data were changed after the report was made")


@pytest.mark.parametrize("length", [0, 1, 55, 56, 63, 64, 65, 120, 100_001])
def test_its_digest_is_that_of_the_standard_library(length: int, browser: Browser) -> None:
    source = (STATIC / "sha256.js").read_text().replace("export ", "")
    view = browser.new_page()
    made = f"sha256(Uint8Array.from({{length: {length}}}, (_, i) => (i * 7 + 3) & 255))"
    found = view.evaluate(f"() => {{ {source}; return {made}; }}")
    view.close()
    assert found == hashlib.sha256(bytes((i * 7 + 3) & 255 for i in range(length))).hexdigest()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run of 16 steps, and of one that failed in step 7 and continued; no test changes it."""
    folder = tmp_path_factory.mktemp("two")
    Tiny(folder / "whole", max_epoch=4).train()
    with pytest.raises(Boom):
        Tiny(folder / "failed", max_epoch=4).train(boom_at(7))
    Tiny(folder / "failed", max_epoch=4).train()
    arguments = [str(folder / "failed"), str(folder / "whole"), "-o", str(folder / "report.html")]
    CliRunner().invoke(command, arguments, catch_exceptions=False)
    return folder / "report.html"


def test_runs_are_hidden_and_shown_and_superseded_points_seen(two: Path, from_disk: FromDisk) -> None:
    view = from_disk(two)
    names = view.locator("#charts .card").first.locator(".chart-name")
    expect(names).to_have_count(2)
    view.get_by_role("checkbox", name="show whole").uncheck()
    expect(names).to_have_count(0)
    step = view.locator("#charts .card").nth(1)
    expect(step.locator(".chart-reading")).to_contain_text("step 16")
    before = step.locator(".chart-plot").evaluate(INK)
    view.get_by_label("superseded points").check()
    assert step.locator(".chart-plot").evaluate(INK) > before, "steps 5 and 6 of the start that failed"
    view.get_by_role("checkbox", name="show whole").check()
    expect(names).to_have_count(2)
    view.get_by_label("log y").check()


def test_a_chart_is_saved_as_png_and_csv(two: Path, from_disk: FromDisk, tmp_path: Path) -> None:
    view = from_disk(two, accept_downloads=True)
    card = view.locator("#charts .card").nth(1)
    saved = {}
    for name in ("PNG", "CSV"):
        with view.expect_download() as download:
            card.get_by_role("button", name=name).click()
        download.value.save_as(tmp_path / name)
        saved[download.value.suggested_filename] = (tmp_path / name).read_bytes()
    assert saved["step-loss.png"].startswith(b"\x89PNG")
    lines = saved["step-loss.csv"].decode().splitlines()
    assert lines[0] == "series,step,min,max,last,superseded" and len(lines) == 1 + 16 + 2 + 16


def test_it_shows_pictures_texts_histograms_and_the_log(tmp_path: Path, from_disk: FromDisk) -> None:
    run, out = pictured(tmp_path / "run"), tmp_path / "report.html"
    CliRunner().invoke(command, [str(run), "-o", str(out)], catch_exceptions=False)
    view = from_disk(out)
    part = view.locator("#summaries")
    expect(part.locator(".chart-title")).to_have_text(["note", "seen/noise", "seen/weights"])
    image = part.locator("img")
    expect(image).to_have_js_property("naturalWidth", 48)
    expect(image).to_have_attribute("alt", "seen/noise at step 12")
    part.get_by_label("Step of seen/noise").fill("0")
    expect(image).to_have_attribute("alt", "seen/noise at step 4")
    expect(image).to_have_js_property("naturalWidth", 48)
    expect(part.locator("pre")).to_have_text(f"{TEXT}3")
    expect(part.locator(".histogram rect")).to_have_count(64)
    expect(view.locator("#log pre")).to_have_text((run / "logs" / "run.log").read_text())


def test_its_charts_have_an_axis_of_time(two: Path, from_disk: FromDisk) -> None:
    view = from_disk(two)
    step = view.locator("#charts .card").nth(1)
    reading = step.locator(".chart-reading")
    view.get_by_role("checkbox", name="show whole").uncheck()
    expect(reading).to_contain_text("step 16")
    view.get_by_role("button", name="Time", exact=True).click()
    expect(reading).to_contain_text(" s ")
    expect(view.get_by_role("button", name="Time", exact=True)).to_have_attribute("aria-pressed", "true")
    before = step.locator(".chart-plot").evaluate(INK)
    view.get_by_label("superseded points").check()
    assert step.locator(".chart-plot").evaluate(INK) > before
    view.get_by_role("button", name="Steps").click()
    expect(reading).to_contain_text("step 16")


def test_values_that_are_all_superseded_are_shown_by_a_button(tmp_path: Path, from_disk: FromDisk) -> None:
    run, out = tmp_path / "run", tmp_path / "report.html"
    first = wrote(block([1.0]), then=[block([5.0, 4.0], "only once")])
    written(run, first, wrote(block([2.0], first=2)))
    CliRunner().invoke(command, [str(run), "-o", str(out)], catch_exceptions=False)
    view = from_disk(out)
    card = view.locator("#charts .card").filter(has_text="only once")
    expect(card.locator(".chart-reading")).to_have_text("all 2 values superseded")
    before = card.locator(".chart-plot").evaluate(INK)
    card.get_by_role("button", name="Show superseded points").click()
    expect(view.get_by_label("superseded points")).to_be_checked()
    assert card.locator(".chart-plot").evaluate(INK) > before + 100


def test_its_timeline_is_saved_as_a_picture(report: Path, from_disk: FromDisk) -> None:
    view = from_disk(report, accept_downloads=True)
    with view.expect_download() as download:
        view.locator("#timeline .card").first.get_by_role("button", name="PNG").click()
    assert re.fullmatch(r"long-\w+-timeline\.png", download.value.suggested_filename)
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_hostile_names_are_text(tmp_path: Path, from_disk: FromDisk) -> None:
    Tiny(tmp_path / "odd", max_epoch=1, config={HOSTILE: HOSTILE}).train(
        tail=lambda loop, epoch: loop.collect_metrics(**{HOSTILE: 1.0})
    )
    out = tmp_path / "report.html"
    CliRunner().invoke(
        command, [str(tmp_path / "odd"), "-o", str(out), "--title", HOSTILE], catch_exceptions=False
    )
    view = from_disk(out, viewport={"width": 420, "height": 800}, color_scheme="dark")
    expect(view.locator("h1")).to_have_text(HOSTILE)
    expect(view.locator("#config th.path")).to_have_text([HOSTILE])
    expect(view.locator("#charts .chart-title").first).to_have_text(f"tail/{HOSTILE}")
    assert view.locator("img, script[src]").count() == 0
    wide = view.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, "nothing makes a narrow page scroll sideways"


def test_its_policy_forbids_connections_and_foreign_scripts(report: Path, browser: Browser) -> None:
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


def test_labels_and_a_damaged_checkpoint_are_told(tmp_path: Path, from_disk: FromDisk) -> None:
    run, out = tmp_path / "odd", tmp_path / "report.html"
    Tiny(run, max_epoch=2).train()
    add_tags(run, ["paper"])
    set_note(run, HOSTILE)
    newest = max((run / "checkpoints").glob("*-*/"))
    (newest / MANIFEST).write_bytes(b"")
    CliRunner().invoke(command, [str(run), "-o", str(out)], catch_exceptions=False)
    view = from_disk(out)
    expect(view.locator("#runs .tag")).to_have_text("paper")
    expect(view.locator("#runs .note")).to_have_text(HOSTILE)
    expect(view.locator("#checkpoints tr").filter(has_text=newest.name)).to_contain_text("damaged: ")
