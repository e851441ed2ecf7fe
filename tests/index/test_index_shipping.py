"""What the journals say is in the index: all of it, once, whatever happened to the run or its files."""

from __future__ import annotations

import hashlib
import math
import platform
import re
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from index_runs import all_runs, everything, index_rows, journal_rows

import everstep
from everstep import Checkpoints, Every
from everstep.index.database import Database
from everstep.index.filters import parse
from everstep.index.location import Location
from everstep.index.query import ask
from everstep.index.run_queries import find_run, newest_facts, starts, summaries
from everstep.index.shipping import forget_gone, ship, sync
from everstep.labels import NAMES as LABELS
from everstep.labels import add_tags
from everstep.record import Block, Journal, Position, RunDir, RunJournal, RunLock
from everstep.record.journal_format import segment_path
from everstep.services import Image, TensorBoard
from everstep.ui.curves import CurveOptions, curves
from postgres_server import Server
from tiny_runs import Boom, Tiny, boom_at, quiet, supervised
from waiting import until


def tail(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=1 / epoch)


def crashed_twice(run_dir: Path) -> None:
    """4 epochs in three starts, each of which left rows that the next one superseded."""
    saves = [everstep.Checkpoints(everstep.Every(steps=3))]
    for at in (8, 14):
        with pytest.raises(Boom):
            Tiny(run_dir, max_epoch=4, services=saves).train(boom_at(at), tail)
    Tiny(run_dir, max_epoch=4, services=saves).train(tail=tail)


def write(run_dir: Path, values: list[float], segment: int = 1, parent: Any = None, host: str = "") -> Path:
    """A segment of a run with one block, one value a step."""
    run = RunDir.open(run_dir, seed=1)
    journal = Journal.open(run.path, segment, parent, {"host": host or platform.node()})
    steps = list(range(1, len(values) + 1))
    journal.append(Block(1, "step", "loss", False, steps, values, [1] * len(steps), [0] * len(steps)))
    journal.close()
    (run.path / "lock").touch()  # nobody holds it: nobody writes what is torn
    return segment_path(run.path, segment)


@pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)
def test_the_valid_rows_are_those_of_the_journal(tmp_path: Path, database: Database) -> None:
    crashed_twice(tmp_path / "run")
    assert sync(database, [tmp_path]).problems == []
    assert index_rows(database, "run") == journal_rows(tmp_path / "run")
    (run,) = all_runs(database, ["valid_loss"])
    assert (run["status"], run["step"], run["epoch"], run["valid_loss"]) == ("finished", 16, 4, 0.25)


@pytest.mark.campaign("machine", gate=1)
@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_an_overlay_from_a_server_is_that_from_a_file(tmp_path: Path, place: Location) -> None:
    """Curves of very many rows, which are read from sketches, and all others."""
    draw, folder = np.random.default_rng(1), tmp_path / "runs"
    for name in "ab":
        write(folder / name, draw.standard_normal(1000).tolist())
        write(folder / name, draw.standard_normal(6000).tolist(), 2, Position(1, 0))
    few: Any = {"points": 20}
    ways: Any = [few, few | {"begin": 0}, few | {"axis": "time", "superseded": True}, {}]
    asked = [CurveOptions("step", "loss", **way) for way in ways]

    def overlays(database: Database) -> list[Any]:
        assert sync(database, [folder]).problems == []
        listed = sorted(all_runs(database), key=lambda run: str(run["name"]))
        return [
            [[list(curve[part]) for part in ("x", "min", "max", "last")] for curve in found["series"]]
            for found in (curves(database, listed, options) for options in asked)
        ]

    sketched, whole, *others = overlays(Database(place))
    assert [sketched, whole, *others] == overlays(Database(tmp_path / "file.db"))
    assert len(sketched) == 2 and sketched != whole, "only one of these is read from sketches"


def test_shipped_piece_by_piece_it_is_the_same(tmp_path: Path, place: Location) -> None:
    """After every flush of every start, as a training ships, against all at once."""
    pieces = Database(place)
    run_dir = tmp_path / "runs" / "run"

    def shipping(loop: Any, step: int) -> None:
        loop._engine.journal.flush()
        ship(pieces, run_dir)

    for at in (6, 11, 0):

        def inside(loop: Any, step: int, at: int = at) -> None:
            shipping(loop, step)
            boom_at(at)(loop, step)

        program = Tiny(run_dir, max_epoch=3, services=[everstep.Checkpoints(everstep.Every(steps=2))])
        with pytest.raises(Boom) if at else nullcontext():
            program.train(inside, tail)
    ship(pieces, run_dir)
    sync(Database(tmp_path / "once.db"), [run_dir])
    assert everything(place) == everything(tmp_path / "once.db")


def test_a_run_made_anew_in_the_place_of_a_deleted_one_is_another(tmp_path: Path, database: Database) -> None:
    for value in (1.0, 2.0, 3.0):  # files of one size
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write(tmp_path / "run", [value])
        assert sync(database, [tmp_path]).rows == 1
    assert [run["status"] for run in all_runs(database)].count("gone") == 2
    assert len(forget_gone(database, [tmp_path])) == 2
    assert [run["name"] for run in all_runs(database)] == [RunDir.open(tmp_path / "run").id]


def test_every_value_comes_back(tmp_path: Path, database: Database) -> None:
    values = [math.nan, math.inf, -math.inf, 0.0, 5e-324, 1.7976931348623157e308, 0.1]
    write(tmp_path / "run", [-value if value == 0 else value for value in values])  # it is 0.0 there
    ship(database, tmp_path / "run")
    with database.read() as connection:
        (summary,) = summaries(connection, int(find_run(connection, "run")["id"]))
    assert [repr(row["value"]) for row in ask(database, "metrics", parse({}))] == list(map(repr, values))
    assert [summary[name] for name in ("smallest", "largest", "last")] == [0.0, 1.7976931348623157e308, 0.1]


def test_a_copied_and_a_moved_run_are_merged(tmp_path: Path, database: Database) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(there / "run", [1.0, 2.0])
    write(here / "other", [5.0])
    shutil.copytree(there / "run", here / "run")
    assert sync(database, [here]).rows == 3
    end = segment_path(there / "run", 1).stat().st_size
    write(there / "run", [3.0], 2, Position(1, end))  # it went on there, and is copied again
    shutil.copytree(there / "run", here / "run", dirs_exist_ok=True)
    assert sync(database, [here]).rows == 1
    (here / "run").rename(here / "moved")
    (tmp_path / "linked").symlink_to("here")
    for seen_from in (here, tmp_path / "linked"):
        assert sync(database, [seen_from]).problems == []
    assert [run["path"] for run in all_runs(database)] == [str(here / "other"), str(here / "moved")]
    assert index_rows(database, "moved") == journal_rows(here / "moved")


def test_a_copy_beside_the_run_is_said_and_left_out(tmp_path: Path, place: Location) -> None:
    write(tmp_path / "run", [1.0])
    shutil.copytree(tmp_path / "run", tmp_path / "run2")
    found = sync(Database(place), [tmp_path])
    (problem,) = found.problems
    assert found.rows == 1 and "is a copy of" in problem and "move one of them" in problem


def test_runs_of_other_machines_are_left_alone(tmp_path: Path, server: Server) -> None:
    """Only its own machine can tell whether a directory is there; a copy counts if the run went on in it."""
    there, here = tmp_path / "there", tmp_path / "here"
    write(there / "run", [1.0, 2.0], host="elsewhere")
    database = Database(server.database())
    sync(database, [there])
    shutil.copytree(there / "run", here / "run")
    shutil.rmtree(there)
    there.mkdir()
    assert forget_gone(database, [there]) == {}
    (problem,) = sync(database, [here]).problems
    assert f"is a copy of elsewhere:{there / 'run'}" in problem
    write(here / "run", [3.0], 2, Position(1, segment_path(here / "run", 1).stat().st_size))
    assert sync(database, [here]).problems == []
    (run,) = all_runs(database)
    assert (run["path"], run["host"]) == (str(here / "run"), platform.node())
    assert index_rows(database, "run") == journal_rows(here / "run")
    shutil.rmtree(here / "run")
    assert list(forget_gone(database, [here])) == [run["name"]]


def test_what_a_database_refuses_is_replaced(tmp_path: Path, place: Location) -> None:
    """NUL and half characters, in what was recorded and in names; and a long name."""
    noise = hashlib.sha256(b"noise").hexdigest() * 4
    run = RunDir.open(tmp_path / "run", seed=1)
    journal = Journal.open(run.path, 1, None, {"config": {"a\0b": "c\0\ud800"}, "host": platform.node()})
    for name in ("lo\0ss", noise):
        journal.append(Block(1, "step", name, False, [1], [1.0], [1], [0]))
    journal.close()
    database = Database(place)
    assert sync(database, [tmp_path]).problems == []
    assert [row[4] for row in index_rows(database, "run")] == [noise, "lo\ufffdss"]
    (found,) = everstep.query("runs", {"config.a\0b": "c\0\ud800", f"step/{noise}": 1.0}, index=place)
    assert found["config"] == {"a\0b": "c\0\ud800"}


def torn(run: Path) -> None:
    path = segment_path(run, 1)
    path.write_bytes(path.read_bytes() + path.read_bytes()[-40:-7])


def of_a_newer_format(run: Path) -> None:
    path = segment_path(run, 1)
    data = bytearray(path.read_bytes())
    data[8] = 99
    data[28:36] = xxhash.xxh3_64_intdigest(bytes(data[:28])).to_bytes(8, "little")
    path.write_bytes(data)


def of_another_run(run: Path) -> None:
    segment_path(run, 1).write_bytes(segment_path(run.with_name("sound"), 1).read_bytes())


def of_an_odd_id(run: Path) -> None:
    shutil.rmtree(run)
    Journal.open(RunDir.open(run, about={"id": "no name \ud800"}).path, 1, None, {}).close()


@pytest.mark.parametrize(("fault", "words", "kept"), [
    (torn, "the last 33 bytes, from .* on, are torn; they are dropped", [1.0, 2.0]),
    (of_a_newer_format, "use the everstep that wrote it", []),
    (of_another_run, "has written it, and this is run-", []),
    (of_an_odd_id, "run is not in the index", []),
    (lambda run: segment_path(run, 2).symlink_to("loop"), "segment-0002.evj is not a regular file", []),
    (lambda run: (run / "run.json").write_text("{"), "run.json is damaged", []),
    (lambda run: run.rename(f"{run}\udcff"), r"run\? is not indexed: its name is not UTF-8", []),
])  # fmt: skip
def test_a_fault_is_told_each_time_and_no_obstacle(tmp_path, database, fault, words, kept) -> None:
    write(tmp_path / "sound", [3.0])
    write(tmp_path / "run", [1.0, 2.0])
    fault(tmp_path / "run")
    for _ in range(2):
        (problem,) = sync(database, [tmp_path]).problems
        assert re.search(words, problem)
    assert [row["value"] for row in ask(database, "metrics", parse({}))] == [*kept, 3.0]
    with pytest.raises(FileNotFoundError), database.read():
        (tmp_path / "none").stat()  # no fault of the index


def test_damage_in_the_middle_is_told_and_the_rest_is_indexed(tmp_path: Path, database: Database) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    journal = Journal.open(run.path, 1, None, {})
    for step in (1, 2, 3):
        journal.append(Block(1, "step", "loss", False, [step], [float(step)], [1], [0]))
        journal.flush()
    size = journal.path.stat().st_size
    journal.close()
    data = bytearray(journal.path.read_bytes())
    frame = (size - data.rindex(b"\xe5\x1aEV")) or 1
    data[size - 2 * frame + 30] ^= 1  # in the block of step 2
    journal.path.write_bytes(data)
    write(tmp_path / "sound", [1.0])
    (problem,) = sync(database, [tmp_path]).problems
    assert f"{frame} bytes at {size - 2 * frame} are damaged; they are skipped" in problem
    assert [row[2] for row in index_rows(database, "run")] == [1, 3]
    assert len(index_rows(database, "sound")) == 1
    (again,) = ship(database, tmp_path / "run").problems
    assert again == problem


def test_empty_files_and_headers_of_garbage(tmp_path: Path, database: Database) -> None:
    write(tmp_path / "run", [1.0, 2.0])
    segment_path(tmp_path / "run", 2).touch()
    segment_path(tmp_path / "run", 3).write_bytes(b"garbage" * 20)
    RunDir.open(tmp_path / "no journal", seed=1)
    (tmp_path / "foreign").mkdir()
    found = sync(database, [tmp_path])
    assert found.runs == 2 and any("header" in problem for problem in found.problems)
    assert index_rows(database, "run") == journal_rows(tmp_path / "run")


def test_a_journal_put_back_from_a_backup_replaces_the_other(tmp_path: Path, database: Database) -> None:
    write(tmp_path / "run", [1.0])
    shutil.copytree(tmp_path / "run", tmp_path / "backup" / "run")
    write(tmp_path / "run", [2.0, 3.0], 2, Position(1, 10_000))
    assert sync(database, [tmp_path / "run"]).rows == 3
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup" / "run", tmp_path / "run")
    sync(database, [tmp_path / "run"])
    assert index_rows(database, "run") == journal_rows(tmp_path / "run")
    assert len(index_rows(database, "run")) == 1


def test_each_change_of_a_run_is_seen_also_one_that_changes_no_folder(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    database = Database(None)

    def look() -> tuple[str, int, dict[str, Any]]:
        assert sync(database, [tmp_path], only=[]).runs == 0
        assert sync(database, [tmp_path], explicit=False).problems == []
        with database.read() as connection:
            found = find_run(connection, run.id)
            return found["status"], found["step"], newest_facts(connection, names=LABELS).get(1, {})

    with closing(Journal.open(run.path, 1, None, {}, warn=print)) as journal:
        journal.append(Block(1, "step", "loss", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
        journal.event("ended", {"reason": "done", "step": 2})
    assert look() == ("finished", 2, {})
    lock = RunLock(run.path)
    lock.acquire()
    try:
        with closing(Journal.open(run.path, 2, Position(1, 1), {}, warn=print)) as journal:
            assert look() == ("finished", 2, {}), "the new file has no byte"
            journal.append(Block(1, "step", "loss", False, [3], [0.5], [1], [0]))
            journal.flush()
            assert look() == ("running", 3, {})
            add_tags(run.path, ["while-it-runs"])
            assert look() == ("running", 3, {"tags": ["while-it-runs"]})
    finally:
        lock.release()
    assert look()[0] == "failed", "it gave the lock back, and did not say how it ended"


LARGEST = 100_000
"""Most bytes of the record of 1,000 steps, two metrics each."""


def test_large_values_lie_beside_a_small_record(tmp_path: Path) -> None:
    draws, run = np.random.default_rng(1), tmp_path / "run"
    weights = draws.standard_normal(500_000)
    services = [everstep.Checkpoints(everstep.Every(steps=250)), TensorBoard()]
    with everstep.TrainLoop(run, {"weights": weights}, max_epoch=4, seed=1, services=services) as loop:
        for epoch in loop.iter_epochs():
            for step, _ in loop.iter_steps(range(250)):
                loop.collect_metrics(loss=float(draws.standard_normal()))
                if step % 10 == 0:
                    loop.collect_metrics(norm=float(step))
            loop.collect_metrics(valid_loss=1 / epoch)
            loop.add_summary({"seen": Image(draws.random((256, 256, 3)))})
    journal, rows = RunJournal(run), (("loss", "step"), ("norm", "step"), ("valid_loss", "tail"))
    assert [len(journal.series(*named)[0]) for named in rows] == [1000, 100, 4]
    assert journal.series("loss", "step")[0][-1] == 1000, "the rows of the tail are there, too"
    beside = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    record = [*(run / "journal").glob("*.evj"), run / "run.json"]
    assert sum(path.stat().st_size for path in record) < LARGEST < 4_000_000 < beside
    database = Database(tmp_path / "index.db")
    sync(database, [run])
    assert index_rows(database, "run") == journal_rows(run)
    with database.read() as connection:
        of_run = connection.exec_driver_sql("SELECT sum(length(packed)) FROM blocks").scalar_one()
    assert of_run < LARGEST


def stands_at(run_dir: Path) -> int:
    """The step of a run, as the index has it."""
    database = Database(None)
    ship(database, run_dir)
    (run,) = all_runs(database)
    with database.read() as connection:
        assert starts(connection, run["id"])[-1]["step"] == run["step"]
    return int(run["step"])


def walk(run_dir: Path, limit: int, inside: Any = lambda step: None) -> None:
    """A Supervisor program with a row each 10 steps and a checkpoint each 20."""

    def step(sv: everstep.Supervisor) -> Any:
        inside(sv.step + 1)
        return {"loss": 1.0} if (sv.step + 1) % 10 == 0 else {}

    supervised(quiet(run_dir, max_step=limit, services=[Checkpoints(Every(steps=20))]), step)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("killed_at", [21, 25, 39])
def test_a_killed_start_stands_at_least_where_a_resume_would_go_on(tmp_path: Path, killed_at: int) -> None:
    def copy(step: int) -> None:
        if step == killed_at:
            committed = tmp_path / "run" / "checkpoints" / "step-00000020"
            until(committed.exists)
            whole = shutil.ignore_patterns(".tmp-*")  # the writer thread may just be renaming or deleting one
            shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=whole)

    walk(tmp_path / "run", 45, copy)
    assert RunJournal(tmp_path / "killed").status().step == 20
    assert 20 <= stands_at(tmp_path / "killed") <= killed_at, "as far as its trail tells"
    walk(tmp_path / "killed", 45)
    assert stands_at(tmp_path / "killed") == 45


def test_a_run_stands_at_its_last_step_and_what_a_resume_takes_back_does_not_count(tmp_path: Path) -> None:
    walk(tmp_path / "run", 33)
    assert stands_at(tmp_path / "run") == 33, "its last row is of step 30"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000033")
    walk(tmp_path / "run", 25)
    assert len(RunJournal(tmp_path / "run").segments()) == 2 and stands_at(tmp_path / "run") == 25
