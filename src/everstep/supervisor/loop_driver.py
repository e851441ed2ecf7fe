"""What the engine asks the loop around it: eight questions, with the answers of a loop without epochs."""

from __future__ import annotations

from typing import Protocol


class LoopDriver(Protocol):
    """Drives the engine's steps, and answers its questions; the engine asks nothing else of a loop."""

    def tag(self) -> str:
        """Tag at the beginning of a line, with the place of the run."""

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""

    def data_wait(self) -> float:
        """Seconds that this start has waited for batches."""

    def batches(self) -> tuple[int, int]:
        """Numbers of batches in this start: drawn by the program itself, and used in complete steps."""
        return 0, 0

    def steps_left(self) -> int | None:
        """Number of steps until the open step loop ends; None if unknown."""
        return None

    def is_partial(self) -> bool:
        """Whether the epoch that is being closed was cut short inside a pass."""
        return False

    def check_epoch(self) -> None:
        """Raise an error if an epoch did not make sense; asked at its end, before its save."""
        return None

    def finish(self) -> bool:
        """Complete what is open at a clean end; return whether the program reached the loop's own end."""
        return True
