"""Names of checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

from everstep.errors import ConfigError

_NAME = re.compile(r"(?:epoch-(\d{4,18})-)?step-(\d{8,18})")


@total_ordering
@dataclass(frozen=True)
class CheckpointName:
    """Name of a checkpoint: "step-00000120", or "epoch-0003-step-00000120" after an epoch's tail.

    Names sort from older to newer: by step; of two at one step, the checkpoint after the epoch is newer.

    Attributes:
        step: number of complete steps, from 0.
        epoch: the epoch that is over, 0 before the first epoch; None inside an epoch.
    """

    step: int
    epoch: int | None = None

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Parse what `str` returns."""
        match = _NAME.fullmatch(text)
        name = None if match is None else cls(int(match[2]), None if match[1] is None else int(match[1]))
        if name is None or str(name) != text:
            raise ConfigError(
                f"{text!r} is not a checkpoint's name; give one such as 'step-00000120' or "
                "'epoch-0003-step-00000120'"
            )
        return name

    @classmethod
    def matches(cls, text: str) -> bool:
        """Whether `text` is a checkpoint's name."""
        try:
            cls.parse(text)
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        step = f"step-{self.step:08d}"
        return step if self.epoch is None else f"epoch-{self.epoch:04d}-{step}"

    def __lt__(self, other: CheckpointName) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, int]:
        return self.step, -1 if self.epoch is None else self.epoch
