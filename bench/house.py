"""How much of the house must be held in mind to follow a step, a save, a metric, a setting, a Trainer.

    python bench/house.py              prints before and now
    python bench/house.py --page       writes both into docs/house.md
    python bench/house.py --json       prints those of now, as bench/house_0ca1ea0.json has those of before

Counted is the tree whose everstep is imported (PYTHONPATH=OTHER/src), by its public names alone.

The rules:

- A *call* is a Python function of everstep that is entered, as sys.setprofile tells; a generator counts each
  time it continues, a comprehension belongs to its function.  Calls of libraries are not counted.
- A *file* counts once.  A *switch* is a call in another file than the call before, in the same thread.
- A *quiet step* lies between a step's body and the next one, where nothing is due; with a batch and a metric
  in a tensor, and without a batch and with a float.  The first 16 steps of a start, which are looked at, are
  left out, and so are the others here.
- A *saving boundary* is the same after a step at which a checkpoint is due, without the thread that writes.
- A *metric* and a *setting* are followed by value: a call counts if a number that stands nowhere else is
  among the call's arguments (`self` left out) or in what is returned, up to five levels deep in containers,
  records and partial functions.  The metric goes from `collect_metrics` to a row of SQLite, in every
  thread, in a run that saves nothing after step 0; the setting from a YAML file to torch.optim.SGD.
- *A Trainer* with two streams and four services is built for the second time, so no import is counted.
- A *room* is a folder of src/everstep or of tests; files beside the folders are one room, "-".
- A *definition* is a `def` or a `class`.  *Twice* are names of classes, and of files, that stand in more
  than one place.  A *circle* is a set of modules that import each other at run time, in functions too.
"""

from __future__ import annotations

import ast
import gc
import io
import json
import os
import sqlite3
import struct
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import everstep

SRC = Path(everstep.__file__).parent
TREE = SRC.parent.parent
BEFORE = Path(__file__).parent / "house_0ca1ea0.json"
MARKER = 0.0009765634918212890625
"""The number that is followed: exact in 64 bits."""
DEPTH = 5


class Way(NamedTuple):
    """Counts of one way through the house."""

    calls: int
    files: int
    switches: int


# --------------------------------------------------------------------------------------- calls


class Calls:
    """Counts calls of everstep's functions inside `counting()`.

    Args:
        value: only calls that handle this number; None: all.
    """

    def __init__(self, value: float | None = None) -> None:
        self._value = None if value is None else Value(value)
        self._made: dict[int, list[list[Any]]] = defaultdict(list)
        self._open: dict[int, list[list[Any]]] = defaultdict(list)

    @contextmanager
    def counting(self, threads: bool = False) -> Iterator[None]:
        """Count this thread's calls; with `threads`, also those of threads that start inside."""
        if threads:
            threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: Any, event: str, returned: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in _PARTS:
            return
        if not code.co_filename.startswith(str(SRC)):
            return
        thread = threading.get_ident()
        if event == "call":
            handled = self._value is None or self._value.is_argument(frame)
            call = [code.co_filename.removeprefix(f"{SRC}/"), code.co_name, handled]
            self._made[thread].append(call)
            self._open[thread].append(call)
        elif self._open[thread]:
            call = self._open[thread].pop()
            call[2] = call[2] or (self._value is not None and self._value.is_in(returned))

    def trace(self) -> list[list[tuple[str, str]]]:
        """Per thread, the calls that count, as (file, function)."""
        return [[(file, name) for file, name, counts in calls if counts] for calls in self._made.values()]

    def way(self) -> Way:
        """The counts."""
        ways = [[file for file, _ in calls] for calls in self.trace()]
        switches = sum(a != b for way in ways for a, b in pairwise(way))
        return Way(sum(map(len, ways)), len({file for way in ways for file in way}), switches)


_PARTS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


class Value:
    """Finds a number in values: as itself, in text, in bytes."""

    def __init__(self, number: float) -> None:
        self._number, self._text = number, repr(number)
        self._bytes = struct.pack("<d", number)

    def is_argument(self, frame: Any) -> bool:
        """Whether a function that is entered was given the number."""
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        given = [name for name in code.co_varnames[:count] if name not in ("self", "cls")]
        return any(self.is_in(frame.f_locals[name]) for name in given if name in frame.f_locals)

    def is_in(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether the number is in a value."""
        kind = type(value)
        if kind is float:
            return bool(value == self._number)
        if kind is str:
            return self._text in value
        if kind in (bytes, bytearray, memoryview):
            return self._bytes in bytes(value) or self._text.encode() in bytes(value)
        if hasattr(kind, "tobytes"):  # an array
            return self._bytes in value.tobytes()
        return depth > 0 and any(self.is_in(part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for pair in list(value.items()) for each in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, partial):
        return [*value.args, value.keywords]
    return list(vars(value).values()) if hasattr(type(value), "__dataclass_fields__") else []


# ----------------------------------------------------------------------------------- the ways


def training_step(folder: Path, at: tuple[int, ...], batch: bool = True) -> Way:
    """The least of the ways from the end of a step's body to the next body, for some steps of a loop."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    services = [everstep.Checkpoints(everstep.Every(steps=20)), everstep.Console(sink=lambda line: None)]
    batches = torch.ones(100, 2, 4).unbind()
    ways = []
    with everstep.TrainLoop(folder, state, max_epoch=1, max_step=100, services=services, seed=0) as loop:
        for _ in loop.iter_epochs():
            steps = loop.iter_steps(batches) if batch else loop.iter_steps()
            for found in steps:
                step = loop.step
                x = found[1] if batch else batches[0]
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                calls = Calls()
                with calls.counting() if step in at else nullcontext():
                    loop.collect_metrics(loss=loss if batch else 0.5)
                    if step in at:
                        next(steps)
                ways += [calls.way()] if step in at else []
    return min(ways)


def metric(folder: Path) -> Way:
    """From `collect_metrics` to the row in SQLite."""
    index = folder / "everstep.db"
    os.environ["EVERSTEP_INDEX"] = str(index)
    loop = everstep.TrainLoop(
        folder / "run", services=[everstep.Console(sink=lambda line: None)], max_epoch=1, max_step=9, seed=0
    )
    calls = Calls(MARKER)
    with suppress(InterruptedError), calls.counting(threads=True), loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                loop.collect_metrics(loss=MARKER if step == 2 else 0.5)
                if step == 3:
                    raise InterruptedError
    os.environ["EVERSTEP_INDEX"] = "off"
    with sqlite3.connect(index) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for table in tables for row in database.execute(f'SELECT * FROM "{table}"')]
    if not any(Value(MARKER).is_in(row) for row in rows):
        raise SystemExit("the metric has no row in the index")
    return calls.way()


CONFIG = f"""
task: {{call: house_parts:Task}}
model: {{call: "torch.nn:Linear", in_features: 4, out_features: 1}}
optimizer: {{call: "torch.optim:SGD", lr: {MARKER!r}}}
streams: {{train: {{call: house_parts:train}}}}
trainer: {{max_epoch: 1}}
seed: 0
"""
PARTS = """
import torch, everstep
class Task(everstep.torch.Task):
    def forward(self, batch):
        return {"loss": self.model(batch).square().mean()}
def train():
    return torch.ones(4, 2, 4).unbind()
"""


def setting(folder: Path) -> Way:
    """From a YAML file to the optimizer's constructor."""
    (folder / "house_parts.py").write_text(PARTS)
    (folder / "house.yaml").write_text(CONFIG)
    construct = torch.optim.SGD.__init__

    def arrive(optimizer: Any, parameters: Any, lr: float = 0.0, **options: Any) -> None:
        raise InterruptedError if lr == MARKER else AssertionError(f"lr is {lr}")

    calls, where = Calls(MARKER), folder / "run"
    open_config = everstep.experiment.open_config
    torch.optim.SGD.__init__ = arrive  # type: ignore[assignment, method-assign]
    try:
        with suppress(InterruptedError), calls.counting():
            open_config(folder / "house.yaml", run_dir=where, skip_check=True).train()
    finally:
        torch.optim.SGD.__init__ = construct  # type: ignore[method-assign]
    return calls.way()


class Fit(everstep.torch.Task):
    """The smallest task."""

    def build_model(self) -> Any:
        return torch.nn.Linear(4, 1)

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}


def trainer(folder: Path) -> Way:
    """Building a Trainer."""

    def build(name: str) -> None:
        batches = torch.ones(4, 2, 4).unbind()
        services = [
            everstep.Evaluate("valid"),
            everstep.Best("valid/loss"),
            everstep.EarlyStop("valid/loss", patience=3),
            everstep.Checkpoints(everstep.Every(steps=100)),
        ]
        streams = {"train": batches, "valid": batches}
        everstep.Trainer(Fit(), streams, folder / name, services=services, max_epoch=1, seed=0)

    build("first")
    calls = Calls()
    with calls.counting():
        build("second")
    return calls.way()


WAYS: dict[str, Callable[[Path], Way]] = {
    "quiet step, without a batch": partial(training_step, at=(34, 54, 74), batch=False),
    "quiet step, with batch and metric": partial(training_step, at=(34, 54, 74)),
    "saving boundary": partial(training_step, at=(40, 60, 80)),
    "metric to its SQL row": metric,
    "setting to the optimizer": setting,
    "building a Trainer": trainer,
}


def count_ways() -> dict[str, Way]:
    """Every way, in a folder of its own."""
    ways = {}
    for name, walk in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            ways[name] = walk(Path(folder))
    return ways


# --------------------------------------------------------------------------------------- files


class Room(NamedTuple):
    """What a room has."""

    files: int
    lines: int
    definitions: int


def rooms(top: Path) -> dict[str, Room]:
    """By room, largest first."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in top.rglob("*.py"):
        inside = path.relative_to(top).parts
        found[inside[0] if len(inside) > 1 else "-"].append(path)
    counted = {
        name: Room(len(paths), sum(map(lines, paths)), sum(len(definitions(path)) for path in paths))
        for name, paths in found.items()
    }
    return dict(sorted(counted.items(), key=lambda item: -item[1].lines))


def lines(path: Path) -> int:
    """Lines of a file, empty ones and comments included."""
    return len(path.read_text().splitlines())


def definitions(path: Path) -> list[Any]:
    """Functions and classes of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def comments(path: Path) -> int:
    """Comments of a file that say something to a reader."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    silent = ("# noqa", "# type:", "# fmt:", "# pragma", "# ---")
    return sum(token.type == tokenize.COMMENT and not token.string.startswith(silent) for token in tokens)


def circles() -> int:
    """Sets of modules that import each other."""
    reach = {name: set(_imports(path)) - {name} for name, path in _modules().items()}
    for middle in reach:  # Warshall's closure
        for inside in reach.values():
            if middle in inside:
                inside |= reach[middle]
    return len({frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]})


def _modules() -> dict[str, Path]:
    paths = sorted(SRC.rglob("*.py"))
    return {
        ".".join(["everstep", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in paths
    }


def _imports(path: Path) -> Iterator[str]:
    modules = _modules()
    for node in _at_run_time(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _at_run_time(child)


def count_words() -> dict[str, int | float]:
    """The tree as a whole."""
    paths = list(SRC.rglob("*.py"))
    classes = Counter(n.name for p in paths for n in definitions(p) if isinstance(n, ast.ClassDef))
    names = Counter(path.name for path in paths if path.name != "__init__.py")
    return {
        "circles of imports": circles(),
        "class names twice": sum(count > 1 for name, count in classes.items() if name[0] != "_"),
        "file names twice": sum(count > 1 for count in names.values()),
        "comments per 100 lines": round(100 * sum(map(comments, paths)) / sum(map(lines, paths)), 1),
        "lines of the longest file": max(map(lines, paths)),
    }


PAGE = """# The size of the house, counted

What a stranger must hold in mind to follow one batch, one metric, one setting: made by `python bench/house.py
--page`, whose first lines have the rules. "Before" is commit {before}, when issue 13 began.

{tables}"""


def table(title: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    """Both as Markdown."""
    names = list(dict.fromkeys([*now, *before]))
    told = [f"| {name} | {_told(before.get(name))} | {_told(now.get(name))} |" for name in names]
    return "\n".join([f"| {title} | before | now |", "|---|---|---|", *told, ""])


def _told(row: Any) -> str:
    numbers = row if isinstance(row, list | tuple) else [] if row is None else [row]
    return " / ".join(f"{number:,}" for number in numbers) or "-"


def count() -> dict[str, Any]:
    """All counts of the tree, by the titles of their tables."""
    gc.disable()  # a finalizer would be a call
    said = sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        ways = count_ways()
    sys.stdout = said
    by_room = {"src/everstep": rooms(SRC), "tests": rooms(TREE / "tests")}
    for found in by_room.values():
        found["all"] = Room(*map(sum, zip(*found.values(), strict=True)))
    inside = {f"{top}: files / lines / definitions": found for top, found in by_room.items()}
    return {"way: calls / files / switches": ways, **inside, "all modules": count_words()}


def main() -> None:
    os.environ["EVERSTEP_INDEX"] = "off"
    now = count()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(now, indent=1))
        return
    before = json.loads(BEFORE.read_text())
    tables = "\n".join(table(title, before[title], now[title]) for title in now)
    if sys.argv[1:] == ["--page"]:
        page = BEFORE.parent.parent / "docs" / "house.md"
        page.write_text(PAGE.format(before=BEFORE.stem.rpartition("_")[2], tables=tables))
    else:
        print(tables, end="")


if __name__ == "__main__":
    main()
