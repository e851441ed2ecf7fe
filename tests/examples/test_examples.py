"""Each example in a small size, under the drill: killed and stopped, it ends as the run that was not."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from drill_counts import count_strikes
from everstep.drill import DrillReport, drill
from everstep.record import RunJournal

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "ddp": ("--epochs", "2"),
    "fsdp": ("--small",),
    "digits": ("--epochs", "2"),
    "digits_trainer": ("--epochs", "2"),
    "digits.yaml": ("trainer.max_epoch=2", "--skip-check"),
    "gan": ("--epochs", "30"),
    "logistic_numpy": ("--steps", "600"),
    "transformer": ("--small",),
    "transformer_trainer": ("--small",),
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exact(name: str) -> DrillReport:
    """Drilled; what it leaves is in `kept`."""
    file = EXAMPLES / (name if "." in name else f"{name}.py")
    report = drill(file, SMALL[name], kills=1, keep="kept")
    assert report.exact, report
    assert {one.verdict for one in report.results} <= {"exact", "no such place"}, report
    return report


def run_dirs() -> list[Path]:
    """Of the undisturbed program, then of those that were struck."""
    return sorted((path.parent for path in Path("kept").rglob("run.json")), reverse=True)


def outputs() -> list[str]:
    """What the last start of each program said, the undisturbed ones last."""
    folders = sorted(Path("kept").iterdir())
    return [sorted(folder.glob("start-*.log"))[-1].read_text() for folder in folders if folder.is_dir()]


LEARNED: dict[str, tuple[str, str, Callable[[list[float]], bool]]] = {
    "digits_trainer": (
        "valid/accuracy",
        "eval/valid",
        lambda all: len(all) == 3 and all[0] < 0.3 and all[-1] > 0.6,
    ),
    "digits.yaml": (
        "valid/accuracy",
        "eval/valid",
        lambda all: len(all) == 3 and all[0] < 0.3 and all[-1] > 0.6,
    ),
    "gan": ("valid/distance", "eval/valid", lambda all: all[-1] < 0.3 < all[0]),
    "transformer": (
        "valid_loss",
        "tail",
        lambda all: all == sorted(all, reverse=True) and all[-1] < 4 < all[0],
    ),
}
"""What an example's undisturbed run says of what it has learnt."""


@pytest.mark.campaign("long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_at_every_hazard(name: str, tally: Any) -> None:
    count_strikes(exact(name), tally)
    if name in LEARNED:
        series, phase, is_learnt = LEARNED[name]
        _, values = RunJournal(run_dirs()[0]).series(series, phase)
        assert is_learnt(values), values
    if name == "logistic_numpy":
        for output in outputs():
            accuracy = next(line for line in output.splitlines() if line.startswith("accuracy"))
            assert float(accuracy.rpartition(" ")[2]) > 0.85


@pytest.mark.campaign("long")
def test_the_transformer_through_a_trainer_is_the_one_of_the_loop_to_the_bit() -> None:
    for name, run in (("transformer", "loop"), ("transformer_trainer", "door")):
        program = [sys.executable, str(EXAMPLES / f"{name}.py"), "--small", "--run", run]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    hand, door = Path("loop"), Path("door")
    one, other = last_arrays(hand), last_arrays(door)
    assert one.keys() == other.keys() and len(one) > 50
    assert all(np.array_equal(array, other[name]) for name, array in one.items())
    assert RunJournal(hand).series("loss") == RunJournal(door).series("loss")
    losses = RunJournal(door).series("valid/loss", "eval/valid")
    assert RunJournal(hand).series("valid_loss", "tail") == losses


def last_arrays(run: Path) -> dict[str, Any]:
    """The arrays of the state that a run ended with."""
    last = max((run / "checkpoints").glob("epoch-*"))
    arrays = load_file(last / "arrays.safetensors").items()
    return {name.replace("average", "ema"): array for name, array in arrays if name.startswith("user/")}


def test_logistic_regression_imports_no_framework() -> None:
    program = (
        "import runpy, sys; sys.argv = ['x', '--steps', '3']; "
        f"runpy.run_path({str(EXAMPLES / 'logistic_numpy.py')!r}, run_name='__main__'); "
        "found = {'torch', 'jax', 'tensorflow'} & sys.modules.keys(); assert not found, found"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.DEVNULL)


LINES = re.findall(r"^\| `python examples/(\w+)\.py(.*?)` \|", (EXAMPLES / "README.md").read_text(), re.M)


def test_the_readme_has_a_line_for_each_example_and_each_is_tested() -> None:
    programs = [path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()]
    names = sorted(path.stem for path in programs)
    readme = (EXAMPLES / "README.md").read_text()
    configs = [path.name for path in EXAMPLES.glob("*.yaml")]
    assert all(f"everstep train examples/{name}" in readme for name in configs)
    assert sorted(name for name, _ in LINES) == names
    assert sorted([*names, *configs]) == sorted(SMALL)


@pytest.mark.parametrize(("name", "options"), LINES)
def test_each_line_of_the_readme_is_understood(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split(), *SMALL[name], "--help"])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert left.value.code == 0 and "--run" in capsys.readouterr().out
