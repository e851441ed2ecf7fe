"""Tools for tests of your own: a clock to set, crashes on demand, and conformance suites.

`check` tries any object and returns what it found.  Each `check_*` raises an `AssertionError` that names
the broken rule and its place.  No test framework is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.testing.checks import Checked as Checked, check as check, check_service as check_service
    from everstep.testing.checks import check_sink as check_sink, check_stream as check_stream
    from everstep.testing.tools import ManualClock as ManualClock, armed as armed
    from everstep.testing.tools import nothing_left as nothing_left

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__)
