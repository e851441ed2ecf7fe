"""torch.profiler, for the service `Profile`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """A recording that begins at once."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """End the recording."""
        self._profile.stop()

    def export(self, path: Path) -> None:
        """Write it as a Chrome trace, after `stop`."""
        self._profile.export_chrome_trace(str(path))
