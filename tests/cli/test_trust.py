"""A run that somebody sent: looking calls nothing, what must import asks; no credential is recorded."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cli_runs
import psycopg
import pytest
from tiny_experiment import write

from everstep.checkpoint import Checkpoint, Store, read_checkpoint
from everstep.cli.group import COMMANDS
from everstep.errors import ConfigError, TrustError
from everstep.experiment import import_paths, open_config, open_run
from everstep.index.database import SCHEMA, Database
from everstep.index.location import as_location
from everstep.record import Block, Journal, RunDir, RunJournal, trust
from postgres_server import Server

PLANTED = ("telltale", "click", "numpy", "pydantic", "ruamel", "sqlalchemy", "tiny_experiment", "torch")
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "trust.md"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command changes in its process is put back."""
    monkeypatch.delenv(trust.TRUST_VARIABLE, raising=False)
    monkeypatch.setenv("EVERSTEP_INDEX", "")
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    import_paths._kept_out.clear()
    for name in sys.modules.keys() - modules.keys():
        if name.partition(".")[0] in ("telltale", "beside", "runs", "this"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml and a run of this user; no test changes it."""
    folder = tmp_path_factory.mktemp("made")
    open_config(write(folder), ["trainer.max_epoch=1"], run_dir=folder / "runs" / "tiny").train()
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where this process is."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def record(run: Path, facts: dict[str, Any]) -> None:
    """Let the newest start of a run have recorded something else."""
    shutil.rmtree(run / "journal")
    journal = Journal.open(run, 1, None, facts)
    journal.append(Block(1, "step", "loss", False, [1], [0.5], [1], [0]))
    journal.event("closed", {"status": "stopped", "reason": "sent away"}, wall=True)
    journal.close()


def recorded(run: Path) -> dict[str, Any]:
    start = RunJournal(run).newest_start()
    assert start is not None
    return dict(start.data["facts"])


@pytest.fixture
def sent(here: Path) -> Path:
    """A hostile run: its record names what lies in it, and os:system; it bears the mark of another run."""
    run, told = here / "runs" / "tiny", here / "told"
    for name in PLANTED:
        (run / f"{name}.py").write_text(f"open({str(told)!r}, 'w').close()\n")
    system = {"call": "os:system", "command": f"touch {told}"}
    facts = recorded(run)
    config = facts["config"] | {
        "task": {"call": "telltale:Task"},
        "streams": {"train": system, "valid": system},
        "model": {"call": "subprocess:getoutput", "cmd": f"touch {told}"},
        "optimizer": system,
        "services": [
            {"telltale:Service": {}}, {"os:system": {"command": f"touch {told}"}}, {"Evaluate": {}},
            {"Scheduled": {"target": "lr", "function": {"call": "this:s"}}},  # of Python itself
        ],
    }  # fmt: skip
    named = {"config": config, "code": [str(run), str(here / "runs")], "argv": [str(run / "telltale.py")]}
    record(run, facts | named)
    store = Store(run, 1, print)
    store.adopt(taken_out(store, here), config=config)
    return run


def taken_out(store: Store, here: Path) -> Checkpoint:
    """The newest checkpoint, which lies elsewhere now."""
    newest = store.path(store.names()[-1])
    return read_checkpoint(Path(shutil.move(newest, here / newest.name)))


def everstep(*command: str) -> tuple[int, str]:
    """The command in this process, where it is: its exit status, and what it says to stderr."""
    status, _, said = cli_runs.here(*command, cwd=Path.cwd())
    return status, said


LOOKING = {
    "config": ["RUN", "RUN trainer.max_epoch=3", "RUN --json"], "show": ["RUN"], "watch": ["RUN --once"],
    "runs": ["", "config.task.call=telltale:Task"], "report": ["RUN -o ../../report.html"],
    "ui": ["--help"],  # the page itself serves until Ctrl-C: tests/ui
    "checkpoints": ["RUN", "RUN verify", "RUN prune --delete"], "export": ["RUN --out weights --entry w"],
    "compare": ["RUN RUN"], "tag": ["RUN seen"], "note": ["RUN seen"], "accept": ["RUN --divergence 1"],
    "import": ["--help"],  # it reads no run: test_import.py
    "audit": ["RUN"], "du": [""], "sql": ["SQL"], "sync": ["RUN"], "prune": ["RUN"],
}  # fmt: skip
"""What looks, or does not go by what a run names; it works on a run of anybody's."""

ASKING = {
    "replay": ["RUN --step 1", "RUN --verify :"], "resume": ["RUN", "RUN --dry-run", "RUN --on-change fork"],
    "eval": ["RUN"], "predict": ["RUN --stream valid --out OUT.npy"],
}  # fmt: skip
"""What must import what a run names, and so asks."""

IN_RUN = "CONFIG --run-dir RUN"
OWN = {
    "train": [f"{IN_RUN} --dry-run", IN_RUN, f"{IN_RUN} --on-change keep", f"{IN_RUN} --on-change fork",
              f"{IN_RUN} --on-change override trainer.max_epoch=2"],
    "sweep": [f"{IN_RUN} --grid seed=[1] --dry-run"], "data": ["CONFIG", "RUN"],
    "diverge": ["RUN RUN"],  # whose records agree, so that nothing is executed; else as replay
    **{command: ["--help"] for command in ("drill", "adopt", "run", "check")},
}  # fmt: skip
"""What runs one's own config or script, on whatever run directory."""

LINES = [
    pytest.param(command, line, id=f"{command}{number}")
    for group in (LOOKING, ASKING, OWN)
    for command, lines in group.items()
    for number, line in enumerate(lines)
]


@pytest.mark.campaign("long", gate=16)
@pytest.mark.parametrize(("command", "line"), LINES)
def test_no_command_imports_or_calls_what_a_strangers_run_names(
    sent: Path, monkeypatch: pytest.MonkeyPatch, command: str, line: str
) -> None:
    """Also where it is started inside the run directory, which Python then looks into."""
    here = sent.parent.parent
    monkeypatch.chdir(sent)
    sys.path.insert(0, "")
    given = {"RUN": str(sent), "CONFIG": str(here / "tiny.yaml"), "OUT.npy": str(here / "out.npy")}
    given["SQL"] = "select value from facts"
    status, said = everstep(command, *(given.get(each, each) for each in line.split()))
    assert not (here / "told").exists() and {"telltale", "this"}.isdisjoint(sys.modules)
    if command in LOOKING:
        # nothing has diverged; the journal is not the one that the checkpoint names; it was stopped
        assert status == {"accept": 2, "audit": 1, "watch": 1}.get(command, 0), said
    if command in ASKING:
        assert status == 1
        named = "code that would be imported and called: telltale:Task, os:system"
        if command == "replay":
            named = f"a command that would be started: {sent / 'telltale.py'}"
        assert f"names {named}" in said
        assert "pass --trust, or set EVERSTEP_TRUST=1" in said and "changed after it was marked" in said
    if line.endswith("keep"):
        assert status == 1 and "pass --trust" in said


def test_the_guide_says_of_each_command_what_it_does() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", GUIDE.read_text(), re.MULTILINE)
    assert dict(rows).keys() == COMMANDS.keys() == {*LOOKING, *ASKING, *OWN}, "every command is tried above"
    assert {name for name, imports in rows if imports == "nothing"} == {*LOOKING}
    assert {name for name, imports in rows if "asks" in imports} == {*ASKING, "train", "sweep", "diverge"}


def test_no_file_calls_anything_by_its_tags(here: Path) -> None:
    (here / "evil.yaml").write_text(f"task: !!python/object/apply:os.system ['touch {here / 'told'}']\n")
    assert everstep("config", "evil.yaml")[0] == 2 and not (here / "told").exists()


def test_python_m_everstep_takes_no_module_from_the_run_directory_it_is_in(sent: Path) -> None:
    show = [sys.executable, "-m", "everstep", "show", "."]
    done = subprocess.run(show, cwd=sent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout and not (sent.parent.parent / "told").exists()


# ------------------------------------------------------------------------------------ whose it is
def test_ones_own_run_asks_nothing_and_says_what_it_imports(here: Path) -> None:
    status, said = everstep("eval", "runs/tiny")
    assert status == 0
    run = RunDir.open("runs/tiny", create=False).id
    assert f"note: for the run {run} is imported and called: tiny_experiment:TinyTask" in said
    assert re.search(r"from '.*/made\d+'", said)
    shutil.move("runs/tiny", "elsewhere")
    assert everstep("resume", "elsewhere", "trainer.max_epoch=2")[0] == 0


def made_anew(run: Path, facts: Any) -> None:
    shutil.rmtree(run)
    RunDir.open(run)
    (run / "journal").mkdir()


FORGED: dict[str, Any] = {
    "config": lambda run, facts: facts["config"]["optimizer"].update(lr=0.5),
    "code": lambda run, facts: facts.update(code=[str(run.parent)]),
    "no mark": lambda run, facts: facts.pop("mark"),
    "another run's": made_anew,
    "of other types": lambda run, facts: facts.update(code=7, mark="\ud800"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_record_does_not_count_as_ones_own(here: Path, forged: str) -> None:
    run = here / "runs" / "tiny"
    FORGED[forged](run, facts := recorded(run))
    record(run, facts)
    with pytest.raises(TrustError, match="does not count as yours: its"):
        open_run("runs/tiny", skip_check=True)
    assert open_run("runs/tiny", skip_check=True, trust=True).trainer is not None


def test_a_forged_checkpoint_does_not_give_the_config(here: Path) -> None:
    """Where the newest start saved nothing, its config is that of the checkpoint."""
    run, told = here / "runs" / "tiny", here / "told"
    store = Store(run, 7, print)
    checkpoint = taken_out(store, here)
    meta: Any = checkpoint.meta
    store.adopt(checkpoint, config=meta["config"] | {"services": [{"telltale:Service": {}}]})
    (here / "telltale.py").write_text(f"open({str(told)!r}, 'w').close()\n")
    with pytest.raises(TrustError, match="none of its starts has recorded this configuration"):
        open_run("runs/tiny", skip_check=True)
    assert not told.exists()


@pytest.mark.parametrize("what", ["none", "readable", "short", "link"])
def test_without_a_key_nothing_counts(here: Path, monkeypatch: Any, tmp_path: Path, what: str) -> None:
    key = trust.key_file()
    assert key is not None
    other = tmp_path / "config" / "everstep" / "key"
    other.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if what == "link":
        other.symlink_to(key)
    elif what != "none":
        other.write_text(key.read_text() if what == "readable" else "ab\n")
        other.chmod(0o644 if what == "readable" else 0o600)
    with pytest.raises(TrustError, match="this user has no key in"):
        open_run("runs/tiny", skip_check=True)
    monkeypatch.setenv(trust.TRUST_VARIABLE, "1")
    assert open_run("runs/tiny", skip_check=True).trainer is not None


def test_the_first_training_makes_a_key_of_its_user(here: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    open_config("tiny.yaml", ["trainer.max_step=1"], run_dir="runs/new", skip_check=True).train()
    key = tmp_path / "config" / "everstep" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    made = key.read_text()
    open_run("runs/new", ["trainer.max_step=2"], skip_check=True).train()
    assert key.read_text() == made
    assert key.read_text().strip() not in json.dumps(recorded(here / "runs" / "new"))


@pytest.mark.parametrize("base", ["/proc/nowhere", "a file"])
def test_a_home_that_cannot_be_written_stops_no_training(here: Path, monkeypatch: Any, base: str) -> None:
    (here / "a file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / base))
    made = open_config("tiny.yaml", ["trainer.max_step=1"], run_dir="runs/new", skip_check=True)
    assert made.train().ending.finished
    with pytest.raises(TrustError):
        open_run("runs/new", skip_check=True)
    assert open_run("runs/new", skip_check=True, trust=True).trainer is not None


# -------------------------------------------------------------------------------- where it lies
@pytest.mark.parametrize("way", ["recorded code", "package", "link", "path"])
def test_even_trusted_code_does_not_come_from_a_run_directory(here: Path, monkeypatch: Any, way: str) -> None:
    run, told = here / "runs" / "tiny", here / "told"
    (run / "evil.py").write_text(f"open({str(told)!r}, 'w').close()\n")
    name = {"package": "runs.tiny.evil:Task", "link": "beside:Task"}.get(way, "evil:Task")
    if way == "link":
        (here / "beside.py").symlink_to(run / "evil.py")
    if way == "path":
        sys.path.insert(0, str(run))
    facts = recorded(run)
    facts["config"]["task"] = {"call": name}
    record(run, facts | {"code": [str(run if way == "recorded code" else here)]})
    with pytest.raises(ConfigError, match=r"from a run directory|No module named 'evil'"):
        open_run(run, skip_check=True, trust=True)
    assert not told.exists()


def test_files_of_another_user_do_not_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(TrustError, match="does not belong to you"):
        open_run("runs/tiny", skip_check=True)


SECRET = "hunter2"
PASSWORD = f"{SECRET}%40{SECRET}"
TOKEN = f"https://{SECRET}@example.org/a.git?access_token={SECRET}"


def test_no_run_nor_database_nor_what_is_printed_holds_a_password(tmp_path, server: Server, capfd) -> None:
    """A training, a resume, a fork, a sweep, an evaluation, and an outage of the database."""
    write(tmp_path)
    for command in (("init", "-q"), ("remote", "add", "origin", TOKEN)):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    public = server.database()
    url = f"{public.replace('everstep@', f'everstep:{PASSWORD}@')}&sslpassword={SECRET}"
    away = f"postgresql://me:{PASSWORD}@/db?host={tmp_path}"
    step = "trainer.max_step={}"
    at = "services=[{{Index: {{at: '{}'}}}}, Evaluate: {{stream: valid}}]"
    said: list[str] = []

    def run(*command: str, status: int = 0, index: str = "") -> str:
        code, told, beside = cli_runs.here(*command, cwd=tmp_path, EVERSTEP_INDEX=index)
        assert code == status, beside
        said.extend((told, beside, *capfd.readouterr()))
        return told

    run("train", "tiny.yaml", step.format(1), at.format(url))
    assert "set EVERSTEP_INDEX, or pass --index" in run("resume", "runs/tiny", step.format(2))
    told = run("resume", "runs/tiny", step.format(3), "--index", url)
    assert "resuming" in told and "config.services" not in told  # another password is no other config
    run("resume", "runs/tiny", step.format(4), index=url)
    told = run("train", "tiny.yaml", step.format(5), at.format(away), f"--index={away}")
    assert "cannot be used" in told
    run("train", "tiny.yaml", "optimizer.lr=0.2", at.format(url), "--on-change=fork")
    shown = ("show runs/tiny", "show runs/tiny --json", f"show tiny --json --index {url}", "config runs/tiny")
    listed = f"runs --json --columns argv,config.services,git.remote --index {url}"
    for line in ("sync runs --index all.db", *shown, "compare runs/tiny runs/tiny-fork-1 --all", listed):
        run(*line.split())
    run("runs", "--index", away, status=1)
    run("runs", f"status={url}", "--index", url, status=2)
    run("train", "tiny.yaml", url, status=2)
    assert [text for text in said if SECRET in text] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) > 30 and tmp_path / "all.db" in files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    with closing(sqlite3.connect(tmp_path / "all.db")) as connection, connection:
        assert SECRET not in "\n".join(connection.iterdump())
    assert "***" in dump(public) and SECRET not in dump(public)
    facts = RunJournal(tmp_path / "runs" / "tiny").facts()
    assert facts["git"]["remote"] == "https://***@example.org/a.git?access_token=***"
    assert f"--index=postgresql://me:***@/db?host={tmp_path}" in facts["argv"]
    with pytest.raises(ConfigError, match="as a run has recorded it, without the password"):
        Database("postgresql://me:***@host/db")
    for text in (f"postgres:/me:{SECRET}@host/db", f"host=h password={SECRET} dbname=d"):
        with pytest.raises(ConfigError, match="is not a URL") as raised:  # and becomes no file of that name
            as_location(text)
        assert SECRET not in str(raised.value)


def dump(url: str) -> str:
    """Every row of a database."""
    with psycopg.connect(url) as connection:
        asked = f"SELECT tablename FROM pg_tables WHERE schemaname = '{SCHEMA}'"
        tables = [f'SELECT * FROM {SCHEMA}."{name}"' for (name,) in connection.execute(asked).fetchall()]
        rows = [str(connection.execute(table).fetchall()) for table in tables]
    assert len(rows) > 5
    return "\n".join(rows)
