"""Clock that stands still until a test moves it."""

from __future__ import annotations

from everstep.errors import ConfigError


class ManualClock:
    """Callable that returns its time in seconds; a stand-in for `time.monotonic`.

    Args:
        now: first time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let some seconds pass.

        Raises:
            ConfigError: `seconds` is negative; to test a clock that goes back, set `now`.
        """
        if seconds < 0:
            raise ConfigError(
                f"advance({seconds!r}): a monotonic clock does not go back; set .now to test that"
            )
        self.now += seconds
