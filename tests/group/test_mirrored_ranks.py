"""A mirrored run of two real processes: the writer uploads the files of both, and brings them back."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import lines_by_rank, outputs
from rank_loops import HEAD

pytestmark = pytest.mark.campaign("long")

PROGRAM = (
    HEAD
    + """
def of_each_rank(name, epochs, mirror=None):
    saves = everstep.Checkpoints(everstep.Every(steps=3), mirror=mirror)
    loop = trained(name, epochs=epochs, services=[saves])
    say(loop.ending.digest, loop.resumed, len(list((folder / name / "checkpoints").glob("*/rank-00001.*"))))

of_each_rank("plain", 2)
of_each_rank("first", 1, folder / "mirror")
of_each_rank("second", 2, folder / "mirror")
"""
)


def test_an_empty_machine_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    for rank, printed in enumerate(outputs(PROGRAM, 2)):
        plain, first, second = (line.split() for line in lines_by_rank(printed)[rank])
        assert second[0] == plain[0] != first[0]
        assert (first[1], second[1]) == ("False", "True") and int(second[2]) == int(plain[2]) > 1
