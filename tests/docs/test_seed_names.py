"""The tool that lists the names of the older systems, on documents of one that never was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "seed_names.py"

DOCUMENT = """NoiseLoop¶
class
old.NoiseLoop(model, max_steps=None, log=<function log at 0x7f>, *hooks, **kwargs)¶ Runs steps.
Methods
make_noise(volume, loud=True)¶ See tf.nn.noise_ops and _private_part of the LoopRunner.
- warm_up
- how many
"""

SOURCE = """Source code for old
from .hooks import Hook, StopNow
class Runner: LEVELS_OF = ['a'] def __init__(self, buffer: int): ''' :param buffer: size ''' some_local = 1
def _inner(self, hidden): ''' :param hidden: none ''' def run(self, name): ''' :param name: which '''
hook.after_all(name)
"""

NOTES = """## 1. Old and others
### Events
| Hook | Behaviour |
|---|---|
| Beep(often\\|rarely, how=1), Honk | `stop_at_{noon,night}` and `every=`, `-q` |
### Experiment
`not_here`
## 2. Another
- Old things: `last_one`, LikeThis.
`nor_here`
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("seed_names", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "seed_names", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_names_of_a_document(tool: ModuleType) -> None:
    found = tool.names(tool.Seed("old", "NoiseLoop¶", ("Old",)), [DOCUMENT], [])
    names = "hooks log LoopRunner loud make_noise max_steps model NoiseLoop volume warm_up"
    assert " ".join(found) == names


def test_names_of_source_code(tool: ModuleType) -> None:
    found = tool.names(tool.Seed("old", "Source code for old", ("Old",)), [SOURCE], [])
    assert " ".join(found) == "after_all buffer Hook LEVELS_OF name run Runner StopNow"


def test_names_of_notes(tool: ModuleType) -> None:
    seed = tool.Seed("old", "(mark)", ("Old",), apart="Experiment")
    found = tool.names(seed, ["(mark)"], [NOTES])
    names = "-q Beep every Honk how last_one LikeThis often rarely stop_at_night stop_at_noon"
    assert " ".join(found) == names


def test_a_document_ends_where_the_next_begins(tool: ModuleType) -> None:
    seed = tool.Seed("old", "NoiseLoop¶", ("Old",), until="Methods\nmake_noise")
    assert " ".join(tool.names(seed, [DOCUMENT], [])) == "hooks log max_steps model NoiseLoop"


def test_a_document_must_be_there(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="not enough values"):
        tool.names(tool.Seed("old", "a mark", ("Old",)), [DOCUMENT], [])
