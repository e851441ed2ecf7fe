"""docs/glossary.md: each term once, in one sentence, and in use; design.md marks no other term."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.*)$", GLOSSARY.read_text(), re.M)
TERMS = [term for term, _ in ENTRIES]


def sources() -> str:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return "\n".join(path.read_text() for path in files if path != GLOSSARY)


def test_each_term_is_there_once_in_one_sentence() -> None:
    assert len(TERMS) == len(set(TERMS)) > 40
    assert GLOSSARY.read_text().count("\n- ") == len(ENTRIES), "an entry of another form"
    assert [term for term, text in ENTRIES if not text.endswith(".") or ". " in text] == []


def test_each_term_is_used_in_code_or_pages() -> None:
    text = sources().lower().replace("_", " ")
    assert [term for term in TERMS if not re.search(rf"\b{term}s?\b", text)] == []


def test_what_the_design_marks_as_a_term_is_explained() -> None:
    """A term is set in italics where design.md uses it first."""
    marked = re.findall(r"(?<!\*)\*([a-z]+(?: [a-z]+)?)\*(?!\*)", (ROOT / "docs" / "design.md").read_text())
    assert {"boundary", "tail", "interim", "controller"} <= set(marked)
    assert set(marked) - set(TERMS) <= {"when", "is"}, "a term without an entry"
