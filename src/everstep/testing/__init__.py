"""Tools for tests of your own: a clock to set, crashes on demand, and conformance suites.

`check` tries any object and returns what it found.  Each `check_*` raises an `AssertionError` that names
the broken rule and its place.  No test framework is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.testing.backend_checks import check_backend as check_backend
    from everstep.testing.clock import ManualClock as ManualClock
    from everstep.testing.armed_hazards import armed as armed
    from everstep.testing.group_checks import check_group as check_group
    from everstep.testing.leftovers import nothing_left as nothing_left
    from everstep.testing.object_checks import Checked as Checked, check as check
    from everstep.testing.service_checks import check_service as check_service
    from everstep.testing.sink_checks import check_sink as check_sink
    from everstep.testing.state_checks import (
        check_stateful as check_stateful,
        stamps_checked as stamps_checked,
    )
    from everstep.testing.stream_checks import check_stream as check_stream

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "everstep.testing.object_checks": ("Checked", "check"),
            "everstep.testing.clock": ("ManualClock",),
            "everstep.testing.armed_hazards": ("armed",),
            "everstep.testing.backend_checks": ("check_backend",),
            "everstep.testing.group_checks": ("check_group",),
            "everstep.testing.service_checks": ("check_service",),
            "everstep.testing.sink_checks": ("check_sink",),
            "everstep.testing.state_checks": ("check_stateful", "stamps_checked"),
            "everstep.testing.stream_checks": ("check_stream",),
            "everstep.testing.leftovers": ("nothing_left",),
        },
    )
