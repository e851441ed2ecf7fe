"""`python scenario_program.py SCENARIO FOLDER`: act in FOLDER/run, and tell of it in FOLDER/log."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoint_samples import SCENARIOS, logging_to

name, folder = sys.argv[1], Path(sys.argv[2])
SCENARIOS[name][1](folder / "run", logging_to(folder / "log"))
