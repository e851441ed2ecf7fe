"""Where a run came from: real repositories, and never a secret."""

import json
import os
import subprocess
import sys

import numpy
import pytest

import everstep.record.provenance as provenance
from everstep.record import RunJournal, facts
from tiny_runs import Boom, Tiny, boom_at


@pytest.fixture
def git(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    repo = tmp_path / "repo"
    repo.mkdir()

    def run(*command):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", "-C", str(repo), *who, *command], check=True, capture_output=True)
        return repo

    run("init")
    return run


@pytest.fixture
def repo(git):
    (git("status") / "train.py").write_text("one\n")
    git("add", ".")
    return git("commit", "-m", "first")


def test_a_start_is_described(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    got = facts(["train.py", "--lr=1"], {"lr": 0.1}, 7, {"numpy": {"version": "2"}})
    assert json.loads(json.dumps(got)) == got
    assert (got["argv"], got["config"], got["seed"]) == (["train.py", "--lr=1"], {"lr": 0.1}, 7)
    assert got["backends"] == {"numpy": {"version": "2"}}
    assert (got["pid"], got["cwd"]) == (os.getpid(), os.getcwd())
    assert got["packages"]["numpy"] == numpy.__version__
    assert "everstep" in got["packages"] and "pytest" in got["packages"]
    assert not {"os", "json", "subprocess"} & set(got["packages"])
    assert "hunter2" not in json.dumps(got)


@pytest.mark.campaign("long")
def test_a_trial_that_is_started_again_by_hand_is_still_one_of_its_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERSTEP_SWEEP", "rates")
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=3).train(boom_at(7))
    monkeypatch.delenv("EVERSTEP_SWEEP")
    Tiny(tmp_path / "run", max_epoch=3).train()
    monkeypatch.setenv("EVERSTEP_SWEEP", "another")
    Tiny(tmp_path / "run", max_epoch=4).train()
    assert [one["sweep"] for one in RunJournal(tmp_path / "run").facts_since(1)] == ["rates"] * 3
    monkeypatch.delenv("EVERSTEP_SWEEP")
    Tiny(tmp_path / "other", max_epoch=1).train()
    assert "sweep" not in RunJournal(tmp_path / "other").facts()


def test_a_configuration_of_any_objects_becomes_json(tmp_path):
    given = {"path": tmp_path, 3: (1, {2}), "f": float, "n": None, "ok": True}
    assert provenance.as_json(given) == {
        "path": repr(tmp_path),
        "3": [1, "{2}"],
        "f": "<class 'float'>",
        "n": None,
        "ok": True,
    }


def test_uncommitted_changes_are_told_apart(repo):
    (repo / "runs").mkdir()
    (repo / "runs" / "x").write_text("")
    hashes = {provenance.git_facts(repo)["diff"]}
    for text in ("two\n", "three\n"):
        (repo / "train.py").write_text(text)
        got = provenance.git_facts(repo)
        assert got["dirty"] is True and len(got["diff"]) == 16
        hashes.add(got["diff"])
    assert None in hashes and len(hashes) == 3


def test_a_head_without_a_branch_and_a_repository_without_a_commit(repo, git, tmp_path):
    git("checkout", "--detach")
    got = provenance.git_facts(repo)
    assert (got["branch"], len(got["commit"])) == (None, 40)
    git("checkout", "--orphan", "main2")
    got = provenance.git_facts(repo)
    assert (got["commit"], got["branch"], got["pushed"]) == (None, "main2", False)


def test_pushed_means_that_a_remote_branch_has_the_commit(repo, git, tmp_path):
    git("remote", "add", "upstream", "https://me:hunter2@example.org/a.git")
    assert provenance.git_facts(repo)["remote"] == "https://***@example.org/a.git"
    subprocess.run(["git", "init", "--bare", str(tmp_path / "remote")], check=True, capture_output=True)
    git("remote", "add", "origin", str(tmp_path / "remote"))
    assert provenance.git_facts(repo)["pushed"] is False
    git("push", "origin", "main")
    got = provenance.git_facts(repo)
    assert (got["pushed"], got["remote"]) == (True, str(tmp_path / "remote"))
    (repo / "train.py").write_text("two\n")
    git("commit", "-am", "second")
    assert provenance.git_facts(repo)["pushed"] is False


def test_outside_a_repository_and_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_facts(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_facts(tmp_path) is None


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\necho fatal: dubious ownership >&2; exit 128\n", "fatal: dubious ownership"),
        ("#!/bin/sh\nexec /bin/sleep 60\n", "git did not answer within 0.2 seconds"),
        ("no program", "git cannot be run: Exec format error"),
        ("#!/bin/sh\necho something else\n", "the answer of git cannot be parsed"),
    ],
)
def test_a_git_that_fails_is_a_note_and_no_failure(tmp_path, monkeypatch, script, problem):
    fake = tmp_path / "git"
    fake.write_text(script)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if "sleep" in script:
        monkeypatch.setattr(provenance, "GIT_SECONDS", 0.2)
    assert provenance.git_facts(tmp_path) == {"problem": problem}


def test_importing_the_room_imports_no_framework_and_no_terminal():
    heavy = "{'torch', 'rich', 'importlib.metadata'}"
    code = f"import sys, everstep.record; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
