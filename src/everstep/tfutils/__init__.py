"""Runs from the parameter trees of tfutils, for its users: docs/coming-from/tfutils.md.

A tree is translated into a task, streams and services for a `Trainer`.  No room below imports this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.tfutils.params_as_json import recorded_params as recorded_params
    from everstep.tfutils.test_record import intermediate_results as intermediate_results
    from everstep.tfutils.testing import test_from_params as test_from_params
    from everstep.tfutils.training import train_from_params as train_from_params

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "everstep.tfutils.params_as_json": ("recorded_params",),
            "everstep.tfutils.test_record": ("intermediate_results",),
            "everstep.tfutils.testing": ("test_from_params",),
            "everstep.tfutils.training": ("train_from_params",),
        },
    )
