"""The witness of a drilled run: what it writes, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.proof.compare import compare_runs
from tiny_runs import Boom, Tiny, boom_at


def witnessed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_writes_every_place_of_every_step_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: str) -> None:
        Tiny(tmp_path / run, max_epoch=1, samples=4).train()

    train("plain")
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    train("drilled")
    assert compare_runs(tmp_path / "plain", tmp_path / "drilled") == []
    found = witnessed(tmp_path / "file")
    steps = [("before", 1, 1), ("step", 1, 1), ("before", 1, 2), ("step", 1, 2)]
    places = [("enter", 0, 0), *steps, ("epoch", 1, 2), ("exit", 1, 2)]
    assert [(one["at"], one["epoch"], one["step"]) for one in found] == places
    assert {one["run"] for one in found} == {str(tmp_path / "drilled")}
    assert set(found[1]["parts"]) == {"samples/train", "weights/w", "weights/momentum"}
    assert {"random/python", "random/numpy"} <= set(found[2]["parts"])


def test_equal_parts_have_equal_digests_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[dict[tuple[str, int], dict[str, str]]] = []
    for name in ("whole", "resumed"):
        monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / name))
        if name == "resumed":
            with pytest.raises(Boom):
                Tiny(tmp_path / "run", max_epoch=2).train(inside=boom_at(6))
            (tmp_path / name).unlink()
        tiny = Tiny(tmp_path / ("run" if name == "resumed" else "other"), max_epoch=2).train()
        assert tiny.loop.ending.finished
        records = witnessed(tmp_path / name)
        digests.append({(one["at"], one["step"]): one["parts"] for one in records if one["at"] != "enter"})
    whole, resumed = digests
    assert ("step", 6) in resumed
    assert resumed == {key: whole[key] for key in resumed}


def test_batches_of_a_supervisor_are_noted_by_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    with everstep.Supervisor(tmp_path / "run", {"w": np.zeros(2)}, seed=0, max_step=2) as sv:
        left, right = sv.stream([1, 2, 3, 4], "left"), sv.stream([5, 6], "right")
        while not sv.should_stop():
            next(left)
            if sv.step:
                next(left), next(right)
            sv.advance()
    steps = [one["parts"] for one in witnessed(tmp_path / "file") if one["at"] == "step"]
    kinds = [{part for part in parts if not part.startswith("random")} for parts in steps]
    assert kinds == [{"samples/left", "weights/w"}, {"samples/left", "samples/right", "weights/w"}]


def test_entries_are_named_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Optimizer:
        def state_dict(self) -> dict[str, Any]:
            return {"state": {}, "param_groups": [{"lr": 0.1}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    Tiny(
        tmp_path / "run", max_epoch=1, state={"w": np.zeros(1), "notes": {"n": 1}, "opt": Optimizer()}
    ).train()
    assert set(witnessed(tmp_path / "file")[0]["parts"]) == {"weights/w", "state/notes", "optimizer/opt"}
