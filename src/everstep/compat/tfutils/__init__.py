"""tfutils' door: a tree of parameters is translated into a task, streams and services for a `Trainer`.

No room below imports this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.compat.tfutils.params import recorded_params as recorded_params
    from everstep.compat.tfutils.runs import (
        intermediate_results as intermediate_results,
    )
    from everstep.compat.tfutils.runs import (
        test_from_params as test_from_params,
    )
    from everstep.compat.tfutils.runs import (
        train_from_params as train_from_params,
    )

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__)
