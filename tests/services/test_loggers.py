"""W&B, MLflow and Trackio: killed, resumed, rolled back, offline: each value is there once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import logged
import posted
import pytest
import wandb_server
from posted import Server, evaluated

import gate
import warm
from everstep import Checkpoints, Every, services
from everstep.errors import ConfigError
from everstep.record import RunJournal
from everstep.services.sink import Line
from tiny_runs import Boom, Tiny, boom_at
from waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
NAMES = ("wandb", "mlflow", "trackio")


@pytest.mark.parametrize("name", ["WandB", "MLflow", "Trackio"])
def test_without_its_package_a_service_names_the_extra(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"pip install {name.lower()}"):
        getattr(services, name)("project")


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
    command = [sys.executable, posted.__file__, str(run_dir), str(server.file)]
    path = os.pathsep.join([str(Path(warm.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "EVERSTEP_HAZARD": "kill:checkpoint.rename:1"}
    assert warm.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL

    def start(**arguments: Any) -> str:
        sink = Told(server)
        Tiny(run_dir, max_epoch=1, services=[sink, Checkpoints()], **arguments).train(tail=evaluated)
        return sink.key

    assert re.fullmatch("run-[0-9a-f]{6}", key := start())
    assert [each.parent for each in RunJournal(run_dir).segments()] == [None, None]
    assert start(resume=False) == f"{key}-3"


def test_wandb_takes_its_mode_from_the_environment_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def command(self, action: str, *more: object) -> list[str]:
        command = [self.python, logged.__file__, action, self.name, str(self.run_dir), self.store]
        return [*command, *map(str, more)]

    def start(self, action: str, *more: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(action, *more),
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

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
    return Counter(
        (
            row.step,
            row.name if row.phase in ("head", "step", "tail") else f"{row.phase}/{row.name}",
            row.value,
        )
        for row in RunJournal(run_dir).rows()
    )


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
def test_going_back_to_an_older_checkpoint(python: str, name: str, tmp_path: Path) -> None:
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
    return Counter(
        (row["_step"], tag, value) for row in run["history"] for tag, value in row.items() if tag[0] != "_"
    )


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
def test_online_the_file_is_uploaded_while_it_grows_however_often_it_is_killed(
    python: str, tmp_path: Path
) -> None:
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
def test_points_that_mlflow_has_without_their_position_are_there_once(
    python: str, checkpoint: str | int, tmp_path: Path
) -> None:
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
    command = [
        python,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
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
def test_mlflow_has_the_config_and_how_the_run_ended(python: str, tmp_path: Path) -> None:
    place = Place(python, "mlflow", tmp_path)
    place.run("train", EVERSTEP_HAZARD="SIGTERM:checkpoint.rename:2", status=143)
    facts = json.loads(place.run("facts").splitlines()[-1])
    assert facts == [["KILLED", {"model.width": "8", "lr": "0.1", "a_b": "1"}]]
    place.run("train")
    assert json.loads(place.run("facts").splitlines()[-1])[0][0] == "FINISHED"
