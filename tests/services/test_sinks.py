"""JSONLines, CSV and TensorBoard: however often killed, what other programs read is the undisturbed run."""

from __future__ import annotations

import csv
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sinks_program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import everstep
import gate
import warm
from everstep import Checkpoints, Every, Service
from everstep.record import RunJournal
from everstep.services import CSV, Histogram, Image, JSONLines, TensorBoard
from everstep.testing import armed
from tiny_runs import Boom, Tiny, boom_at

PROGRAM = Path(sinks_program.__file__)
EVERYTHING = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
SEED = gate.seed


def points(run_dir: Path, folder: str = "logs/tensorboard") -> dict[str, list[Any]]:
    """Tag -> (step, value) of each point, as TensorBoard's own reader finds them."""
    events = EventAccumulator(str(run_dir / folder), EVERYTHING)
    events.Reload()
    tags = events.Tags()
    found: dict[str, list[Any]] = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["images"]:
        found[tag] = [(e.step, e.width, e.height, e.encoded_image_string) for e in events.Images(tag)]
    for tag in tags["histograms"]:
        found[tag] = [(e.step, e.histogram_value) for e in events.Histograms(tag)]
    for tag in tags["tensors"]:
        found[tag] = [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors(tag)]
    return found


def jsonl(run_dir: Path) -> pd.DataFrame:
    return pd.read_json(run_dir / "logs" / "metrics.jsonl", lines=True, precise_float=True)


def table(run_dir: Path) -> pd.DataFrame:
    return pd.read_csv(run_dir / "logs" / "metrics.csv")


def exact(frame: pd.DataFrame, run_dir: Path) -> pd.DataFrame:
    """The frame with the numbers as they stand in the file: pandas rounds the last bit."""
    with open(run_dir / "logs" / "metrics.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    for name in frame.columns.drop(["step", "epoch", "phase"]):
        found = [float(line[name] or "nan") for line in lines]
        assert frame[name].tolist() == pytest.approx(found, nan_ok=True)
        frame[name] = found
    return frame


def require_same_files(a: Path, b: Path) -> None:
    assert points(a) == points(b)
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (a / "logs" / name).read_text() == (b / "logs" / name).read_text()


def rows_of(run_dir: Path, name: str, phase: str = "step") -> list[tuple[int, float]]:
    return [(r.step, r.value) for r in RunJournal(run_dir).rows() if (r.name, r.phase) == (name, phase)]


# ----------------------------------------------------------------------------------- the promise


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([sys.executable, str(PROGRAM), str(run_dir)], check=True, stdout=subprocess.DEVNULL)
    return run_dir


def test_the_undisturbed_run_is_written_whole(undisturbed: Path) -> None:
    found = points(undisturbed)
    single = {name: [(step, np.float32(v)) for step, v in rows_of(undisturbed, name)] for name in ("loss",)}
    assert found["loss"] == single["loss"] and len(found["loss"]) == 80
    assert [step for step, _ in found["epoch/loss"]] == [20, 40, 60, 80]
    assert [step for step, _ in found["valid_loss"]] == [20, 20, 40, 40, 60, 60, 80, 80]
    assert [step for step, *_ in found["seen/noise"]] == [*range(5, 81, 5)] and found["seen/noise"][0][
        1:3
    ] == (6, 4)
    assert [step for step, _ in found["seen/weights"]] == [*range(5, 81, 5)]
    assert found["head"] == [(20 * n, f"epoch {n + 1}".encode()) for n in range(4)]
    assert [step for step, _ in found["tail"]] == [20, 40, 60, 80]
    for frame in (jsonl(undisturbed), exact(table(undisturbed), undisturbed)):
        steps = frame[frame.phase == "step"]
        assert list(zip(steps.step, steps.loss, strict=True)) == rows_of(undisturbed, "loss")
        late = steps[steps["late, metric"].notna()]
        assert list(zip(late.step, late["late, metric"], strict=True)) == rows_of(undisturbed, "late, metric")
        assert list(frame[frame.phase == "tail"].valid_loss) == [
            v for _, v in rows_of(undisturbed, "valid_loss", "tail")
        ]


KILLS = [
    "step:4", "hazard:sink.create:3", "step:12", "hazard:sink.rename:1", "tail:1",
    "hazard:sink.rename:3", "hazard:media.rename:2", "step:43", "hazard:sink.write:7",
    "hazard:journal.write:4", "step:51", "hazard:sink.write:9", "hazard:checkpoint.rename:4",
    "tail:3", "hazard:sink.create:2", "step:80",
]  # fmt: skip


@pytest.mark.campaign("long")
def test_killed_anywhere_no_point_is_there_twice_and_none_is_missing(
    undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    killed = 0
    for kill in KILLS:
        kind, _, rest = kill.partition(":")
        hazard = {"EVERSTEP_HAZARD": f"kill:{rest}"} if kind == "hazard" else {}
        command = [sys.executable, str(PROGRAM), str(run_dir), *([] if hazard else [kill])]
        done = warm.run(command, env=os.environ | hazard, stdout=subprocess.DEVNULL)
        assert done.returncode in (0, -signal.SIGKILL)
        killed += done.returncode != 0
    assert killed >= 13
    sinks_program.train(run_dir)
    require_same_files(undisturbed, run_dir)


@pytest.mark.campaign("random")
def test_killed_at_random_times(undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    run_dir = tmp_path / "run"
    for _ in range(4):
        with warm.Popen([sys.executable, str(PROGRAM), str(run_dir)], stdout=subprocess.DEVNULL) as victim:
            began = time.monotonic()
            while not (run_dir / "checkpoints").exists() and victim.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 1.2 * (time.monotonic() - began)))
            victim.kill()
    sinks_program.train(run_dir)
    print(f"seed {SEED}")
    require_same_files(undisturbed, run_dir)


# ------------------------------------------------------------------------------- going back, and on


def sinks() -> list[Service]:
    return [sink(every=Every(steps=1)) for sink in (JSONLines, CSV, TensorBoard)]


def tiny(run_dir: Path, **arguments: Any) -> Tiny:
    services = [*arguments.pop("sinks", sinks()), Checkpoints(Every(steps=1), keep_last=None)]
    return Tiny(run_dir, max_epoch=3, services=services, **arguments)


def evaluated(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=epoch / 3)


@pytest.mark.campaign("long")
def test_going_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    tiny(tmp_path / "whole").train(tail=evaluated)
    tiny(tmp_path / "run").train(tail=evaluated)
    for back in (9, 4, 11, "epoch-0000-step-00000000", 2, 2):
        tiny(tmp_path / "run", resume=back).train(tail=evaluated)
        require_same_files(tmp_path / "whole", tmp_path / "run")
    for at in (6, 7):  # and crashing before anything is written
        with pytest.raises(Boom):
            tiny(tmp_path / "run", resume=5).train(boom_at(at))
    tiny(tmp_path / "run", resume=5).train(tail=evaluated)
    require_same_files(tmp_path / "whole", tmp_path / "run")


def test_starting_over_with_the_same_services(tmp_path: Path) -> None:
    same = sinks()
    tiny(tmp_path / "run", seed=1, sinks=same).train(tail=evaluated)
    tiny(tmp_path / "run", seed=7, sinks=same, resume=False).train(tail=evaluated)
    tiny(tmp_path / "whole", seed=7).train(tail=evaluated)
    require_same_files(tmp_path / "whole", tmp_path / "run")


def test_a_sink_that_comes_later_or_lost_its_files_writes_all_there_was(tmp_path: Path) -> None:
    tiny(tmp_path / "whole").train(tail=evaluated)
    with pytest.raises(Boom):
        tiny(tmp_path / "run", sinks=()).train(boom_at(5), tail=evaluated)
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(boom_at(8), tail=evaluated)
    for path in [
        *(tmp_path / "run" / "logs").glob("metrics.*"),
        *(tmp_path / "run" / "logs").rglob("*.everstep"),
    ]:
        path.unlink()
    tiny(tmp_path / "run").train(tail=evaluated)
    require_same_files(tmp_path / "whole", tmp_path / "run")


def test_other_settings_hold_for_the_whole_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(boom_at(6), tail=evaluated)
    board = TensorBoard(prefix="metrics/", skip=["valid*"], throttle={"loss": 3})
    tiny(tmp_path / "run", sinks=[board]).train(tail=evaluated)
    found = points(tmp_path / "run")
    assert {tag: [step for step, _ in found[tag]] for tag in found} == {
        "metrics/loss": [3, 6, 9, 12],
        "metrics/epoch/loss": [4, 8, 12],
    }


def test_a_tensorboard_that_is_open_forgets_what_a_resume_does_again(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(boom_at(10), tail=evaluated)
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "tensorboard"), EVERYTHING)
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [*range(1, 10)]
    tiny(tmp_path / "run", resume=5).train(tail=evaluated)
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [*range(1, 13)]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("point", ["sink.create", "sink.write", "sink.rename"])
def test_a_full_disk_costs_no_training_and_the_files_catch_up(tmp_path: Path, point: str) -> None:
    whole = tiny(tmp_path / "whole").train(tail=evaluated)
    run = tiny(tmp_path / "run")
    with armed(f"ENOSPC:{point}:2-5"):
        run.train(tail=evaluated)
    assert run.result() == whole.result()
    require_same_files(tmp_path / "whole", tmp_path / "run")


def test_a_disk_that_is_full_to_the_end_is_said_and_the_next_start_mends(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    with armed("ENOSPC:sink.write:8-999"):
        run.train(tail=evaluated)
    assert run.loop.ending.finished
    assert any("is not complete" in line and "start the run again" in line for line in run.lines)
    tiny(tmp_path / "run").train(tail=evaluated)
    tiny(tmp_path / "whole").train(tail=evaluated)
    require_same_files(tmp_path / "whole", tmp_path / "run")


def delete(run_dir: Path, file: Path) -> None:
    file.unlink()


def delete_the_folder(run_dir: Path, file: Path) -> None:
    shutil.rmtree(run_dir / "logs", ignore_errors=True)


def overwrite(run_dir: Path, file: Path) -> None:
    file.write_bytes(b"\xff\x00,,\n")


def replace_by_an_equal_one(run_dir: Path, file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("harm", "at"),
    [(delete, 12), (delete_the_folder, 6), (overwrite, 6), (overwrite, 12), (replace_by_an_equal_one, 12)],
)
def test_files_that_are_harmed_meanwhile_are_made_anew(
    tmp_path: Path, harm: Callable[[Path, Path], None], at: int
) -> None:
    def inside(loop: Any, step: int) -> None:
        if step == at:
            for file in [
                *(tmp_path / "run" / "logs").glob("metrics.*"),
                *(tmp_path / "run" / "logs").rglob("*.everstep"),
            ]:
                harm(tmp_path / "run", file)

    tiny(tmp_path / "whole").train(tail=evaluated)
    run = tiny(tmp_path / "run").train(inside, tail=evaluated)
    require_same_files(tmp_path / "whole", tmp_path / "run")
    assert len([line for line in run.lines if "is made anew" in line]) == 3
    assert run.loop.ending.warnings == ()


# ------------------------------------------------------------------------------------ the contents


def test_values_and_names_of_every_kind(tmp_path: Path) -> None:
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "low": -math.inf,
        "tiny": 1e-300,
        'say "hi",\n': 0.1,
        "step": -0.0,
    }
    tiny(tmp_path / "run").train(tail=lambda loop, epoch: loop.collect_metrics(values))
    for frame in (jsonl(tmp_path / "run"), table(tmp_path / "run")):
        line = frame[frame.phase == "tail"].iloc[0]
        assert line.step == 4 and math.isnan(line.nan)
        assert (line.inf, line.low, line.tiny, line['say "hi",\n']) == (math.inf, -math.inf, 1e-300, 0.1)
        assert math.copysign(1, line["metric/step"]) == -1
    assert math.isnan(points(tmp_path / "run")["nan"][0][1])


def test_text_that_is_no_unicode_holds_nothing_up(tmp_path: Path) -> None:
    def bad(loop: Any, epoch: int) -> None:
        loop.collect_metrics({"\udc80": 1.0})
        loop.add_summary({"text": "\udc80"})

    run = tiny(tmp_path / "run").train(tail=bad)
    assert run.loop.ending.warnings == ()
    found = points(tmp_path / "run")
    assert found["?"][0] == (4, 1.0) and found["text"][0] == (4, b"?") and "?" in table(tmp_path / "run")


def images() -> dict[str, Any]:
    import torch

    return {
        "gray": np.full((4, 6), 0.5),
        "channels last": np.zeros((4, 6, 3), np.uint8),
        "channels first": np.zeros((3, 4, 6), np.float32),
        "a tensor with a gradient": torch.zeros(1, 4, 6, requires_grad=True),
        "not contiguous": torch.zeros(6, 4).T,
        "alpha, out of range, nan": np.stack([np.full((4, 6), v) for v in (-1, 2, math.nan, 1)], -1),
    }


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("name", images())
def test_images(tmp_path: Path, name: str) -> None:
    tiny(tmp_path / "run").train(tail=lambda loop, epoch: loop.add_summary({name: Image(images()[name])}))
    ((step, width, height, png), *_) = points(tmp_path / "run")[name]
    assert (step, width, height, png[1:4]) == (4, 6, 4, b"PNG")


WRONG: dict[str, Any] = {
    "give a mapping": 3.0,
    "numbers go to collect_metrics": {"loss": 0.5},
    "with 1, 3 or 4 channels": {"x": Image(np.zeros((2, 2, 2)))},
    "is not an array": {"x": Image([[1, 2]])},
    "none of them finite": {"x": Histogram(np.array([math.nan]))},
}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_summary_is_a_warning(tmp_path: Path, message: str) -> None:
    run = tiny(tmp_path / "run").train(tail=lambda loop, epoch: loop.add_summary(WRONG[message]))
    assert len(run.loop.ending.warnings) == 3 and message in run.loop.ending.warnings[0]


class Texts(Service):
    """Adds a summary after each third step, and after each epoch."""

    stage = everstep.Stage.MEASURE

    def open(self, run: Any) -> None:
        self.loop = run

    def run(self, boundary: everstep.Boundary) -> None:
        self.loop.add_summary({boundary.moment.value: f"after {boundary.step}"})


def test_a_service_adds_summaries_once_also_after_a_crash(tmp_path: Path) -> None:
    found = []
    for name, crashes in (("undisturbed", False), ("resumed", True)):

        def start(run_dir: Path = tmp_path / name) -> Tiny:
            texts = Texts("texts", Every(steps=3) | Every(epochs=1))
            services = [texts, TensorBoard(), Checkpoints(every=Every(steps=2))]
            return Tiny(run_dir, max_epoch=2, services=services)

        if crashes:
            with pytest.raises(Boom):
                start().train(boom_at(6))
        start().train()
        written = {tag: values for tag, values in points(tmp_path / name).items() if tag.startswith("after")}
        found.append(written)
    assert found[0] == found[1]
    told = {tag: [(step, text.decode()) for step, text in values] for tag, values in found[0].items()}
    assert told == {
        "after_step": [(step, f"after {step}") for step in (3, 6)],
        "after_epoch": [(step, f"after {step}") for step in (4, 8)],
    }


def test_a_table_of_some_metrics_with_another_delimiter(tmp_path: Path) -> None:
    services = [CSV(metrics=["*loss"], delimiter=";", every=Every(steps=1)), CSV("logs/all.csv", name="all")]
    with everstep.TrainLoop(tmp_path / "run", max_epoch=2, services=services, seed=1) as loop:
        for epoch in loop.iter_epochs():
            for step in loop.iter_steps(range(2)):
                loop.collect_metrics(loss=step[0], accuracy=0.5)
                if step[0] == 3:
                    loop.collect_metrics(late_loss=1.0)  # the file is made anew with one more column
            loop.collect_metrics(accuracy=epoch)  # a line without any of them
    found = (tmp_path / "run" / "logs" / "metrics.csv").read_text().splitlines()
    assert found == [
        "step;epoch;phase;loss;late_loss",
        *("1;1;step;1.0;", "2;1;step;2.0;", "2;1;epoch;1.5;"),
        *("3;2;step;3.0;1.0", "4;2;step;4.0;", "4;2;epoch;3.5;1.0"),
    ]
    assert "accuracy" in (tmp_path / "run" / "logs" / "all.csv").read_text()


@pytest.mark.campaign("long")
def test_no_framework_comes_with_it(tmp_path: Path) -> None:
    """One that is imported becomes part of the random state: an observer would change the run."""
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); from sinks_program import train, Path; "
        "import everstep.services.tensorboard; assert 'tensorboard' not in sys.modules; "
        f"train(Path({str(tmp_path / 'run')!r})); "
        "assert 'tensorboard' in sys.modules; assert not {'torch', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, stdout=subprocess.DEVNULL)
