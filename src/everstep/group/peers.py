"""`Peers`: detection of a rank whose process or machine is gone, told apart from a slow or stopped rank."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from contextlib import suppress

from everstep.errors import GroupError
from everstep.group.store_group import StoreGroup

REACH = 10.0
"""Seconds for a connection to be made."""
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
"""After a silent second the kernel asks the other machine each second, and gives up after 4 times."""

_open: weakref.WeakSet[Peers] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the copies of a forked child (a loader worker): a connection ends when its last holder does."""
    for peers in list(_open):
        peers.close_copies()


os.register_at_fork(after_in_child=_close_in_child)


class Peers:
    """Watches the next rank over a connection that is silent, and reports its loss to the group.

    The kernel closes the connection at once when a process ends, however it ends, and after 5 seconds when
    its machine answers no more.  For a process that is stopped, busy or swapped out the kernel still answers:
    so what is lost is gone, and what is only slow is never lost.  Beats in the store could not tell the two
    apart.

    The ranks watch each other in a ring: of any number that are lost at once, one at least has a living
    watcher.  All ranks make it together, and close it before the group, in any order.
    """

    def __init__(self, group: StoreGroup) -> None:
        self._group, self._next = group, (group.rank + 1) % group.size
        self._closing = False
        self._connections: list[socket.socket] = []
        """To the rank that this one watches, and to the rank that watches this one."""
        own = _own_address()
        with socket.create_server((own, 0)) as listener:
            addresses = group.gather([own, listener.getsockname()[1]], "the addresses of the ranks")
            failure = self._connect(listener, *addresses[self._next])
        failures = group.gather(failure, "the connections between the ranks")
        if any(failures):
            self.close_copies()
            message = "; ".join(filter(None, failures))
            raise GroupError(f"{message}; open the ports between the machines of the training")
        _open.add(self)
        self._thread = threading.Thread(target=self._watch, name="everstep-peers", daemon=True)
        self._thread.start()

    def _connect(self, listener: socket.socket, host: str, port: int) -> str | None:
        """Connect to the next rank, and accept the one before; return what failed, in words."""
        listener.settimeout(REACH)
        try:
            self._connections.append(watched := socket.create_connection((host, port), REACH))
            self._connections.append(listener.accept()[0])
        except OSError as error:
            return f"rank {self._group.rank} does not reach rank {self._next} at {host}:{port} ({error})"
        watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # macOS calls them otherwise
                watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        watched.settimeout(None)
        return None

    def _watch(self) -> None:
        try:
            data = self._connections[0].recv(1)
        except OSError:  # reset by a process that was killed, or its machine does not answer
            data = b""
        if not data and not self._closing:
            with suppress(GroupError):  # without the store the others know already
                self._group.fail("its process died without an error (kill -9, out of memory?)", self._next)

    def close(self) -> None:
        """Say goodbye to the rank that watches this one, and end the thread."""
        self._closing = True
        watched, watcher = self._connections
        with suppress(OSError):  # the other end is gone
            watcher.send(b"e")
        with suppress(OSError):
            watched.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._thread.join()
        self.close_copies()
        _open.discard(self)

    def close_copies(self) -> None:
        """Close this process's ends of the connections, without announcing it."""
        for connection in self._connections:
            connection.close()


def _own_address() -> str:
    """Return the address of this machine's interface that leads to the master; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))
        return str(asking.getsockname()[0])
