"""Files and services that log a run: however often killed, what others read is the undisturbed run."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import logged
import numpy as np
import pandas as pd
import posted
import pytest
import wandb_server
from posted import Server, evaluated
from readers import EVERYTHING, points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import everstep
import gate
import warm
from everstep import Checkpoints, Every, Service, services
from everstep.errors import ConfigError, ServiceError
from everstep.record import Event, RunJournal
from everstep.services import CSV, FinalValues, Histogram, Image, JSONLines, Sink, TensorBoard
from everstep.services.sink import Line
from everstep.testing import armed
from tiny_runs import Boom, Tiny, boom_at, rows
from waiting import PATIENCE, until


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The undisturbed run; no test changes it."""
    return tiny(tmp_path_factory.mktemp("whole") / "run").train(tail=evaluated)


def require_same_files(whole: Tiny, run_dir: Path) -> None:
    assert points(whole.run_dir) == points(run_dir)
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (whole.run_dir / "logs" / name).read_text() == (run_dir / "logs" / name).read_text()


def rows_of(run_dir: Path, name: str, phase: str = "step") -> list[tuple[int, float]]:
    return [(r.step, r.value) for r in RunJournal(run_dir).rows() if (r.name, r.phase) == (name, phase)]


def sinks() -> list[Service]:
    return [sink(every=Every(steps=1)) for sink in (JSONLines, CSV, TensorBoard)]


def tiny(run_dir: Path, **arguments: Any) -> Tiny:
    services = [*arguments.pop("sinks", sinks()), Checkpoints(Every(steps=1), keep_last=None)]
    return Tiny(run_dir, **{"max_epoch": 3, **arguments, "services": services})


def test_the_undisturbed_run_is_written_whole(tmp_path: Path) -> None:
    """Killed at any point: test_all_together."""

    def inside(loop: Any, step: int) -> None:
        if step > 50:
            loop.collect_metrics({"late, metric": step / 3})
        if step % 5 == 0:
            seen = {"noise": Image(np.random.rand(4, 6, 3)), "weights": Histogram(np.arange(step))}
            loop.add_summary({"seen": seen})

    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            for value in (1.0, 2.0):
                loop.collect_metrics(valid_loss=value / 7)
        loop.add_summary({"tail": f"epoch {epoch}"})

    tiny(tmp_path, samples=40, max_epoch=4).train(inside, tail)
    found = points(tmp_path)
    assert found["loss"] == [(step, np.float32(v)) for step, v in rows_of(tmp_path, "loss")]
    assert len(found["loss"]) == 80 and [step for step, _ in found["epoch/loss"]] == [20, 40, 60, 80]
    assert [step for step, _ in found["valid_loss"]] == [20, 20, 40, 40, 60, 60, 80, 80]
    assert [shown[:3] for shown in found["seen/noise"]] == [(step, 6, 4) for step in range(5, 81, 5)]
    assert [step for step, _ in found["seen/weights"]] == [*range(5, 81, 5)]
    assert found["tail"] == [(20 * n, f"epoch {n}".encode()) for n in range(1, 5)]
    for frame in (jsonl(tmp_path), exact(table(tmp_path), tmp_path)):
        steps = frame[frame.phase == "step"]
        assert list(zip(steps.step, steps.loss, strict=True)) == rows_of(tmp_path, "loss")
        late = steps[steps["late, metric"].notna()]
        assert list(zip(late.step, late["late, metric"], strict=True)) == rows_of(tmp_path, "late, metric")
        values = [v for _, v in rows_of(tmp_path, "valid_loss", "tail")]
        assert list(frame[frame.phase == "tail"].valid_loss) == values


def test_lines_have_one_order_wherever_the_writer_thread_is_done_with_a_checkpoint(tmp_path: Path) -> None:
    class Measured(Service):
        stage = everstep.services.Stage.MEASURE

        def run(self, boundary: Any) -> everstep.Outcome:
            return everstep.Outcome({"right": 1.0})

    services = [Measured("measured", Every(epochs=1)), Checkpoints(Every(steps=3))]
    Tiny(tmp_path, max_epoch=2, services=services).train(tail=evaluated)
    ((_, items),) = RunJournal(tmp_path).parts()
    announced = [item for item in items if isinstance(item, Event) and item.kind == "checkpoint"]
    others = [item for item in items if item not in announced]
    wanted = list(JSONLines.lines(others))
    phases = ["step"] * 4 + ["tail", "eval/measured", "epoch"]
    assert [line["phase"] for line in wanted] == phases * 2
    phase = [None if isinstance(item, Event) else item.block.phase for item in others]
    # the rows of one phase are written together: between them nothing is announced
    places = [n for n in range(1, len(others)) if phase[n] is None or phase[n] != phase[n - 1]]
    assert len(places) > 10
    for place in places:
        assert [*JSONLines.lines([*others[:place], announced[0], *others[place:]])] == wanted


@pytest.mark.parametrize("every", [Every(steps=1), Every(steps=3), Every(epochs=1)], ids=str)
def test_files_depend_neither_on_when_they_were_written_nor_on_where_a_start_began(
    every: everstep.Schedule, tmp_path: Path
) -> None:
    """Evaluations at an epoch's last step, at its end and in its tail are lines of one step."""

    def program(name: str, every: everstep.Schedule) -> Tiny:
        schedule = Every(steps=2) | Every(epochs=1)
        evaluator = lambda service: {f"{service.stream}/loss": 0.5}  # noqa: E731
        evaluate = everstep.Evaluate("valid", schedule, validate_first=True, evaluator=evaluator)
        files = [sink(every=every) for sink in (JSONLines, CSV)]
        return Tiny(tmp_path / name, max_epoch=2, services=[*files, evaluate, Checkpoints(Every(steps=1))])

    whole = program("whole", Every(steps=1000)).train(tail=evaluated)
    phases = [line.phase for line in jsonl(whole.run_dir).itertuples()]
    assert phases[-5:] == ["step", "tail", "eval/valid", "eval/valid", "epoch"]
    assert [row[1] for row in rows(whole.run_dir, "eval/valid")] == [0, 2, 4, 4, 6, 8, 8]
    for crash in range(10):
        left = iter(range(crash, -1, -1))

        def reach(loop: Any, place: int, left: Iterator[int] = left) -> None:
            if next(left, 1) == 0:
                raise Boom

        def tail(loop: Any, epoch: int, reach: Any = reach) -> None:
            evaluated(loop, epoch)
            reach(loop, epoch)

        with pytest.raises(Boom):
            program(f"run{crash}", every).train(reach, tail)
        run = program(f"run{crash}", every).train(tail=evaluated)
        for name in ("metrics.jsonl", "metrics.csv"):
            files = [(run_dir / "logs" / name).read_text() for run_dir in (whole.run_dir, run.run_dir)]
            assert files[0] == files[1], crash


def test_a_service_that_finishes_later_finds_the_file_whole(tmp_path: Path) -> None:
    """One that sends it, say; the last step's line waits for the loop's end."""

    class Sends(Service):
        def finish(self, boundary: Any) -> None:
            self.lines = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()

    sends = Sends("sends")
    tiny(tmp_path, sinks=[JSONLines(every=Every(steps=1000)), sends]).train()
    assert [json.loads(line)["step"] for line in sends.lines if '"step"' in line][-2:] == [10, 11]


def test_final_values_come_last_also_where_a_file_is_made_anew(tmp_path: Path) -> None:
    Tiny(tmp_path, max_epoch=2, services=[FinalValues(lambda: {"norm": 2.0})]).train(tail=evaluated)
    ((_, items),) = RunJournal(tmp_path).parts()
    assert [line["phase"] for line in JSONLines.lines(items)][-2:] == ["epoch", "eval/final values"]


class Database(Sink):
    """Wrong: a database at the path, which the file of the next start replaces."""

    def write(self, file: IO[str], items: Any) -> None:
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("create table if not exists metrics (step, loss)")
            db.executemany("insert into metrics values (:step, :loss)", self.lines(items))


class Wrong(Sink):
    def write(self, file: IO[str], items: Any) -> None:
        raise KeyError("accuracy")


def test_a_sink_that_opens_its_path_or_fails_to_write_is_named(tmp_path: Path) -> None:
    wrong = Wrong("logs/wrong", every=Every(steps=1))
    run = Tiny(tmp_path / "wrong", max_epoch=2, services=[wrong]).train()
    assert (
        run.loop.ending.finished and "'wrong' failed, and the training goes on" in run.loop.ending.warnings[0]
    )
    assert any("logs/wrong is not complete (KeyError: 'accuracy')" in line for line in run.lines)
    run = Tiny(tmp_path / "run", max_epoch=2, services=[Database("logs/metrics.db", every=Every(steps=1))])
    with pytest.raises(ServiceError, match=r"UsageError: write\(\) of 'database' has written.*RemoteSink"):
        run.train()
    assert (
        run.loop.ending.step == 8
        and "'database' failed, and the training goes on" in run.loop.ending.warnings[0]
    )


@pytest.mark.campaign("long")
def test_going_back_to_an_older_checkpoint(tmp_path: Path, whole: Tiny) -> None:
    tiny(tmp_path / "run").train(tail=evaluated)
    for back in (9, 4, 11, "epoch-0000-step-00000000", 2, 2):
        tiny(tmp_path / "run", resume=back).train(tail=evaluated)
        require_same_files(whole, tmp_path / "run")
    for at in (6, 7):  # and crashing before anything is written
        with pytest.raises(Boom):
            tiny(tmp_path / "run", resume=5).train(boom_at(at))
    tiny(tmp_path / "run", resume=5).train(tail=evaluated)
    require_same_files(whole, tmp_path / "run")


def test_starting_over_with_the_same_services(tmp_path: Path, whole: Tiny) -> None:
    same = sinks()
    tiny(tmp_path / "run", seed=1, sinks=same).train(tail=evaluated)
    tiny(tmp_path / "run", seed=7, sinks=same, resume=False).train(tail=evaluated)
    require_same_files(whole, tmp_path / "run")


def test_a_sink_that_comes_later_or_lost_its_files_writes_all_there_was(tmp_path: Path, whole: Tiny) -> None:
    logs = tmp_path / "run" / "logs"
    with pytest.raises(Boom):
        tiny(tmp_path / "run", sinks=()).train(boom_at(5), tail=evaluated)
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(boom_at(8), tail=evaluated)
    for path in (*logs.glob("metrics.*"), *logs.rglob("*.everstep")):
        path.unlink()
    tiny(tmp_path / "run").train(tail=evaluated)
    require_same_files(whole, tmp_path / "run")


def test_other_settings_hold_for_the_whole_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(boom_at(6), tail=evaluated)
    board = TensorBoard(prefix="metrics/", skip=["valid*"], throttle={"loss": 3})
    tiny(tmp_path / "run", sinks=[board]).train(tail=evaluated)
    found = {tag: [step for step, _ in each] for tag, each in points(tmp_path / "run").items()}
    assert found == {"metrics/loss": [3, 6, 9, 12], "metrics/epoch/loss": [4, 8, 12]}


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
def test_a_full_disk_costs_no_training_and_files_catch_up(tmp_path: Path, whole: Tiny, point: str) -> None:
    run = tiny(tmp_path / "run")
    with armed(f"ENOSPC:{point}:2-5"):
        run.train(tail=evaluated)
    assert run.result() == whole.result()
    require_same_files(whole, tmp_path / "run")


def test_a_disk_that_is_full_to_the_end_is_said_and_the_next_start_mends(tmp_path: Path, whole: Tiny) -> None:
    run = tiny(tmp_path / "run")
    with armed("ENOSPC:sink.write:8-999"):
        run.train(tail=evaluated)
    assert run.loop.ending.finished
    assert any("is not complete" in line and "start the run again" in line for line in run.lines)
    tiny(tmp_path / "run").train(tail=evaluated)
    require_same_files(whole, tmp_path / "run")


def require_posted_once(run_dir: Path, server: Server) -> None:
    """The server has the lines of the run's record: each once, and no other."""
    lines = [*map(json.loads, (run_dir / "logs" / "metrics.jsonl").read_text().splitlines())]
    assert sorted(map(repr, server.read()["lines"])) == sorted(map(repr, lines)) and len(lines) == 19


def posts_until(strike: str, run_dir: Path, server: Server) -> None:
    """A start of the program that posts, which a kill ends there; "" lets it end by itself."""
    path = os.pathsep.join([str(Path(warm.__file__).parent), os.environ.get("PYTHONPATH", "")])
    hazard = {"EVERSTEP_HAZARD": f"kill:{strike}"} if strike else {}
    command = [sys.executable, posted.__file__, str(run_dir), str(server.file)]
    environment = {**os.environ, "PYTHONPATH": path, **hazard}
    status = warm.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
    assert status == (-signal.SIGKILL if strike else 0), strike


def test_killed_anywhere_a_service_on_the_network_gets_each_value_once(tmp_path: Path) -> None:
    """A kill before a request, after it, in a save before it, at the end, in a start that ends nothing."""
    run_dir, server = tmp_path / "run", Server(tmp_path / "server.json")
    strikes = ["sink.send:1", "sink.sent:1", "checkpoint.rename:1", "sink.send:2", "sink.sent:2"]
    for strike in [*strikes, "loop.exit:1", "sink.send:1", "sink.sent:1", "", ""]:
        posts_until(strike, run_dir, server)
    require_posted_once(run_dir, server)
    assert json.loads(server.read()["position"])["lines"] == 19


def test_an_outage_is_a_warning_and_caught_up_later(tmp_path: Path) -> None:
    server = Server(tmp_path / "server.json")
    server.fails = ["before", "after", "before"]
    run = posted.posting(tmp_path / "run", server).train(tail=evaluated)
    refused, no_answer = "ConnectionError: refused", "TimeoutError: no answer"
    later = "nothing is lost: the next checkpoint or start sends these values"
    assert run.loop.ending.warnings == tuple(
        f"service 'posts' failed, and the training goes on: {error}; {later}"
        for error in (refused, no_answer, refused)
    )
    require_posted_once(tmp_path / "run", server)
    server = Server(tmp_path / "other.json")
    server.fails = ["before"] * 99
    run = posted.posting(tmp_path / "long", server).train(tail=evaluated)
    assert run.loop.ending.finished and "start the run again to send them" in "".join(run.lines)
    server.fails = []
    for _ in range(2):
        posted.posting(tmp_path / "long", server).train(tail=evaluated)
        require_posted_once(tmp_path / "long", server)


def test_a_service_that_does_not_answer_holds_up_one_step_and_not_the_end(tmp_path: Path) -> None:
    server, answers, asked = Server(tmp_path / "server.json"), threading.Event(), []

    class Silent(posted.Posts):
        def send(self, lines: list[Any], position: str) -> None:
            asked.append(position)
            answers.wait()
            super().send(lines, position)

    silent = Silent(server, timeout=0.1)
    run = Tiny(tmp_path / "run", max_epoch=9, services=[silent, JSONLines()]).train(tail=evaluated)
    assert run.loop.ending.finished and until(lambda: asked) and len(asked) == 1
    late = [each for each in run.loop.ending.warnings if "TimeoutError" in each]
    # where the machine is slow, the question for the position is late, too
    assert len(late) <= 2 and "TimeoutError: no answer in 0.1 s; nothing is lost: the next" in late[0], late
    answers.set()
    assert silent._thread is not None
    silent._thread.join()
    Tiny(tmp_path / "run", max_epoch=9, services=[posted.Posts(server), JSONLines()]).train(tail=evaluated)
    lines = (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert sorted(map(repr, server.read()["lines"])) == sorted(map(repr, map(json.loads, lines)))


def test_going_back_sends_what_is_other_than_the_first_time(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", Server(tmp_path / "server.json")
    posted.posting(run_dir, server, every=1).train(tail=evaluated)
    for back in (9, 2, 5):
        posted.posting(run_dir, server, every=1, resume=back).train(tail=evaluated)
        require_posted_once(run_dir, server)
    twice = lambda loop, epoch: evaluated(loop, 2 * epoch)  # noqa: E731
    posted.posting(run_dir, server, every=1, resume=6).train(tail=twice)
    assert [line["valid_loss"] for line in server.read()["lines"][19:]] == [4 / 3, 2.0]
    fresh = Server(tmp_path / "fresh.json")
    fresh.file.write_text(json.dumps({"lines": [], "position": server.read()["position"]}))
    posted.posting(run_dir, fresh, resume=False).train(tail=evaluated)
    require_posted_once(run_dir, fresh)


def test_a_position_of_another_origin_is_named(tmp_path: Path) -> None:
    server = Server(tmp_path / "server.json")
    server.file.write_text('{"position": "step 7", "lines": []}')
    run = posted.posting(tmp_path / "run", server).train()
    assert "position() returned 'step 7'" in "".join(run.lines) and not server.read()["lines"]


def test_values_and_names_of_every_kind(tmp_path: Path) -> None:
    values = {"nan": math.nan, "inf": math.inf, "low": -math.inf, "tiny": 1e-300, 'say "hi",\n': 0.1}
    values |= {"step": -0.0}
    tiny(tmp_path / "run").train(tail=lambda loop, epoch: loop.collect_metrics(values))
    for frame in (jsonl(tmp_path / "run"), table(tmp_path / "run")):
        line = frame[frame.phase == "tail"].iloc[0]
        assert line.step == 4 and math.isnan(line.nan)
        assert (line.inf, line.low, line.tiny, line['say "hi",\n']) == (math.inf, -math.inf, 1e-300, 0.1)
        assert math.copysign(1, line["metric/step"]) == -1
    assert math.isnan(points(tmp_path / "run")["nan"][0][1])


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


def test_images_and_text_that_is_no_unicode(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        loop.add_summary({name: Image(pixels) for name, pixels in images().items()})
        loop.collect_metrics({"\udc80": 1.0})
        loop.add_summary({"text": "\udc80"})

    run = tiny(tmp_path / "run").train(tail=tail)
    assert run.loop.ending.warnings == ()
    found = points(tmp_path / "run")
    for name in images():
        ((step, width, height, png), *_) = found[name]
        assert (step, width, height, png[1:4]) == (4, 6, 4, b"PNG"), name
    assert found["?"][0] == (4, 1.0) and found["text"][0] == (4, b"?") and "?" in table(tmp_path / "run")


WRONG: dict[str, Any] = {
    "give a mapping": 3.0,
    "numbers go to collect_metrics": {"loss": 0.5},
    "with 1, 3 or 4 channels": {"x": Image(np.zeros((2, 2, 2)))},
    "is not an array": {"x": Image([[1, 2]])},
    "none of them finite": {"x": Histogram(np.array([math.nan]))},
}


def test_a_wrong_summary_is_a_warning(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", samples=10, max_epoch=1)
    run.train(lambda loop, step: loop.add_summary([*WRONG.values()][step - 1]))
    for message, warning in zip(WRONG, run.loop.ending.warnings, strict=True):
        assert message in warning


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
    program = """
import sys, numpy, everstep
import everstep.services.tensorboard as board
assert "tensorboard" not in sys.modules
with everstep.TrainLoop(sys.argv[1], max_epoch=1, services=[everstep.services.TensorBoard()]) as loop:
    for _ in loop.iter_epochs():
        for step, _ in loop.iter_steps(range(2)):
            loop.collect_metrics(loss=1.0)
            loop.add_summary({"seen": board.Image(numpy.zeros((2, 2))), "text": "x"})
assert "tensorboard" in sys.modules
assert not {"torch", "tensorflow"} & sys.modules.keys()
"""
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


ROOT = Path(__file__).parents[2]
NAMES = ("wandb", "mlflow", "trackio")


class Told(posted.Posts):
    """Keeps what a sink for a network is told of its run."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.lines: list[Line] = []
        self.told: list[str] = []

    def send(self, lines: list[Any], position: str) -> None:
        super().send(lines, position)
        self.lines += lines

    def end(self, status: str) -> None:
        self.told.append(status)


def test_a_sink_is_told_its_run_the_config_and_how_each_start_ends(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", Server(tmp_path / "server.json")

    def start(*hooks: Any, **arguments: Any) -> Told:
        sink = Told(server)
        saves = Checkpoints(Every(steps=3), keep_last=None)
        tiny = Tiny(run_dir, max_epoch=3, services=[sink, saves], config={"lr": 0.1}, **arguments)
        with suppress(Boom):
            tiny.train(*hooks, tail=evaluated)
        return sink

    failed, finished = start(boom_at(8)), start()
    assert (failed.told, finished.told) == (["failed"], ["finished"])
    assert failed.run_config == {"lr": 0.1}
    assert failed.key == finished.key and re.fullmatch("run-[0-9a-f]{6}", failed.key)
    assert start(resume=False).key == f"{failed.key}-3"
    epoch = next(line for line in failed.lines if line["phase"] == "epoch")
    assert epoch.tagged().keys() == {"epoch/loss"} and epoch["step"] == 4
    assert RunJournal(run_dir).segments()[0].blocks[0].time == pytest.approx(failed.lines[0].time, abs=0.001)


def test_a_start_that_begins_anew_as_nothing_was_saved_is_the_same_run_to_a_service(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", Server(tmp_path / "server.json")
    posts_until("checkpoint.rename:1", run_dir, server)

    def start(**arguments: Any) -> str:
        sink = Told(server)
        Tiny(run_dir, max_epoch=1, services=[sink, Checkpoints()], **arguments).train(tail=evaluated)
        return sink.key

    assert re.fullmatch("run-[0-9a-f]{6}", key := start())
    assert [each.parent for each in RunJournal(run_dir).segments()] == [None, None]
    assert start(resume=False) == f"{key}-3"


def test_wandb_takes_its_mode_from_the_environment_if_none_is_given(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "wandb"  # which is not installed here: its name alone is looked for
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Tiny(tmp_path / "run", max_epoch=1, services=[services.WandB("project")]).train(tail=evaluated)
    assert not (tmp_path / "run" / "logs" / "wandb").exists()
    assert services.WandB("project", mode="offline")._mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "shared")
    with pytest.raises(ConfigError, match="WANDB_MODE='shared'"):
        services.WandB("project")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter with the three packages, beside all that this one has."""
    folder = tmp_path_factory.mktemp("loggers") / "env"
    venv.create(folder)
    found = str(folder / "bin" / "python")
    site = Path(sysconfig.get_path("platlib", vars={"base": str(folder), "platbase": str(folder)}))
    paths = [sysconfig.get_path("platlib"), ROOT / "src", ROOT / "tests", ROOT / "tests" / "services"]
    (site / "everstep_tests.pth").write_text("".join(f"{path}\n" for path in paths))
    install = [sys.executable, "-m", "pip", "-q", "--python", found, "install", *NAMES]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return found


class Place:
    """A run, and the store of a service in which it logs."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        self.python, self.name, self.run_dir = python, name, folder / "run"
        self.store = f"sqlite:///{folder}/mlflow.db"
        self.environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_SILENT": "true"}

    def start(self, action: str, *more: object, **environment: str) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [self.python, logged.__file__, action, self.name, str(self.run_dir), self.store]
        command += map(str, more)
        return subprocess.Popen(command, env={**self.environment, **environment}, text=True, **pipes)

    def run(self, action: str, *more: object, status: int = 0, **environment: str) -> str:
        process = self.start(action, *more, **environment)
        out, errors = process.communicate()
        assert process.returncode == status, errors
        return out

    def points(self) -> Counter[tuple[Any, ...]]:
        """What the service's own store has."""
        return Counter(map(tuple, json.loads(self.run("read").splitlines()[-1])))

    def require_each_once(self) -> None:
        assert self.points() == expected(self.run_dir)


def expected(run_dir: Path) -> Counter[tuple[Any, ...]]:
    """Step, tag and value of each valid row."""
    rows = RunJournal(run_dir).rows()
    own = ("head", "step", "tail")
    return Counter((r.step, r.name if r.phase in own else f"{r.phase}/{r.name}", r.value) for r in rows)


@pytest.mark.campaign("machine")
@pytest.mark.parametrize("name", NAMES)
def test_a_service_passes_its_own_check(python: str, name: str, tmp_path: Path) -> None:
    """Of MLflow and Trackio each line of position() and send() is a place of a kill."""
    # a pool of connections to SQLite would be files that the service leaves open
    Place(python, name, tmp_path).run("check", MLFLOW_SQLALCHEMYSTORE_POOLCLASS="NullPool")


@pytest.mark.campaign("machine")
@pytest.mark.timeout(1200)  # 27 starts, of some seconds each
@pytest.mark.parametrize("name", NAMES)
def test_killed_anywhere_each_value_is_there_once(python: str, name: str, tmp_path: Path) -> None:
    place, draws = Place(python, name, tmp_path), random.Random(gate.seed)
    points = ["sink.send", "sink.sent"] if name != "wandb" else ["sink.create", "sink.rename", "sink.write"]
    for point in [*points, "checkpoint.rename", "journal.write", "loop.exit"]:
        place.run("train", status=-signal.SIGKILL, EVERSTEP_HAZARD=f"kill:{point}:1")
    kills = 0
    while kills < 20:
        process = place.start("train", "newest", 60)
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(draws.randint(1, 12))]
        time.sleep(draws.random() / 50)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL and seen[0], f"it ended before kill {kills + 1}"
        kills += 1
    place.run("train", "newest", 60)
    place.require_each_once()
    assert len(expected(place.run_dir)) == 4 * 60 + 2 * 60


@pytest.mark.campaign("machine")
@pytest.mark.parametrize("name", NAMES)
def test_going_back_is_sent_once(python: str, name: str, tmp_path: Path) -> None:
    """The same values are sent once; others take their place in W&B, and stand beside them elsewhere."""
    place = Place(python, name, tmp_path)
    place.run("train")
    place.run("train", 6)
    place.require_each_once()
    before = expected(place.run_dir)
    place.run("train", 3, SHIFT="1")
    after = expected(place.run_dir)
    assert len(after - before) == 3, "valid_loss of three epochs"
    assert place.points() == (after if name == "wandb" else before | after)


@contextmanager
def wandb_stand_in(python: str) -> Iterator[tuple[dict[str, str], Any]]:
    """What a client needs in its environment, and a function that returns the server's runs."""
    process = subprocess.Popen([python, wandb_server.__file__, "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"

    def runs() -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)["runs"]
        return found

    try:
        yield {"WANDB_BASE_URL": url, "WANDB_API_KEY": wandb_server.KEY}, runs
    finally:
        process.kill()
        process.communicate()


def uploaded(run: dict[str, Any]) -> Counter[tuple[Any, ...]]:
    values = ((row["_step"], tag, value) for row in run["history"] for tag, value in row.items())
    return Counter(each for each in values if each[1][0] != "_")


@pytest.mark.campaign("machine")
def test_wandb_sync_of_a_run_that_was_killed_and_went_back_is_one_run(python: str, tmp_path: Path) -> None:
    place = Place(python, "wandb", tmp_path)
    with wandb_stand_in(python) as (environment, runs):

        def sync() -> dict[str, Any]:
            command = [python, "-m", "wandb", "sync", str(place.run_dir / "logs" / "wandb")]
            subprocess.run(command, env={**place.environment, **environment}, check=True, cwd=tmp_path)
            (run,) = runs().values()
            return run

        place.run("train", status=-signal.SIGKILL, EVERSTEP_HAZARD="kill:checkpoint.rename:3")
        first = sync()
        assert first["exitcode"] == 1 and 0 < len(uploaded(first)) < len(expected(place.run_dir)) + 1
        assert uploaded(sync()) == uploaded(first), "no new rows"
        place.run("train")
        run = sync()
        whole = expected(place.run_dir)
        assert uploaded(run) == whole
        assert "W&B keeps those that were uploaded first" in place.run("train", 6, SHIFT="1")
        assert uploaded(sync()) == whole
    assert (run["exitcode"], run["tags"], run["group"]) == (0, ["a"], "b")
    assert run["config"]["lr"]["value"] == 0.1 and run["summary"]["valid_loss"] == 1.0


@pytest.mark.campaign("machine")
def test_online_a_file_is_uploaded_while_it_grows_however_often_killed(python: str, tmp_path: Path) -> None:
    place, draws, rows = Place(python, "wandb-online", tmp_path), random.Random(gate.seed), 0
    with wandb_stand_in(python) as (environment, runs):

        def is_longer() -> bool:
            return sum(len(run["history"]) for run in runs().values()) > rows

        for _ in range(6):
            process = place.start("train", "newest", 100_000, **environment)
            until(is_longer)  # while it trains
            assert process.stdout is not None
            for _ in range(draws.randint(1, 400)):
                process.stdout.readline()
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            (run,) = runs().values()
            assert "complete" not in run
            rows = len(run["history"])
        place.run("train", "newest", 40, **environment)
        (run,) = runs().values()
    assert uploaded(run) == expected(place.run_dir)
    assert run["complete"] and run["exitcode"] == 0


@pytest.mark.campaign("machine")
@pytest.mark.parametrize("checkpoint", ["newest", 3])
def test_mlflows_points_without_position_are_there_once(python: str, checkpoint: Any, tmp_path: Path) -> None:
    """Sent again from an older checkpoint they have other times."""
    place = Place(python, "mlflow", tmp_path)
    place.run("train", status=-signal.SIGKILL, KILL_AT_POSITION="before 2")
    had = place.points()
    assert {step for step, _, _ in had} == {1, 2, 3, 4, 5, 6}
    place.run("train", checkpoint)
    place.require_each_once()
    assert not had - place.points()


@pytest.mark.campaign("machine")
def test_where_mlflow_has_the_position_it_has_the_points(python: str, tmp_path: Path) -> None:
    """990 points in one send: with the tags of the position more than MLflow's client sends at once."""
    place = Place(python, "mlflow", tmp_path)
    store, place.store = place.store, "http://127.0.0.1:9"
    assert "start the run again to send them" in place.run("train", "newest", 165)
    place.store = store
    place.run("train", "newest", 165, status=-signal.SIGKILL, KILL_AT_POSITION="after 1")
    place.run("train", "newest", 165)
    assert place.points().total() == 990
    place.require_each_once()


@pytest.mark.campaign("machine")
def test_an_outage_of_mlflow_is_caught_up(python: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Place(python, "mlflow", tmp_path)
    store, place.store = place.store, f"http://127.0.0.1:{port}"
    assert "start the run again to send them" in place.run("train")
    command = [python, "-m", "mlflow", "server", "--backend-store-uri", store]
    command += ["--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        until(lambda: answers(port))
        assert "warning" not in place.run("train")
        place.require_each_once()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    place.store = store
    place.require_each_once()


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@pytest.mark.campaign("machine")
def test_a_kill_while_mlflow_makes_its_tables_leaves_no_broken_store(python: str, tmp_path: Path) -> None:
    folder = tmp_path / "my folder"
    place = Place(python, "mlflow", folder)
    folder.mkdir()
    (folder / ".tmp-mine").write_text("no leftover of MLflow")

    def has(size: int) -> bool:
        with suppress(FileNotFoundError):  # a leftover that this start deletes
            return any(file.stat().st_size >= size for file in folder.glob(".tmp-mlflow.db-*/mlflow.db"))
        return False

    for size in (1, 100_000, 300_000):
        process = place.start("train", "newest", 4)
        assert until(partial(has, size))
        process.kill()
        process.communicate()
        assert not (folder / "mlflow.db").exists(), "it was too late to kill"
    place.run("train", "newest", 4)
    place.require_each_once()
    assert [each.name for each in folder.glob(".tmp-*")] == [".tmp-mine"]


@pytest.mark.campaign("machine")
def test_mlflow_has_the_config_and_how_the_run_ended(python: str, tmp_path: Path) -> None:
    place = Place(python, "mlflow", tmp_path)
    place.run("train", EVERSTEP_HAZARD="SIGTERM:checkpoint.rename:2", status=143)
    facts = json.loads(place.run("facts").splitlines()[-1])
    assert facts == [["KILLED", {"model.width": "8", "lr": "0.1", "a_b": "1"}]]
    place.run("train")
    assert json.loads(place.run("facts").splitlines()[-1])[0][0] == "FINISHED"
