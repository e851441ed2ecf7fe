"""A run with a service that logs to W&B, MLflow or Trackio, and a reader of what is there; a program, too.

python logged.py train SERVICE RUN_DIR STORE [CHECKPOINT] [EPOCHS]
python logged.py read SERVICE RUN_DIR STORE
python logged.py facts mlflow RUN_DIR STORE
python logged.py check SERVICE RUN_DIR STORE
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from everstep import Checkpoints, Every, Service
from everstep.services import MLflow, Trackio, WandB
from everstep.testing import check_sink
from tiny_runs import Tiny

Point = tuple[int, str, float]
"""Step, tag, value."""


def service(name: str, store: str) -> Service:
    if name.startswith("wandb"):
        mode: Any = "online" if name == "wandb-online" else "offline"
        return WandB("tests", mode=mode, tags=["a"], group="b", every=Every(steps=2))
    if name == "mlflow":
        return MLflow(store, experiment="tests", timeout=None)
    return Trackio("tests")


def records(file: Path) -> Iterator[Any]:
    """Records of W&B's transaction log."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = file.read_bytes(), 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            yield found
            record = b""


def wandb(run_dir: Path, store: str) -> Iterator[Point]:
    for file in (run_dir / "logs" / "wandb").rglob("*.wandb"):
        for record in records(file):
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                yield from ((items["_step"], tag, v) for tag, v in items.items() if tag[0] != "_")


def run_id(run_dir: Path) -> str:
    return str(json.loads((run_dir / "run.json").read_text())["id"])


def mlflow_runs(store: str) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("tests")
    return client, [] if experiment is None else [*client.search_runs([experiment.experiment_id])]


def mlflow(run_dir: Path, store: str) -> Iterator[Point]:
    client, runs = mlflow_runs(store)
    for run in runs:
        if run.data.tags["everstep.run"] == run_id(run_dir):
            for tag in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, tag):
                    yield point.step, tag, point.value


def trackio(run_dir: Path, store: str) -> Iterator[Point]:
    with closing(sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "tests.db")) as database, database:
        rows = database.execute("select step, metrics from metrics where run_id = ?", (run_id(run_dir),))
        for step, metrics in rows.fetchall():
            yield from ((step, tag, value) for tag, value in json.loads(metrics).items())


READERS: dict[str, Any] = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}


def kill_at_position(where: str, sends: int) -> None:
    """Kill this process before MLflow stores the position of a send, or after it."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    set_tags = SqlAlchemyStore._set_tags

    def killed(store: Any, run_id: str, tags: Any) -> None:
        nonlocal sends
        sends -= any(tag.key == "everstep.sent" for tag in tags)
        if where == "after":
            set_tags(store, run_id, tags)
        if not sends:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "before":
            set_tags(store, run_id, tags)

    SqlAlchemyStore._set_tags = killed


def main(
    action: str, name: str, run_dir: Path, store: str, checkpoint: str = "newest", epochs: int = 3
) -> None:
    if action == "train":
        if "KILL_AT_POSITION" in os.environ:
            where, sends = os.environ["KILL_AT_POSITION"].split()
            kill_at_position(where, int(sends))
        services = [service(name, store), Checkpoints(Every(steps=3), keep_last=None)]
        resume: Any = int(checkpoint) if checkpoint.isdigit() else True
        config = {"model": {"width": 8}, "lr": 0.1, "a@b": 1}  # MLflow refuses "@"
        tiny = Tiny(run_dir, max_epoch=int(epochs), services=services, resume=resume, config=config)
        shift = int(os.environ.get("SHIFT", "0"))  # other values of one metric
        tail = lambda loop, epoch: loop.collect_metrics(valid_loss=epoch / 3 + shift)  # noqa: E731
        tiny.train(lambda loop, step: print(step, flush=True), tail)
        print(*tiny.lines, sep="\n")
    elif action == "facts":
        print(json.dumps([(run.info.status, run.data.params) for run in mlflow_runs(store)[1]]))
    elif action == "read":
        print(json.dumps([*READERS[name](run_dir, store)]))
    else:

        def read(of: Path) -> Iterator[Point]:
            return ((step, tag.removeprefix("epoch/"), v) for step, tag, v in READERS[name](of, store))

        check_sink(lambda: service(name, store), read)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
