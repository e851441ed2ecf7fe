"""Each example in a small size, under the drill: killed and stopped, it ends as the run that was not."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
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


def exact(name: str, *hazards: str, seed: int = 0) -> DrillReport:
    """Drilled; what it leaves is in `kept`."""
    file = EXAMPLES / (name if "." in name else f"{name}.py")
    report = drill(file, SMALL[name], kills=1, hazards=hazards, seed=seed, keep="kept")
    assert report.exact, report
    assert {one.verdict for one in report.ordeals} <= {"exact", "no such place"}, report
    return report


def run_dirs() -> list[Path]:
    """Of the undisturbed program, then of those that were struck."""
    return sorted((path.parent for path in Path("kept").rglob("run.json")), reverse=True)


def outputs() -> list[str]:
    """What the last start of each program said, the undisturbed ones last."""
    folders = sorted(Path("kept").iterdir())
    return [sorted(folder.glob("start-*.log"))[-1].read_text() for folder in folders if folder.is_dir()]


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("name", "hazard", "metric", "first", "last"),
    [
        ("digits_trainer", "commit", "valid/accuracy", (0, 0.3), (0.6, 1)),
        ("digits.yaml", "last step", "valid/accuracy", (0, 0.3), (0.6, 1)),
        ("gan", "last step", "valid/distance", (0.3, 9), (0, 0.3)),
    ],
)
def test_it_learns_and_a_strike_changes_nothing(
    name: str, hazard: str, metric: str, first: tuple[float, float], last: tuple[float, float]
) -> None:
    exact(name, hazard)
    _, values = RunJournal(run_dirs()[0]).series(metric, "eval/valid")
    assert first[0] <= values[0] <= first[1] and last[0] <= values[-1] <= last[1]


@pytest.mark.campaign("long")
def test_the_transformer_learns() -> None:
    report = exact("transformer", "last step", seed=1)
    (resumed,) = [name for one in report.ordeals for start in one.starts for name in start.resumed_from]
    assert resumed == "step-00000175"  # inside an accumulation, and an epoch
    undisturbed, *_, struck = run_dirs()
    _, losses = RunJournal(undisturbed).series("valid_loss", "tail")
    assert losses == sorted(losses, reverse=True) and losses[-1] < 4 < losses[0]
    texts = [output[output.index("\ndef ") :] for output in outputs()]
    assert len(set(texts)) == 1
    lines = [(run / "logs" / "metrics.jsonl").read_text().splitlines() for run in (undisturbed, struck)]
    untimed = [[line for line in file if "_time" not in line] for file in lines]
    assert untimed[0] == untimed[1]


@pytest.mark.campaign("long")
def test_the_transformer_through_a_trainer_is_the_one_of_the_loop_to_the_bit() -> None:
    exact("transformer_trainer", "last step", seed=1)
    program = [sys.executable, str(EXAMPLES / "transformer.py"), "--small", "--run", "loop"]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    hand, door = Path("loop"), run_dirs()[0]
    one, other = last_arrays(hand), last_arrays(door)
    assert one.keys() == other.keys() and len(one) > 50
    assert all(np.array_equal(array, other[name]) for name, array in one.items())
    assert RunJournal(hand).series("loss") == RunJournal(door).series("loss")
    assert RunJournal(hand).series("valid_loss", "tail") == RunJournal(door).series(
        "valid/loss", "eval/valid"
    )


def last_arrays(run: Path) -> dict[str, Any]:
    """The arrays of the state that a run ended with."""
    last = max((run / "checkpoints").glob("epoch-*"))
    arrays = load_file(last / "arrays.safetensors").items()
    return {name.replace("average", "ema"): array for name, array in arrays if name.startswith("user/")}


@pytest.mark.campaign("long")
def test_logistic_regression_learns() -> None:
    exact("logistic_numpy", "commit")
    for output in outputs():
        accuracy = next(line for line in output.splitlines() if line.startswith("accuracy"))
        assert float(accuracy.rpartition(" ")[2]) > 0.85


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


@pytest.mark.campaign("long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_at_every_hazard(name: str, tally: Any) -> None:
    count_strikes(exact(name), tally)
