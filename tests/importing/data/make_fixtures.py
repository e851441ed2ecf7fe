"""Make the fixtures of test_import.py, with mlflow 3.17 and wandb 0.31 in an environment of their own.

    python make_fixtures.py      # in an empty folder: makes mlruns/, mlflow.sql and offline.wandb

Of the file of W&B only the records are kept that tell of the run: the others name the machine.
"""

import glob
import os
import sqlite3
import struct
import zlib
from pathlib import Path

os.environ |= {"WANDB_MODE": "offline", "WANDB_HOST": "node-7", "MLFLOW_ALLOW_FILE_STORE": "true"}

import mlflow
import wandb

TABLES = ("experiments", "runs", "metrics", "params", "tags")
KEPT = {2, 3, 5, 17, 18}  # history, summary, config, run, exit


def record() -> None:
    mlflow.set_experiment("digits")
    with mlflow.start_run(run_name="wide"):
        mlflow.log_params({"lr": 0.1, "layers": [1, 2], "kind": "mlp"})
        for i in range(5):
            mlflow.log_metric("train/loss", 1 / (i + 1), step=i)
        mlflow.log_metric("gap", float("nan"), step=0)
        mlflow.set_tag("who", "x")
    try:
        with mlflow.start_run(run_name="bad"):
            mlflow.log_metric("loss", 2.0, step=0)
            raise KeyError
    except KeyError:
        pass


def number(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def kinds(message: bytes) -> set[int]:
    found, at = set(), 0
    while at < len(message):
        key, at = number(message, at)
        size, at = number(message, at)
        at += size if key & 7 else 0
        found.add(key >> 3)
    return found


mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
record()
mlflow.set_tracking_uri("sqlite:///mlflow.db")
record()
starts = [(f'CREATE TABLE "{name}" ', f'INSERT INTO "{name}" ', f"CREATE TABLE {name} ") for name in TABLES]
with sqlite3.connect("mlflow.db") as database, open("mlflow.sql", "w") as out:
    for line in database.iterdump():
        if any(line.startswith(start) for start in starts):
            out.write(line + "\n")

settings = {"lr": 0.1, "model": {"width": 64}}
run = wandb.init(project="digits", name="narrow", config=settings, tags=["a"], notes="hello")
for i in range(20):
    run.log({"loss": 1 / (i + 1), "val": {"acc": i / 20 if i % 5 == 0 else float("nan")}, "text": "x"})
run.finish()

(file,) = glob.glob("wandb/offline-run-*/*.wandb")
data, at, kept = Path(file).read_bytes(), 7, bytearray(b":W&B\xe1\xbe\x00")
while at + 7 <= len(data):
    _, length, kind = struct.unpack_from("<IHB", data, at)
    body = data[at + 7 : at + 7 + length]
    at += 7 + length
    if kinds(body) & KEPT:
        kept += struct.pack("<IHB", zlib.crc32(bytes([kind]) + body), length, kind) + body
Path("offline.wandb").write_bytes(kept)
