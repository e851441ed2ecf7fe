"""No test depends on what the product leaves out where it takes too many seconds."""

from waiting import patient  # noqa: F401
