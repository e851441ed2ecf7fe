"""Seeded mutants of a room: which of them its tests notice, before tests are deleted and after.

    python tools/mutants.py src/everstep/record tests/record -n 40 --page before.json
    python tools/mutants.py src/everstep/record tests/record -n 40 --against before.json

A mutant is one small fault: a comparison turned, `and` for `or`, a condition negated, a number off by one,
a statement left out. The second call tries only what the first one's tests noticed, and exits with 1 if they
have lost one. A mutant is a file, a function and the text of a statement, so it is found again as long as
that statement stands; those that have gone are counted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each statement within a function, with the qualified name of the function."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        name, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                pending.append((f"{name}.{child.name}", child))
            elif isinstance(child, ast.stmt):
                if name and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    yield name, child
                pending.append((name, child))


def faults(statement: ast.stmt) -> list[str]:
    """The faults that may be put into a statement itself, not into those inside it."""
    faults = ["leave out"] if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise) else []
    if isinstance(statement, ast.If | ast.While):
        faults.append("negate")
    for i, node in enumerate(_own_nodes(statement)):
        if type(node) in TURNED:
            faults.append(f"turn {i}")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            faults.append(f"add {i}")
    return faults


def _own_nodes(statement: ast.stmt) -> list[ast.AST]:
    nodes, pending = (
        [],
        [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)],
    )
    while pending:
        node = pending.pop(0)
        nodes.append(node)
        pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return nodes


def mutate(source: str, function: str, text: str, fault: str) -> str | None:
    """The source with the fault in it; None where the statement is not found."""
    tree = ast.parse(source)
    for name, statement in statements(tree):
        if name != function or ast.unparse(statement) != text:
            continue
        kind, _, place = fault.partition(" ")
        if kind == "leave":
            _replace(tree, statement, ast.Pass())
        elif kind == "negate":
            statement.test = ast.UnaryOp(ast.Not(), statement.test)  # type: ignore[attr-defined]
        else:
            node = _own_nodes(statement)[int(place)]
            if kind == "add":
                node.value += 1  # type: ignore[attr-defined]
            else:
                _replace(statement, node, TURNED[type(node)]())
        return ast.unparse(ast.fix_missing_locations(tree))
    return None


def _replace(within: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(within):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                setattr(parent, field, [new if item is old else item for item in value])


def notice(path: str, source: str, tests: list[str]) -> bool:
    """Run the tests over a copy of src with that file changed, in a fork that has torch already."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / path).write_text(source)
        child = os.fork()
        if child == 0:
            os.environ["PYTHONPATH"] = f"{folder}/src"
            sys.path.insert(0, f"{folder}/src")
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            import pytest

            os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])) & 0xFF)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def draw(files: list[Path], n: int, seed: int) -> list[tuple[str, str, str, str]]:
    every = [
        (str(file.relative_to(ROOT)), name, ast.unparse(statement), fault)
        for file in files
        for name, statement in statements(ast.parse(file.read_text()))
        for fault in faults(statement)
    ]
    return random.Random(seed).sample(every, min(n, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a file or folder of src")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=Path, help="write here which mutants were noticed")
    parser.add_argument("--against", type=Path, help="try what this page says was noticed")
    options = parser.parse_args()
    import numpy  # noqa: F401 - imported once, for all forks
    import torch  # noqa: F401

    os.chdir(ROOT)
    source = options.source.resolve()
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    if options.against:
        mutants = [tuple(mutant) for mutant in json.loads(options.against.read_text())["noticed"]]
    else:
        mutants = draw(files, options.n, options.seed)
    results: dict[str, list[list[str]]] = {"noticed": [], "survived": [], "gone": []}
    for path, function, text, fault in mutants:
        mutated = mutate((ROOT / path).read_text(), function, text, fault) if (ROOT / path).exists() else None
        outcome = (
            "gone" if mutated is None else "noticed" if notice(path, mutated, options.tests) else "survived"
        )
        results[outcome].append([path, function, text, fault])
        print(
            f"{outcome:9} {path} {function[1:]}: {fault}: {copy.copy(text).splitlines()[0][:80]}", flush=True
        )
    print(", ".join(f"{len(listed)} {outcome}" for outcome, listed in results.items()))
    if options.page:
        options.page.write_text(json.dumps(results, indent=1))
    return 1 if options.against and results["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
