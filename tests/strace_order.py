"""What strace's record must show of a process that saves: an order of calls that no power cut can spoil."""

from __future__ import annotations

import re
from collections.abc import Iterable

from strace_log import Call, role

COVERED = {
    "open": {"create"},
    "write": {"write"},
    "fsync": {"fsync"},
    "fsync_folder": {"fsync"},
    "rename": {"rename", "link"},
    "mkdir": {"mkdir"},
    "link": {"link"},
    "unlink": {"unlink"},
    "rmtree": {"unlink", "rmdir"},
    "truncate": {"truncate"},
    # one operation each, of several calls
    "create": {"mkdir", "unlink", "create", "write", "map"},
    "log": {"mkdir", "create", "write"},
}
"""Classes of calls that a hazard of this last name announces."""

WITHOUT_FSYNC = {
    # a power cut costs the comparison, no step
    r"journal/segment-N(-rank-N)?\.trail": "the trail is never the truth",
}
"""Names that are given without an fsync, and why."""


def unannounced(calls: Iterable[Call]) -> set[str]:
    """The roles of calls before which no hazard of their class stands."""
    return {
        call.role
        for call in calls
        if not call.failed
        and call.kind != "open"
        and call.kind not in COVERED.get(call.hazard.rpartition(".")[2], ())
    }


def _matches(roles: Iterable[str], path: str) -> bool:
    return any(re.fullmatch(rf"(.*/)?{pattern}", path) for pattern in roles)


class Order:
    """Follows a record; each fault of the order is an AssertionError.

    A file has its final name only after an fsync of its bytes and of the folders below that name.  The name
    is durable, by an fsync of its folder, before its thread changes anything else, and before anything is
    deleted.

    Attributes:
        committed: the roles of the names that were given in this way.
    """

    def __init__(self) -> None:
        self._dirty: dict[str, Call] = {}
        """Files with bytes, and folders with names, that are not durable."""
        self._open: dict[str, tuple[str, Call]] = {}
        """Thread -> the folder that it must sync next, and why."""
        self.committed: set[str] = set()

    def follow(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if not call.failed:
                self._follow(call)
        assert not self._open, f"never durable: {[str(why) for _, why in self._open.values()]}"

    def _follow(self, call: Call) -> None:
        due, why = self._open.get(call.thread, ("", call))
        if call.kind == "fsync":
            self._dirty.pop(call.path, None)
            if due == call.path:
                del self._open[call.thread]
            return
        # the first name of a file that has a second one
        tidying = call.kind == "unlink" and _is_temporary(call.path)
        assert not due or tidying, f"{why} is not durable, and then comes {call}"
        if call.kind in ("write", "truncate", "create", "map"):
            self._dirty[call.path] = call
        if call.kind in ("create", "mkdir", "unlink", "rmdir", "rename"):
            self._dirty[_folder(call.path)] = call
        if call.kind in ("rename", "link"):
            self._give(call)
        elif call.kind in ("unlink", "rmdir") and not _matches(WITHOUT_FSYNC, role(call.path)):
            self._delete(call)

    def _give(self, call: Call) -> None:
        name = call.role.partition(" -> ")[2]
        without = _matches(WITHOUT_FSYNC, name)
        for path in [path for path in self._dirty if _is_in(path, call.path)]:
            before = self._dirty.pop(path)
            assert without or call.kind == "link", f"{call}, and {path} was not synced since: {before}"
            assert without or path == call.path, f"{call}, and {path} was not synced since: {before}"
        self._dirty[_folder(call.target)] = call
        if without or (call.kind == "link" and _is_temporary(call.target)):
            return
        if _is_temporary(call.target):
            # what is to be deleted: nothing in it may go before its old name has gone for certain
            self._open[call.thread] = (_folder(call.target), call)
        elif not _is_temporary(_folder(call.target)):
            self._open[call.thread] = (_folder(call.target), call)
            self.committed.add(name)

    def _delete(self, call: Call) -> None:
        waiting = [str(why) for thread, (_, why) in self._open.items() if thread != call.thread]
        assert not waiting, f"{call}, and these names are not durable: {waiting}"


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."


def _is_in(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


def _is_temporary(path: str) -> bool:
    return any(part.startswith(".tmp-") for part in path.split("/"))
