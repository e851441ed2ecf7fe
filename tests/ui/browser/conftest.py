"""Chromium and real pages over real runs.

A browser lives as long as one file of tests: Playwright keeps an event loop in this thread, and other tests
that run in the same process would find it running.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Opened, path_of_chromium
from page_server import Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path_of_chromium(), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Open a page: `opened(page, "#/runs", width=1000)`; none of its scripts may fail or be refused."""
    faults: list[str] = []
    pages = []
    failed: list[Any] = []

    def open_it(page: Page, address: str = "", width: int = 1400, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        pages.append(page)
        page.visitors.append(context.close)
        name, _, value = page.cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{page.port}/"}])
        view = context.new_page()
        view.set_default_timeout(15_000)
        view.on("pageerror", lambda error: faults.append(error.stack or str(error)))
        view.on("console", lambda message: _note(faults, message))
        view.on("response", lambda found: failed.append(found) if found.status >= 500 else None)
        view.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        view.goto(f"http://127.0.0.1:{page.port}/{address}")
        return view

    yield open_it
    faults += [f"{found.url}: {found.text()}" for found in failed]
    for page in pages:
        page.close_visitors()
    assert not faults


def _note(faults: list[str], message: Any) -> None:
    """Keep complaints of the browser; one about a refused filter is expected."""
    if message.type == "error" and "400 (Bad Request)" not in message.text:
        faults.append(message.text)
