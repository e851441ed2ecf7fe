"""The browser of these tests, and how they open a page in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
Opened = Callable[..., Any]


def path_of_chromium() -> str:
    """Path of Chromium.

    Raises:
        pytest.fail.Exception: there is none; says how to get it.
    """
    given = os.environ.get("EVERSTEP_CHROMIUM")
    found = next(filter(None, map(shutil.which, [given] if given else NAMES)), None)
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium as root, or EVERSTEP_CHROMIUM=/path/to/chromium")
    return found


def expect(what: Any) -> Any:
    """Wait for what is said of `what`; imported late, so that tests can be listed without Playwright."""
    from playwright.sync_api import expect

    return expect(what)
