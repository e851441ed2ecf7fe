"""Commands that look at runs: what reaches a terminal, a pipe and a shell."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from cli_runs import as_json, completed, everstep
from index_runs import alive, journal_rows, start, train, written

import everstep as house
import warm
from everstep import EarlyStop
from everstep.cli.group import COMMANDS, home_of
from everstep.index.database import Database
from everstep.labels import Labels, add_tags, labels
from everstep.record import Block, Journal, Position, RunDir
from everstep.ui.runs_table import ListOptions, RunsTable
from tiny_runs import Tiny, collecting, flip, rows
from tiny_task import trainer


def names(runs: list[dict[str, str]]) -> list[str]:
    return [run["name"].rpartition("-")[0] for run in runs]


def listed(folder: Path, *words: str) -> list[str]:
    """The names of the runs that a list has."""
    return names(as_json("runs", *words, cwd=folder))


# ------------------------------------------------------------------------------- the command itself
def test_help_lists_every_command_and_says_what_the_exit_status_means(tmp_path: Path) -> None:
    told, _ = everstep("--help", cwd=tmp_path)
    assert "0 done, 1 something is wrong or failed, 2 wrong usage" in told
    for name in ("sweep", "runs", "show", "compare", "export", "prune", "checkpoints", "sync"):
        assert re.search(rf"^  {name} ", told, re.MULTILINE)
    told = " ".join(everstep("runs", "--help", cwd=tmp_path)[0].split())
    assert "The status is running, finished, stopped, failed, killed, or gone" in told
    assert everstep("--version", cwd=tmp_path)[0].startswith("everstep, version ")


def test_the_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    assert completed(tmp_path, "s") == ["sweep", "show", "sql", "sync"]
    assert "--on-change" in completed(tmp_path, "train", "--o")
    assert completed(tmp_path, "train", "--on-change", "k") == ["keep"]
    assert "everstep_completion" in everstep(cwd=tmp_path, _EVERSTEP_COMPLETE="zsh_source")[0]


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize(("command", "said"), [
    ("shwo", "did you mean 'show'"), ("runs valid_los<1", "did you mean 'valid_loss'"),
    ("runs valid_loss<", "is not a comparison"),
    ("runs --columns name,config.optimizer.lrr", "did you mean 'config.optimizer.lr'"),
    ("runs --where step", "is not JSON"),
    ("runs --index mysql://host/runs", "give a file, or postgresql://"),
    ("show goood", "there is no run 'goood' in the index "),
    ("report goood", "everstep.db, and no run directory at that path; give the directory of a run"),
    ("show good --metric valid_los", "did you mean 'valid_loss'"),
    ("show good --metric step/valid_loss", "did you mean 'tail/valid_loss'"),
    ("show ./runs", "is not a run directory"),
    ("replay good --step 1 --verify 1:2", "give one of --step N and --verify A:B"),
    ("replay good --verify 1:x", "give steps as A:B, such as 40:80"),
    ("replay good --verify 90:99", "has the steps 1 to "),
    ("diverge good", "give two runs"),
    ("check nothing.py:x", "file nothing.py does not exist"),
    ("check logging:Handlr", "did you mean 'Handler'"),
    ("check subprocess:Popen", "give a function that makes the object"),
    ("export good --best x --checkpoint 4 --out x", "give --best or --checkpoint, not both"),
    ("compare good", "two runs or more"), ("checkpoints good pin", "needs a NAME: give names"),
    ("checkpoints good verify good", "no checkpoint 'good'"),
    ("checkpoints good pin 5", "the nearest is epoch-0001-step-00000004"),
    ("prune --delete", "give either RUNs, or CONDITIONS such as 'epoch<1' and --where JSON"),
    ("prune --delete good epoch<1", "give either RUNs, or CONDITIONS"),
    ("prune --delete goood", "did you mean 'good-"), ("prune --delete epcoh<1", "did you mean 'epoch'"),
])  # fmt: skip
def test_wrong_usage_is_exit_status_2_with_a_remedy(made: Path, command: str, said: str) -> None:
    runs = {*made.glob("runs/*/run.json")}
    assert said in everstep(*command.split(), cwd=made, status=2)[1]
    assert {*made.glob("runs/*/run.json")} == runs != set()


def test_where_there_is_no_run_or_no_extra(tmp_path: Path) -> None:
    for command in ("runs", "prune good --delete --index none/everstep.db"):
        assert "there are no runs" in everstep(*command.split(), cwd=tmp_path, status=1)[1]
    assert list(tmp_path.iterdir()) == []
    program = "import sys; sys.modules['sqlalchemy'] = None; import everstep.cli; everstep.cli.main()"
    command = [sys.executable, "-c", program, "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    remedy = "this needs sqlalchemy, which is not installed: pip install click sqlalchemy"
    assert (done.returncode, done.stderr) == (1, f"everstep: {remedy}\n")


# ---------------------------------------------------------------------------------------- runs
def test_runs_are_filtered_and_sorted(made: Path) -> None:
    every = as_json("runs", cwd=made)
    ended = {"good": "finished", "long": "finished", **{end: end for end in ("killed", "failed", "stopped")}}
    assert dict(zip(names(every), (run["status"] for run in every), strict=True)) == ended
    for words, found in {
        "valid_loss<0.6 status=finished --sort valid_loss": ["long", "good"],
        "status=finished --sort -valid_loss --limit 1": ["good"],
        "valid_loss<0": [],
    }.items():
        assert listed(made, *words.split()) == found, words
    assert listed(made, "reason='ValueError: at the step'") == ["failed"]
    assert listed(made, "reason=SIGTERM") == ["stopped"]
    notes = everstep("runs", "runs", "runs/good", cwd=made)[1]
    assert "runs is a folder, not a condition: everstep runs --index runs\n" in notes
    assert "runs/good is a folder, not a condition: everstep show runs/good\n" in notes
    assert [run["ranks"] for run in every] == [1] * 5
    head = everstep("runs", cwd=made)[0].splitlines()[0].split()
    assert head == ["name", "status", "step", "epoch", "started", "valid_loss"], "ranks of several"


def test_columns_are_facts_metrics_and_paths_into_what_was_recorded(made: Path) -> None:
    columns = "step,valid_loss,step/loss,packages.numpy"
    (run,) = as_json("runs", "name>good", "name<h", "--columns", columns, cwd=made)
    rows = {row[3:5] + row[2:3]: row[6] for row in journal_rows(made / "runs" / "good")}
    assert (run["step"], run["valid_loss"]) == (8, 0.5) and run["packages.numpy"]
    assert run["step/loss"] == float.fromhex(rows["step", "loss", 8])
    assert as_json("runs", "name=good", "parent.run!=x", "--columns", "parent.run", cwd=made)  # null in all


def test_the_metric_of_a_list_is_none_of_the_machine_and_stays_beside_filters(tmp_path: Path) -> None:
    for name in "abcdef":
        journal = Journal.open(RunDir.open(tmp_path / "runs" / name, seed=1).path, 1, None, {"lock": False})
        journal.append(Block(1, "step", "loss", False, [1], [0.5], [1], [0]))
        for metric in ("cpu_share", "evaluation_share") if name in "abcd" else ():
            journal.append(Block(1, "eval/throughput", metric, True, [1], [0.25], [1], [0]))
        journal.event("closed", {"status": "failed", "reason": "made", "step": 1})
        journal.close()
    for words in ("", "--sort started", "failed", "--sort -loss", "cpu_share<1"):
        last = ["loss", "cpu_share"] if "cpu" in words else ["loss"]
        table, _ = everstep("runs", *words.split(), cwd=tmp_path)
        assert table.splitlines()[0].split() == ["name", "status", "step", "epoch", "started", *last], words
    columns = RunsTable(Database(tmp_path / "runs" / "everstep.db")).listed(ListOptions())["columns"]
    assert [column["name"] for column in columns] == ["name", "status", "loss", "step", "epoch", "started"]


def test_a_run_lasts_as_long_as_its_starts_were_alive(tmp_path: Path) -> None:
    alive(tmp_path / "runs" / "brief", (1000, 8.125))
    alive(tmp_path / "runs" / "long", (1000, 3600), (90_000, 1800), (200_000, 7200))
    alive(tmp_path / "runs" / "twice", (1000, 40), (1000, 60))  # as an import that is repeated
    RunDir.open(tmp_path / "runs" / "new", seed=1)
    table, _ = everstep("runs", "--columns", "name,duration", "--sort", "-duration", cwd=tmp_path)
    shown = re.findall(r"\n(\w+)-\w{6} +(.+)", table)
    assert shown == [("long", "3.5 h"), ("twice", "1.0 min"), ("brief", "8.1 s"), ("new", "-")]
    (long,) = as_json("runs", "duration>3600", cwd=tmp_path)
    assert names([long]) == ["long"] and long["duration"] == 3600 + 1800 + 7200
    run = as_json("show", "long", cwd=tmp_path)
    assert (run["duration"], [start["duration"] for start in run["segments"]]) == (12600, [3600, 1800, 7200])
    told, _ = everstep("show", "long", cwd=tmp_path)
    assert "\n  duration   3.5 h\n" in told and re.search(r"\n +2 .* 30 min ", told)
    compared, _ = everstep("compare", "long", "brief", cwd=tmp_path)
    assert re.search(r"\n  duration +3.5 h +8.1 s\n", compared)


# ---------------------------------------------------------------------------------------- show
def test_show_by_directory_needs_no_index_and_writes_nothing(here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    run = as_json("show", "runs/long", cwd=here)
    assert (run["status"], run["step"], run["epoch"], run["seed"]) == ("finished", 16, 4, 7)
    starts = [(start["status"], start["verified"], start["step"]) for start in run["segments"]]
    assert starts == [
        ("killed", None, 10),
        ("finished", "verified", 16),
    ]  # the journal has 8 steps of the first
    assert run["segments"][1]["from"].startswith("epoch-000")
    (loss,) = (one for one in run["metrics"] if (one["phase"], one["name"]) == ("tail", "valid_loss"))
    assert (loss["best"], loss["best_step"]) == (0.25, 16)
    assert [one["name"] for one in run["checkpoints"]][-1] == "epoch-0004-step-00000016"
    told, _ = everstep("show", "runs/long", cwd=here)
    parts = ("starts", "  verified  ", "metrics", "checkpoints", "seed       7")
    assert all(part in told for part in ("finished: max_epoch 4 is reached", *parts)), told
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


def test_show_prints_the_settings_and_why_a_resume_was_not_verified(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run").path
    config = {"lr": 0.1, "model": {f"width{at}": at for at in range(30)}}
    for number, (parent, step) in enumerate([(None, None), (Position(1, 0), "step-00000002")], 1):
        facts = {"config": config, "resumed_from": step}
        journal = Journal.open(run, number, parent, facts, warn=lambda message: None)
        journal.append(Block(1, "step", "loss", False, [3], [4.0], [1], [0]))
        journal.flush()
        journal.close()
    told, _ = everstep("show", "run", cwd=tmp_path)
    assert re.search(r"\nsettings\n  name +value\n  lr +0.1\n  model.width0 +0\n", told)
    assert "  model.width18 " in told and "  model.width19 " not in told and "\n  and 11 more: " in told
    assert "\n  start 2: this start ended before its steps were compared with the earlier ones\n" in told


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("run", ["long", "runs/long"])
def test_the_rows_of_a_metric(made: Path, run: str) -> None:
    rows = as_json("show", run, "--metric", "valid_loss", cwd=made)
    assert [(row["step"], row["phase"], row["value"]) for row in rows] == [
        (4, "tail", 1.0), (8, "tail", 0.5), (12, "tail", 1 / 3), (16, "tail", 0.25)
    ]  # fmt: skip
    rows = as_json("show", run, "--metric", "loss", cwd=made)
    expected = [(row[3], row[2], row[6]) for row in journal_rows(made / "runs" / "long") if row[4] == "loss"]
    assert sorted((row["phase"], row["step"], row["value"].hex()) for row in rows) == sorted(expected)
    assert {row["phase"] for row in as_json("show", run, "--metric", "step/loss", cwd=made)} == {"step"}
    assert len(everstep("show", run, "--metric", "epoch/loss", cwd=made)[0].splitlines()) == 5


def test_what_a_run_watches_is_shown_first_and_tells_which_value_is_better(tmp_path: Path) -> None:
    for name, value in (("low", 0.2), ("high", 0.9)):
        stop = EarlyStop("regret", "min", patience=9)
        tiny = Tiny(tmp_path / "runs" / name, max_epoch=2, watch=("f1", "max"), services=[stop])
        metrics = {"alpha": 1.0, "f1": value, "regret": 1 / value}
        tiny.train(tail=lambda loop, epoch, metrics=metrics: loop.collect_metrics(metrics))
    tail = lambda loop, epoch: loop.collect_metrics(alpha=1.0, f1=0.5)  # noqa: E731
    Tiny(tmp_path / "runs" / "unwatched", max_epoch=1).train(tail=tail)
    told, _ = everstep("runs", cwd=tmp_path)
    assert told.splitlines()[0].split() == ["name", "status", "step", "epoch", "started", "f1"]
    found = as_json("runs", "--sort", "-best/f1", cwd=tmp_path)
    assert names(found) == ["high", "unwatched", "low"]
    assert [run["best/f1"] for run in found] == [0.9, 0.5, 0.2]
    shown = as_json("show", "unwatched", cwd=tmp_path)["metrics"]
    assert {one["name"]: one["best"] for one in shown if one["phase"] == "tail"} == {"alpha": None, "f1": 0.5}
    assert listed(tmp_path, "--sort", "best/regret")[:2] == ["high", "low"]
    assert as_json("compare", "high", "low", cwd=tmp_path)["metrics"]["tail/f1 best"].popitem()[1] == 0.2
    said = everstep("runs", "--sort", "best/alpha", cwd=tmp_path, status=2)[1]
    assert "nothing tells whether a smaller or a larger 'alpha' is better" in said


def test_a_run_that_began_with_weights_of_another_is_found_by_it(tmp_path: Path) -> None:
    Tiny(tmp_path / "runs" / "old", max_epoch=1).train()
    Tiny(tmp_path / "runs" / "new", max_epoch=1, init_from=tmp_path / "runs" / "old").train()
    old = RunDir.open(tmp_path / "runs" / "old", create=False).id
    assert listed(tmp_path, f"parent.run={old}") == ["new"]
    told, _ = everstep("show", "new", cwd=tmp_path)
    assert f"  began from {old}, {tmp_path}/runs/old/checkpoints/epoch-0001-step-00000004\n" in told
    assert "parent.run" in as_json("compare", "old", "new", cwd=tmp_path)["facts"]
    assert "began from" not in everstep("show", "old", cwd=tmp_path)[0]


# ----------------------------------------------------------------------------- compare, sync
def test_compare_shows_what_differs(made: Path) -> None:
    found = as_json("compare", "good", "runs/long", cwd=made)
    good, long = found["runs"]
    assert good.startswith("good-") and long.startswith("long-")
    assert found["facts"]["step"] == {good: 8, long: 16} and "seed" not in found["facts"]
    assert found["metrics"]["tail/valid_loss best"] == {good: 0.5, long: 0.25}
    assert set(found["metrics"]["step/loss last"]) == {good, long}
    assert "seed" in as_json("compare", "good", "long", "--all", cwd=made)["facts"]
    told, _ = everstep("compare", "good", "long", cwd=made)
    assert re.search(r"tail/valid_loss last +0.5 +0.25\n", told)


def test_packages_that_differ_are_one_line(tmp_path: Path) -> None:
    packages = {"torch": "2.12", "numpy": "1.9", "aaa": "1", "bbb": "2", "zzz": "3"}
    written(tmp_path / "runs" / "old", packages=packages | {"same": "1"}, host="a")
    written(tmp_path / "runs" / "new", packages={"torch": "2.13", "numpy": "2.0", "same": "1"}, host="b")
    told, _ = everstep("compare", "old", "new", cwd=tmp_path)
    (line,) = [line for line in told.splitlines() if "packages" in line]
    shown = [part.strip() for part in re.split("  +", line.strip())]
    assert shown == ["packages (5 differ: --all)", "torch 2.12, numpy 1.9, aaa 1", "torch 2.13, numpy 2.0"]
    assert re.search(r"packages\.zzz +3 +-\n", everstep("compare", "old", "new", "--all", cwd=tmp_path)[0])
    assert "packages.zzz" in as_json("compare", "old", "new", cwd=tmp_path)["facts"]


@pytest.mark.campaign("long")
def test_runs_that_are_equal_to_the_bit_are_seen_to_be(here: Path) -> None:
    """By the newest checkpoint's digest, which is that of `Ending`."""
    train(here / "runs" / "again", 4)
    again, long = (as_json("show", f"runs/{name}", cwd=here) for name in ("again", "long"))
    assert again["digest"] == long["digest"] == again["checkpoints"][-1]["digest"]
    assert f"\n  digest     {long['digest']}\n" in everstep("show", "runs/long", cwd=here)[0]
    told, _ = everstep("compare", "runs/long", "runs/again", cwd=here)
    assert told.endswith(f"the newest checkpoints are equal to the bit: digest {long['digest']}\n")
    told, _ = everstep("compare", "runs/long", "runs/good", cwd=here)
    good = as_json("show", "runs/good", cwd=here)["digest"]
    assert re.search(rf"\n  digest +{long['digest']} +{good}\n", told) and "to the bit" not in told


LONG = "valid/" + "a_rather_long_part/" * 4 + "loss"
OTHER = "the-second-one-which-has-a-long-name"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("command", [
    ("runs", "--columns", f"name,status,{LONG},path"), ("show", "first"), ("compare", "first", OTHER),
], ids=lambda command: command[0])  # fmt: skip
def test_long_names_and_values(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Whole in a pipe; in a terminal no line is longer than that, and numbers are whole."""
    for name, value in (("first", 0.123456789), (OTHER, -1.23456e-300)):
        Tiny(tmp_path / "runs" / name, max_epoch=1).train(collecting(LONG, [value]))
    whole, _ = everstep(*command, cwd=tmp_path)
    assert LONG in whole and "0.123457" in whole
    shown = in_a_terminal(80, "everstep", *command, cwd=tmp_path)
    table = [line for line in shown.splitlines() if "…" in line]
    assert table and max(map(len, table)) <= 80 and "0.123457" in shown and LONG not in shown


def in_a_terminal(columns: int, *command: str, cwd: Path) -> str:
    """What a command prints there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    how: Any = {"env": {**os.environ, "EVERSTEP_INDEX": "", "COLUMNS": ""}, "stdout": theirs, "stdin": theirs}
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=cwd, **how)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return said.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/`: slow and fast, of two learning rates, which keep their best weights."""
    folder = tmp_path_factory.mktemp("fitted")
    program = """
import everstep, torch
for name, rate in ("slow", 0.01), ("fast", 0.1):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    state, best = {"model": model, "optimizer": optimizer}, everstep.Best("valid/loss")
    with everstep.TrainLoop(f"runs/{name}", state=state, max_epoch=3, services=[best]) as loop:
        for epoch in loop.iter_epochs():
            for step, x in loop.iter_steps([torch.ones(1, 1)]):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            with loop.evaluation():
                loop.collect_metrics({"valid/loss": [3.0, 0.5, 1.0][epoch - 1]})
"""
    warm.run([sys.executable, "-c", program], cwd=folder, capture_output=True, check=True)
    return folder


def test_compare_shows_options(fitted: Path) -> None:
    found = as_json("compare", "slow", "fast", "--all", cwd=fitted)
    assert list(found["facts"]["optimizer.lr"].values()) == ["0.01", "0.1"]
    assert "the runs have different seeds" in everstep("compare", "slow", "fast", cwd=fitted)[0]
    told, _ = everstep("compare", "slow", "fast", "--all", cwd=fitted)
    assert re.search(r"\n  optimizer.lr +0.01 +0.1\n", told)
    assert re.search(r"\n  services  .*…", told) and max(map(len, told.splitlines())) <= 2 + 40 + 2 * (2 + 60)


def test_best_weights_are_shown_with_value_and_step(fitted: Path) -> None:
    best = as_json("show", "runs/fast", cwd=fitted)["best"][0]
    path = str(fitted / "runs" / "fast" / "best" / "valid.loss" / "epoch-0002-step-00000002")
    assert best == {"metric": "valid/loss", "rank": 1, "value": 0.5, "step": 2, "epoch": 2, "path": path}
    told, _ = everstep("checkpoints", "runs/fast", cwd=fitted)
    assert re.search(r"^valid/loss +1 +0\.5 +2 +2 ", told, re.MULTILINE)
    told, _ = everstep("show", "fast", cwd=fitted)
    assert re.search(rf"\n  valid/loss +1 +0.5 +2 +2  {path}\n", told)


@pytest.mark.campaign("long")
def test_a_run_that_moved_away_is_gone_until_it_is_found_or_forgotten(here: Path) -> None:
    everstep("sync", "runs", cwd=here)
    (here / "later").mkdir()
    shutil.move(here / "runs" / "good", here / "later" / "good")
    shutil.rmtree(here / "runs" / "long")
    assert listed(here, "status=gone") == ["good", "long"]
    told, _ = everstep("show", "good", cwd=here)
    assert re.match(r"good-\w{6}  gone.*\n  its directory is gone: everstep sync", told)
    assert train(here / "later" / "good", 3) == 0
    everstep("sync", "later", cwd=here)
    (good,) = as_json("runs", "name=good", cwd=here)
    assert (good["status"], good["step"], good["path"]) == ("finished", 12, str(here / "later" / "good"))
    told, _ = everstep("sync", "runs", cwd=here)
    assert re.search(r"\nforgotten: long-\w{6}, whose directory .*long is gone\n$", told)
    assert as_json("sync", "runs", cwd=here)["forgotten"] == []
    assert sorted(listed(here)) == ["failed", "good", "killed", "stopped"]


# --------------------------------------------------------------------------------- checkpoints
def test_checkpoints_are_listed_pinned_and_pruned(here: Path) -> None:
    run = here / "runs" / "long"
    saved = [(o["name"], o["pinned"], o["next"]) for o in as_json("checkpoints", "runs/long", cwd=here)]
    first, middle, last = (f"epoch-000{epoch}-step-000000{4 * epoch:02d}" for epoch in (2, 3, 4))
    assert saved == [(first, False, False), (middle, False, False), (last, False, True)]
    as_json("checkpoints", "runs/long", "pin", first, cwd=here)
    dry = as_json("checkpoints", "runs/long", "prune", "--keep-last", "1", cwd=here)
    assert [one["name"] for one in dry] == [middle] and len(list((run / "checkpoints").iterdir())) == 3
    told, _ = everstep("checkpoints", "runs/long", "prune", "--keep-last", "1", "--delete", cwd=here)
    assert "1 checkpoint deleted" in told
    assert {path.name for path in (run / "checkpoints").iterdir()} == {first, last}
    for words, pinned in (("unpin epoch-0002-step-00000008", False), ("pin 8 latest", True)):
        left = as_json("checkpoints", "runs/long", *words.split(), cwd=here)
        assert [one["pinned"] for one in left] == [pinned] * 2
    (run / "checkpoints" / last / "manifest.json").write_text("{")
    (latest,) = as_json("checkpoints", "runs/long", "list", "latest", cwd=here)
    assert latest["name"] == first
    everstep("checkpoints", "runs/killed", "prune", "--delete", cwd=here)
    assert as_json("show", "runs/killed", cwd=here)["status"] == "killed"


def test_a_damaged_checkpoint_is_found_by_verify(here: Path) -> None:
    assert {one["verified"] for one in as_json("checkpoints", "runs/good", "verify", cwd=here)} == {"whole"}
    flip(here / "runs" / "good" / "checkpoints" / "epoch-0002-step-00000008" / "arrays.safetensors")
    found = as_json("checkpoints", "runs/good", "verify", cwd=here, status=1)
    assert [one["name"] for one in found if one["verified"] == "damaged"] == ["epoch-0002-step-00000008"]
    told, _ = everstep("checkpoints", "runs/good", "verify", cwd=here, status=1)
    *table, problem = told.splitlines()
    assert table[0].startswith("verified ") and table[-1].startswith("damaged ")
    assert "epoch-0002-step-00000008 is damaged" in problem
    told, _ = everstep("checkpoints", "runs/good", "verify", "epoch-0001-step-00000004", cwd=here)
    assert "whole" in told


def test_show_lists_evaluations_outside_a_loop(tmp_path: Path) -> None:
    door = trainer(tmp_path / "runs" / "digits")
    door.run_training()
    found = door.evaluate("test")
    shown = as_json("show", "digits", cwd=tmp_path)
    (one,) = shown["evaluations"]
    assert (one["checkpoint"], one["metrics"]) == ("epoch-0002-step-00000008", found)
    assert f"test/loss {found['test/loss']:.6g}" in everstep("show", "digits", cwd=tmp_path)[0]


EVIL = "\x1b[2J\x1b]0;owned\x07good\u202efinished\x9b31m\r\nb-000000  finished"


def clean(text: str) -> bool:
    return not any(each in text for each in "\x1b\x9b\x07\u202e\r")


@pytest.fixture
def evil_runs(tmp_path: Path) -> Path:
    """A run whose reason, command, metric and path hold control characters; and many others."""
    for name in ("evil \x1b[1m\n", *(f"many{n}" for n in range(3))):
        run = RunDir.open(tmp_path / "runs" / name, seed=1)
        facts = {"argv": ["train", EVIL], "host": EVIL, "git": {"commit": EVIL, "branch": EVIL}}
        journal = Journal.open(run.path, 1, None, facts)
        for phase in ("step", "epoch"):
            journal.append(Block(1, phase, f"loss{EVIL}", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
        journal.event("closed", {"status": "failed", "reason": EVIL}, wall=True)
        journal.close()
    return tmp_path


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize(("status", "command"), [
    (0, ("runs", "--columns", "name,status,reason,path,host")),
    (0, ("show", "runs/many0")), (0, ("compare", "runs/many0", "runs/many1")),
    (0, ("tag", "runs/many0", "seen")), (2, ("tag", "runs/many0", "\x1b[2J")),
    (2, ("show", "runs/none\x1b[2J")), (2, ("runs", "no\x1bsuch<1")),
])  # fmt: skip
def test_no_control_character_of_a_run_is_printed(evil_runs: Path, status: int, command: list[str]) -> None:
    out, err = everstep(*command, cwd=evil_runs, status=status)
    assert clean(out + err)
    assert status or command[0] != "runs" or len(out.splitlines()) == 1 + 4
    assert status or command[0] != "show" or r"\x1b[2J" in out


@pytest.mark.campaign("long")
def test_a_reader_that_has_seen_enough_ends_a_listing_well(evil_runs: Path) -> None:
    for command in ("runs", "runs --json", "show runs/many0", "checkpoints runs/many0"):
        line = ["bash", "-c", f"{sys.executable} -m everstep {command} | true; exit ${{PIPESTATUS[0]}}"]
        done = subprocess.run(line, cwd=evil_runs, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_a_listing_that_cannot_be_made_is_exit_status_1(evil_runs: Path) -> None:
    nobody = "postgresql://me@/db?host=" + str(evil_runs / "nowhere")
    out, err = everstep("runs", "--json", cwd=evil_runs, status=1, EVERSTEP_INDEX=nobody)
    assert not out and "cannot be used" in err
    (evil_runs / "runs" / "everstep.db").write_bytes(b"no database" * 1000)
    out, err = everstep("runs", "--json", cwd=evil_runs, status=1)
    assert not out and "malformed" in err and "delete it" in err
    (evil_runs / "runs" / "everstep.db").unlink()
    assert len(json.loads(everstep("runs", "--json", cwd=evil_runs)[0])) == 4


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        Tiny(tmp_path / "runs" / name, max_epoch=1).train()
    return tmp_path


def paths(two_runs: Path, *conditions: str, **environment: str) -> list[str]:
    found = json.loads(everstep("runs", *conditions, "--json", cwd=two_runs, **environment)[0])
    return sorted(Path(run["path"]).name for run in found)


def test_a_tag_is_a_column_a_filter_and_part_of_a_run(two_runs: Path) -> None:
    assert paths(two_runs, "tags=baseline") == []
    everstep("tag", "one", "baseline", "paper", cwd=two_runs)
    everstep("note", "runs/one", "the old data", cwd=two_runs)
    assert paths(two_runs, "tags=baseline") == paths(two_runs, "tags=paper") == ["one"]
    assert paths(two_runs, "tags!=baseline") == ["two"]
    assert paths(two_runs, "--where", '{"tags": {"$in": ["paper", "x"]}}') == ["one"]
    line = ("runs", "--sort", "name", "--columns")
    said = everstep(*line, "name,tags,note", cwd=two_runs)[0].splitlines()
    assert said[0].split() == ["name", "tags", "note"] and said[2].split()[1:] == ["-", "-"]
    assert said[1].endswith("  baseline paper  the old data")
    assert as_json(*line, "tags", cwd=two_runs) == [{"tags": ["baseline", "paper"]}, {"tags": None}]
    shown = as_json("show", "one", cwd=two_runs)
    assert (shown["tags"], shown["note"]) == (["baseline", "paper"], "the old data")
    told, _ = everstep("show", "one", cwd=two_runs)
    assert "  tags       baseline paper\n  note       the old data\n" in told
    asked = house.query("runs", {"tags": "paper"}, index=two_runs / "runs" / "everstep.db")
    assert [Path(run["path"]).name for run in asked] == ["one"]
    (two_runs / "runs" / "one" / "labels.json").unlink()
    assert paths(two_runs, "tags=baseline") == []


@pytest.mark.campaign("long")
def test_a_further_start_keeps_them_and_the_run_is_the_same(two_runs: Path) -> None:
    add_tags(two_runs / "runs" / "one", ["kept"])
    for name in ("one", "two"):
        Tiny(two_runs / "runs" / name, max_epoch=2).train()
    assert paths(two_runs, "tags=kept") == ["one"]
    assert rows(two_runs / "runs" / "one") == rows(two_runs / "runs" / "two") != []


def test_of_writers_at_once_none_undoes_another(two_runs: Path) -> None:
    """Each adds ten tags, one by one."""
    add = "import sys; from everstep.labels import add_tags; from pathlib import Path\n"
    add += "for n in range(10): add_tags(Path(sys.argv[1]), [f'{sys.argv[2]}-{n}'])"
    run = two_runs / "runs" / "one"
    writers = [warm.Popen([sys.executable, "-c", add, str(run), name]) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(labels(run).tags) == sorted(f"{name}-{n}" for name in "abcd" for n in range(10))


# ------------------------------------------------------------------------------- what is bad
EVIL_TAG = "\x1b[2J\u202eevil\r\nrunning\x07"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("line", "says"), [
    (("tag", "one", EVIL_TAG), "control characters"),
    (("tag", "one", "x" * 101), "100 characters at most"),
    (("tag", "one", *(str(n) for n in range(101))), "102 tags are too many"),
    (("tag", "one", "--remove", "kep"), "did you mean 'kept'"),
    (("tag", "nobody", "x"), "there is no run 'nobody'"),
    (("note", "one", "x" * 10_001), "10,001 characters is too long"),
])  # fmt: skip
def test_a_mistake_changes_nothing(two_runs: Path, line: tuple[str, ...], says: str) -> None:
    add_tags(two_runs / "runs" / "one", ["kept"])
    assert says in everstep(*line, cwd=two_runs, status=2)[1]
    assert labels(two_runs / "runs" / "one") == Labels(("kept",), "")


@pytest.mark.campaign("long")
def test_what_a_note_says_is_data(two_runs: Path) -> None:
    """Control characters, which a shell can give, are escaped; credentials are not kept."""
    everstep("note", "one", EVIL_TAG + " https://me:s3cret@example.org", cwd=two_runs)
    for line in (("show", "one"), ("runs", "--columns", "name,note"), ("note", "one")):
        said = everstep(*line, cwd=two_runs)[0]
        assert "evil" in said and clean(said)
    assert "s3cret" not in (two_runs / "runs" / "one" / "labels.json").read_text()


def test_the_labels_of_a_stranger_stop_nothing(two_runs: Path) -> None:
    """Other bytes: tests/hostile."""
    evil = {"tags": [EVIL_TAG, "\ud800\0"] * 1000, "note": "x" * 900_000}
    for content in (b"[" * 100_000, b'{"tags": {"a": 1}, "note": ["x"]}', json.dumps(evil).encode()):
        (two_runs / "runs" / "one" / "labels.json").write_bytes(content)
        assert paths(two_runs) == ["one", "two"]
        said = everstep("show", "one", cwd=two_runs)[0]
        assert len(said) < 40_000 and clean(said)


# ---------------------------------------------------------------------------------------- watch
def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_look_tells_the_place_the_time_left_the_metrics_and_the_newest_warning(tmp_path: Path) -> None:
    told: list[str] = []

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=abs(epoch - 2.5))

    def inside(loop: Any, step: int) -> None:
        if step == 14:
            told.append(everstep("watch", "run", "--once", cwd=tmp_path)[0])

    services = [EarlyStop("vaild_loss", patience=9)]
    Tiny(tmp_path / "run", max_epoch=5, services=services).train(inside, tail)
    (text,) = told
    first, place = text.splitlines()[:2]
    assert first.startswith("run-") and "  running, last sign 2" in first
    # the step by the trail; the journal has the rows of three epochs
    assert place.startswith("  step 13, epoch 3, 65%, 0:00:0") and place.endswith(" left")
    (best,) = (line.split() for line in text.splitlines() if "valid_loss " in line)
    assert best == ["tail", "valid_loss", "12", "0.5", "0.5", "8"]
    assert "warning: " in text.splitlines()[-1] and "vaild_loss" in text.splitlines()[-1]
    before = files(tmp_path)
    text, _ = everstep("watch", "run", cwd=tmp_path)
    assert files(tmp_path) == before
    assert "  finished: max_epoch 5 is reached\n  step 20, epoch 5, 100%\n" in text


@pytest.mark.parametrize(("said", "status"), [("finished", 0), ("stopped", 1), ("failed", 1)])
def test_the_exit_status_tells_how_it_ended(tmp_path: Path, said: str, status: int) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    journal.append(Block(0, "step", "loss", False, [1, 2], [0.5, float("nan")], [1, 1], [0, 0]))
    journal.event("closed", {"status": said, "reason": "\x1b[2Jdone", "step": 2}, wall=True)
    journal.close()
    text, _ = everstep("watch", "run", cwd=tmp_path, status=status)
    assert text.splitlines()[0].endswith(f"{said}: \\x1b[2Jdone") and "step 2\n" in text


def test_in_a_pipe_each_change_is_told_until_the_run_ends(tmp_path: Path) -> None:
    training = start(tmp_path / "run", 2, 2, "ask")
    while "asks at 2" not in training.stdout.readline():
        pass
    command = [sys.executable, "-m", "everstep", "watch", "run", "--every", "0.05"]
    how: Any = {"env": {**os.environ, "EVERSTEP_INDEX": ""}, "stdout": subprocess.PIPE, "text": True}
    watching = warm.Popen(command, cwd=tmp_path, **how)
    for step in (2, 3, 4):
        print(file=training.stdin, flush=True)
        line = "-"
        while line and f"  step {step}, epoch" not in line:
            line = watching.stdout.readline()
        assert line, "it has ended before the run"
    training.communicate("\n" * 8)
    text, _ = watching.communicate()
    assert (training.returncode, watching.returncode) == (0, 0)
    assert text.count("finished: max_epoch 2 is reached") == 1 and "\x1b" not in text


# ------------------------------------------------------- what a command imports: nothing heavy for its help
TELLS = """
import sys
before = {*sys.modules}
import everstep.cli
try:
    everstep.cli.main()
finally:
    print("\\n", *{*sys.modules} - before, file=sys.stderr)
"""
"""Calls the command, and ends with a line of the modules that it has imported."""

HEAVY = {"asyncio", "numpy", "sqlalchemy", "torch", "pydantic"}
HEAVY |= {"everstep.record", "everstep.checkpoint", "everstep.index.database"}


def imported(*command: str, status: int = 0, cwd: Path | None = None, **environment: str) -> set[str]:
    """The modules that a command imports in a process of its own."""
    environment = {**os.environ, "EVERSTEP_INDEX": "", **environment}
    how: Any = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", TELLS, *command], cwd=cwd, check=False, **how)
    assert done.returncode == status, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def require_light(modules: set[str]) -> None:
    """Of packages that are neither Python's nor ours, click alone."""
    others = {name.partition(".")[0] for name in modules} - {"everstep", *sys.stdlib_module_names}
    assert others == {"click"} and not modules & HEAVY


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_needs_click_and_nothing_heavy(command: str) -> None:
    modules = imported(command, "--help")
    assert home_of(command) in modules
    require_light(modules)


def test_the_list_of_commands_imports_none_of_them() -> None:
    modules = imported("--help")
    require_light(modules)
    assert not modules & {*map(home_of, COMMANDS), "difflib", "importlib.metadata", "json", "pathlib"}


ASKED = {"_EVERSTEP_COMPLETE": "bash_complete", "COMP_WORDS": "everstep runs --so", "COMP_CWORD": "2"}


USES = [("runs --limit 0", 2, {}), ("import csv .", 2, {}), ("", 0, ASKED)]


@pytest.mark.parametrize(("command", "status", "environment"), USES)
def test_wrong_usage_and_a_completion_import_little(command: str, status: int, environment: Any) -> None:
    modules = imported(*command.split(), status=status, **environment)
    assert "everstep.cli.runs" in modules or command[:6] == "import"
    require_light(modules)


def test_a_list_of_runs_needs_neither_numpy_nor_another_database(tmp_path: Path) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run", seed=1).path, 1, None, {})
    journal.event("closed", {"status": "finished", "reason": "max_step 1 is reached"}, wall=True)
    journal.close()
    imported("sync", cwd=tmp_path)
    modules = imported("runs", cwd=tmp_path)
    assert "sqlalchemy.dialects.sqlite" in modules
    assert not modules & {"numpy", "sqlalchemy.dialects.postgresql", "everstep.record", "everstep.checkpoint"}
