"""The comparator itself: one flipped bit anywhere in a run is found; only the clock may differ."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from law_support.forkserver import ForkServer

from everstep.checkpoint import Draft, Store
from everstep.errors import DamagedCheckpointError, RunDirError
from everstep.proof.compare import compare_runs, state_leaves
from everstep.record import RunJournal, journal_format
from everstep.state import Encoded

OF_DATA = ("position#", "last_end#", "contents#", "contents/0", "contents/1")
WALL = {"wall/segment", "wall/seconds", *(f"wall/streams/train/{leaf}" for leaf in OF_DATA)}
"""The leaves that may differ between equal runs: of the clock, and of arrays of the data, perhaps caches.

Law 1 is as strong as this list is short.
"""


@pytest.fixture(scope="module")
def run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with every kind of leaf: its last state stands inside an accumulation window."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--epochs", "2", "--accumulate", "3", "--patience", "9", "--data", "plain")
    assert server.run("victim", [str(folder / "a"), *options], folder / "log") == 0
    return folder / "a"


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "b"))


def test_a_run_equals_its_copy(run: Path, copied: Path) -> None:
    assert compare_runs(run, copied) == []


def test_only_these_leaves_may_differ(run: Path) -> None:
    store = Store(run, 0, print)
    for name in store.names():
        leaves = state_leaves(store.read(name))
        assert {path for path in leaves if path.split("/")[0].removesuffix("#") == "wall"} == WALL


# ---------------------------------------------------------------------------------------- leaves


def tampered(run_dir: Path, change: Callable[[dict[str, Any], Any], str]) -> str:
    """Commit the run's last checkpoint again, with `change(arrays, structure)` applied; return its answer."""
    store = Store(run_dir, 99, lambda _: None)
    last = store.read(store.names()[-1])
    structure: Any = copy.deepcopy(last.structure)
    path = change(last.arrays, structure)
    shutil.rmtree(last.path)
    state = Encoded(structure, last.arrays)
    store.commit(Draft(last.name, state, "0", last.epoch, last.phase, last.partial, last.meta))
    return path


def bit_of(start: str) -> Any:
    def change(arrays: dict[str, Any], structure: Any) -> str:
        name = next(name for name in arrays if name.startswith(start))
        arrays[name].data[-1] ^= 1
        return name

    return change


def bit_of_value(path: str) -> Any:
    def change(arrays: dict[str, Any], structure: Any) -> str:
        *above, last = path.split("/")
        for part in above:
            structure = structure[part]
        value = np.array(structure[last])
        structure[last] = (value.view(np.uint64) ^ np.uint64(1)).view(value.dtype).item()
        assert structure[last] != value
        return path

    return change


def another_type(arrays: dict[str, Any], structure: Any) -> str:
    arrays["user/model/0.bias"].dtype = "I32"
    return "user/model/0.bias#"


def later(arrays: dict[str, Any], structure: Any) -> str:
    structure["wall"]["seconds"] += 1
    return ""


ARRAYS = ("user/model/", "user/optimizer/", "user/ema/", "gradients/", *(f"rng/rank0/{of}/" for of in
          ("python", "numpy", "torch")))  # fmt: skip
VALUES = (
    "user/notes/seen", "user/notes/longest", "user/per_step/last_epoch",
    "progress/step", "progress/updates", "streams/train/pass", "rng/rank0/numpy/state/pos",
    "services/early stop valid_loss/state/best", "services/early stop valid_loss/state/improved",
    "services/metrics/state/readers/print steps/windows/loss/mean",
)  # fmt: skip
CHANGES: dict[str, Callable[[dict[str, Any], Any], str]] = {
    **{path: bit_of(path) for path in ARRAYS},
    **{path: bit_of_value(path) for path in VALUES},
    "another type": another_type,
    "the clock": later,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_bit_of_a_leaf_is_a_difference_and_the_clock_is_none(run: Path, copied: Path, change) -> None:
    path = tampered(copied, change)
    assert [one.path for one in compare_runs(run, copied)] == [f"leaf/{path}"] * bool(path)


def test_a_leaf_that_is_gone(run: Path, copied: Path) -> None:
    tampered(copied, lambda arrays, structure: str(structure["user"]["notes"].pop("seen")))
    [found] = compare_runs(run, copied)
    assert (found.path, found.actual) == ("leaf/user/notes/seen", "absent")


def test_damaged_and_other_best_weights(run: Path, copied: Path) -> None:
    older, newer = sorted((copied / "best" / "valid_loss").iterdir())
    shutil.copytree(older, newer, dirs_exist_ok=True)
    found = [one.path for one in compare_runs(run, copied)]
    assert "best/valid_loss/user/model/0.weight" in found
    assert all(path.startswith("best/valid_loss/user/") for path in found)
    for weights in copied.glob("best/valid_loss/*/arrays.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="best/valid_loss"):
        compare_runs(run, copied)


# ------------------------------------------------------------------------------------------ rows


Block = journal_format.Block
Change = Callable[[Block], Iterator[Block]]


def rewritten(run_dir: Path, change: Change) -> None:
    """Write the journal's only file again, each block replaced by those of `change(block)`."""
    [path] = (run_dir / "journal").glob("*.evj")
    data = path.read_bytes()
    out = bytearray(data[: journal_format.HEADER_SIZE])
    for frame in journal_format.scan(data, journal_format.HEADER_SIZE):
        assert isinstance(frame, journal_format.Frame)
        payloads = [bytes(frame.payload)]
        if frame.kind == journal_format.METRICS:
            block = journal_format.unpack_block(frame.payload)
            payloads = [journal_format.pack_block(each, 0.0) for each in change(block)]
        for payload in payloads:
            out += journal_format.pack_frame(frame.kind, frame.offset, payload)
    path.write_bytes(out)


def first(phase: str, apply: Callable[[Block], list[Block]]) -> Change:
    """A change of the first block of a phase whose rows count."""
    done: list[bool] = []

    def change(block: Block) -> Iterator[Block]:
        is_first = block.phase == phase and not block.wall and not done
        done.extend([True] * is_first)
        yield from apply(block) if is_first else [block]

    return change


COLUMNS = ("steps", "values", "counts", "seqs")


def flip_value(block: Block) -> list[Block]:
    [bits] = np.array(block.values[:1]).view(np.uint64) ^ np.uint64(1)
    return [block._replace(values=[float(np.uint64(bits).view(np.float64)), *block.values[1:]])]


def flip_count(block: Block) -> list[Block]:
    return [block._replace(counts=[block.counts[0] ^ 1, *block.counts[1:]])]


def twice(block: Block) -> list[Block]:
    return [block._replace(**{c: [getattr(block, c)[0], *getattr(block, c)] for c in COLUMNS})]


def drop_first(block: Block) -> list[Block]:
    rest = block._replace(**{c: getattr(block, c)[1:] for c in COLUMNS})
    return [rest] if rest.steps else []


@pytest.mark.parametrize("change", [flip_value, flip_count, twice, drop_first])
@pytest.mark.parametrize("phase", ["step", "tail", "epoch"])
def test_one_row(run: Path, copied: Path, tmp_path: Path, phase: str, change: Any) -> None:
    rewritten(copied, first(phase, change))
    [found] = compare_runs(run, copied)
    assert found.path.startswith("row/") and f"/{phase}/" in found.path
    assert (found.actual == "absent") == (change is drop_first)
    assert ("2 times" in found.actual) == (change is twice)
    if change is twice:  # a difference also where both have it
        [found] = compare_runs(copied, Path(shutil.copytree(copied, tmp_path / "c")))
        assert "2 times" in found.expected and "2 times" in found.actual


def test_rows_of_the_clock_may_differ(run: Path, copied: Path) -> None:
    def change(block: Block) -> Iterator[Block]:
        yield block._replace(values=[value + 1 for value in block.values]) if block.wall else block

    rewritten(copied, change)
    assert any(row.wall for row in RunJournal(run).rows())
    assert compare_runs(run, copied) == []


def test_a_folder_that_is_no_run(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError):
        compare_runs(run, tmp_path)
