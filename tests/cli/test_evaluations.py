"""Evaluations outside a loop, as commands list them."""

from __future__ import annotations

import sys
from pathlib import Path

from cli_runs import as_json, everstep

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))


def test_show_lists_them(tmp_path: Path) -> None:
    from tiny_task import trainer

    door = trainer(tmp_path / "runs" / "digits")
    door.run_training()
    found = door.evaluate("test")
    shown = as_json("show", "digits", cwd=tmp_path)
    assert [(one["checkpoint"], one["metrics"]) for one in shown["evaluations"]] == [
        ("epoch-0002-step-00000008", found)
    ]
    text, _ = everstep("show", "digits", cwd=tmp_path)
    assert f"test/loss {found['test/loss']:.6g}" in text
