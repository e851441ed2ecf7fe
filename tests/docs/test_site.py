"""The site of `make docs`: every link and anchor leads somewhere, nothing is fetched, a search finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.campaign("machine")

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """Links of a page, what it loads by itself, and the names of its places."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") != "canonical":
            self.loads.append(found.get("href", ""))
        elif "src" in found:
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    subprocess.run(["make", "docs", f"ARGS={folder}", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    return folder


def broken(site: Path) -> Iterator[str]:
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    yield f"{file.relative_to(site)} fetches {link}"
                continue
            there = Path(os.path.normpath(file.parent / unquote(parts.path))) if parts.path else file
            if there.is_dir():
                there /= "index.html"
            if not there.is_file():
                yield f"{file.relative_to(site)} leads to {link}"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].names:
                yield f"{file.relative_to(site)} leads to {link}, a place that is not there"


def test_each_link_of_the_pages_has_its_file() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from build_site import layout, settings

    files = layout({})
    assert "quickstart.md" in files and "examples/digits.py.md" in files
    listed = re.findall(r'= "([\w./-]+\.md)"', settings())
    shown = {name for name in listed if not name.startswith("reference")}
    programs = {
        name for name in files if name.startswith(("examples/", "conformance/")) or not name.endswith(".md")
    }
    assert shown == set(files) - programs


def test_links_and_anchors_lead_somewhere_and_nothing_is_fetched(site: Path) -> None:
    assert list(broken(site)) == []
    assert not re.search(r"url\(.?https?:|@import", "".join(f.read_text() for f in site.rglob("*.css")))


def test_a_search_finds_pages_and_public_names(site: Path) -> None:
    found = json.loads((site / "search.json").read_text())
    titles = {item["title"] for item in found["items"]}
    assert {"Quickstart", "Glossary", "TrainLoop", "EarlyStop", "RingBuffer", "ConfigError"} <= titles
