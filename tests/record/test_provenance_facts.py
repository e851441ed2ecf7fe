"""What a run records: where it came from, never a secret, and how it failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner

import everstep.record.provenance as provenance
from everstep import redaction
from everstep.cli.group import commands
from everstep.errors import Interrupted
from everstep.record import FailurePages, RunJournal, facts, failures, redact
from everstep.record.pages import KEPT
from everstep.redaction import redacted, redacted_line
from everstep.supervisor.opening.configuration import Configuration
from everstep.testing import armed
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


def test_a_start_is_described(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    config = {"path": tmp_path, 3: (1, {2}), "f": float, "n": None, "ok": True}
    got = facts(["train.py", "--lr=1"], config, 7, {"numpy": {"version": "2"}})
    assert json.loads(json.dumps(got)) == got
    assert (got["argv"], got["seed"]) == (["train.py", "--lr=1"], 7)
    named = {"path": repr(tmp_path), "f": "<class 'float'>"}
    assert got["config"] == {**named, "3": [1, "{2}"], "n": None, "ok": True}  # JSON of any objects
    assert got["backends"] == {"numpy": {"version": "2"}}
    assert (got["pid"], got["cwd"]) == (os.getpid(), os.getcwd())
    assert got["packages"]["numpy"] == numpy.__version__
    assert "everstep" in got["packages"] and "pytest" in got["packages"]
    assert not {"os", "json", "subprocess"} & set(got["packages"]) and "hunter2" not in json.dumps(got)


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


def test_a_git_that_fails_is_a_note_and_no_failure(tmp_path, monkeypatch):
    (fake := tmp_path / "git").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for script, problem in (
        ("#!/bin/sh\necho fatal: dubious ownership >&2; exit 128\n", "fatal: dubious ownership"),
        ("no program", "git cannot be run: Exec format error"),
        ("#!/bin/sh\necho something else\n", "the answer of git cannot be parsed"),
        ("#!/bin/sh\nexec /bin/sleep 60\n", "git did not answer within 0.2 seconds"),
    ):
        fake.write_text(script)
        if "sleep" in script:
            monkeypatch.setattr(provenance, "GIT_SECONDS", 0.2)
        assert provenance.git_facts(tmp_path) == {"problem": problem}


def test_importing_the_room_imports_no_framework_and_no_terminal():
    heavy = "{'torch', 'rich', 'importlib.metadata'}"
    code = f"import sys, everstep.record; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    redaction._patterns.clear()


CREDENTIALS = {
    "postgresql://me:hunter2@host:5432/db": "postgresql://me:***@host:5432/db",
    "postgresql://me:hun@ter2@host/db": "postgresql://me:***@host/db",
    "postgresql://me:hun/te?r2@host/db": "postgresql://me:***@host/db",
    "postgresql://me:12/34@host/db": "postgresql://me:***@host/db",
    "postgresql://me:hun%40ter2@/db?host=/tmp": "postgresql://me:***@/db?host=/tmp",
    "postgresql://me@host/db?password=hun@ter2": "postgresql://me@host/db?password=***",
    "postgresql:///db?sslpassword=hunter2&host=h": "postgresql:///db?sslpassword=***&host=h",
    "postgresql:///db?user=me&pass%77ord=hunter2": "postgresql:///db?user=me&pass%77ord=***",
    "https://hunter2@github.com/a/b.git": "https://***@github.com/a/b.git",
    "https://me:hunter2@github.com/a.git": "https://***@github.com/a.git",
    "https://h/a.tar?access_token=hunter2#x": "https://h/a.tar?access_token=***",
    "https://h/a?X-Amz-Signature=hunter2&b=1": "https://h/a?X-Amz-Signature=***&b=1",
    "'=/tmp&sslpassword=hunter2 is": "'=/tmp&sslpassword=*** is",
    "me:hun@ter2@host:a/b.git": "me:***@host:a/b.git",
    "--index=postgresql://me:hunter2@host/db": "--index=postgresql://me:***@host/db",
    "at 'https://hunter2@h/x' and me:hunter2@h:x": "at 'https://***@h/x' and me:***@h:x",
}
NONE = (
    "postgresql://me@host:5432/db?host=/tmp/x&connect_timeout=3", "postgresql:///db", "https://[::1]:80/a",
    "https://host:8080/path@v2", "s3://bucket/key@1", "ssh://git@example.org/a.git",
    "git@example.org:a/b.git", "optimizer.lr=0.1", "torch.optim:AdamW", "me@example.org", "step=3, loss=0.1",
)  # fmt: skip


@pytest.mark.parametrize(("given", "told"), [*CREDENTIALS.items(), *((text, text) for text in NONE)])
def test_a_credential_is_known_by_its_form(given: str, told: str) -> None:
    assert redacted(given) == redacted(told) == told
    assert redacted({"a": [given, {"b": given}]}) == {"a": [told, {"b": told}]}


def test_a_pattern_of_ones_own_hides_what_its_groups_find() -> None:
    line = ["train.py", "--api-key", "hunter2", "--api-key=hunter2", "--lr", "0.1"]
    assert redacted_line(line) == line
    redact(r"api[-_]key[= ](\S+)")
    redact("sk-[a-z]+")
    assert redacted_line(line) == ["train.py", "--api-key", "***", "--api-key=***", "--lr", "0.1"]
    assert redacted_line(["--api-key", "two words"])[1] == "*** words"
    assert redacted({"api_key": "hunter2", "pin": 4}) == {"api_key": "***", "pin": 4}
    assert redacted({"key": "sk-abc, more"}) == {"key": "***, more"}
    redact("pin=([0-9]+)")
    assert redacted({"pin": 4, "spin": True}) == {"pin": "***", "spin": True}


def test_facts_and_configurations_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    url, masked = "postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"
    told = facts(["train.py", "--index", url, f"--index={url}"], {"at": url}, 1)
    assert "hunter2" not in str(told)
    assert told["argv"][1:] == ["--index", masked, f"--index={masked}"]
    assert Configuration({"at": url}).changes({"at": "postgresql://me:other@host/db"}) == []
    assert Configuration({"at": url}).changes({"at": "postgresql://me:other@elsewhere/db"})


def test_what_a_run_says_and_why_it_ended_have_none(tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@host/db"

    def fail(loop: object, step: int) -> None:
        run.loop.println(f"asking {url}")
        if step == 2:
            raise RuntimeError(f"{url} is away")

    run = Tiny(tmp_path / "run", max_epoch=1)
    with pytest.raises(RuntimeError):
        run.train(inside=fail)
    assert "asking postgresql://me:***@host/db" in run.lines
    stopped = Tiny(tmp_path / "stopped", max_epoch=1)
    redact("sk-[a-z]+")
    stopped.train(inside=lambda loop, step: loop.request_stop(f"{url} is away (sk-hunter2)"))
    found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, data in found.items() if b"hunter2" in data] == []
    assert any(b"***@host/db is away" in data for data in found.values())


def test_a_pattern_of_ones_own_does_not_reach_what_everstep_goes_by(tmp_path: Path) -> None:
    """A pattern for hexadecimal tokens finds digests, too."""
    straight = Tiny(tmp_path / "a", max_epoch=2).train()
    redact("[0-9a-f]{6,}")
    redact(r"\d+")
    Tiny(tmp_path / "b", max_epoch=1, config={"pin": 1234}).train()
    again = Tiny(tmp_path / "b", max_epoch=2, config={"pin": 1234}).train()
    assert again.result() == straight.result() and not any("differ" in line for line in again.lines)
    facts = RunJournal(tmp_path / "b").facts()
    assert facts["config"] == {"pin": "***"} and facts["resumed_from"] == "epoch-0001-step-00000004"


UNITS = ("a", "a.", "a:", "a" * 120 + ":", "://", "a://", ":@", "a@a:", "a:@a/", "&a=")


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("end", ["@", "=@", "@h:", ""])
def test_a_hostile_text_takes_time_in_proportion(unit: str, end: str) -> None:
    """Each pattern that begins again at each character takes an hour for such strings."""
    redacted(unit * (1_000_000 // len(unit)) + end)


def failing(run_dir: Path, error: BaseException) -> Tiny:
    def fails_here(loop: Any, step: int) -> None:
        if step == 3:
            raise error

    tiny = Tiny(run_dir, max_epoch=2)
    with pytest.raises(type(error)):
        tiny.train(fails_here)
    return tiny


def shown(run_dir: Path, *options: str) -> str:
    return CliRunner().invoke(commands, ["show", str(run_dir), *options], catch_exceptions=False).output


def test_an_exception_leaves_a_page_with_its_traceback(tmp_path: Path) -> None:
    failing(tmp_path, ValueError("of https://me:secret@host/data"))
    failing(tmp_path, KeyError("again"))
    first, second = failures(tmp_path)
    assert (first.kind, first.segment, first.rank, first.step, first.epoch) == ("error", 1, 0, 2, 1)
    assert (first.cause, first.pid) == (None, os.getpid())
    assert first.what.startswith("ValueError: of https://") and "secret" not in str(first)
    assert first.lines[0] == "Traceback (most recent call last):" and "secret" not in "".join(first.lines)
    assert any("in fails_here" in line for line in first.lines)
    assert (second.segment, second.what) == (2, "KeyError: 'again'")
    told = json.loads(shown(tmp_path, "--json"))["failures"]
    assert [each["what"] for each in told] == [first.what, second.what]
    assert "KeyError: 'again'" in shown(tmp_path).partition("failures\n")[2]


def test_a_planned_end_leaves_no_page(tmp_path: Path) -> None:
    run = Tiny(tmp_path, max_epoch=1)
    with pytest.raises(Interrupted):
        run.train(lambda loop, step: step == 2 and signal.raise_signal(signal.SIGTERM))
    Tiny(tmp_path, max_epoch=1).train()
    assert failures(tmp_path) == [] and not (tmp_path / "failures").exists()
    (left,) = RunJournal(tmp_path).events("interrupted", valid=False)
    assert (left.data["status"], left.data["reason"]) == (143, "SIGTERM")
    assert "failures" not in shown(tmp_path)


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path) -> None:
    with armed("ENOSPC:failures.write:1"):
        tiny = failing(tmp_path, ValueError("the first"))
    assert failures(tmp_path) == [] and list((tmp_path / "failures").iterdir()) == []
    assert tiny.loop.ending is not None
    (warning,) = tiny.loop.ending.warnings
    assert "could not be written" in warning and "ValueError: the first" in warning


def test_the_newest_pages_of_each_rank_stay_and_a_page_of_a_deep_recursion_is_small(tmp_path: Path) -> None:
    lines = [f"{number}: {'x' * 1000}" for number in range(10_000)]
    path = FailurePages(tmp_path, 1, rank=0).write("error", "deep", lines, step=0, epoch=0)
    pages = FailurePages(tmp_path, 2, rank=1)
    for number in range(KEPT + 2):
        pages.write("hang", str(number), [], step=number, epoch=0)
    page, *others = failures(tmp_path)
    assert path.stat().st_size < 400_000 and (page.lines[0], page.lines[-1]) == (lines[0], lines[-1])
    assert [page.what for page in others] == [*map(str, range(2, KEPT + 2))]


STRANGERS: list[Any] = [b"not JSON", b" " * (2 << 20), {"time": 1e300}, {"step": "3"}, {"lines": [{}]}]


def test_what_is_no_page_is_passed_over(tmp_path: Path) -> None:
    failing(tmp_path, ValueError("real"))
    (page,) = (tmp_path / "failures").iterdir()
    real = json.loads(page.read_text())
    for number, content in enumerate(STRANGERS, 2):
        data = json.dumps({**real, **content}).encode() if isinstance(content, dict) else content
        (page.parent / f"segment-0001-rank-0-error-{number:03d}.json").write_bytes(data)
    os.mkfifo(page.parent / "segment-0001-rank-0-error-009.json")
    (page.parent / "notes.txt").write_text("mine")
    assert [failure.what for failure in failures(tmp_path)] == ["ValueError: real"]
    assert "ValueError: real" in shown(tmp_path)
