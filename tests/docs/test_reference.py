"""docs/reference.md lists every argument that exists, with its default, and none besides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """Argument to default, as they stand in the table under a title."""
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section(title), re.MULTILINE))


def arguments(function: Callable[..., Any]) -> dict[str, str]:
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            default = parameter.default
            text = "time.monotonic" if callable(default) else repr(default).replace("'", '"')
            found[parameter.name] = "needed" if default is parameter.empty else f"`{text}`"
    return found


def test_every_argument_of_both_doors() -> None:
    shared = arguments(everstep.Supervisor.__init__)
    assert rows("TrainLoop and Supervisor") == shared
    own = arguments(everstep.TrainLoop.__init__)
    assert rows("TrainLoop only") == {name: own[name] for name in own.keys() - shared.keys()}


@pytest.mark.parametrize("name", ["arrays", "loader", "prefetch", "replay"])
def test_every_argument_of_data(name: str) -> None:
    text = section("Data")
    assert f"`data.{name}(" in text
    assert all(re.search(rf"\b{argument}\b", text) for argument in arguments(getattr(everstep.data, name)))


def test_every_argument_of_a_torch_task() -> None:
    assert rows("everstep.torch") == arguments(everstep.torch.Task.__init__)


@pytest.mark.parametrize("name", ["ClipOptimizer", "MinibatchOptimizer"])
def test_every_argument_of_the_optimizers(name: str) -> None:
    (call,) = re.findall(rf"^\| `{name}\((.+)\)` \|", section("everstep.torch"), re.MULTILINE)
    given = arguments(getattr(everstep.torch, name).__init__)
    wanted = [key if default == "needed" else f"{key}={default.strip('`')}" for key, default in given.items()]
    assert call == ", ".join(wanted)


def test_every_argument_of_an_experiment() -> None:
    assert rows("Experiment") == arguments(everstep.Experiment.__init__)


def test_the_guide_on_strangers_runs_tells_of_every_command() -> None:
    """tests/cli/test_trust.py goes through them: a new command has its lines there, too."""
    from everstep.cli.group import COMMANDS

    guide = (Path(__file__).parents[2] / "docs" / "guide" / "trust.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) == set(COMMANDS)
