"""What is done with runs that are there: find, show, compare, audit them, execute their steps again.

`everstep.query` searches many of them.
"""

from __future__ import annotations

from everstep.proof.audit import audit
from everstep.record import Evaluation, evaluations
from everstep.replaying import replay
from everstep.supervisor import best
from everstep.views.describe_run import compare, show

__all__ = ["Evaluation", "audit", "best", "compare", "evaluations", "replay", "show"]
