"""What torchrun expects of the processes that it has started; nothing here imports torch.

torchrun takes any exit status but 0 for a failure: it ends the other ranks, and starts all of them again
while --max-restarts allows it.  It prints the error file of the rank that failed first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def exit_status(status: int) -> int:
    """Return the exit status of a process whose planned end has `status`: 0 under torchrun.

    torchrun would start a run again whose time is used up (3), and turns 143 into 1.  The run's journal has
    the status that was meant.
    """
    return 0 if RUN_ID in os.environ else status


def write_error_file(what: str, lines: Sequence[str]) -> None:
    """Write why this process fails where torchrun reads it; do nothing without torchrun.

    The form is that of torch.distributed.elastic's `record`, whose file is written later and wins.

    Args:
        what: type and message of the error.
        lines: its traceback.

    Raises:
        OSError: the file cannot be written.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        extra = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": what, "extraInfo": extra}}))
