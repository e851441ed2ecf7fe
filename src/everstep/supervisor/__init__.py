"""The engine under every loop: lock, recovery, signals, services, the step, the ending.

`Supervisor` (supervisor.py) and every other `Door` (door.py) hold an `Engine` (engine.py), which is driven
by a `LoopDriver` (settings.py).  In the order of a run come settings.py, opening/ and streams/.  At each
boundary boundaries.py, board.py (the services) and saving/ are at work, at the end leaving/.  What happens
to a batch, a save, a position: "Five ways through the code" in docs/design.md.
"""

from everstep.supervisor.door import Handle
from everstep.supervisor.leaving.exit import BestRecord, Ending
from everstep.supervisor.leaving.undoing import recovering
from everstep.supervisor.opening.init_from import InitFrom, Loaded, best, load
from everstep.supervisor.supervisor import Supervisor

__all__ = ["BestRecord", "Ending", "Handle", "InitFrom", "Loaded", "Supervisor", "best", "load", "recovering"]
