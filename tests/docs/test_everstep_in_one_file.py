"""docs/everstep_in_one_file.py keeps the promise of law 1: killed at any instant, it ends as if left alone.

Each start is a fork of this process, which has imported torch: a start costs what its steps cost.  A kill is
SIGKILL before a line of the file that is drawn at random.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import gate

FILE = Path(__file__).parent.parent.parent / "docs" / "everstep_in_one_file.py"
SEED = gate.seed
COMMIT = ("write_whole", "sync_folder", "_save", "sync")

Trap = Callable[[], None]


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("everstep_in_one_file", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The first step of an optimizer imports for a second; here that is done once, not in each fork.
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1)
    (weight * 2).sum().backward()
    optimizer.step()
    return module


def start(program: Callable[[], object], trap: Trap = lambda: None) -> int:
    """Run a program in a fork.  Its exit status: 0, 1 for an exception, -9 if it was killed."""
    torch.set_num_threads(1)  # a fork has no threads but its own
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            trap()
            program()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def before_line(number: int, functions: tuple[str, ...] = ()) -> Trap:
    """A trap that kills before the `number`-th line that is executed in these functions of the file."""
    left = number

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        of_file = frame.f_code.co_filename == str(FILE)
        return line if of_file and (not functions or frame.f_code.co_name in functions) else None

    return lambda: sys.settrace(call)


def outcome(one_file: ModuleType, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """All rows (each has its samples), and the state of the last checkpoint, to the bit."""
    newest = sorted((folder / "checkpoints").glob("*.pt"))[-1]
    content = one_file.read_whole(newest)
    assert content is not None
    state = torch.load(io.BytesIO(content), weights_only=True)
    bits = tree_map(lambda leaf: leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf, state)
    return one_file.read_rows(folder / "journal"), bits


@pytest.fixture(scope="module")
def undisturbed(one_file: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(lambda: one_file.main(folder, 3)) == 0
    rows, state = outcome(one_file, folder)
    assert len(rows) == 33 and state["position"] == (3, 0, 30) and state["rows"] == 33
    return rows, state


def test_it_has_at_most_300_lines_and_needs_torch_alone() -> None:
    source = FILE.read_text()
    assert source.count("\n") <= 300
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
        )
    }
    assert "torch" in imported and imported <= sys.stdlib_module_names | {"torch"}


@pytest.mark.parametrize("functions", [(), COMMIT], ids=["any line", "a line of the commit"])
def test_killed_before_random_lines_it_ends_as_if_left_alone(
    one_file: ModuleType, undisturbed: Any, tmp_path: Path, functions: tuple[str, ...]
) -> None:
    draw = random.Random(f"{SEED}/{functions}")
    for _ in range(5):
        trap = before_line(draw.randrange(1, 60 if functions else 300), functions)
        assert start(lambda: one_file.main(tmp_path, 3), trap) in (-signal.SIGKILL, 0), SEED
    assert start(lambda: one_file.main(tmp_path, 3)) == 0, SEED
    assert outcome(one_file, tmp_path) == undisturbed


def within_a_write(size: int) -> Trap:
    """A trap that ends the process while it writes a file, after `size` bytes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_checkpoint_of_which_half_is_written_is_none(
    one_file: ModuleType, undisturbed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(lambda: one_file.main(tmp_path, 3), within_a_write(5_000)) == -signal.SIGXFSZ
    (unfinished,) = (tmp_path / "checkpoints").iterdir()
    assert unfinished.stat().st_size == 5_000
    assert start(lambda: one_file.main(tmp_path, 3)) == 0
    assert "starting at epoch 0, batch 0" in capfd.readouterr().out
    assert outcome(one_file, tmp_path) == undisturbed


def test_what_the_state_lacks_is_found_by_the_resume(
    one_file: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Forgetful(one_file.Run):
        def __init__(self, folder: Path, objects: dict[str, Any], save_every: int) -> None:
            super().__init__(folder, {"model": objects["model"]}, save_every)

    def program() -> None:
        one_file.Run = Forgetful
        try:
            one_file.main(tmp_path, 3)
        except SystemExit as error:
            print(error, flush=True)
            raise

    assert start(program, before_line(60, ("log",))) == -signal.SIGKILL
    assert start(program) == 1
    assert "this resume is not exact" in capfd.readouterr().out


def test_of_damaged_checkpoints_the_one_before_is_used_and_without_any_it_refuses(
    one_file: ModuleType, undisturbed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(lambda: one_file.main(tmp_path, 3)) == 0
    older, newest = sorted((tmp_path / "checkpoints").glob("*.pt"))
    newest.write_bytes(flipped(newest.read_bytes()))
    assert start(lambda: one_file.main(tmp_path, 3)) == 0
    assert f"{newest} is damaged" in capfd.readouterr().out
    assert outcome(one_file, tmp_path) == undisturbed
    for path in (older, newest):
        path.write_bytes(flipped(path.read_bytes()))
    assert start(lambda: one_file.main(tmp_path, 3)) == 1


def flipped(content: bytes) -> bytes:
    """With another bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
