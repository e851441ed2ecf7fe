"""docs/design.md and docs/glossary.md: each room and term once; the ways name what the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def steps_of_the_ways() -> Iterator[tuple[str, list[Path], set[str]]]:
    """Each numbered step with its names, and the files that it names; if none, those of the step before."""
    design = (ROOT / "docs" / "design.md").read_text()
    ways = design.split("## Five ways through the code\n")[1].split("\n## ")[0]
    files: list[Path] = []
    for step in re.findall(r"^\d\. .*?(?=^\d\. |\n\n|\Z)", ways, re.M | re.S):
        quoted = re.findall(r"`([^`]+)`", step)
        named = [ROOT / "src" / "everstep" / text for text in quoted if text.endswith(".py")]
        files = named + files if re.search(r"\b[Tt]here `", step) else named or files
        # a name, or the call of it; neither a key of a config (`max_epoch=`, `trainer`) nor a path
        names = {
            match[1] for text in quoted if (match := re.fullmatch(r"(_?[A-Z]\w*\.\w+|\w+)(\(.*\))?", text))
        }
        yield step, files, names


def defined(file: Path) -> set[str]:
    """What a file defines, `Class.method` for members."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{each.name}" for each in ast.walk(node) if isinstance(each, ast.FunctionDef)
            }
    return found


def test_the_ways_through_the_code_name_files_that_are_there() -> None:
    steps = list(steps_of_the_ways())
    assert len(steps) > 25
    assert {str(file) for _, files, _ in steps for file in files if not file.exists()} == set()


def test_the_ways_through_the_code_name_what_their_files_have() -> None:
    """A class and its method are defined in a file that the step names; another name occurs in one."""
    wrong = []
    for step, files, names in steps_of_the_ways():
        has, text = set[str]().union(*map(defined, files)), "\n".join(file.read_text() for file in files)
        lacks = {
            name for name in names if name not in has and ("." in name or not re.search(rf"\b{name}\b", text))
        }
        wrong += [f"{name}: {step[:60]}" for name in sorted(lacks)]
    assert wrong == []


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
