"""What reaches a terminal, a pipe that closes, and a shell that completes a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import everstep

from everstep.record import Block, Journal, RunDir

EVIL = "\x1b[2J\x1b]0;owned\x07good\u202efinished\x9b31m\r\nb-000000  finished"


@pytest.fixture
def here(tmp_path: Path) -> Path:
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


def clean(text: str) -> bool:
    return not any(each in text for each in ("\x1b", "\x9b", "\x07", "\u202e", "\r"))


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize(
    "command",
    [
        ("runs", "--columns", "name,status,reason,path,host"),
        ("show", "runs/many0"),
        ("compare", "runs/many0", "runs/many1"),
        ("tag", "runs/many0", "seen"),
        ("tag", "runs/many0", "\x1b[2J"),
        ("show", "runs/none\x1b[2J"),
        ("runs", "no\x1bsuch<1"),
    ],
)
def test_no_control_character_of_a_run_reaches_the_terminal(here: Path, command: tuple[str, ...]) -> None:
    status = 2 if "none" in command[1] or "such" in command[1] or "\x1b" in command[-1] else 0
    out, err = everstep(*command, cwd=here, status=status)
    assert clean(out + err)
    if command[0] == "runs" and status == 0:
        assert len(out.splitlines()) == 1 + 4
    assert command[0] != "show" or status or r"\x1b[2J" in out


@pytest.mark.campaign("long")
def test_a_reader_that_has_seen_enough_ends_a_listing_well(here: Path) -> None:
    for command in ("runs", "runs --json", "show runs/many0", "checkpoints runs/many0"):
        line = f"{sys.executable} -m everstep {command} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=here, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_a_listing_that_cannot_be_made_is_exit_status_1(here: Path) -> None:
    nobody = "postgresql://me@/db?host=" + str(here / "nowhere")
    out, err = everstep("runs", "--json", cwd=here, status=1, EVERSTEP_INDEX=nobody)
    assert not out and "cannot be used" in err
    (here / "runs" / "everstep.db").write_bytes(b"no database" * 1000)
    out, err = everstep("runs", "--json", cwd=here, status=1)
    assert not out and "malformed" in err and "delete it" in err
    (here / "runs" / "everstep.db").unlink()
    assert len(json.loads(everstep("runs", "--json", cwd=here)[0])) == 4
