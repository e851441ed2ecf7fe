"""The transformer learns, and a killed run of it ends as the one that was not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer.py"


def command(run: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), "--small", "--run", str(run)]


def finish(run: Path) -> str:
    return subprocess.run(command(run), capture_output=True, text=True, timeout=120, check=True).stdout


def kill_after(run: Path, checkpoint: str) -> None:
    """SIGKILL once the checkpoint is there."""
    with subprocess.Popen(command(run), stdout=subprocess.DEVNULL) as victim:
        while victim.poll() is None and not (run / "checkpoints" / checkpoint).exists():
            time.sleep(0.001)
        victim.kill()


def test_a_run_killed_twice_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole")
    _, losses = RunJournal(tmp_path / "whole").series("valid_loss", "tail")
    assert losses == sorted(losses, reverse=True) and losses[-1] < 4 < losses[0]
    assert "\ndef " in whole
    kill_after(tmp_path / "killed", "step-00000025")  # inside an accumulation, and an epoch
    kill_after(tmp_path / "killed", "step-00000150")
    killed = finish(tmp_path / "killed")
    assert "resuming epoch" in killed
    assert compare_runs(tmp_path / "whole", tmp_path / "killed") == []
    assert killed[killed.index("\ndef ") :] == whole[whole.index("\ndef ") :]
    files = [tmp_path / name / "logs" / "metrics.jsonl" for name in ("whole", "killed")]
    untimed = [[line for line in f.read_text().splitlines() if "_time" not in line] for f in files]
    assert untimed[0] == untimed[1]
