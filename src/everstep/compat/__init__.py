"""Doors by the names and arguments of older systems, translated into everstep's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.compat import tfutils as tfutils

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__)
