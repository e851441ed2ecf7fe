"""A start is killed at each operation of its mirror: an empty machine ends in the run that nobody killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.campaign("machine"), pytest.mark.timeout(1800)]

VICTIM = Path(__file__).with_name("mirror_victim.py")
WRITING = ("open", "write", "fsync", "rename", "fsync_folder", "mkdir", "unlink")
UPLOADING = (*WRITING, "list", "read", "contents", "put", "verify", "delete")
POINTS = {
    "uploading": {f"mirror.{each}" for each in UPLOADING},
    "restoring": {f"mirror.{each}" for each in (*WRITING, "list", "read", "fetch")}
    | {f"checkpoint.{each}" for each in WRITING},
}
SCENARIOS = tuple(POINTS)
AT_MOST = {"uploading": 3, "restoring": 2}


def campaign(folder: Path, mirrors: str, scenario: str, at_most: int) -> list[str]:
    """Points at which the starts were killed; every run ended right."""
    plan = json.dumps({"mirrors": mirrors, "scenario": scenario, "at_most": at_most})
    command = [sys.executable, str(VICTIM), str(folder), plan]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    wrong, specs, killed = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(wrong)
    assert killed > 0.8 * len(specs)
    return [spec.split(":")[1] for spec in specs]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_each_operation_on_a_folder(tmp_path: Path, scenario: str) -> None:
    points = set(campaign(tmp_path, str(tmp_path / "mirror-{n}"), scenario, AT_MOST[scenario]))
    assert points == POINTS[scenario]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_each_operation_on_s3(tmp_path: Path, bucket: str, scenario: str) -> None:
    points = set(campaign(tmp_path, bucket + "/run-{n}", scenario, AT_MOST[scenario]))
    # what only a mirror in a folder does; what is brought is written to a local folder anyhow
    files = {f"mirror.{each}" for each in WRITING} if scenario == "uploading" else set()
    assert points == POINTS[scenario] - files
