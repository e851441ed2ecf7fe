"""A save, seen at each of its operations on the disk: what is named is there, and nothing goes too early."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import everstep
from everstep import hazard
from everstep.checkpoint import Store
from tiny_runs import Tiny

EPOCHS = 4


def seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Train with best weights and one kept checkpoint; (operation, checkpoints before it) of the writer."""
    found: list[tuple[str, list[str]]] = []

    def look(operation: str) -> None:
        if threading.current_thread().name == "everstep-writer":
            store = Store(run_dir)
            found.append((operation, [str(name) for name in store.names()]))
            for facts in store.facts():
                for metric, names in facts.kept.items():
                    lost = [name for name in names if not (store.best_folder(metric) / name).exists()]
                    assert not lost, f"before {operation}: {facts.name} names {lost}, which is not there"

    monkeypatch.setattr(hazard, "_action", look)
    services = [everstep.Best("valid_loss"), everstep.Checkpoints(everstep.Every(epochs=1), keep_last=1)]
    Tiny(run_dir, services=services, max_epoch=EPOCHS).train(
        tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
    )
    return found


def test_rows_then_the_checkpoint_then_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(tmp_path, monkeypatch)
    names = [f"epoch-{epoch:04d}-step-{4 * epoch:08d}" for epoch in range(EPOCHS + 1)]
    came = [next(at for at, (_, there) in enumerate(found) if name in there) for name in names]
    for before, name, start, end in zip(names, names[1:], came, came[1:], strict=False):
        operations = [operation for operation, _ in found[start:end]]
        assert "journal.fsync" in operations, f"{name} is there before its rows are durable"
        assert before in found[end][1], f"{before} went before {name} was there"
    assert [str(name) for name in Store(tmp_path).names()] == names[-1:]
