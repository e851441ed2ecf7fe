"""The record in W&B, MLflow and Trackio: each value once, however often the run was killed."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote

from everstep.arguments import number
from everstep.contracts.services import RunView
from everstep.display.cells import flat
from everstep.durable import discard, discard_leftovers, name_first, temporary
from everstep.errors import ConfigError
from everstep.formats.histories import WANDB_BEGINNING, WANDB_BLOCK, WANDB_HEAD, wandb_records
from everstep.record import Item, RunJournal
from everstep.schedule import Schedule
from everstep.services.sink import Line, Parts, RemoteSink, Sink, describe_root, last_status, require_package

_POSITION = [f"everstep.position.{number}" for number in range(20)]
"""Tags of MLflow's: after hundreds of starts a position is longer than one may be."""
_REFUSED = re.compile(r"[^/\w.\- :]")  # by MLflow, in names
_LIVE = """
import os, sys, threading, time
def end_with_parent():
    while os.getppid() == int(sys.argv[2]): time.sleep(0.1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from wandb.cli.cli import cli
cli(["beta", "sync", "--live", "--no-skip-online", sys.argv[1]])
"""
"""Uploads a file while it grows; ends after its last record, or with the process that writes it."""
_COUNT = """
import sys, wandb
try:
    print(wandb.Api().run(sys.argv[1]).historyLineCount)
except (ValueError, wandb.errors.CommError) as error:
    if "Could not find run" not in str(error):
        raise
    print(0)
"""
"""Asks W&B how many rows it has of a run: the number of the row at which its uploads go on."""


class WandB(Sink):
    """Write the record as one run of W&B: to a file that `wandb sync` uploads, or to the server at once.

    Each start makes the file anew, without the rows that were uploaded: W&B changes none of those, and a
    warning tells where they have other values now.  W&B has one row for each step, with the last of several
    values of a metric.  Names as in `TensorBoard`.  Needs `everstep[wandb]`.

    Args:
        project, entity, group, tags: as for `wandb.init`.
        run_name: the name that is shown; None: the name of the run's directory.
        mode: "online" uploads while the run trains, by `wandb beta sync --live` in a process of its own;
            "offline" only writes the file, `logs/wandb/offline-run-TIME-ID/run-ID.wandb`; "disabled" does
            nothing.  None: as the environment variable WANDB_MODE says, or else "online".
        timeout: seconds that an online run waits for an answer at its start, and for the upload at its end,
            more than 0; None: until it comes.
        every: as in `JSONLines`.
    """

    binary = True

    def __init__(
        self,
        project: str,
        *,
        entity: str | None = None,
        run_name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
        timeout: float | None = 60.0,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__("logs/wandb/run.wandb", every=every, name=name)
        self._mode = mode or os.environ.get("WANDB_MODE") or "online"
        if self._mode not in ("online", "offline", "disabled"):
            origin = "mode" if mode else "WANDB_MODE"
            raise ConfigError(f'WandB({origin}={self._mode!r}): give "online", "offline" or "disabled"')
        if self._mode == "disabled":
            self.moments = frozenset()
        require_package("WandB", "wandb")
        self.timeout = number("timeout", timeout, of="seconds", none="to wait until the upload ends")
        self._names = {"project": project, "entity": entity or "", "run_group": group or ""}
        self._run_name, self._tags = run_name, tuple(tags)
        self._upload: subprocess.Popen[bytes] | None = None

    def begin(self, parts: Parts) -> None:
        from wandb.proto import wandb_internal_pb2

        self._stop_upload()
        self._format: Any = wandb_internal_pb2
        run_dir = self._run.run_dir
        key, self._config, self._began, _ = describe_root(RunJournal(run_dir), parts[0][0])
        self._now, self._id = self._began, re.sub(r"[^a-zA-Z0-9_-]", "-", key)[-64:]
        logs, is_online = run_dir / "logs", self._mode == "online"
        environment = {**os.environ, "WANDB_DIR": str(logs)}  # for the logs of its commands
        synced = [*logs.glob(f"wandb/offline-*/run-{self._id}.wandb.synced")]
        remote_rows = self._count_remote_rows(environment) if is_online else None
        self._uploaded = remote_rows or sum(map(_count_rows, synced))
        # W&B's command uploads the files of a run in the order of these times
        self._file_began = int(self._began) + len(synced)
        began = datetime.fromtimestamp(self._file_began, UTC).strftime("%Y%m%d_%H%M%S")
        folder = f"{'run' if is_online else 'offline-run'}-{began}-{self._id}"
        self._place = Path(f"logs/wandb/{folder}/run-{self._id}.wandb")
        self._synced.unlink(missing_ok=True)
        super().begin(parts)
        if remote_rows is not None:
            with open(self.path.with_name("upload.log"), "ab") as log:
                self._upload = subprocess.Popen(
                    [sys.executable, "-c", _LIVE, str(self.path), str(os.getpid())],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                )  # fmt: skip

    def _count_remote_rows(self, environment: dict[str, str]) -> int | None:
        parts = (self._names["entity"], self._names["project"], self._id)
        command = [sys.executable, "-c", _COUNT, "/".join(filter(None, parts))]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=self.timeout, env=environment, check=True
            )
        except subprocess.SubprocessError as error:
            reason = [str(error), *str(getattr(error, "stderr", None) or "").strip().splitlines()][-1]
            self._run.println(f"warning: W&B does not answer ({reason}); the next start uploads the rest")
            return None
        return int(process.stdout.split()[-1])

    def _warn_of_changes(self) -> None:
        journal = RunJournal(self._run.run_dir)
        valid = dict(journal.comparable())
        rows = journal.comparable(valid=False)
        changed = {key[1] for key, value in rows if valid.get(key, value) != value} & self._steps_uploaded
        if changed:
            self._run.println(
                f"warning: {len(changed)} steps that W&B has of this run, from step {min(changed)}, have had "
                "several values; W&B keeps those that were uploaded first"
            )

    def head(self, file: IO[bytes]) -> None:
        import wandb

        self._step, self._row, self._summary = -1, dict[str, Any](), dict[str, Any]()
        self._steps_uploaded = set[int]()
        file.write(WANDB_BEGINNING)
        self._put(file, header={"version_info": {"producer": wandb.__version__, "min_consumer": "0.70.0"}})
        self._put(
            file,
            run={
                "run_id": self._id,
                "display_name": self._run_name or self._run.run_dir.name,
                "tags": self._tags,
                "config": {"update": _items(self._config)},
                "start_time": {"seconds": self._file_began},
                **self._names,
            },
        )

    def write(self, file: IO[bytes], items: Iterable[Item]) -> None:
        for line in self.lines(items):
            if line["step"] != self._step:
                self._put_row(file)
                self._step = line["step"]
            self._now = max(self._now, line.time)
            self._row.update(line.tagged())

    def needs_new_file(self, items: Iterable[Item]) -> bool:
        """Begin another file if this one was uploaded meanwhile."""
        return self._synced.exists()

    def foot(self, file: IO[bytes]) -> None:
        self._put_row(file)
        self._warn_of_changes()
        code = int(last_status(self._run.run_dir) != "finished")
        self._put(file, exit={"exit_code": code, "runtime": int(self._now - self._began)})

    def close(self) -> None:
        if self._mode == "disabled":
            return
        super().close()
        if self._upload is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._upload.wait(self.timeout)
        self._stop_upload()
        if not self._synced.exists():  # also without a login the command ends well
            self._run.println(
                f"warning: the upload to W&B is not complete, see {self.path.with_name('upload.log')}; start "
                "the run again to upload the rest"
            )

    @property
    def _synced(self) -> Path:
        """What W&B's command leaves beside a file that it has uploaded."""
        return self.path.with_name(self.path.name + ".synced")

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.kill()
            self._upload.wait()
            self._upload = None

    def _put_row(self, file: IO[bytes]) -> None:
        if not self._row:
            return
        wall = {"_step": self._step, "_timestamp": self._now, "_runtime": self._now - self._began}
        row, self._row = {**self._row, **wall}, {}
        self._summary.update(row)
        if len(self._steps_uploaded) < self._uploaded:
            self._steps_uploaded.add(self._step)
            return
        self._put(file, history={"item": _items(row), "step": {"num": self._step}})
        self._put(file, summary={"update": _items(self._summary)})

    def _put(self, file: IO[bytes], **record: Any) -> None:
        """Add a record of W&B's transaction log, which has the form of a log of LevelDB."""
        data, parts = self._format.Record(**record).SerializeToString(), 0
        while data or not parts:
            room = WANDB_BLOCK - file.tell() % WANDB_BLOCK
            if room < WANDB_HEAD:
                file.write(bytes(room))
                room = WANDB_BLOCK
            part, data = data[: room - WANDB_HEAD], data[room - WANDB_HEAD :]
            kind = (3 if parts else 2) if data else (4 if parts else 1)  # middle, first, last, or whole
            file.write(struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part)
            parts += 1


def _items(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"nested_key": [name], "value_json": json.dumps(value)} for name, value in values.items()]


def _count_rows(synced: Path) -> int:
    rows = 0
    with suppress(ConfigError):  # damaged since it was uploaded: the training goes on
        for record in wandb_records(synced.with_suffix("")):
            rows += record.HasField("history")
    return rows


class MLflow(RemoteSink):
    """Send the record to MLflow, as one run: metrics, the config as params, and how the run has ended.

    Where a run goes back to an older checkpoint, values that are other than the first time stand beside
    those.  Params keep their first value.  Names are as in `TensorBoard`, "_" in place of characters that
    MLflow refuses.  Needs `everstep[mlflow]`.

    Args:
        tracking_uri: as for `mlflow.set_tracking_uri`; None: as MLflow is set up.
        experiment: the experiment, made if it is missing; None: $MLFLOW_EXPERIMENT_NAME, or "Default".
        run_name: the name that is shown; None: the name of the run's directory.
        tags: tags of a new run.
        timeout: as in `RemoteSink`.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, name=name)
        require_package("MLflow", "mlflow")
        self._uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self._tags = dict(tags or {})

    def open(self, run: RunView) -> None:
        """Import MLflow, and make a new SQLite file, which takes longer than an answer may."""
        from mlflow import get_tracking_uri
        from sqlalchemy import make_url

        super().open(run)
        # the next checkpoint asks again; MLflow's own waits would hold up the training for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        uri = self._uri or get_tracking_uri()
        file = make_url(uri).database if uri.startswith("sqlite:") else None
        try:
            if file and not file.startswith((":", "file:")):
                _make_store(Path(file))
        except Exception as error:
            run.println(f"warning: MLflow cannot make {file} ({type(error).__name__}: {error})")

    def position(self) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient(self._uri)
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = next(iter(self._client.search_runs([number], f"tags.`everstep.run` = '{self.key}'")), None)
        if run is None:
            tags = {**self._tags, "everstep.run": self.key}
            run = self._client.create_run(number, tags=tags, run_name=self._run_name or self.run_dir.name)
        elif run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id, tags = run.info.run_id, run.data.tags
        config = {_REFUSED.sub("_", key): value for key, value in flat(self.run_config)}
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in config.items()}
        params = [Param(key, text[:6000]) for key, text in texts.items() if key not in run.data.params]
        for at in range(0, len(params), 100):
            self._client.log_batch(self._run_id, params=params[at : at + 100], synchronous=True)
        self._is_partly_sent = tags.get("everstep.sending") != tags.get("everstep.sent")
        return "".join(tags[key] for key in _POSITION if key in tags)

    def send(self, lines: list[Line], position: str) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(_REFUSED.sub("_", key), value, round(line.time * 1000), line["step"])
            for line in lines
            for key, value in line.tagged().items()
        ]
        if self._is_partly_sent:  # and perhaps computed again since, at another time
            keys = {metric.key for metric in metrics}
            points = [p for key in keys for p in self._client.get_metric_history(self._run_id, key)]
            known, missing = Counter(map(_point, points)), []
            for metric in metrics:
                known[_point(metric)] -= 1
                if known[_point(metric)] < 0:
                    missing.append(metric)
            metrics = missing
        tags = [RunTag(key, position[7000 * at :][:7000]) for at, key in enumerate(_POSITION)]
        tags.append(RunTag("everstep.sent", mark := f"{zlib.crc32(position.encode()):08x}"))
        # apart: there is no transaction, and the client would send tags with the first points
        self._client.set_tag(self._run_id, "everstep.sending", mark, synchronous=True)
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics[at : at + 1000], synchronous=True)
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        self._is_partly_sent = False

    def end(self, status: str) -> None:
        state = {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._run_id, state)


def _make_store(store: Path) -> None:
    """Make a new SQLite file: MLflow cannot open one if it was killed while making the tables."""
    from mlflow import MlflowClient

    discard_leftovers(store.parent, "sink", store.name)
    if store.exists():
        return
    folder = temporary(store)  # for SQLite's own files, too
    folder.mkdir(parents=True)
    # spaces stay: MLflow makes the folder of the URI as it is written
    MlflowClient(f"sqlite:///{quote(str(folder / store.name), safe='/ ')}").search_experiments(max_results=1)
    name_first(folder / store.name, store, "sink")  # another process may have been first
    discard(folder, "sink")


def _point(metric: Any) -> tuple[str, int, float | str]:
    """Name, step and value of a point; MLflow stores an infinity as the largest number."""
    value = max(-sys.float_info.max, min(sys.float_info.max, metric.value))
    return metric.key, metric.step, "nan" if math.isnan(metric.value) else float(value)


class Trackio(RemoteSink):
    """Write the record to Trackio's database, as one run with the run's config.

    Names, and what a run does that goes back, are as in `MLflow`.  Needs `everstep[trackio]`.

    Args:
        project: the project; its database is in $TRACKIO_DIR.
        run_name: the name that is shown; None: the name of the run's directory.
        group: group of runs.
    """

    def __init__(
        self, project: str, *, run_name: str | None = None, group: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        require_package("Trackio", "trackio")
        self._project, self._run_name, self._group = project, run_name, group

    def position(self) -> str:
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        if utils.get_storage_mode() != "sqlite":
            raise ConfigError("Trackio writes no database here; set TRACKIO_STORAGE_MODE=sqlite")
        query = (
            f"SELECT log_id FROM metrics WHERE run_id = '{self.key}' AND log_id LIKE '%{{%' "
            "ORDER BY id DESC LIMIT 1"
        )
        try:
            rows = SQLiteStorage.query_project(self._project, query)["rows"]
        except FileNotFoundError:
            return ""  # before the first run of the project
        return str(rows[0]["log_id"]).partition(" ")[2] if rows else ""

    def send(self, lines: list[Line], position: str) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        ids = [f"{self.key} {self.sent + at}" for at in range(len(lines) - 1)]
        times = [datetime.fromtimestamp(line.time, UTC).isoformat() for line in lines]
        config = {key: value for key, value in self.run_config.items() if not key.startswith("_")}
        SQLiteStorage.bulk_log(
            self._project,
            self._run_name or self.run_dir.name,
            [line.tagged() for line in lines],
            [line["step"] for line in lines],
            times,
            None if self.sent else {**config, "_Group": self._group, "_Created": times[0]},
            [*ids, f"{self.key} {position}"],
            run_id=self.key,
        )
