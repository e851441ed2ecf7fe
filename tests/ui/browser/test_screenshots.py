"""The pictures in docs/images can be made again, and are what README and docs show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.campaign("machine")

ROOT = Path(__file__).parent.parent.parent.parent
IMAGES = ROOT / "docs" / "images"
LARGEST = 200_000
"""Most bytes of a picture."""


def test_the_pictures_of_the_page_and_of_a_report_can_be_made_again(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; import screenshots; screenshots.take(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT / "tools", timeout=300)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in IMAGES.glob("*.png")}
    for made in tmp_path.iterdir():
        with Image.open(made) as new, Image.open(IMAGES / made.name) as old:
            assert new.size == old.size, f"{made.name}: python tools/screenshots.py makes it anew"
            assert len(new.convert("RGB").getcolors(1 << 24) or []) > 50, "something is drawn"
        assert (IMAGES / made.name).stat().st_size <= LARGEST


def test_each_picture_is_shown_with_words_for_who_cannot_see_it() -> None:
    shown = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for words, place in re.findall(r"!\[([^]]*)\]\(([^)\s]*images/[^)\s]*)\)", page.read_text()):
            assert len(words.split()) > 2, f"{page.name}: {place} has no words"
            shown[(page.parent / place).resolve()] = words
    assert shown.keys() == set(IMAGES.iterdir())
