"""The figures of docs/scale.md: tools/scale.py counts them again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign("timed")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("size", [8, 1000])
def test_files_and_requests_are_those_of_the_page(size: int) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "scale.py", str(size)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    rows = -(-1024 // size)
    with_rows = -(-1024 // rows)
    assert found["save"]["requests"] == 4 * size + 3 and found["gather"]["requests"] == 3 * size + 2
    assert found["save"]["files"] == size + with_rows + 2
    assert all(seconds < 5 for seconds in found["seconds to"].values()), found
    page = (ROOT / "docs" / "scale.md").read_text()
    if size == 1000:
        for figure in (found["save"]["files"], found["save"]["requests"], found["gather"]["requests"]):
            assert f"{figure:,}" in page
