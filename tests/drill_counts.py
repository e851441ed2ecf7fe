"""What a drill whose programs were all exact counts for a campaign."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

from everstep.drill import DrillReport


def count_strikes(report: DrillReport, tally: Callable[..., None]) -> None:
    """Count the starts that a signal has ended, by hazard: SIGKILL as kills, others as signals."""
    found: Counter[tuple[str, str]] = Counter()
    for result in report.results:
        for start in result.starts:
            if start.status == -signal.SIGKILL:
                found["kills", result.hazard] += 1
            elif start.status < 0 or start.status > 128:
                found["signals", result.hazard] += 1
    for (kind, hazard), n in found.items():
        ranks = "one process" if report.ranks == 1 else f"{report.ranks} ranks"
        tally(kind, n, phase=f"drill: {hazard}", door="the drill", ranks=ranks)
