"""What a browser loads: known libraries, small, with nothing from elsewhere and no markup made of strings."""

from __future__ import annotations

import hashlib
import json
import re

from everstep.ui import STATIC
from everstep.ui.report import MODULES, bundle

VENDOR = STATIC / "vendor"
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and VENDOR not in path.parents)


def test_vendored_files_are_those_of_the_list() -> None:
    listed = {"VENDORED.json"}
    for library in json.loads((VENDOR / "VENDORED.json").read_text()):
        assert re.fullmatch(r"\d+\.\d+\.\d+", library["version"])
        assert library["licence"] in ("MIT", "Apache-2.0")
        assert f"LICENSE.{library['name']}" in {each["file"] for each in library["files"]}
        for each in library["files"]:
            found = hashlib.sha256((VENDOR / each["file"]).read_bytes()).hexdigest()
            assert found == each["sha256"], f"{each['file']} is not the file of {library['package']}"
            listed.add(each["file"])
    assert {path.name for path in VENDOR.iterdir()} == listed


def test_all_of_it_is_below_300_kb() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < 300_000


def test_no_string_becomes_markup_or_code() -> None:
    """Names and messages of runs are data: the DOM takes them as text."""
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|new Function"
    for path in OWN:
        assert not re.search(ways, path.read_text()), path.name


def test_nothing_comes_from_another_host() -> None:
    namespaces = {"http://www.w3.org/2000/svg"}
    for path in OWN:
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[\w./-]*", path.read_text())) <= namespaces, (
            path.name
        )


def test_the_page_fulfils_its_own_content_security_policy() -> None:
    """`default-src 'self'` refuses scripts, styles and handlers inside markup."""
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert (STATIC / address.removeprefix("/static/")).is_file(), address


def test_the_report_can_hold_all_of_it_in_one_file() -> None:
    assert not re.search(r"^(?:import|export)\b", bundle(MODULES), re.MULTILINE)
    for path in STATIC.rglob("*.*s"):
        assert not re.search("</script|</style|<!--", path.read_text(), re.IGNORECASE), path.name
