"""Tools for tests of your own: a clock to set, crashes on demand, and conformance suites.

`check` tries any object and says what it found.  Each `check_*` raises `AssertionError` that says which
rule is broken and where.  They need no test framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.testing.backends import check_backend
    from everstep.testing.check import Checked, check
    from everstep.testing.clock import ManualClock
    from everstep.testing.hazards import armed
    from everstep.testing.leftovers import nothing_left
    from everstep.testing.services import check_service
    from everstep.testing.state import check_stateful
    from everstep.testing.streams import check_stream

_HOMES = {
    "Checked": "check",
    "ManualClock": "clock",
    "armed": "hazards",
    "check": "check",
    "check_backend": "backends",
    "check_service": "services",
    "check_stateful": "state",
    "check_stream": "streams",
    "nothing_left": "leftovers",
}

__all__ = [
    "Checked",
    "ManualClock",
    "armed",
    "check",
    "check_backend",
    "check_service",
    "check_stateful",
    "check_stream",
    "nothing_left",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from everstep.errors import nearest

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {nearest(name, _HOMES)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
