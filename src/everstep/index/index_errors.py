"""Errors of an index, one class per remedy of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from everstep.errors import RunIndexError

T = TypeVar("T")


class IndexBusyError(RunIndexError):
    """Another process is writing; nothing is lost, and a later try is early enough."""


class UnwritableIndexError(RunIndexError):
    """The index cannot be written here, for its permissions or the disk; reading may work."""


class MalformedIndexError(RunIndexError):
    """The file is damaged and was set aside; the next writer makes it again."""


class RefusedError(RunIndexError):
    """A value is too long or too large for the database; the index itself is sound."""


def again_if_malformed(work: Callable[[], T], say: Callable[[str], object]) -> T:
    """Return what `work` returns; if it finds the index malformed, print that and do the work again.

    The malformed file was set aside, so that the second try makes the index again from the journals.
    """
    try:
        return work()
    except MalformedIndexError as error:
        say(str(error))
        return work()
