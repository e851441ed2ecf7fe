"""The table of rooms in docs/design.md, and docs/glossary.md: what there is, all of it, each once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_table_of_rooms_names_each_room_and_no_other() -> None:
    source = ROOT / "src" / "everstep"
    table = re.search(r"^\| room \|.*?\n\n", (ROOT / "docs" / "design.md").read_text(), re.M | re.S)
    assert table is not None
    first_cells = re.findall(r"^\| (`[^|]*) \|", table.group(), re.M)
    named = {name.rstrip("/") for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    rooms = {path.name for path in source.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    modules = {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    assert not named - rooms - modules
    assert not rooms - named


GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.*)$", GLOSSARY.read_text(), re.M)
TERMS = [term for term, _ in ENTRIES]


def sources() -> str:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return "\n".join(path.read_text() for path in files if path != GLOSSARY)


def test_each_term_is_there_once_in_one_sentence() -> None:
    assert 40 < len(TERMS) == len(set(TERMS)) <= 60
    assert GLOSSARY.read_text().count("\n- ") == len(ENTRIES), "an entry of another form"
    assert [term for term, text in ENTRIES if not text.endswith(".") or ". " in text] == []


def test_each_term_is_used_in_code_or_pages() -> None:
    text = sources().lower().replace("_", " ")
    assert [term for term in TERMS if not re.search(rf"\b{term}s?\b", text)] == []


def test_what_the_design_sets_in_italics_as_a_term_is_explained() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    assert {"boundary", "tail", "interim", "controller", "finished"} <= set(TERMS)
    assert all(
        re.search(rf"(?<!\*)\*{term}\*", design) for term in ("boundary", "tail", "interim", "controller")
    )


def test_the_folders_of_a_run_and_the_doors_are_explained() -> None:
    text = GLOSSARY.read_text()
    assert {"damaged", "superseded", "best", "journal", "checkpoint"} <= set(TERMS)
    assert all(f"`{door}`" in text for door in ("Supervisor", "TrainLoop", "Trainer", "Experiment"))
