"""No documented name of an older system is left without an answer, and no answer names what is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep

FOLDER = Path(__file__).parent.parent.parent / "docs" / "coming-from"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))


def answered(page: str) -> str:
    """The code in the first columns of a page's tables."""
    rows = [line for line in (FOLDER / f"{page}.md").read_text().splitlines() if line.startswith("| ")]
    firsts = [re.split(r"(?<!\\)\|", row)[1] for row in rows]
    return "\n".join(code for first in firsts for code in re.findall(r"`([^`]+)`", first))


def test_every_page_has_its_list_of_names() -> None:
    """They were made once from the documents of the older systems; lightning-hf's is by hand."""
    assert PAGES
    assert sorted(path.stem for path in (FOLDER / "names").glob("*.txt")) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_in_a_table(page: str) -> None:
    names, code = (FOLDER / "names" / f"{page}.txt").read_text().split(), answered(page)
    missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", code)]
    assert names
    assert not missing


def codes_of(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (FOLDER / f"{page}.md").read_text())


def paths_of(page: str) -> Iterator[str]:
    """What the page calls everstep's own: `everstep.Name`, `services.Name` and `Moment.NAME` in code."""
    for code in codes_of(page):
        for path in re.findall(r"\beverstep((?:\.[A-Za-z_]\w*)+)", code):
            yield path[1:]
        for path in re.findall(r"(?<!\.)\b((?:services|data|Moment)\.[A-Za-z_]\w*)", code):
            yield path.replace("Moment.", "services.Moment.")


@pytest.mark.parametrize("page", PAGES)
def test_what_an_answer_names_is_there(page: str) -> None:
    for path in paths_of(page):
        found: Any = everstep
        for name in path.split("."):
            found = getattr(found, name)


class Idle(everstep.Task):
    def build(self) -> None:
        """Nothing."""

    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("page", PAGES)
def test_what_an_answer_does_with_a_door_can_be_done(page: str, tmp_path: Path) -> None:
    """`trainer.watch(stream)`, `loop.step`, `sv.stream(data)`."""
    doors = {
        "trainer": everstep.Trainer(Idle(), {}, tmp_path / "trainer"),
        "loop": everstep.TrainLoop(tmp_path / "loop"),
        "sv": everstep.Supervisor(tmp_path / "sv"),
    }
    for code in codes_of(page):
        for door, name in re.findall(r"(?<![\w.])(trainer|loop|sv)\.([A-Za-z_]\w*)", code):
            assert name in dir(doors[door]), code


@pytest.mark.parametrize("page", PAGES)
def test_names_of_ours_have_their_home(page: str) -> None:
    """In the columns of answers; without it the tests above would not see them."""
    ours = "|".join(name for name in [*everstep.__all__, *everstep.services.__all__] if name[0].isupper())
    rows = [line for line in (FOLDER / f"{page}.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        for code in re.findall(r"`([^`]+)`", "|".join(re.split(r"(?<!\\)\|", row)[2:])):
            bare = re.search(rf"(?<![\w.\"'])(?!Moment)({ours})\b", code)
            assert bare is None, f"{bare[0]} in {code}"
