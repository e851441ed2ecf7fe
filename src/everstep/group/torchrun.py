"""What torchrun expects of the processes that it has started; nothing here imports torch.

torchrun takes any exit status but 0 for a failure: it ends the other ranks, and starts all of them again
while --max-restarts allows it.  It prints the error file of the rank that failed first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.errors import StoreLostError
from everstep.unattended import STARTED

RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


def launched() -> bool:
    """Whether torchrun has started this process."""
    return RUN_ID in os.environ


def end_with_torchrun() -> None:
    """Let the kernel (Linux's) kill this process when torchrun dies; do nothing without torchrun.

    A rank that is left asks the store of a torchrun that is gone again and again, for up to an hour.
    """
    if not launched():
        return
    if sys.platform == "linux":  # before the look at the parent: its death in between is noticed either way
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getpid() == STARTED[0] and os.getppid() != STARTED[1]:
        raise StoreLostError("torchrun, which has started this process, is gone; start it again")


def exit_status(status: int) -> int:
    """Return the exit status of a process whose planned end has `status`: 0 under torchrun.

    torchrun would start a run again whose time is used up (3), and turns 143 into 1.  The run's journal has
    the status that was meant.
    """
    return 0 if launched() else status


def write_error_file(what: str, lines: Sequence[str]) -> None:
    """Write why this process fails where torchrun reads it; do nothing without torchrun.

    The form is that of torch.distributed.elastic's `record`, whose file is written later and wins.

    Args:
        what: type and message of the error.
        lines: its traceback.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        extra = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": what, "extraInfo": extra}}))
