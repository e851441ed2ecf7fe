"""Faults of an index, by what the caller can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from everstep.errors import RunIndexError

T = TypeVar("T")


class IndexBusyError(RunIndexError):
    """Another process is writing; nothing is lost, later is early enough."""


class UnwritableIndexError(RunIndexError):
    """The index cannot be written here: permissions, or the disk.  Reading may work."""


class MalformedIndexError(RunIndexError):
    """Its file was no database any more, and was set aside: the next who writes makes it again."""


class RefusedError(RunIndexError):
    """A value is too long or too large for the database; the index itself is sound."""


def again_if_malformed(work: Callable[[], T], say: Callable[[str], object]) -> T:
    """Return what `work` returns; where it finds the index malformed, say so and do the work again.

    The malformed file was set aside, so the second time the index is made anew from the journals.
    """
    try:
        return work()
    except MalformedIndexError as error:
        say(str(error))
        return work()
