"""Drill: prove the promise on your own script.  Kill it at every hazard, resume it, compare."""

from everstep.drill.campaign import HAZARDS, RANK_HAZARDS, drill
from everstep.drill.report import DrillReport, KillResult
from everstep.record import COMPONENTS, Difference

__all__ = ["COMPONENTS", "HAZARDS", "RANK_HAZARDS", "Difference", "DrillReport", "KillResult", "drill"]
