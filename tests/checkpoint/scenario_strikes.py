"""Scenarios of `checkpoint_samples` under strace: recorded, and struck at one call after another."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoint_samples import SCENARIOS
from crash_verdicts import require_sound

import strace_record
from power_cut_model import Disk
from strace_log import Call

PROGRAM = str(Path(__file__).with_name("scenario_program.py"))
LOG = "log"
"""What the scenario has said; no file of everstep."""


class Strikes:
    """A scenario, recorded once, that is struck again and again."""

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
        ended = strace_record.record(self._command, acted, self.folder / "strace", environment)
        assert ended.status == 0, ended.output
        return ended.calls

    def strike(self, call: Call, way: str) -> str:
        """Strike, and require that nothing is lost; returns the role of the call that was struck."""
        for _attempt in range(20):  # the order of hashed names decides how many files are opened
            acted = self.fresh()
            ended, hit = strace_record.struck(self._command, acted, self.folder / "strace", call, way)
            if hit is not None and hit.role == call.role:
                break
        where = f"{self.scenario}: {way} at {call}, status {ended.status}"
        assert hit is not None and hit.role == call.role, f"{where}: struck {hit}"
        try:
            require_sound(self.scenario, acted, refused=ended.status > 0)
        except Exception as error:
            raise AssertionError(f"{where}: {error}\n{ended.output}") from error
        return hit.role
