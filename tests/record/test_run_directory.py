"""The run directory: made once, refused when it is something else, or damaged."""

import os
import sys
from pathlib import Path

import pytest

import warm
from everstep import hazard
from everstep.errors import RunDirError
from everstep.record import Journal, RunDir, to_read


def test_a_new_run_gets_a_name_and_a_seed_and_keeps_them(tmp_path):
    run = RunDir.open(tmp_path / "runs" / "my digits")
    again = RunDir.open(tmp_path / "runs" / "my digits", seed=3)
    name, _, random = run.id.rpartition("-")
    assert (name, len(random)) == ("my-digits", 6)
    assert 0 <= run.seed < 2**31
    assert again.facts == run.facts
    assert (run.facts["seed_given"], run.facts["versions"]) == (False, {"run": 1, "journal": 2})
    assert os.listdir(run.path) == ["run.json"]
    assert RunDir.open(tmp_path / "elsewhere" / "my digits").id != run.id
    given = RunDir.open(tmp_path / "given", seed=0)
    assert (given.seed, given.facts["seed_given"]) == (0, True)


def test_segments_are_counted_from_the_files(tmp_path):
    run = RunDir.open(tmp_path)
    assert run.next_segment() == 1
    for number in (1, 2):
        Journal.open(run.path, number, None, {}).close()
    (run.journal / "segment-0001.evj").unlink()
    assert run.next_segment() == 3


def test_what_was_opened_may_be_another_run_by_now(tmp_path):
    run = RunDir.open(tmp_path / "a")
    run.require_same()
    run.path.rename(tmp_path / "b")
    with pytest.raises(RunDirError, match=f"the run {run.id} in .* was removed while it was opened"):
        run.require_same()
    now = RunDir.open(tmp_path / "a")
    with pytest.raises(RunDirError, match=f"was replaced by {now.id} .*start again"):
        run.require_same()


def test_what_is_no_run_directory_is_refused(tmp_path):
    for path, words in ((tmp_path / "x", "does not exist"), (tmp_path, "has no run.json")):
        with pytest.raises(RunDirError, match=f"{words}; check the path"):
            RunDir.open(path, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").write_text("")
    for path, words in {
        "x": "x is a file; give a directory",
        "x/y": "Not a directory",
        ".": "not a run directory: it holds x and no run.json; give an empty",
    }.items():
        with pytest.raises(RunDirError, match=words):
            RunDir.open(tmp_path / path)
    (tmp_path / "x").unlink()
    (tmp_path / ".cache").mkdir()
    RunDir.open(tmp_path)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EACCES"])
def test_a_disk_that_refuses_is_an_error_with_a_remedy(tmp_path, error):
    hazard.arm(f"{error}:run.json.write:1")
    with pytest.raises(RunDirError, match=r"cannot be used: .*; give a path that can be written"):
        RunDir.open(tmp_path / "x")
    assert os.listdir(tmp_path / "x") == []


def test_a_read_only_directory_is_refused(read_only_dir):
    with pytest.raises(RunDirError, match=r"cannot be written \(read-only\); change its permissions"):
        RunDir.open(read_only_dir)


def test_a_flip_of_any_byte_is_noticed_and_a_lost_file_is_not_made_again(tmp_path):
    RunDir.open(tmp_path, seed=12345)
    (tmp_path / "checkpoints").mkdir()
    whole = (tmp_path / "run.json").read_bytes()
    for at in range(len(whole)):
        (tmp_path / "run.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for create in (True, False):
            with pytest.raises(RunDirError, match=r"run.json is damaged.*restore it from a backup"):
                RunDir.open(tmp_path, create=create)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunDirError, match=r"holds a run \(checkpoints\) but no run.json; restore it"):
        RunDir.open(tmp_path)


def test_a_newer_layout_is_refused_naming_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.record.rundir.VERSION", 2)
    RunDir.open(tmp_path)
    monkeypatch.undo()
    with pytest.raises(RunDirError, match="format 2, this everstep reads up to 1; upgrade"):
        RunDir.open(tmp_path)


OPEN = "import sys; from everstep.record import RunDir; print(RunDir.open(sys.argv[1], seed=5).id)"


def opened(path, hazard=None):
    environment = os.environ | ({"EVERSTEP_HAZARD": hazard} if hazard else {})
    command = [sys.executable, "-c", OPEN, str(path)]
    return warm.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_kill_at_every_operation_leaves_a_directory_that_opens(tmp_path):
    trace = tmp_path / "trace"
    opened(tmp_path / "whole", f"trace:{trace}")
    points = trace.read_text().split()
    assert len(points) == 9
    for number, point in enumerate(points):
        path = tmp_path / str(number)
        nth = points[: number + 1].count(point)
        assert opened(path, f"kill:{point}:{nth}").returncode == -9
        run = RunDir.open(path, seed=5)
        assert (run.seed, RunDir.open(path).facts) == (5, run.facts)


def test_of_two_that_make_the_same_run_at_once_the_first_counts(tmp_path):
    """The second one arrives between the first one's look and its write."""
    seen = []

    def other(name):
        if name == "run.json.rename" and not seen:
            seen.append(opened(tmp_path).stdout.strip())

    hazard._action = other
    run = RunDir.open(tmp_path, seed=6)
    assert [run.id] == seen
    assert run.seed == 5


def test_a_root_moves_run_directories_and_only_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_ROOT", "root")
    root = tmp_path / "root"
    for path in ("runs/x", str(tmp_path / "runs" / "x"), "runs/../runs/x"):
        opened = RunDir.open(path)
        assert opened.path == root.joinpath(*tmp_path.parts[1:], "runs", "x")
        assert RunDir.open(opened.path).id == opened.id, "what lies below the root is taken as it is"
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    (tmp_path / "pretrained").mkdir()
    assert to_read("pretrained") == Path("pretrained")
    assert to_read("runs/x") == opened.path
