"""How long the page takes to answer: a list of 10,000 runs, and an overlay of 200 runs of 10,000 points.

    python bench/page.py [--runs 10000] [--overlay 200] [--points 10000] [--folder FOLDER] [--index-alone]
                         [--postgres URL] [--rivals tensorboard mlflow trackio aim] [--rival-runs 1000]
                         [--rival-overlay 10] [--python PYTHON]

Runs are made as a training makes them: a run directory with a journal each; the index is made from these.
The server is the command `everstep ui` in a process of its own, asked over HTTP as a browser asks, by one
client; a value is the time from the request to the last byte.  `--index-alone` and `--postgres` ask again
where no journal can be read, as of runs on other machines.  The first picture is asked of Chromium, where
Playwright is installed.  `--rivals` writes the losses for TensorBoard,
MLflow, Trackio and Aim, too, where they are installed, and asks these as their own pages ask.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from figures import Figure, Table, program

from everstep.record import Block, Journal, RunDir

FACTS = {
    "packages": {f"package{n}": f"1.{n}" for n in range(30)},
    "host": os.uname().nodename,
    "argv": ["train.py"],
}
METRICS = ("loss", "accuracy", "learning_rate")


def make(folder: Path, runs: int, overlay: int, points: int) -> None:
    """Make runs of a sweep; the first `overlay` have `points` values of each metric."""
    for number in range(runs):
        draw = random.Random(number)
        run = RunDir.open(folder / f"trial-{number:05d}", seed=number)
        config = {
            "optimizer": {"lr": draw.choice((0.1, 0.01, 0.001)), "betas": [0.9, 0.99]},
            "width": number % 64,
        }
        journal = Journal.open(run.path, 1, None, {**FACTS, "config": config, "seed": number}, warn=print)
        for phase, name, values in rows(number, points if number < overlay else 20):
            for at in range(0, len(values), 1000):  # as a training flushes
                part = values[at : at + 1000].tolist()
                steps = list(range(at + 1, at + 1 + len(part)))
                count = len(part)
                journal.append(Block(1, phase, name, False, steps, part, [1] * count, [0] * count))
                journal.flush()
        journal.event(
            "closed", {"status": draw.choice(("finished", "failed")), "reason": "made", "step": points}
        )
        journal.close()


def rows(number: int, points: int) -> Iterator[tuple[str, str, Any]]:
    """The values of a run's metrics: (phase, name, values)."""
    noise = np.random.default_rng(number)
    for name in METRICS:
        yield "step", name, np.exp(-np.arange(points) / points) + 0.1 * noise.standard_normal(points)
    yield "tail", "valid_loss", np.abs(noise.standard_normal(1))


# ----------------------------------------------------------------------------------------- asking


class Server:
    """A server on a port of this machine, asked over one kept connection."""

    def __init__(self, command: list[str], port: int = 0, **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            # only ours tells its port there; nobody reads the others' lines, and a full pipe would stop them
            stdout=subprocess.DEVNULL if port else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.port, self.cookie = port, ""

    def get(self, path: str, body: Any = None, **parameters: Any) -> tuple[float, bytes]:
        """Return (seconds from request to the last byte, the answer)."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        with contextlib.closing(line):
            began = time.perf_counter()
            headers = {"Cookie": self.cookie, **({"Content-Type": "application/json"} if body else {})}
            asked = f"{path}?{urlencode(parameters)}" if parameters else path
            line.request("POST" if body else "GET", asked, json.dumps(body) if body else None, headers)
            answer = line.getresponse()
            found = answer.read()
            assert answer.status in (200, 303), (answer.status, found[:500])
            if answer.getheader("Set-Cookie"):
                self.cookie = str(answer.getheader("Set-Cookie")).partition(";")[0]
            return time.perf_counter() - began, found

    def end(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # MLflow's ignores the first word, and has children
        self.process.wait()


def page(place: str, python: str = sys.executable) -> Server:
    """Start `everstep ui` and enter it."""
    server = Server([python, "-m", "everstep", "ui", place], EVERSTEP_INDEX="")
    assert server.process.stdout is not None
    found = re.search(r"127\.0\.0\.1:(\d+)/(\?token=\S+)", server.process.stdout.readline())
    assert found, "everstep ui did not start"
    server.port = int(found[1])
    server.get(f"/{found[2]}")
    return server


def questions(count: int) -> Iterator[dict[str, Any]]:
    """Filters and orders as people make them, in random order."""
    draw = random.Random(1)
    filters = [
        *("", "valid_loss<0.5", "status=finished", "config.optimizer.lr=0.01", "loss<0.4 status=failed"),
        *("config.width>32 valid_loss<1", "name=trial-00007", "config.optimizer.betas=0.9", "accuracy!=1"),
    ]
    sorts = ("started", "valid_loss", "loss", "name", "config.width", "status", "accuracy")
    for _ in range(count):
        chosen = {"where": draw.choice(filters), "sort": draw.choice(sorts), "desc": draw.choice((0, 1))}
        yield {**chosen, "columns": "name,status,valid_loss,loss,config.optimizer.lr", "limit": 100}


def told(what: str, seconds: list[float], size: int = 0, goal: float | None = None) -> Figure:
    """The answers to a question, with the size of the last."""
    extent = f" ({size / 1e6:.1f} MB)" if size else ""
    return Figure(f"{what}{extent}", "ms", [each * 1e3 for each in seconds], goal=goal)


# Playwright asks less and less often, up to twice a second
_NOTE_FIRST_ROW = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("tbody th a")) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => (window.firstRow = performance.now())));
}).observe(document, { childList: true, subtree: true });
"""


def pictures(server: Server) -> list[float]:
    """Seconds until a browser that has seen nothing yet shows the first run; nothing without Playwright."""
    chromium, found = shutil.which("chromium"), list[float]()
    with contextlib.suppress(ImportError):
        from playwright.sync_api import sync_playwright

        name, _, value = server.cookie.partition("=")
        address = f"http://127.0.0.1:{server.port}/"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for _ in range(10):
                context = browser.new_context(viewport={"width": 1400, "height": 900})
                context.add_cookies([{"name": name, "value": value, "url": address}])
                context.add_init_script(_NOTE_FIRST_ROW)
                view = context.new_page()
                view.goto(address)
                view.locator("tbody th a").first.wait_for()
                found.append(view.evaluate("window.firstRow") / 1000)
                context.close()
            browser.close()
    return found


def ask_page(python: str, overlays: list[int], place: str, name: str) -> Iterator[Figure]:
    began = time.perf_counter()
    server = page(place, python)
    yield told(f"{name}: from the command to the page", [time.perf_counter() - began])
    try:
        if shown := pictures(server):
            yield told(f"{name}: the first picture of the list in Chromium", shown, goal=1000)
        found = sorted(server.get("/api/runs", **asked)[0] for asked in questions(200))
        yield told(f"{name}: filter and sort", found)
        yield told(f"{name}: filter and sort, the slowest 20th", found[-len(found) // 20 :], goal=200)
        listed = json.loads(server.get("/api/runs", where="", sort="name", limit=max(overlays))[1])["rows"]
        for overlay, points in product(overlays, (None, 1000)):
            ids = ",".join(row["id"] for row in listed[:overlay])
            asked: dict[str, Any] = {"runs": ids, "stream": "step", "metric": "accuracy"}
            asked |= {"metric": "loss", "points": points} if points else {}
            label, goal = ("1,000 points of each", 1000) if points else ("points as the page chooses", 500)
            for when, times in (("first time", 1), ("again", 5)):
                curves = [server.get("/api/series", **asked) for _ in range(times)]
                what = f"{name}: overlay of {overlay} runs, {when}, {label}"
                yield told(what, [seconds for seconds, _ in curves], len(curves[0][1]), goal)
    finally:
        server.end()


def index_alone(runs: Path, folder: Path) -> Path:
    """Copy the index, with paths that do not exist; a copy that is there is used again."""
    place, begun = folder / "alone.db", folder / "begun.db"
    if place.exists():
        return place
    begun.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(runs / "everstep.db")) as old,
        contextlib.closing(sqlite3.connect(begun)) as new,
    ):
        old.backup(new)
        new.execute("UPDATE runs SET path = '/nowhere/' || name")
        new.commit()
    return begun.rename(place)


def shipped_to(url: str, runs: Path) -> str:
    """Ship the runs to a server, as of another machine."""
    from everstep.index.database import Database
    from everstep.index.shipping import sync

    database = Database(url)
    sync(database, [runs])
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE runs SET host = 'another'")
    return url


# ----------------------------------------------------------------------------------------- rivals


def event_file(logs: Path, values: Any) -> None:
    """Write losses as TensorBoard's own writer does, byte for byte; that takes 0.1 ms for each."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    table, steps = np.array(CRC_TABLE, np.uint32), np.arange(1, len(values) + 1)

    def packed(kind: str, numbers: Any) -> Any:
        return np.asarray(numbers, kind).reshape(len(numbers), -1).view(np.uint8)

    def with_checksum(data: Any) -> Any:
        found = np.full(len(data), 0xFFFFFFFF, np.uint32)
        for byte in data.T:
            found = table[(found ^ byte) & 0xFF] ^ (found >> 8)
        found = ~found
        return np.hstack([data, packed("<u4", ((found >> 15) | (found << 17)) + np.uint32(0xA282EAD8))])

    EventFileWriter(str(logs)).close()  # writes the first record
    with next(logs.iterdir()).open("ab") as file:
        sizes = (1 + np.log2(steps).astype(int) // 7).tolist()  # bytes of a step, of 7 bits each
        for size in sorted({*sizes}):
            mine = np.array(sizes) == size
            some = steps[mine]
            digits = [some >> 7 * at & 127 | 128 * (at + 1 < size) for at in range(size)]
            numbers = [packed("<f8", some), packed("u1", np.stack(digits, 1)), packed("<f4", values[mine])]
            parts = [b"\x09", b"\x10", b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15"]
            data = np.hstack(
                [
                    each
                    for tag, number in zip(parts, numbers, strict=True)
                    for each in (np.tile(np.frombuffer(tag, np.uint8), (len(some), 1)), number)
                ]
            )
            length = packed("<u8", np.full(len(some), data.shape[1]))
            file.write(np.hstack([with_checksum(length), with_checksum(data)]).tobytes())


def tensorboard(folder: Path, overlay: int, points: int) -> Iterator[Figure]:
    """The same curves as event files; TensorBoard's list has no filter of values: only curves are asked."""

    def write(place: Path) -> None:
        for number in range(overlay):
            event_file(place / f"trial-{number:05d}", next(rows(number, points))[2])

    logs = written(folder / "tensorboard", write)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", "6123"]
    server = Server([*command, "--samples_per_plugin", "scalars=1000"], 6123)
    began = time.perf_counter()
    try:
        while True:  # until all runs are read
            with contextlib.suppress(OSError, AssertionError):
                tags = json.loads(server.get("/data/plugin/scalars/tags")[1])
                if len(tags) >= overlay and all(tags.values()):
                    break
            time.sleep(1)
        yield told(
            f"TensorBoard: from the command to {overlay} runs (its list has no filter of values)",
            [time.perf_counter() - began],
        )
        whole = []
        for _ in range(5):  # its page asks for each run by itself
            begun = time.perf_counter()
            for number in range(overlay):
                server.get("/data/plugin/scalars/scalars", tag="loss", run=f"trial-{number:05d}")
            whole.append(time.perf_counter() - begun)
        yield told(
            f"TensorBoard: overlay of {overlay} runs, a request for each (1,000 sampled points)", whole
        )
    finally:
        server.end()


def written(place: Path, write: Callable[[Path], None]) -> Path:
    """A rival's store, used again where an earlier call wrote it whole."""
    if not place.exists():
        begun = place.with_name(f"{place.name}-begun")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        measured(f"{place.name} written", lambda: write(begun))
        begun.rename(place)
    return place


def mlflow(folder: Path, runs: int, overlay: int, points: int) -> Iterator[Figure]:
    """The same runs in MLflow's SQLite store, written by its client in batches."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    def write(place: Path) -> None:
        client = MlflowClient(f"sqlite:///{place}/mlflow.db")
        experiment = client.create_experiment("bench")
        for number in range(runs):
            run = client.create_run(experiment, run_name=f"trial-{number:05d}")
            metrics = [
                Metric(name, value, step, step)
                for _, name, values in islice(rows(number, points if number < overlay else 1), 1)
                for step, value in enumerate(values.tolist(), 1)
            ]
            lr = random.Random(number).choice((0.1, 0.01, 0.001))
            for at in range(0, len(metrics), 900):
                client.log_batch(
                    run.info.run_id, metrics[at : at + 900], [Param("lr", str(lr))] if not at else []
                )
            client.set_terminated(run.info.run_id)

    place = f"sqlite:///{written(folder / 'mlflow', write)}/mlflow.db"
    client = MlflowClient(place)
    experiment = client.get_experiment_by_name("bench").experiment_id
    first = client.search_runs([experiment], order_by=["attributes.run_name ASC"], max_results=overlay)
    ids = [run.info.run_id for run in first]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", place, "--port", "6124"]
    server = Server([*command, "--workers", "1"], 6124)
    try:
        while True:
            with contextlib.suppress(OSError, AssertionError):
                server.get("/health")
                break
            time.sleep(1)
        draw, listed = random.Random(1), []
        for _ in range(50):
            asked = {
                "filter": draw.choice(("", "metrics.loss < 0.4", "params.lr = '0.01'", "metrics.loss > 1"))
            }
            order = draw.choice(("attributes.run_name", "attributes.start_time", "metrics.loss"))
            body = {"experiment_ids": [experiment], "max_results": 100, "order_by": [f"{order} ASC"], **asked}
            listed.append(server.get("/api/2.0/mlflow/runs/search", body)[0])
        yield told(f"MLflow: filter and sort of {runs:,} runs", listed)
        whole = []
        for _ in range(3):  # its page asks for each run by itself, 1,000 points or fewer
            begun = time.perf_counter()
            for run in ids[:overlay]:
                server.get(
                    "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval",
                    run_ids=run,
                    metric_key="loss",
                    max_results=1000,
                )
            whole.append(time.perf_counter() - begun)
        yield told(f"MLflow: overlay of {overlay} runs, a request for each (1,000 points)", whole)
    finally:
        server.end()


def trackio(folder: Path, runs: int, overlay: int, points: int) -> Iterator[Figure]:
    """The same runs in Trackio's SQLite store; its page gets all runs and filters their names itself."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")  # read when it is imported

    def write(place: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(place)
        from trackio.sqlite_storage import SQLiteStorage

        for number in range(runs):
            for _, name, values in islice(rows(number, points if number < overlay else 1), 1):
                logged = [{name: value} for value in values.tolist()]
                config = {"lr": random.Random(number).choice((0.1, 0.01, 0.001))}
                run = f"trial-{number:05d}"
                SQLiteStorage.bulk_log("bench", run, logged, [*range(1, len(logged) + 1)], config=config)

    place = written(folder / "trackio", write)
    program = "import trackio; trackio.show(open_browser=False, server_port=6126, block_thread=True)"
    server = Server([sys.executable, "-c", program], 6126, TRACKIO_DIR=str(place))
    project = {"project": "bench"}
    try:
        while True:
            with contextlib.suppress(OSError, AssertionError):
                server.get("/api/get_all_projects", {"kwargs": {}})
                break
            time.sleep(1)
        listed = [
            server.get("/api/get_runs_for_project", project)[0]
            + server.get("/api/get_run_configs", project)[0]
            for _ in range(50)
        ]
        yield told(
            f"Trackio: names and settings of {runs:,} runs (it filters names, and sorts nothing)", listed
        )
        known = json.loads(server.get("/api/get_runs_for_project", project)[1])["data"]
        first = sorted(known, key=lambda run: str(run["name"]))[:overlay]
        asked = [{"run": run["name"], "run_id": run["id"]} for run in first]
        whole = []
        for _ in range(3):  # its page asks for 64 runs at once
            begun = time.perf_counter()
            for at in range(0, overlay, 64):
                logs = {**project, "runs": asked[at : at + 64], "max_points": 1000, "scalar_only": True}
                server.get("/api/get_logs_batch", logs)
            whole.append(time.perf_counter() - begun)
        yield told(f"Trackio: overlay of {overlay} runs (1,000 points)", whole)
    finally:
        server.end()


def aim(folder: Path, runs: int, overlay: int, points: int) -> Iterator[Figure]:
    """The same runs in a repository of Aim, whose page asks one question for all curves."""
    from aim import Repo, Run  # type: ignore[import-not-found]

    def write(place: Path) -> None:
        repo = Repo.from_path(str(place), init=True)
        for number in range(runs):
            run = Run(repo=repo, system_tracking_interval=None, log_system_params=False)
            run["lr"] = random.Random(number).choice((0.1, 0.01, 0.001))
            for _, name, values in islice(rows(number, points if number < overlay else 1), 1):
                for step, value in enumerate(values.tolist(), 1):
                    run.track(value, name=name, step=step, context={"overlaid": number < overlay})
            run.close()

    place = written(folder / "aim", write)
    up = [str(Path(sys.executable).parent / "aim"), "up", "--repo", str(place), "--port", "6125"]
    server = Server([*up, "--yes"], 6125, AIM_ANALYTICS="0")
    asked = {"report_progress": "false", "skip_system": "true"}
    try:
        while True:
            with contextlib.suppress(OSError, AssertionError):
                server.get("/api/projects/")
                break
            time.sleep(1)
        draw = random.Random(1)
        words = ("", "run.lr == 0.01", 'run.metrics["loss", {"overlaid": False}].last < 0.4', "run.lr > 0.01")
        listed = [
            server.get("/api/runs/search/run/", q=draw.choice(words), limit=100, **asked)[0]
            for _ in range(50)
        ]
        yield told(f"Aim: filter of {runs:,} runs (its order is the time of the start)", listed)
        question = 'metric.name == "loss" and metric.context.overlaid == True'
        found = [server.get("/api/runs/search/metric/", q=question, p=1000, **asked) for _ in range(3)]
        whole = [seconds for seconds, _ in found]
        yield told(f"Aim: overlay of {overlay} runs (1,000 points)", whole, len(found[0][1]))
    finally:
        server.end()


def measured(what: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    print(f"{what}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


def measure(given: argparse.Namespace) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        runs = folder / "runs"
        if not runs.exists():
            measured("runs made", lambda: make(runs, given.runs, given.overlay, given.points))
        if not (runs / "everstep.db").exists():
            measured("index made", lambda: page(str(runs)).end())
        beside = given.rival_overlay or given.overlay
        overlays = [*dict.fromkeys((given.overlay, beside))]
        alone = str(index_alone(runs, folder)) if given.index_alone else ""
        figures = [*ask_page(given.python, overlays, str(runs), "everstep")]
        if alone:
            figures += ask_page(given.python, overlays, alone, "everstep, SQLite alone")
        if given.postgres:
            url = shipped_to(given.postgres, runs)
            figures += ask_page(given.python, overlays, url, "everstep, PostgreSQL alone")
        if "tensorboard" in given.rivals:
            figures += tensorboard(folder, given.overlay, given.points)
        if "mlflow" in given.rivals:
            figures += mlflow(folder, given.rival_runs, beside, given.points)
        if "trackio" in given.rivals:
            figures += trackio(folder, given.rival_runs, beside, given.points)
        if "aim" in given.rivals:
            figures += aim(folder, given.rival_runs, beside, given.points)
    named = [f"{name} {version(name)}" for name in given.rivals]
    more = ""
    if named:
        have = f"{given.rival_runs:,} of the runs, of which {beside} have as many values"
        more = f" Beside it: {', '.join(named)}; all but TensorBoard have the losses of {have}."
    how = (
        f"{given.runs:,} runs of 3 metrics, of which {given.overlay} have {given.points:,} values of each; "
        f"milliseconds from a request over HTTP to the last byte.{more}"
    )
    yield Table("The page", how, figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--overlay", type=int, default=200)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="a folder to keep; what is there is used again")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="of our own server: it would use the rivals' faster libraries where they are installed",
    )
    parser.add_argument(
        "--rivals", nargs="*", choices=("tensorboard", "mlflow", "trackio", "aim"), default=()
    )
    parser.add_argument("--rival-runs", type=int, default=1000)
    parser.add_argument(
        "--rival-overlay",
        type=int,
        help="runs of the overlay of MLflow, Trackio and Aim: writing takes hours",
    )
    parser.add_argument("--index-alone", action="store_true", help="ask again with the journals away")
    parser.add_argument("--postgres", metavar="URL", help="ask again with the runs on this server alone")


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
