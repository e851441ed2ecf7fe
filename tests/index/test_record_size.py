"""A record has the values of each step and no large ones: state, pictures and files lie beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from index_runs import index_rows, journal_rows

import everstep
from everstep.index.database import Database
from everstep.index.shipping import sync
from everstep.record import RunJournal
from everstep.services import Image, TensorBoard

LARGEST = 100_000
"""Most bytes of the record of 1,000 steps, two metrics each."""


def test_large_values_lie_beside_a_small_record(tmp_path: Path) -> None:
    draws, run = np.random.default_rng(1), tmp_path / "run"
    weights = draws.standard_normal(500_000)
    loop = everstep.TrainLoop(
        run,
        state={"weights": weights},
        max_epoch=4,
        seed=1,
        services=[everstep.Checkpoints(everstep.Every(steps=250)), TensorBoard()],
    )
    with loop:
        for epoch in loop.iter_epochs():
            for step, _ in loop.iter_steps(range(250)):
                loop.collect_metrics(loss=float(draws.standard_normal()))
                if step % 10 == 0:
                    loop.collect_metrics(norm=float(step))
            loop.collect_metrics(valid_loss=1 / epoch)
            loop.add_summary({"seen": Image(draws.random((256, 256, 3)))})
    journal = RunJournal(run)
    assert [len(journal.series(name, phase)[0]) for name, phase in ROWS] == [1000, 100, 4]
    assert journal.series("loss", "step")[0][-1] == 1000, "the rows of the tail are there, too"
    beside = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    record = [*(run / "journal").glob("*.evj"), run / "run.json"]
    assert sum(path.stat().st_size for path in record) < LARGEST < 4_000_000 < beside
    database = Database(tmp_path / "index.db")
    sync(database, [run])
    assert index_rows(database, "run") == journal_rows(run)
    with database.read() as connection:
        of_run = connection.exec_driver_sql("SELECT sum(length(packed)) FROM blocks").scalar_one()
    assert of_run < LARGEST


ROWS = (("loss", "step"), ("norm", "step"), ("valid_loss", "tail"))
