"""Process-level care for any loop: lock, recovery, signals, services, the step, the ending."""

from everstep.supervisor.door import Handle
from everstep.supervisor.leaving.ending import BestRecord, Ending
from everstep.supervisor.leaving.rollbacks import recovering
from everstep.supervisor.opening.init_from import InitFrom
from everstep.supervisor.opening.load_objects import Loaded, best, load
from everstep.supervisor.supervisor import Supervisor

__all__ = [
    "BestRecord",
    "Ending",
    "Handle",
    "InitFrom",
    "Loaded",
    "Supervisor",
    "best",
    "load",
    "recovering",
]
