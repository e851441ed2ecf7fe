"""The docstrings are the reference: each public name has its own, and each argument a line in it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from snippet_setups import SETUPS

import everstep

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from reference import MODULES, public  # noqa: E402

PAGE = ROOT / "docs" / "reference.md"
UNSAID = {"name", "run_dir", "path", "message", "ranks"}
"""Arguments whose meaning is the same everywhere: a service's name, a run, a file, the words of an error."""


def names() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        home = everstep if module == "everstep" else getattr(everstep, module.removeprefix("everstep."))
        exported = getattr(home, "__all__", None) or [
            name for name, found in vars(home).items() if getattr(found, "__module__", "") == module
        ]
        for name in public(module, exported):
            found = getattr(home, name)
            if not inspect.ismodule(found) and callable(found):
                yield f"{module}.{name}", found


PUBLIC = dict(names())


def described(found: Any) -> set[str]:
    """Return the names of arguments that a docstring, or those of the classes above, tells of."""
    homes = found.__mro__ if inspect.isclass(found) else [found]
    docs = [inspect.cleandoc(text.__doc__ or "") for home in homes for text in (home, home.__init__)]
    if found is everstep.TrainLoop:
        docs.append(inspect.cleandoc(everstep.Supervisor.__doc__ or ""))  # "as for `Supervisor`"
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", "\n\n".join(docs), re.MULTILINE)
    lines = re.findall(r"^    ([\w*, ]+?)(?: \(.*?\))?:", "\n".join(sections), re.MULTILINE)
    said = {name.strip(" *") for line in lines for name in line.split(",")}
    return said | set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", docs[0]))))


def test_all_rooms_are_looked_at() -> None:
    assert len(PUBLIC) > 100 and {"everstep.data.arrays", "everstep.torch.Task", "everstep.load"} <= set(
        PUBLIC
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_and_its_arguments_are_documented(name: str) -> None:
    found = PUBLIC[name]
    assert found.__doc__, f"{name} has no docstring"
    members = vars(found).items() if inspect.isclass(found) and name.count(".") == 1 else ()
    silent = [
        member
        for member, thing in members
        if member[0] != "_" and (inspect.isfunction(thing) or isinstance(thing, property))
        if not inspect.getdoc(getattr(found, member))
    ]
    assert silent == []
    if (inspect.isclass(found) and issubclass(found, (Enum, Exception))) or found in TUPLES:
        return
    arguments = inspect.signature(found).parameters.values()
    wanted = {
        each.name
        for each in arguments
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and each.name[0] != "_"
    }
    assert wanted - described(found) - UNSAID == set()


TUPLES = {everstep.record.Row, everstep.record.Event}
"""Their fields are described one by one, in docstrings of their own or in the guide."""


def test_the_page_leads_to_the_docstrings() -> None:
    for name, target in re.findall(r"\[`([\w.]+)`[^\]]*\]\(\.\./(src/[^)]+)\)", PAGE.read_text()):
        found: Any = everstep
        for part in name.split("."):
            found = getattr(found, part)
        if name == "record.RunJournal" or inspect.ismodule(found):
            continue
        assert inspect.getsourcefile(inspect.unwrap(found)) == str(ROOT / target), name


def test_help_everstep_names_everything_on_one_screen_and_its_loops_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = everstep.__doc__ or ""
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert set(everstep.__all__) - named == set() and text.count("\n") <= 45
    monkeypatch.chdir(tmp_path)
    names = SETUPS["task"]()
    loop, trainer = (dedent(block) for block in re.findall(r"((?:^    .*\n)+)", text, re.MULTILINE))
    exec(loop, {**names, "validate": lambda: 0.5})
    exec(trainer, {**names, "task": names["Digits"]()})
    assert len(everstep.record.RunJournal("runs/task").series("valid/loss")[0]) == 9


def test_the_guide_on_strangers_runs_tells_of_every_command() -> None:
    """tests/cli/test_trust.py goes through them: a new command has its lines there, too."""
    from everstep.cli.group import COMMANDS

    guide = (ROOT / "docs" / "guide" / "trust.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) == set(COMMANDS)
