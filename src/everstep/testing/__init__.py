"""Tools for tests of your own: a clock to set, crashes on demand, and conformance suites.

`check` tries any object and returns what it found.  Each `check_*` raises an `AssertionError` that names
the broken rule and its place.  No test framework is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.testing.backends import check_backend as check_backend
    from everstep.testing.clock import ManualClock as ManualClock
    from everstep.testing.hazards import armed as armed
    from everstep.testing.leftovers import nothing_left as nothing_left
    from everstep.testing.objects import Checked as Checked, check as check
    from everstep.testing.services import check_service as check_service
    from everstep.testing.state import check_stateful as check_stateful
    from everstep.testing.streams import check_stream as check_stream

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "everstep.testing.objects": ("Checked", "check"),
            "everstep.testing.clock": ("ManualClock",),
            "everstep.testing.hazards": ("armed",),
            "everstep.testing.backends": ("check_backend",),
            "everstep.testing.services": ("check_service",),
            "everstep.testing.state": ("check_stateful",),
            "everstep.testing.streams": ("check_stream",),
            "everstep.testing.leftovers": ("nothing_left",),
        },
    )
