"""A mirror in a plain folder: a disk vanishes, comes back, or is another run's."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from mirror_program import make, train
from mirror_victim import picked

import everstep
from everstep import hazard
from everstep.errors import ConfigError, MirrorError, RunLockedError
from everstep.mirror import run_mirror
from everstep.mirror.mirror import Contents, Holder, parse
from tiny_runs import Boom, Tiny, boom_at, rows
from waiting import until


def test_a_victim_of_the_campaign_is_killed_at_each_point_first_and_late() -> None:
    # so the gate imports what only the campaign runs: a name that was gone had stopped the mirror's kills
    puts = [f"kill:mirror.put:{n}" for n in (1, 7, 14)]
    assert picked(["mirror.put"] * 16 + ["mirror.list"], 3) == [*puts, "kill:mirror.list:1"]


def contents(mirror: Path) -> dict[str, Any]:
    """The newest list of a mirror."""
    body: dict[str, Any] = json.loads(max((mirror / "contents").glob("*.json")).read_bytes())["body"]
    return body


def committed(run_dir: Path) -> set[str]:
    """What a directory has of what a mirror holds."""
    found = [p for top in ("checkpoints", "best", "journal") for p in (run_dir / top).rglob("*")]
    return {p.relative_to(run_dir).as_posix() for p in found if p.is_file() and p.suffix != ".trail"}


def await_checkpoint(mirror: Path, name: str) -> None:
    """Wait until a checkpoint is in the newest list."""
    until(lambda: f"checkpoints/{name}/manifest.json" in contents(mirror)["files"])


def warnings_of(tiny: Tiny) -> list[str]:
    return [line for line in tiny.lines if line.startswith("warning") and "mirror" in line]


def stop_at(run_dir: Path, mirror: Path | None, step: int, **arguments: Any) -> Tiny:
    """A start that ends by an error of the program in the body of a step."""
    tiny = make(run_dir, mirror, **arguments)
    with pytest.raises(Boom):
        train(tiny, boom_at(step))
    return tiny


def test_an_empty_machine_goes_on_exactly(tmp_path: Path, right: Any) -> None:
    mirror = tmp_path / "elsewhere" / "mirror"
    first = train(make(tmp_path / "first", mirror, epochs=2))
    shutil.rmtree(tmp_path / "first")
    second = train(make(tmp_path / "second", mirror))
    assert second.result() == right
    assert any("the run comes from its mirror" in line for line in second.lines)
    assert not warnings_of(first) + warnings_of(second)
    third = train(make(tmp_path / "third", mirror))  # finished: no step is run
    assert third.seen == [] and third.result() == right


@pytest.mark.campaign("long")
def test_the_mirror_holds_what_the_directory_has_and_nothing_else(tmp_path: Path) -> None:
    mirror, run_dir = tmp_path / "mirror", tmp_path / "run"
    train(make(run_dir, mirror))
    held = contents(mirror)
    assert set(held["files"]) == committed(run_dir)
    keys = {part[0] for parts in held["files"].values() for part in parts}
    there = {p.relative_to(mirror).as_posix() for p in (mirror / "files").rglob("*") if p.is_file()}
    assert there == keys
    assert len(list((mirror / "contents").iterdir())) == 2
    for path, parts in held["files"].items():
        assert b"".join((mirror / key).read_bytes() for key, _, _ in parts) == (run_dir / path).read_bytes()


@pytest.mark.campaign("long")
def test_a_directory_that_is_behind_is_brought_up(tmp_path: Path, right: Any) -> None:
    """The first disk comes back after a second machine has gone on."""
    mirror = tmp_path / "mirror"
    train(make(tmp_path / "first", mirror, epochs=1))
    train(make(tmp_path / "second", mirror, epochs=2))
    again = train(make(tmp_path / "first", mirror))
    assert again.result() == right
    assert [step for _, step, _ in again.seen] == [9, 10, 11, 12]
    aside = tmp_path / "first" / "superseded"  # nothing was deleted that only this directory had
    names = {path.name.partition(".")[0] for path in aside.glob("*")}
    assert names == {"step-00000002", "epoch-0001-step-00000004"}


@pytest.mark.campaign("long")
def test_trained_apart_is_refused_and_either_can_go_on(tmp_path: Path, right: Any) -> None:
    mirror, first = tmp_path / "mirror", tmp_path / "first"
    train(make(first, mirror, epochs=1))
    train(make(first, None, epochs=2))  # without the mirror: its checkpoints are there alone
    train(make(tmp_path / "second", mirror, epochs=2))
    there = lambda: sorted(path for path in first.rglob("*") if path.stem != "lock")  # noqa: E731
    before = there()
    with pytest.raises(MirrorError, match=r"trained apart.*empty run directory.*another mirror"):
        train(make(first, mirror))
    assert there() == before
    assert train(make(first, tmp_path / "another")).result() == right
    assert train(make(tmp_path / "third", mirror)).result() == right


@pytest.mark.campaign("long")
def test_a_shorter_journal_of_its_own_is_another_history(tmp_path: Path) -> None:
    """Nothing is moved before the journals are compared to the last byte that both have."""
    mirror, first = tmp_path / "mirror", tmp_path / "first"
    train(make(first, mirror, epochs=1))
    train(make(first, None, epochs=2))
    train(make(tmp_path / "second", mirror, epochs=2))
    segment = first / "journal" / "segment-0002.evj"
    segment.write_bytes(segment.read_bytes()[:700])
    with pytest.raises(MirrorError, match=r"trained apart: journal/segment-0002.evj differs from byte 0 on"):
        train(make(first, mirror))
    assert not (first / "superseded").exists()


@pytest.mark.campaign("long")
def test_a_checkpoint_that_the_mirror_has_never_had_is_not_passed_over(tmp_path: Path) -> None:
    mirror, first = tmp_path / "mirror", tmp_path / "first"
    train(make(first, mirror, epochs=1))
    old = shutil.copytree(mirror, tmp_path / "old")
    stop_at(first, mirror, 7, epochs=3)
    shutil.rmtree(mirror)
    old.rename(mirror)  # as if the last uploads had never come
    segment = first / "journal" / "segment-0002.evj"
    data = segment.read_bytes()
    segment.unlink()
    train(make(tmp_path / "second", mirror, epochs=2))
    segment.write_bytes(data[:2000])  # its own beginning of segment 2, and its checkpoint of step 6
    with pytest.raises(MirrorError, match="trained apart"):
        train(make(first, mirror))


@pytest.mark.campaign("long")
def test_another_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    train(make(tmp_path / "first", mirror, epochs=1))
    train(make(tmp_path / "other", None, epochs=1))
    held, other = contents(mirror), make(tmp_path / "other", mirror)
    with pytest.raises(MirrorError, match=r"is of the run first-\w+, and .* holds other-\w+: give each run"):
        train(other)
    assert other.seen == [] and contents(mirror) == held


def test_of_two_machines_the_earlier_is_refused(tmp_path: Path, right: Any) -> None:
    mirror = tmp_path / "mirror"
    later: list[Tiny] = []

    def inside(loop: Any, step: int) -> None:
        if step == 6:
            await_checkpoint(mirror, "epoch-0001-step-00000004")
            later.append(train(make(tmp_path / "second", mirror)))

    first = make(tmp_path / "first", mirror)
    with pytest.raises(RunLockedError, match=r"was taken over by process .* in .*second"):
        train(first, inside)
    assert later[0].result() == right
    assert any("took over the mirror from process" in line for line in later[0].lines)
    assert train(make(tmp_path / "third", mirror)).result() == right  # nothing of the first came in between


@pytest.mark.campaign("long")
def test_an_outage_is_one_warning_and_is_caught_up(tmp_path: Path, right: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_mirror, "PAUSES", (0.01, 0.02))
    hazard.arm("EIO:mirror.put:3-12")
    tiny = train(make(tmp_path / "run", tmp_path / "mirror"))
    hazard.arm(None)
    assert len(warnings_of(tiny)) == 1 and "the training continues" in warnings_of(tiny)[0]
    assert sum("can be written again, and has everything" in line for line in tiny.lines) == 1
    assert set(contents(tmp_path / "mirror")["files"]) == committed(tmp_path / "run")
    assert tiny.result() == right
    assert train(make(tmp_path / "second", tmp_path / "mirror")).result() == right


@pytest.mark.campaign("long")
def test_what_is_not_mirrored_at_the_end_is_said_and_caught_up(tmp_path: Path, right: Any) -> None:
    hazard.arm("EIO:mirror.put:1-9999")
    tiny = train(make(tmp_path / "run", tmp_path / "mirror", mirror_wait=0.2))
    hazard.arm(None)
    said = warnings_of(tiny)
    assert len(said) == 2 and "epoch-0003-step-00000012" in said[1] and "Input/output error" in said[1]
    assert tuple(line.removeprefix("warning: ") for line in said) == tiny.loop.ending.warnings
    assert tiny.result() == right
    assert train(make(tmp_path / "run", tmp_path / "mirror")).seen == []
    assert train(make(tmp_path / "second", tmp_path / "mirror")).result() == right


@pytest.mark.campaign("long")
def test_training_and_retention_wait_for_no_slow_mirror(tmp_path: Path, right: Any, monkeypatch: Any) -> None:
    free, waiting = threading.Event(), set()

    def slow(name: str) -> None:
        if name == "mirror.put":
            waiting.add(threading.current_thread().name)
            assert free.wait(60)

    monkeypatch.setattr(hazard, "_action", slow)
    seen: list[int] = []

    def inside(loop: Any, step: int) -> None:
        seen.append(step)
        if step == 10:  # all steps until here were made while the first upload stood still
            names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
            assert "epoch-0000-step-00000000" in names  # what is being uploaded is not deleted
            assert not list((tmp_path / "mirror" / "files").glob("*"))
            free.set()

    tiny = make(tmp_path / "run", tmp_path / "mirror")
    train(tiny, inside)
    assert waiting == {"everstep-mirror"} and seen == list(range(1, 13))
    assert tiny.result() == right
    assert set(contents(tmp_path / "mirror")["files"]) == committed(tmp_path / "run")
    assert "epoch-0000-step-00000000" not in {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert not [each for each in threading.enumerate() if each.name == "everstep-mirror"]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("gone", ["", "files", "journal", "contents"])
def test_a_mirror_that_loses_files_in_a_run_gets_them_again(tmp_path: Path, right: Any, gone: str) -> None:
    """A disk is replaced by an empty one; a rule of a store deletes what is old."""
    mirror = tmp_path / "mirror"

    def inside(loop: Any, step: int) -> None:
        if step == 7:
            await_checkpoint(mirror, "step-00000006")
            for path in [mirror / gone] if gone != "journal" else list((mirror / "files").glob("*/journal")):
                shutil.rmtree(path, ignore_errors=True)  # the mirror deletes what is old, too

    first = train(make(tmp_path / "first", mirror, epochs=2), inside)
    told = [line for line in warnings_of(first) if "has lost" in line]
    assert len(told) == (gone != "contents")
    assert train(make(tmp_path / "second", mirror)).result() == right


@pytest.mark.campaign("long")
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_file_that_is_damaged_before_its_upload(tmp_path: Path, harm: Any, monkeypatch: Any) -> None:
    """No checkpoint is listed that lacks a file."""
    monkeypatch.setattr(run_mirror, "PAUSES", (0.01, 0.01))

    def inside(loop: Any, step: int) -> None:
        if step == 1:
            hazard.arm("EIO:mirror.put:1-9999")
        if step == 8:
            newest = max((tmp_path / "first/checkpoints").iterdir(), key=lambda path: path.name[-8:])
            harm(newest / "arrays.safetensors")
            hazard.arm(None)

    train(make(tmp_path / "first", tmp_path / "mirror", 3), inside)
    names = contents(tmp_path / "mirror")["files"]
    for path in names:
        if path.endswith("manifest.json"):
            files = json.loads((tmp_path / "first" / path).read_bytes())["body"]["files"]
            places = [f"{path}/../{f}" for f in files]
            assert {os.path.normpath(place) for place in places} <= names.keys()
    assert train(make(tmp_path / "second", tmp_path / "mirror", 4)).seen[0][1] == 13


@pytest.mark.campaign("long")
@pytest.mark.parametrize("place", ["contents", "files"])
def test_a_damaged_mirror_gives_nothing(tmp_path: Path, place: str) -> None:
    mirror = tmp_path / "mirror"
    train(make(tmp_path / "first", mirror, epochs=1))
    for path in (mirror / place).rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    second = make(tmp_path / "second", mirror)
    with pytest.raises(MirrorError, match="none is whole" if place == "contents" else "is damaged"):
        train(second)
    assert second.seen == [] and not list((tmp_path / "second").glob("checkpoints/*"))


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("checkpoints/../../escaped", "files/00000001/x"),
        ("../escaped", "files/00000001/x"),
        ("logs/run.log", "files/00000001/x"),
        ("checkpoints/step-00000001/manifest.json", "files/../../secret"),
        ("checkpoints/half\ud800", "files/00000001/x"),
    ],
)
def test_a_list_from_a_stranger_leads_nowhere(tmp_path: Path, path: str, key: str) -> None:
    import xxhash

    mirror = tmp_path / "mirror"
    train(make(tmp_path / "first", mirror, epochs=1))
    newest = max((mirror / "contents").glob("*.json"))
    body = contents(mirror)
    body["files"][path] = [[key, 1, "0" * 32]]
    text = json.dumps(body).encode()
    newest.write_bytes(b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text))
    with pytest.raises(MirrorError, match="not a file of a run"):
        train(make(tmp_path / "second", mirror))


@pytest.mark.campaign("long")
def test_pins_come_back(tmp_path: Path) -> None:
    mirror, first = tmp_path / "mirror", tmp_path / "first"
    train(make(first, mirror, epochs=1))
    everstep.checkpoint.Store(first).pin(everstep.checkpoint.CheckpointName.parse("step-00000002"))
    stop_at(first, mirror, 8)
    assert "step-00000002" in (first / "pins.json").read_text()
    second = train(make(tmp_path / "second", mirror))
    assert (tmp_path / "second" / "checkpoints" / "step-00000002").is_dir()
    assert rows(tmp_path / "second") and second.loop.ending.finished


# ------------------------------------------------------------------------------------- bad input
@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize(
    ("mirror", "missing", "message"),
    [
        ("nonsense://place", "", "nonsense.*give a folder, s3://BUCKET/PATH"),
        ("s3://user:***@bucket/run", "", "comes from a record"),
        ("", "", "is not a path"),
        ("s3://bucket/run", "fsspec", r"pip install fsspec s3fs"),
        ("gs://bucket/run", "gcsfs", r"pip install fsspec s3fs gcsfs"),
        ("HERE/run/mirror", "", "lie in each other"),
        ("HERE", "", "lie in each other"),
        ("HERE/run", "", "lie in each other"),
        ("HERE/file/mirror", "", r"cannot be (read|written).*start without mirror="),
    ],
)
def test_what_cannot_be_a_mirror_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str, missing: str, message: str
) -> None:
    (tmp_path / "file").touch()
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    steps: list[int] = []
    address = mirror.replace("HERE", str(tmp_path))
    with pytest.raises((ConfigError, MirrorError), match=message):
        train(make(tmp_path / "run", address), lambda loop, step: steps.append(step))
    assert steps == [] and not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.campaign("long")
def test_a_drill_leaves_a_real_mirror_alone(tmp_path: Path, right: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("EVERSTEP_ROOT", str(tmp_path / "root"))
    mirror = tmp_path / "mirror"
    tiny = train(make(tmp_path / "run", mirror))
    assert tiny.loop.ending.finished and not mirror.exists()
    assert (tmp_path / "root").joinpath(*mirror.parts[1:], "contents").is_dir()
    other = train(make(tmp_path / "other", "s3://bucket/run"))
    assert any("the mirror s3://bucket/run is left alone" in line for line in other.lines)


def test_a_secret_in_a_url_is_recorded_nowhere(tmp_path: Path) -> None:
    """The server of this URL does not exist."""
    url = "ftp://me:hunter2-secret@127.0.0.1:9/run"
    tiny = make(tmp_path / "run", url)
    with pytest.raises(MirrorError) as error:
        train(tiny)
    told = [str(error.value), repr(error.value.__cause__), *tiny.lines, repr(tiny.loop)]
    assert not [line for line in told if "hunter2" in line]
    assert "ftp://***@127.0.0.1:9/run" in str(error.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_a_note_of_other_characters_than_bytes_is_refused() -> None:
    """Found by fuzzing: writing it ended with a UnicodeEncodeError."""
    holder = Holder("token", "host", 1, "/directory", False)
    for note, is_refused in (("\xff", False), ("\ud800", True)):
        packed = Contents(1, {"id": "a"}, holder, {}, {"pins.json": note}).packed()
        with pytest.raises(MirrorError, match="UnicodeEncodeError") if is_refused else nullcontext():
            parse(packed, "place")
