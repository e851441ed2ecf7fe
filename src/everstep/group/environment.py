"""`find_group`: the group that this process is part of; and what torchrun, which has started it, expects.

torchrun takes any exit status but 0 for a failure: it ends the other ranks, and starts all of them again
while --max-restarts allows it.  It prints the error file of the rank that failed first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep import backends
from everstep.arguments import number
from everstep.contracts.group import LIMIT, Group
from everstep.errors import ConfigError, StoreLostError
from everstep.group.store_group import StoreGroup
from everstep.redaction import redacted
from everstep.unattended import STARTED

_STORE = "everstep.backends.torch.parallel"
LIMIT_VARIABLE = "EVERSTEP_GROUP_LIMIT"
RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


def find_group() -> Group:
    """Join the group that this process is part of; all its ranks have to do so.

    A process group that the program has initialised counts first, then the variables of a launcher
    (WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them).  With neither, or in a group of one,
    this process is the group, and nothing is imported.  EVERSTEP_GROUP_LIMIT has the seconds to wait for the
    other ranks, here and in the operations of the group; else 600.
    """
    is_launched = os.environ.get("WORLD_SIZE", "1") != "1"
    if not is_launched and all(backend.processes() == 1 for backend in backends.active()):
        return Group()
    # torch's is the only store so far; its room is named by a string, since only importlib may load a backend
    limit = _limit()
    end_with_torchrun()
    rank, size, store = importlib.import_module(_STORE).connect(limit)
    return StoreGroup(rank, size, store, limit)


def group_size() -> int:
    """Number of processes that train together, as far as this one knows without joining them."""
    known = max((backend.processes() for backend in backends.active()), default=1)
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if known == 1 and value.isdecimal() else known


def _limit() -> float:
    value = os.environ.get(LIMIT_VARIABLE, str(LIMIT))
    try:
        return float(number(LIMIT_VARIABLE, float(value)))
    except ValueError:  # a ConfigError, too
        raise ConfigError(f"{LIMIT_VARIABLE}={value!r}: give a positive number of seconds") from None


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
    """Write an error and its traceback, without credentials, for torchrun; do nothing without torchrun.

    The form is that of torch.distributed.elastic's `record`, whose file is written later and wins.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        extra = {"py_callstack": "\n".join(redacted(lines)), "timestamp": str(int(time.time()))}
        try:
            Path(path).write_text(json.dumps({"message": {"message": redacted(what), "extraInfo": extra}}))
        except OSError as error:
            print(f"torchrun's error file could not be written ({error})", file=sys.stderr)
