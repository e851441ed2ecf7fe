"""The house is built as docs/design.md says: rooms, imports, the door, names, messages.

Each test collects all violations of a rule.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import everstep
from everstep import errors

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "everstep"

FLOORS = (
    {"errors"},
    {"arguments", "display", "first_use", "hazard", "lazy", "polling", "redaction", "version"},
    {"unattended"},
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
    {"compat"},
    {"testing", "proof", "torch", "views"},
    {"drill", "ui"},
    {"replaying"},
    {"runs"},
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
        names_it = room != "compat" and "everstep.compat" in path.read_text()
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
        "supervisor/supervisor.py",
        "loop/epochs.py",
        "loop/train_loop.py",
        "trainer/trainer_loop.py",
    )
]
"""What drives the engine: the loops that users see, and what answers the engine's questions for them."""


def attributes(path: Path) -> Iterator[ast.Attribute]:
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))


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


# ------------------------------------------------------------------------------------ the names


ROOMS = (
    *("compat", "data", "drill", "errors", "experiment", "record", "runs", "schedule", "services"),
    *("supervisor", "testing", "torch", "trainer"),
)
"""What `everstep.NAME` gives besides the public names."""


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'TrainLoop'"):
        everstep.TrainLop  # noqa: B018


USED = ("__future__", "typing", "everstep.lazy", "everstep.unattended", "everstep.version")
"""Modules of which a module of late names imports something for itself."""

LATE = ("everstep", *(f"everstep.{room}" for room in ("data", "experiment", "services", "testing", "torch")))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these nodes import, but for what a module of late names uses itself."""
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module not in USED]
    return {alias.asname or alias.name for node in found for alias in node.names}


@pytest.mark.parametrize("name", LATE)
def test_type_checkers_and_dir_see_every_public_name_and_no_submodule_hides_one(name: str) -> None:
    """`import everstep.testing.check` would bind the module where the function is expected."""
    module = importlib.import_module(name)
    source = tree(Path(str(module.__file__)))
    shown = imported(ast.walk(source))
    late = shown - imported(at_run_time(source))
    assert shown == {*module.__all__, *(ROOMS if name == "everstep" else ())} and shown <= {*dir(module)}
    assert not late - {*ROOMS} & {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}


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


# ------------------------------------------------------------------------------ nothing unfinished


def test_nothing_is_left_for_later() -> None:
    """No stubs (but for the methods that exist to be overridden) and no test that nowhere runs."""
    stubs = {
        f"{dotted(path)}: {line.strip()}"
        for path in modules()
        for line in path.read_text().splitlines()
        if re.search(r"raise NotImplementedError|\b(TODO|FIXME|XXX)\b", line)
    }
    assert stubs == {
        'contracts.services: raise NotImplementedError(f"{type(self).__name__}.run")',
        "schedule: raise NotImplementedError(type(self).__name__)",
    }
    silenced = re.compile(r"pytest\.(xfail|importorskip)|mark\.(skip|xfail)\b")
    skipped = {path.name for path in (ROOT / "tests").rglob("*.py") if silenced.search(path.read_text())}
    assert not skipped
