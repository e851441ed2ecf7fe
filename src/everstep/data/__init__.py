"""Data that can be resumed anywhere: streams, and the adapters that make streams of a user's data.

A stream knows its order and its positions, and nothing of a run: so it can be read and tested without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.contracts.data import Cursor, Stream
from everstep.data.adapt import as_stream, replay, stateful
from everstep.data.arrays import arrays
from everstep.data.checked import checked
from everstep.data.prefetch import prefetch
from everstep.data.ring_buffer import RingBuffer
from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.backends.torch.keyed_loader import loader as loader
else:
    # Loaded late, because `loader` imports torch: other users do not pay for that.
    __getattr__, __dir__, _ = exports(__name__)

__all__ = [
    "Cursor",
    "RingBuffer",
    "Stream",
    "arrays",
    "as_stream",
    "checked",
    "loader",
    "prefetch",
    "replay",
    "stateful",
]
