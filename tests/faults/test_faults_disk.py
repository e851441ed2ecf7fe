"""Faults 20 to 24, and 42: a disk that refuses, and a machine without memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults_support import STEPS, Run

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]


def refused(run: Run, hazard: str | None, *more: str, remedy: str, failures: int | None = None) -> str:
    """A start that ends well although saves fail: each is said with what to do, and training goes on."""
    said = run.ends(0, *more, hazard=hazard)
    failed = [
        line for line in said.splitlines() if "a save failed, and the previous checkpoint is intact" in line
    ]
    assert failed and (failures is None or len(failed) == failures), said
    assert all(remedy in line for line in failed), said
    assert run.last_bodies() == list(range(1, STEPS + 1)), said
    return said


@pytest.mark.campaign("long")
def test_fault_20_the_disk_is_full_for_a_while(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Three saves fail, and those after them do not; killed meanwhile, the run has the checkpoint before."""
    outage = "ENOSPC:checkpoint.write:60-62"
    said = refused(run, outage, remedy="the disk is full: free space", failures=3)
    assert said.count(f"in {run.run_dir}, where ") == said.count("bytes are free") == 3, said
    run.require_equal(undisturbed())
    killed = another("killed")
    killed.dies(f"{outage} then kill:faults.body:1")
    assert killed.names(), killed.said()
    killed.finish()
    assert killed.last_bodies()[0] > 1, killed.said()
    killed.require_equal(undisturbed())
    tally("crash points", 4, fault="20", door=door, error="ENOSPC")


@pytest.mark.campaign("long")
def test_fault_21_the_disk_is_full_and_a_neighbour_takes_what_becomes_free(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Nothing is deleted before its successor is on the disk, so there is always something to resume from."""
    greedy = ("--do", "full:8", "--do", "room:19")
    said = refused(run, None, *greedy, remedy="the disk is full: free space")
    assert "the journal can be written again" in said or "journal" not in said, said
    run.require_equal(undisturbed())
    killed = another("killed")
    killed.ends(-9, "--do", "full:8", hazard="kill:faults.body:23")
    kept = killed.names()
    assert len(kept) >= 2 and killed.bodies()[-1] == 23
    killed.require_clean()
    killed.finish()
    assert killed.last_bodies()[0] == kept[-1].step + 1
    killed.require_equal(undisturbed())
    tally("crash points", 2, fault="21", door=door, error="ENOSPC")


@pytest.mark.campaign("long", gate=1)
def test_fault_22_the_disk_of_the_metric_log_is_full(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Rows wait in memory until there is room, and this is said."""
    said = run.ends(0, hazard="ENOSPC:journal.write:3-5")
    assert "the journal cannot be written; training continues" in said, said
    assert "the journal can be written again; the rows that waited are written" in said, said
    assert run.last_bodies() == list(range(1, STEPS + 1))
    run.require_equal(undisturbed())
    never = another("never")
    said = never.ends(1, hazard="ENOSPC:journal.write:3-9999")
    assert "rows are lost: they could not be written before the run ended" in said, said
    assert "start again" in said.splitlines()[-1], said
    never.finish()
    never.require_equal(undisturbed())  # their steps were executed again
    tally("crash points", 2, fault="22", door=door, error="ENOSPC")


@pytest.mark.campaign("long")
def test_fault_23_a_failed_fsync_fails_its_save_and_is_not_tried_again(
    run: Run, undisturbed: Undisturbed, tmp_path: Path, tally: Tally, door: str
) -> None:
    """The kernel may have dropped the bytes, and would report success the second time."""
    log = tmp_path / "syncs"
    refused(run, None, "--do", f"sync:8:{log}", remedy="the device fails", failures=1)
    run.require_equal(undisturbed())
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    (failed,) = (number for what, number, _ in lines if what == "failed")
    assert failed not in [number for what, number, _ in lines if what == "synced"]
    assert sum(name.endswith("arrays.safetensors") for what, _, name in lines if what == "synced") >= 3
    tally("crash points", 1, fault="23", door=door, error="EIO")


@pytest.mark.campaign("long")
def test_fault_24_the_folder_is_read_only_or_forbidden_or_deleted(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    for error, remedy in (
        ("EROFS", "the file system is read-only: remount it"),
        ("EACCES", "it may not be written: change its permissions"),
    ):
        for place in ("open:9-11", "mkdir:7-8", "rename:7"):
            run = another(f"{error} {place}")
            refused(run, f"{error}:checkpoint.{place}", remedy=remedy)
            run.require_equal(undisturbed())
    deleted = another("deleted")
    deleted.ends(0, "--do", "delete:11:checkpoints")
    deleted.require_equal(undisturbed())
    tally("crash points", 7, fault="24", door=door, error="EROFS, EACCES")


@pytest.mark.campaign("long")
def test_fault_42_a_save_finds_no_memory(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    refused(run, None, "--do", "memory:8", remedy="there is too little memory: free some", failures=1)
    run.require_equal(undisturbed())
    # the state grows in step 8, and there is no memory for its copy until step 14
    grown = another("grown")
    scarce = ("--do", "grow:8", "--do", "scarce:8", "--do", "plenty:14")
    refused(grown, None, *scarce, remedy="there is too little memory: free some")
    grown.require_equal(undisturbed("--do", "grow:8"))
    tally("crash points", 2, fault="42", door=door, error="MemoryError")
