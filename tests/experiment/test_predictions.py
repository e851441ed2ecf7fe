"""Predictions as files: every name and number comes back, and what a file cannot hold is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.errors import DataError
from everstep.experiment.predictions import write

NAMES = ("file", "allow_pickle", "args", "a b")


@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_predictions_of_any_name_are_read_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"found.{kind}"
    batches = [{name: np.arange(2.0) + at for at, name in enumerate(NAMES)} for _ in range(2)]
    assert write(path, batches) == 4
    found: dict[str, Any]
    if kind == "npz":
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name].tolist() for name in arrays.files}
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = {name: [line[name] for line in lines] for name in lines[0]}
    assert found == {name: [at, at + 1.0] * 2 for at, name in enumerate(NAMES)}


def test_lines_are_strict_json(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [np.array([[0.1, np.nan], [np.inf, -np.inf]], np.float32)])

    def refused(constant: str) -> None:
        raise AssertionError(constant)

    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refused) for line in lines)
    assert first == [float(np.float32(0.1)), "nan"] and second == ["inf", "-inf"]


OBJECTS = np.array([{}, None], object)


@pytest.mark.parametrize(
    ("name", "batches", "said"),
    [
        ("a.npz", [], "no batch"),
        ("a.npz", [{"a": [1]}, {"a": [1], "b": [1]}], "the first batch has no prediction 'b'"),
        ("a.npz", [{"a": [1], "b": [1]}, {"a": [1]}], "batch 2 has no prediction 'b'"),
        ("a.npz", [{"a": [1], "b": [1, 2]}], "different numbers of samples: a has 1, b has 2"),
        ("a.jsonl", [{"a": [1], "b": [1, 2]}], "different numbers of samples"),
        ("a.npz", [[[1]], [1]], "do not fit together"),
        ("a.npy", [{"a": [1], "b": [1]}], "named a, b; give a .npz or .jsonl"),
        ("a.npz", [OBJECTS], "'predictions' holds Python objects"),
        ("a.npy", [OBJECTS], "'predictions' holds Python objects"),
        ("a.jsonl", [OBJECTS], "'predictions' is object, which JSON lacks"),
        ("a.jsonl", [np.array([1j])], "'predictions' is complex128, which JSON lacks"),
    ],
)
def test_what_a_file_cannot_hold_is_said(tmp_path: Path, name: str, batches: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        write(tmp_path / name, batches)
    assert not list(tmp_path.iterdir())
