"""Drill: prove the promise on your own script.  Kill it at every hazard, resume it, compare."""

from everstep.drill.campaign import drill
from everstep.drill.divergence import COMPONENTS, Divergence
from everstep.drill.hazards import HAZARDS
from everstep.drill.report import DrillReport, Ordeal, StartSummary

__all__ = ["COMPONENTS", "HAZARDS", "Divergence", "DrillReport", "Ordeal", "StartSummary", "drill"]
