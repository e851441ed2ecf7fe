"""A clock that stands still until a test moves it."""

from __future__ import annotations

from everstep.errors import ConfigError


class ManualClock:
    """Callable that returns its time in seconds; a stand-in for `time.monotonic`.

    Args:
        now: seconds it starts at.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass.

        Raises:
            ConfigError: negative; a monotonic clock does not go back.  Set `now` to test one that does.
        """
        if seconds < 0:
            raise ConfigError(
                f"advance({seconds!r}): a monotonic clock does not go back; set .now to test that"
            )
        self.now += seconds
