"""The size of the house: lines by room beside their budgets, and what else a stranger meets.

    python tools/house.py            prints it
    python tools/house.py --page     writes it into docs/room_sizes.md

A room is a folder of src/everstep; files beside the folders are one room, "base".  A docstring is a string
that stands alone.  tests/test_house.py holds the totals.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC, TESTS, PAGE = ROOT / "src" / "everstep", ROOT / "tests", ROOT / "docs" / "room_sizes.md"

BUDGETS = {
    "base": 1_100, "contracts": 1_000, "state": 800, "metrics": 850, "data": 1_250, "checkpoint": 2_300,
    "record": 2_100, "group": 700, "supervisor": 4_300, "loop": 800, "services": 2_000, "backends": 4_200,
    "trainer": 1_300, "experiment": 1_200, "index": 1_400, "ui": 900, "cli": 1_200, "drill": 700,
    "proof": 400, "replaying": 400, "mirror": 900, "formats": 300, "views": 300,
    "display": 100, "testing": 700, "compat": 800,
}  # fmt: skip
"""Lines that a room may have; rooms trade among each other, the sum does not grow."""
SMALL = 60
"""Lines up to which a file has to justify itself."""

Kinds = Counter[str]


def rooms() -> dict[str, list[Path]]:
    """Return the modules of each room."""
    found = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        inside = path.relative_to(SRC).parts
        found[inside[0] if len(inside) > 1 else "base"].append(path)
    return found


def kinds(path: Path) -> Kinds:
    """Count the lines of a file by what they are: code, docstring, comment or blank."""
    text = path.read_text()
    lines = dict.fromkeys(range(1, text.count("\n") + 1), "code")
    lines |= {number: "blank" for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            lines[token.start[0]] = "comment"
    for node in ast.walk(ast.parse(text)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):  # type: ignore[attr-defined]
            lines |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), "docstring")  # type: ignore[attr-defined]
    return Counter(lines.values())


def lines_of(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def public_names() -> int:
    import everstep

    return len(everstep.__all__)


def totals() -> dict[str, int]:
    """Return what tests/test_house.py holds, by name."""
    modules = [path for paths in rooms().values() for path in paths]
    return {
        "lines of src": lines_of(modules),
        "lines of tests": lines_of([*TESTS.rglob("*.py")]),
        f"modules of at most {SMALL} lines": sum(lines_of([path]) <= SMALL for path in modules),
        "names in everstep": public_names(),
    }


def page() -> Iterator[str]:
    """Yield the lines of docs/room_sizes.md."""
    yield "# The sizes of the rooms"
    yield ""
    yield "Made by `python tools/house.py --page`. A room may have more than its budget as long as another"
    yield "has less; the sum is the goal, and `tests/test_house.py` holds what has been reached."
    yield ""
    yield "| room | files | lines | code | docstrings | comments | budget |"
    yield "|---|---|---|---|---|---|---|"
    everything = Kinds()
    counted = {room: sum(map(kinds, paths), Kinds()) for room, paths in rooms().items()}
    for room, count in sorted(counted.items(), key=lambda each: -each[1].total()):
        everything += count
        yield _row(room, len(rooms()[room]), count, BUDGETS[room])
    yield _row("all", sum(map(len, rooms().values())), everything, sum(BUDGETS.values()))
    yield ""
    yield "| | now |"
    yield "|---|---|"
    yield from (f"| {name} | {value:,} |" for name, value in totals().items())


def _row(room: str, files: int, count: Kinds, budget: int) -> str:
    shown = [files, count.total(), count["code"], count["docstring"], count["comment"], budget]
    return f"| {room} | {' | '.join(f'{each:,}' for each in shown)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", action="store_true", help="write docs/room_sizes.md")
    text = "\n".join(page()) + "\n"
    print(text, end="")
    if parser.parse_args().page:
        PAGE.write_text(text)
