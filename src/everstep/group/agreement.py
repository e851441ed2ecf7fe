"""`Agreement`: the step at which all ranks stop for a wish of one (protocol: docs/several_processes.md).

JAX's `multihost_utils.reached_preemption_sync_point` takes the maximum of all ranks' steps, too; every main
thread calls it at every step, and waits there for a lock while the maximum is found (tensorflow,
`core/distributed_runtime/preemption/preemption_sync_manager.cc`).  Here a step with nothing due costs one
comparison of integers, and a main thread waits at the step that it has promised, and nowhere else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Literal

from everstep.contracts.group import KeyValueStore
from everstep.group.store_group import StoreGroup, missing, require_no_failure
from everstep.polling import looking, wait_until

JOIN = 10.0
"""Seconds for which `close` waits for the threads; they are late only where the store does not answer."""

_Token = Literal["wish", "look", "close"]


class Agreement:
    """Finds a step at which all ranks stop, whenever one of them wishes so; two threads per rank.

    The main thread compares the number of its completed steps with a `next_due` of its owner's.  Where it is
    reached, the main thread calls `ask`; if that returns True, all ranks are at this step, and the main
    threads meet there (with `StoreGroup.gather`, to learn what was wished).  Before the next step the owner
    plans: sets `next_due` to what is due by number, and only then lowers it to `next_ask`.

    Every rank has to make an Agreement, and none may close it before all main threads have made their last
    step and met.

    Args:
        group: the group; its time limit is that of each agreement.
        steps: tells how many steps this process has completed, a number that never falls; called in a thread.
        look: makes the main thread ask after each step from now on (`next_due = 0`); called in a thread.
        failed: called in a thread, once, with the error that ends the agreements: a rank or the store is
            lost.  `ask` raises this error as well, which a main thread inside a collective does not call.
    """

    def __init__(
        self,
        group: StoreGroup,
        steps: Callable[[], int],
        look: Callable[[], None],
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._group, self._steps, self._look, self._failed = group, steps, look, failed
        self._tokens: queue.SimpleQueue[_Token] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._number = 1
        """Number of the agreement that this rank's main thread reaches next."""
        self._begun = False
        self._promise: int | None = None
        """Step that the main thread does not pass without knowing the agreed one."""
        self._agreed: int | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._threads = [
            self._thread("everstep-wishes", self._send, group.store),
            self._thread("everstep-agreement", self._watch, group.store.clone()),
        ]

    # ------------------------------------------------------------------------ in any thread

    def wish(self) -> None:
        """Wish that all ranks stop soon; from any thread or signal handler, what is wished being set before.

        The wish is granted at a step that this rank has not passed, or where its main thread meets the
        others next for another reason.
        """
        self._tokens.put("wish")  # takes no lock, so a signal handler may interrupt it

    # ------------------------------------------------------------------- in the main thread

    def ask(self, step: int) -> bool:
        """Whether all ranks stop after `step` steps; waits where this rank has promised not to pass it."""
        with self._changed:
            self._changed.wait_for(lambda: step != self._promise or self._agreed is not None or self._error)
            if self._error is not None:
                raise self._error
            if step != self._agreed:
                return False
            self._number += 1
            self._begun, self._promise, self._agreed = False, None, None
        self._tokens.put("look")  # a wish for the next agreement may have come before this one was reached
        return True

    def next_ask(self, step: int) -> int | None:
        """Return the step after which the main thread has to ask next; None: after none that is known."""
        with self._changed:
            if self._error is not None or (self._begun and self._promise is None):
                return step + 1
            return self._promise if self._agreed is None else self._agreed

    def close(self) -> None:
        self._closing = True
        self._tokens.put("close")
        for thread in self._threads:
            thread.join(JOIN)

    # ---------------------------------------------------------------------- in the threads

    def _thread(
        self, name: str, run: Callable[[KeyValueStore], None], store: KeyValueStore
    ) -> threading.Thread:
        def body() -> None:
            try:
                run(store)
            except BaseException as error:  # of any kind: the main thread raises it when it asks next
                self._end_by(error)

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _end_by(self, error: BaseException) -> None:
        self._group.abandon(f"the ranks can no longer agree ({error})")
        with self._changed:
            first, self._error = self._error is None, self._error or error
            self._changed.notify_all()
        self._look()
        if first:
            self._failed(error)

    def _send(self, store: KeyValueStore) -> None:
        """Carry wishes from the queue to the store, and ring the bells."""
        sent = 0
        while (token := self._tokens.get()) != "close":
            # the number is read after the token is taken: had the main thread reached that agreement
            # before, it would read what was wished after the wish, and grant it there
            number = self._number
            if token == "look":
                store.set(self._group.bells[self._group.rank], "")
            elif number != sent:
                store.set(f"wish/{number}", "")
                store.set_all(self._group.bells, "")
                sent = number
        store.set(self._group.bells[self._group.rank], "")

    def _watch(self, store: KeyValueStore) -> None:
        """Answer each ring of this rank's bell: by an agreement, an error, or the end."""
        bell = self._group.bells[self._group.rank]
        while True:
            store.block(bell)
            store.delete(bell)  # before looking: what happens from here on rings again
            if self._closing:
                return
            require_no_failure(self._group, store)
            with self._changed:
                number, reached = self._number, self._agreed is None
            if reached and store.has([f"wish/{number}"]):
                self._find(store, number)

    def _find(self, store: KeyValueStore, number: int) -> None:
        with self._changed:  # no `ask` between the count and the promise
            self._begun = True
            self._look()  # before the count is read: the main thread asks at this count or at the next one
            self._promise = self._steps() + 1
        keys = [f"pass/{number}/{rank}" for rank in range(self._group.size)]
        store.set(keys[self._group.rank], str(self._promise))
        self._wait(store, keys)
        if self._closing:
            return
        agreed = max(map(int, store.get(keys)))
        with self._changed:
            self._agreed = agreed
            self._changed.notify_all()
        self._forget(store, number - 2)

    def _wait(self, store: KeyValueStore, keys: list[str]) -> None:
        ready = looking(
            lambda: self._closing or store.has(keys), lambda: require_no_failure(self._group, store)
        )
        if not wait_until(ready, self._group.limit):
            require_no_failure(self._group, store)
            promised = [store.has([key]) for key in keys]
            raise missing("an agreement", self._group.limit, self._group.rank, promised)

    def _forget(self, store: KeyValueStore, number: int) -> None:
        """Delete own keys of an agreement that every rank has reached: their main threads have met since."""
        if number > 0:
            store.delete(f"pass/{number}/{self._group.rank}")
            if self._group.writer:
                store.delete(f"wish/{number}")
