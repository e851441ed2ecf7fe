"""Process-level care for any loop: lock, recovery, signals, services, the step, the ending."""

from everstep.supervisor.door import Handle
from everstep.supervisor.ending import BestRecord, Ending
from everstep.supervisor.init_from import InitFrom
from everstep.supervisor.loading import Loaded, best, load
from everstep.supervisor.rolling_back import recovering
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
