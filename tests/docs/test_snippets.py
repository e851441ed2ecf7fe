"""Every Python snippet of README.md and docs/ runs as it stands there, in an empty directory.

A comment above a snippet says what it takes for granted (tests/docs/snippet_setups.py), and which error
it is there to show:

    <!-- snippet: digits -->
    <!-- snippet: digits, raises DataError -->

Without a comment a snippet starts from nothing.  A `recipe` needs libraries that set-up does not install:
tests/recipes runs it.  What those of docs/coming-from did is looked at, too
(tests/docs/what_samples_did.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from snippet_setups import SETUPS
from what_samples_did import DID

import everstep
from everstep import errors

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)

SNIPPET = re.compile(
    r"^(?:<!-- snippet: (?P<setup>\w+)(?:, raises (?P<error>\w+))? -->\n)?"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    """One fenced block, and what its comment says."""

    page: Path
    line: int
    code: str
    setup: str | None
    error: str | None


def snippets() -> list[Snippet]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in SNIPPET.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            found.append(Snippet(page, line, match["code"], match["setup"], match["error"]))
    return found


def of_folder(name: str) -> dict[str, list[Snippet]]:
    """By page."""
    found: dict[str, list[Snippet]] = {}
    for snippet in snippets():
        if snippet.page.parent.name == name:
            found.setdefault(snippet.page.stem, []).append(snippet)
    return found


def look_at(snippet: Snippet) -> Callable[[dict[str, Any]], None]:
    """What looks at the names and runs that it has left."""
    page = of_folder("coming-from").get(snippet.page.stem, [])
    return DID[snippet.page.stem][page.index(snippet)] if snippet in page else lambda names: None


def test_every_sample_of_coming_from_is_looked_at() -> None:
    assert {page: len(found) for page, found in of_folder("coming-from").items()} == {
        page: len(looks) for page, looks in DID.items()
    }


def name_of(snippet: Snippet) -> str:
    return f"{snippet.page.relative_to(ROOT)}:{snippet.line + 1}"


@pytest.mark.campaign("long", gate=12)
@pytest.mark.parametrize("snippet", [each for each in snippets() if each.setup != "recipe"], ids=name_of)
def test_snippet_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    if snippet.setup is not None:
        names |= SETUPS[snippet.setup]()
    code = compile("\n" * snippet.line + snippet.code, str(snippet.page), "exec", dont_inherit=True)
    if snippet.error is None:
        exec(code, names)
        look_at(snippet)(names)
        return
    with pytest.raises(getattr(errors, snippet.error)):
        exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_is_a_snippet(page: Path) -> None:
    """None escapes by indentation, another spelling of the language, or a comment with a typo."""
    text = page.read_text()
    assert len(re.findall(r"```\s*(?:python|py|pycon)\b", text, re.IGNORECASE)) == len(SNIPPET.findall(text))
    assert text.count("<!-- snippet:") == sum(match["setup"] is not None for match in SNIPPET.finditer(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose)
    targets = [target.partition("#")[0] for pair in links for target in pair if target]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_each_part_of_everstep_that_a_page_names_is_there_after_a_plain_import() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"\beverstep\.([a-z_]+)\.[a-z_]+\(", page.read_text())
    }
    assert {"data", "record"} <= named
    for name in named:
        everstep.__getattr__(name)  # by name: what a test before this one has imported does not count
