"""Scenarios of `checkpoint_samples`, recorded by strace."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoint_samples import SCENARIOS

from power_cut_model import Disk
from strace_record import Call, record

PROGRAM = str(Path(__file__).with_name("scenario_program.py"))
LOG = "log"
"""What the scenario has said; no file of everstep."""


class Strikes:
    """A scenario that can be recorded."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.folder, self.scenario = folder, scenario
        self._command = [PROGRAM, scenario, str(folder / "acted")]

    def fresh(self) -> Path:
        acted = self.folder / "acted"
        shutil.rmtree(acted, ignore_errors=True)
        (acted / "run").mkdir(parents=True)
        SCENARIOS[self.scenario][0](acted / "run")
        return acted

    def record(self, **environment: str) -> list[Call]:
        """The calls of everstep; `self.disk` is the disk before them."""
        acted = self.fresh()
        self.disk = Disk(acted)
        return record(self._command, acted, self.folder / "strace", **environment)
