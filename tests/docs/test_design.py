"""The table of rooms in docs/design.md names what there is, and all of it."""

from __future__ import annotations

import re
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
