"""Checkpoints as earlier versions of everstep wrote them (stored/, by the program of tiny_runs.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.checkpoint import find_checkpoint, read_checkpoint, verify_checkpoint
from everstep.checkpoint.manifest import FORMAT, MANIFEST
from tiny_runs import Tiny

STORED = Path(__file__).with_name("stored")
EACH = pytest.mark.parametrize("version", range(3, FORMAT))


def stored(version: int) -> Path:
    return STORED / f"format-{version}" / "step-00000006"


@EACH
def test_every_byte_is_read(version: int) -> None:
    path = stored(version)
    assert json.loads((path / MANIFEST).read_bytes())["body"]["format"] == version
    verify_checkpoint(path)
    found = find_checkpoint(path, print)
    assert found is not None and found.step == 6 and found.ranks == 1
    assert found.own.structure == {} and found.common.arrays["user/w"].shape == (3,)
    assert read_checkpoint(path, rank=3).structure == found.structure


@pytest.mark.campaign("long", gate=2)
@EACH
def test_a_run_continues_from_it_as_if_it_had_never_stopped(tmp_path: Path, version: int) -> None:
    whole = Tiny(tmp_path / "whole", max_epoch=3).train()
    resumed = Tiny(tmp_path / "resumed", max_epoch=3, resume=stored(version)).train()
    assert resumed.seen == [(e, s, ids) for e, s, ids in whole.seen if s > 6]
    assert resumed.w.tobytes() == whole.w.tobytes() and resumed.momentum.tobytes() == whole.momentum.tobytes()
