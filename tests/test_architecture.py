"""The house is built as docs/design.md says: rooms, imports, the door, names, messages.

Each test collects all violations of a rule.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import errors
from everstep.supervisor.door import Door
from everstep.supervisor.engine import Engine
from everstep.supervisor.questions import Questions
from everstep.trainer.trainer_loop import TrainerLoop

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "everstep"

FLOORS = (
    {"errors"},
    {"arguments", "display", "hazard", "lazy", "polling", "redaction"},
    {"unattended", "drilled"},
    {"schedule"},
    {"contracts", "durable", "untrusted_files"},
    {"timing", "backends", "labels"},
    {"state"},
    {"checkpoint", "group", "metrics", "record", "data"},
    {"index", "formats", "mirror"},
    {"services"},
    {"supervisor"},
    {"loop"},
    {"trainer"},
    {"experiment"},
    {"tfutils"},
    {"testing", "proof", "torch", "views"},
    {"drill", "importing", "ui"},
    {"replaying"},
    {"cli"},
    {"__init__"},
    {"__main__"},
)
"""From the ground up: a room imports from floors below its own, never from its own.

"backends" is the list of them; the backends themselves (backends/numpy.py, backends/torch/) stand
beside the house: they implement contracts, and only importlib names them.
"""
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
BACKEND_MAY_IMPORT = {"contracts", "data", "errors", "arguments", "backends"}
FRAMEWORKS = {"torch", "torchdata", "jax", "flax", "tensorflow", "keras"}


# ------------------------------------------------------------------------------------- imports


@cache
def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def dotted(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that `path` imports at run time, inside functions too."""
    found: set[str] = set()
    for node in at_run_time(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; imports are absolute here"
            assert node.module is not None
            found |= {submodule(node.module, alias.name) for alias in node.names}
    return frozenset(found)


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside `if TYPE_CHECKING:`."""
    left = [node]
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                yield child
                left.append(child)


def submodule(module: str, name: str) -> str:
    """What `from module import name` loads: a submodule of that name, else the module."""
    folder = ROOT / "src" / Path(*module.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
    return f"{module}.{name}" if is_module else module


def ours(path: Path) -> set[str]:
    """The everstep modules that `path` imports, without the leading "everstep."."""
    return {
        name.partition(".")[2] or "__init__" for name in imports(path) if name.split(".")[0] == "everstep"
    }


def test_imports_go_one_way() -> None:
    rooms = {path.name.removesuffix(".py") for path in SRC.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__pycache__", "py.typed"} == HEIGHT.keys()
    wrong = []
    for path in modules():
        module = dotted(path)
        room, _, inside = module.partition(".")
        below = {other for other in HEIGHT if HEIGHT[other] < HEIGHT[room]}
        allowed = BACKEND_MAY_IMPORT if room == "backends" and inside else below
        others = {name.split(".")[0] for name in ours(path)} - {room}
        wrong += [f"{module} imports {other}, which is not below it" for other in others - allowed]
        frameworks = {name.split(".")[0] for name in imports(path)} & FRAMEWORKS
        if room != "backends":
            wrong += [f"{module} imports {name}; only backends may" for name in frameworks]
        # what only its trees need is in a room that no other imports
        names_it = room != "tfutils" and "everstep.tfutils" in path.read_text()
        if names_it and module not in ("__init__", "experiment"):
            wrong.append(f"{module} names tfutils; the doors that export its names import them late")
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    graph = {dotted(path): ours(path) for path in modules()}
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if state.get(module) == "done":
            return
        assert state.get(module) != "open", f"import cycle: {' -> '.join([*trail, module])}"
        state[module] = "open"
        for other in graph.get(module, ()):
            if other != module:
                visit(other, (*trail, module))
        state[module] = "done"

    for module in graph:
        visit(module, ())


# ---------------------------------------------------------------------------------- the engine

DOORS = [
    SRC / name
    for name in (
        "supervisor/door.py",
        "supervisor/draws.py",
        "supervisor/supervisor.py",
        "loop/epochs.py",
        "loop/train_loop.py",
        "trainer/trainer_loop.py",
    )
]
"""What drives the engine: the loops that users see, and what answers the engine's questions for them."""
BEFORE_THE_RUN = {f"supervisor.opening.{name}" for name in ("open_run", "recover", "init_from")}
"""These make the parts, or what they begin with; nothing is running then."""


def questions() -> set[str]:
    return {name for name, value in vars(Questions).items() if inspect.isfunction(value) and name[0] != "_"}


def attributes(path: Path) -> Iterator[ast.Attribute]:
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))


def test_the_engine_is_held_and_asks_at_most_eight_questions() -> None:
    assert len(questions()) <= 8
    for door in (Door, everstep.Supervisor, everstep.TrainLoop, TrainerLoop):
        assert not issubclass(door, Engine)
    for path in (SRC / "supervisor").rglob("*.py"):
        asked = {
            node.attr
            for node in attributes(path)
            if isinstance(node.value, ast.Attribute)
            and node.value.attr == "loop"
            and ast.unparse(node.value).split(".")[-2] in ("self", "engine", "_engine")
        }
        assert asked <= questions(), f"{path.name} asks {asked - questions()}"


def test_a_door_touches_no_underscore_name_of_the_engine() -> None:
    """Underscore names are a door's own: on `self`, and on nothing else."""
    foreign = {
        f"{dotted(path)}: {ast.unparse(node)}"
        for path in DOORS
        for node in attributes(path)
        if node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    taken = {
        f"{dotted(path)}: {alias.name}"
        for path in DOORS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert foreign | taken == set()


def test_no_two_parts_of_the_engine_write_the_same_attribute() -> None:
    """What is set on another object than `self` is set from one file."""
    writers: dict[str, set[str]] = {}
    for path in {*(SRC / "supervisor").rglob("*.py"), *DOORS}:
        for node in attributes(path):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node.ctx, ast.Store) and not own and dotted(path) not in BEFORE_THE_RUN:
                writers.setdefault(node.attr, set()).add(dotted(path))
    assert {"step", "stop", "epoch", "open_step"} <= writers.keys()
    assert not {name: files for name, files in writers.items() if len(files) > 1}


# ------------------------------------------------------------------------------------ the door


def run(program: str) -> str:
    """What a fresh interpreter prints: which modules are imported is true of one alone."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_everstep_loads_nothing_heavy_and_takes_no_name_of_a_room() -> None:
    names = "data, torch, errors, testing"
    modules, with_a_loop, star = run(
        "import everstep, sys; print(*sys.modules); everstep.TrainLoop; print(*sys.modules)\n"
        f"{names} = range(4); from everstep import *; print({names}, TrainLoop.__name__)"
    ).splitlines()
    heavy = {"numpy", "rich", "sqlalchemy", "pydantic", "safetensors"}
    assert not set(modules.split()) & (FRAMEWORKS | heavy)
    assert not set(with_a_loop.split()) & FRAMEWORKS
    assert star == "0 1 2 3 TrainLoop"


@pytest.mark.campaign("timed")
def test_import_everstep_takes_under_a_tenth_of_a_second() -> None:
    # Of the processor: a machine with other work to do lets everybody wait.
    program = "import time; t = time.process_time(); import everstep; print(time.process_time() - t)"
    assert min(float(run(program)) for _ in range(5)) < 0.1


# ------------------------------------------------------------------------------------ the names


ROOMS = ("data", "drill", "errors", "experiment", "record", "schedule", "services", "testing", "torch")
"""What `everstep.NAME` gives besides the public names."""


def public() -> list[tuple[str, Any]]:
    return [(name, getattr(everstep, name)) for name in (*everstep.__all__, *ROOMS)]


def test_every_public_name_has_a_docstring() -> None:
    without = []
    for name, value in public():
        members = vars(value).items() if inspect.isclass(value) else ()
        documented = {name: value} | {
            f"{name}.{member}": getattr(value, member)
            for member, thing in members
            if not member.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
        }
        without += [each for each, thing in documented.items() if not inspect.getdoc(thing)]
    assert without == []


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'TrainLoop'"):
        everstep.TrainLop  # noqa: B018


USED = ("__future__", "typing", "everstep.drilled", "everstep.lazy", "everstep.unattended")
"""Modules of which a module of late names imports something for itself."""

LATE = ("everstep", *(f"everstep.{room}" for room in ("data", "experiment", "services", "testing", "torch")))


LATE_NAMES = """
import importlib, json, os, pkgutil, sys
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:  # each of them alone, as a user imports it
        module = importlib.import_module(name)
        late = {*module.__all__} - {*vars(module)}
        submodules = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", ()))}
        print(json.dumps([name, [*late & submodules], dir(module)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_type_checkers_and_dir_see_every_public_name_and_no_submodule_hides_one() -> None:
    """`import everstep.testing.check` would bind the module where the function is expected."""
    program = f"import sys; sys.argv[1:] = {[*LATE]}; {LATE_NAMES}".replace("; \n", "\n")
    told = {name: more for name, *more in map(json.loads, run(program).splitlines())}
    assert told.keys() == {*LATE}
    for name, (hidden, listed) in told.items():
        module = importlib.import_module(name)
        assert module.__file__ is not None
        shown = set()
        for node in ast.walk(tree(Path(module.__file__))):
            if isinstance(node, ast.ImportFrom) and node.module not in USED:
                shown |= {alias.asname or alias.name for alias in node.names}
        assert shown == {*module.__all__, *(ROOMS if name == "everstep" else ())}, name
        assert (shown - {*listed}, hidden) == (set(), []), name


# ----------------------------------------------------------------------------------- the errors

CLASSES = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}

REMEDIED_ELSEWHERE = {"DamagedCheckpointError", "RestoreError", "Interrupted", "GuardStop"}
"""The store goes back to the checkpoint before; the caller says which state and adds the three lists; an
exit is no fault."""

REMEDY = re.compile(
    r"\b(act|as in|call|change|check|choose|collect|combine|convert|correct|did you mean|do not|"
    r"encode|enter|free|give|hold|initialise|install|is there after|known:|leave|looks like|loop with|"
    r"lower|make|move|nearest|one epoch loop|one step loop|pass|put|raise|reduce|resume|return|"
    r"see to|set|submit|upgrade|use)\b"
    r"|([:;] |, or | and )(ask|bring|delete|drill|open|record|register|restore|run|save|start|sync|train)\b",
    re.IGNORECASE,
)
"""Words of advice; those that a fault is told in, too, count where advice begins."""


def messages() -> Iterator[tuple[str, str, str]]:
    """Each message that is written where one of our errors is made: where, the error, the message."""
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                yield from (
                    (f"{dotted(path)}:{message.lineno}", node.func.id, ast.unparse(message))
                    for message in node.args
                    if isinstance(message, ast.JoinedStr | ast.Constant) and not is_number(message)
                )


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def test_every_message_says_what_to_do() -> None:
    silent = [
        f"{where}: {error}({message})"
        for where, error, message in messages()
        if error not in REMEDIED_ELSEWHERE
        and not message.rstrip("'\"").endswith("}")  # advice from elsewhere
        and not REMEDY.search(message)
    ]
    assert silent == []


def test_every_error_is_used() -> None:
    text = "\n".join(path.read_text() for path in modules() if path.name != "errors.py")
    bases = {base.__name__ for name in CLASSES for base in vars(errors)[name].__mro__[1:]}
    unused = {name for name in CLASSES - bases if not re.search(rf"\b{name}\(", text)}
    assert not unused


# ------------------------------------------------------------------------------ nothing unfinished


def test_nothing_is_left_for_later() -> None:
    """No stubs (but for the four methods that exist to be overridden) and no test that nowhere runs."""
    stubs = {
        f"{dotted(path)}: {line.strip()}"
        for path in modules()
        for line in path.read_text().splitlines()
        if re.search(r"raise NotImplementedError|\b(TODO|FIXME|XXX)\b", line)
    }
    assert stubs == {
        "contracts.group: raise NotImplementedError(type(self).__name__)",
        "data.cursor: raise NotImplementedError(type(self).__name__)",
        'contracts.services: raise NotImplementedError(f"{type(self).__name__}.run")',
        "schedule: raise NotImplementedError(type(self).__name__)",
    }
    silenced = re.compile(r"pytest\.(xfail|importorskip)|mark\.(skip|xfail)\b")
    skipped = {path.name for path in (ROOT / "tests").rglob("*.py") if silenced.search(path.read_text())}
    assert not skipped
