"""The stacks of all threads of this process, as lines for a person."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType


def stacks() -> list[str]:
    """Return where each thread stands, the main thread first, in the form of a traceback.

    A thread inside C code shows the Python line that has called it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    lines: list[str] = []
    for ident, frame in found:
        lines += [f"Thread {names.get(ident, ident)!r} (most recent call last):", *_stack(frame), ""]
    return lines


def _stack(frame: FrameType) -> list[str]:
    return "".join(traceback.format_stack(frame)).splitlines()
