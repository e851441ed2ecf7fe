"""What the engine asks the loop around it: eight questions, with the answers of a loop without epochs."""

from __future__ import annotations

from typing import Protocol


class Questions(Protocol):
    """Asked by the engine, answered by whoever calls its steps; nothing else goes from engine to loop."""

    def tag(self) -> str:
        """The beginning of a line that says where the run stands."""

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""

    def data_wait(self) -> float:
        """Seconds that this start has waited for batches."""

    def batches(self) -> tuple[int, int]:
        """Batches that the program has drawn by itself in this start, and those of complete steps."""
        return 0, 0

    def steps_left(self) -> int | None:
        """Steps until the open step loop ends by itself; None where that is not known."""
        return None

    def is_partial(self) -> bool:
        """Whether the epoch that is being closed was cut short inside a pass."""
        return False

    def check_epoch(self) -> None:
        """Raise if what an epoch did makes no sense; asked at its end, before it is saved."""
        return None

    def finish(self) -> bool:
        """Complete what is open at a clean end; whether the program went on to the loop's own end."""
        return True
