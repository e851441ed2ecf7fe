"""Data that can be resumed anywhere: streams, and the adapters that make them of what users have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from everstep.data.adapt import as_stream
from everstep.data.arrays import arrays
from everstep.data.checked import checked
from everstep.data.iterables import replay
from everstep.data.prefetch import prefetch

if TYPE_CHECKING:
    from everstep.backends.torch.loader import loader

__all__ = ["arrays", "as_stream", "checked", "loader", "prefetch", "replay"]


def __getattr__(name: str) -> Any:
    # loader needs torch, which only those pay for who use it.
    if name == "loader":
        return importlib.import_module("everstep.backends.torch.loader").loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
