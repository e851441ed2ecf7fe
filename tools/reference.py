"""The reference, as Markdown, from the docstrings of every public name; griffe reads them.

tests/docs/test_reference.py says that each public name has a docstring, and each argument its line there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

SRC = Path(__file__).parent.parent / "src"

MODULES = {
    "everstep": "The doors, and what most programs use.",
    "everstep.data": "Streams of batches whose place is saved.",
    "everstep.services": "What happens around steps.",
    "everstep.runs": "Runs that are there: shown, compared, audited, executed again.",
    "everstep.trainer": "Several trainings in one process.",
    "everstep.supervisor": "What a start ends with, and what was loaded.",
    "everstep.torch": "Tasks, models and optimizers of PyTorch.",
    "everstep.experiment": "Runs from config files.",
    "everstep.record": "What a run has recorded.",
    "everstep.testing": "Tests for your own objects and services.",
    "everstep.drill": "Kills of a program, and what a resume spoils.",
    "everstep.errors": "What can be raised; each says what to do.",
}
"""Module -> what it has."""

RECORD = (
    "RunJournal", "Row", "Event", "Item", "Evaluation", "evaluations", "failures", "accept", "redact",
    "last_step",
)  # fmt: skip
"""The part of `everstep.record` that is for users; its other names are for the rooms of the house."""
LEFT_OUT = {"exports", "alike", "nearest"}
"""Helpers of the house."""


def pages() -> dict[str, str]:
    """Return the pages: their paths in the site's source, and their text."""
    import griffe

    house = griffe.load("everstep", search_paths=[str(SRC)], allow_inspection=False)
    found = {}
    for module, about in MODULES.items():
        home = house if module == "everstep" else house[module.removeprefix("everstep.")]
        found[f"reference/{module.replace('.', '_')}.md"] = "\n".join(_module(module, about, home))
    return {"reference.md": _overview(found), **found}


def _overview(pages: dict[str, str]) -> str:
    text = ["# Reference\n\nFrom the docstrings. The commands: `everstep --help`, and `--help` after each.\n"]
    for (module, about), (path, page) in zip(MODULES.items(), pages.items(), strict=True):
        names = re.findall(r"(?m)^## (\w+)$", page)
        links = ", ".join(f"[`{name}`]({path}#{name.lower()})" for name in names)
        text.append(f"## [{module}]({path})\n\n{about}\n\n{links}\n")
    return "\n".join(text)


def public(module: str, names: Iterable[str]) -> list[str]:
    """Return those of a module's names that the reference has, in order."""
    if module == "everstep.record":
        return sorted(set(RECORD) & set(names))
    return sorted(name for name in names if name[:1] != "_" and name not in LEFT_OUT)


def _module(name: str, about: str, home: Any) -> Iterator[str]:
    yield f"# {name}\n\n{home.docstring.value if name == 'everstep' else about}\n"
    doors = {} if name == "everstep" else home.parent.members
    for key in public(name, _own(name, home)):
        found = _named(home, key)
        if found is not None and (key not in doors or _named(home.parent, key) is not found):
            yield from _entry(key, found)


def _own(module: str, home: Any) -> Iterator[str]:
    """Yield the names that a module defines or exports."""
    exports = set() if home.exports is None else set(map(str, home.exports))
    for name, member in home.members.items():
        if member.is_alias:
            ours = module != "everstep.errors" and member.target_path.startswith("everstep.")
        else:
            ours = name in exports or not member.is_module
        if ours and (name in exports or not exports):
            yield name


def _named(home: Any, name: str) -> Any:
    """Return what a name of a module stands for; None for a module that has nothing of its own name."""
    found = home.members[name]
    found = found.final_target if found.is_alias else found
    return found.members.get(name) if found.is_module else found


def _entry(name: str, found: Any, depth: int = 2) -> Iterator[str]:
    yield f"{'#' * depth} {name}\n"
    if found.is_class:
        yield from _signature(name, found.all_members.get("__init__"))
        yield from _docstring(found)
        init = found.members.get("__init__")
        if init is not None and init.docstring:
            yield from _docstring(init)
        members = {**{k: m for k, m in found.inherited_members.items()}, **found.members}
        for key, member in sorted(members.items()):
            if key[0] != "_" and (member.is_function or member.is_attribute) and member.docstring:
                yield from _member(key, member)
    elif found.is_function:
        yield from _signature(name, found)
        yield from _docstring(found)
    else:
        yield from _docstring(found)


def _member(name: str, member: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if member.is_function:
        yield from _signature(name, member)
    yield from _docstring(member)


def _signature(name: str, function: Any) -> Iterator[str]:
    if function is None or not function.is_function:
        return
    parts, keyword_only = [], False
    for each in function.parameters:
        kind = each.kind.value
        if each.name in ("self", "cls"):
            continue
        if kind == "keyword-only" and not keyword_only:
            parts.append("*")
            keyword_only = True
        if kind == "variadic positional":
            keyword_only = True
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        parts.append(f"{star}{each.name}" + (f"={each.default}" if each.default and not star else ""))
    line = f"{name}({', '.join(parts)})"
    yield f"```python\n{line if len(line) < 90 else _in_lines(name, parts)}\n```\n"


def _in_lines(name: str, parts: list[str]) -> str:
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _docstring(found: Any) -> Iterator[str]:
    if found.docstring is None:
        return
    for section in found.docstring.parse("google", warnings=False):
        kind, value = section.kind.value, section.value
        if kind == "text":
            yield f"{_fenced(value)}\n"
        elif kind in ("parameters", "attributes", "other parameters"):
            yield f"| {'attribute' if kind == 'attributes' else 'argument'} | meaning |\n|---|---|"
            yield from (f"| `{item.name}` | {_in_cell(item.description)} |" for item in value)
            yield ""
        elif kind in ("returns", "yields"):
            yield from (f"**{kind.capitalize()}** {_after(item)}\n" for item in value)
        elif kind == "raises":
            yield "**Raises**\n"
            yield from (f"- `{item.annotation}`: {' '.join(item.description.split())}" for item in value)
            yield ""
        else:
            yield f"**{section.title or kind.capitalize()}** {getattr(value, 'contents', value)}\n"


def _fenced(text: str) -> str:
    """Put fences around examples, which docstrings indent."""
    return re.sub(
        r"(?m)(?:^    .*\n?|^\n(?=    ))+",
        lambda found: f"\n```python\n{dedent(found[0]).strip(chr(10))}\n```\n",
        text,
    )


def _after(item: Any) -> str:
    """Return a result's line: griffe takes words before a colon for a type."""
    said = item.description
    if item.annotation is not None and str(item.annotation) and str(item.annotation) not in str(said):
        before = getattr(item, "name", "") or ""
        said = f"{before}{said}"
    return " ".join(said.split())


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
