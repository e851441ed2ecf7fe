"""`Agreement`: the step at which all ranks stop for a wish of one (protocol: docs/several_processes.md)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from everstep.errors import GroupError
from everstep.group.store_group import StoreGroup, require_no_failure

JOIN = 10.0
"""Seconds for which `close` waits for the threads; they are late only where the store does not answer."""


class Agreement:
    """Finds a step at which all ranks stop, whenever one of them wishes so; two threads per rank.

    Where a main thread has made `next_due` steps, it calls `ask`; if that returns True, all ranks are at this
    step, and the main threads meet there to learn what was wished.  Before the next step the owner sets
    `next_due` to what is due by number, and only then lowers it to `next_ask`.  None may close it before all
    main threads have made their last step and met.

    Args:
        group: the group; its time limit is that of each agreement.
        steps: tells how many steps this process has completed, a number that never falls; called in a thread.
        look: makes the main thread ask after each step from now on (`next_due = 0`); called in a thread.
        lost: called with the error that ends the agreements, in the thread that hears of it first: a rank has
            failed, also this one, or the store is gone.  `ask` raises this error as well, which a main thread
            inside a collective does not call.
        leaves_alone: whether the failure of this rank is not one of all ranks, which leave together and in
            their own time; called in a thread.
    """

    def __init__(
        self,
        group: StoreGroup,
        steps: Callable[[], int],
        look: Callable[[], None],
        lost: Callable[[BaseException], None] = lambda error: None,
        leaves_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._group, self._store, self._steps, self._look = group, group.store, steps, look
        self._leaves_alone, self._lost, self._bell = leaves_alone, lost, group.bells[group.rank]
        self._bell_store = group.store.clone()  # a connection in which a request waits for the bell
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._number = 1
        """Number of the agreement that this rank's main thread reaches next."""
        self._closing = False
        self._promise: int | None = None
        """Step that the main thread does not pass without knowing the agreed one."""
        self._stop_at: int | None = None
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=[work], name=f"everstep-{name}", daemon=True)
            for name, work in {"wishes": self._carry_wishes, "agreement": self._answer_bell}.items()
        ]
        for thread in self._threads:
            thread.start()

    def wish(self) -> None:
        """Wish that all ranks stop soon; from any thread or signal handler, what is wished being set before.

        The wish is granted at a step that this rank has not passed, or where its main thread meets the
        others next for another reason.
        """
        self._wishes.put(True)  # takes no lock, so a signal handler may interrupt it

    # ------------------------------------------------------------------- in the main thread

    def ask(self, step: int) -> bool:
        """Whether all ranks stop after `step` steps; waits where this rank has promised not to pass it."""
        with self._changed:
            self._changed.wait_for(lambda: step != self._promise or self._stop_at is not None or self._error)
            if self._error is not None:
                raise self._error
            if step != self._stop_at:
                return False
            self._number += 1
            self._promise = self._stop_at = None
        self._store.set(self._bell, "")  # a wish for the next agreement may have come before this one
        return True

    def next_ask(self, step: int) -> int | None:
        """Return the step after which the main thread has to ask next; None: after none that is known."""
        with self._changed:
            if self._error is not None:
                return step + 1
            return self._promise if self._stop_at is None else self._stop_at

    def close(self) -> None:
        self._closing = True
        self._wishes.put(False)
        for thread in self._threads:
            thread.join(JOIN)

    # ---------------------------------------------------------------------- in the threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # of any kind: the main thread raises it when it asks next
            self._group.abandon(f"the ranks can no longer agree ({error})")
            self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        with self._changed:
            is_first, self._error = self._error is None, self._error or error
            self._changed.notify_all()
        self._look()
        if is_first:
            self._lost(error)

    def _carry_wishes(self) -> None:
        """Carry wishes from the queue to the store, and ring the bells."""
        sent = 0
        while self._wishes.get():
            # the number is read after the wish is taken: had the main thread reached that agreement
            # before, it would read what was wished after the wish, and grant it there
            number = self._number
            if number != sent:
                self._store.set(f"wish/{number}", "")
                self._store.set_all(self._group.bells, "")
                sent = number
        self._store.set(self._bell, "")

    def _answer_bell(self) -> None:
        """Answer each ring of this rank's bell: by an agreement, an error, or the end."""
        while True:
            self._bell_store.block(self._bell)
            self._store.delete(self._bell)  # before looking: what happens from here on rings again
            if self._closing:
                return
            require_no_failure(self._group)
            if (failure := self._group.failure()) is not None and self._leaves_alone():
                self._end_with(GroupError(failure[1]))  # of this rank, whose main thread leaves
                return
            with self._changed:
                number, is_open = self._number, self._stop_at is None
            if is_open and self._store.has([f"wish/{number}"]):
                self._find_agreement(number)

    def _find_agreement(self, number: int) -> None:
        with self._changed:  # no `ask` between the count and the promise
            self._look()  # before the count is read: the main thread asks at this count or at the next one
            self._promise = self._steps() + 1
        keys = [f"pass/{number}/{rank}" for rank in range(self._group.size)]
        self._store.set(keys[self._group.rank], str(self._promise))
        self._group.await_keys(keys, "an agreement", keys, lambda: self._closing)
        if self._closing:
            return
        agreed = max(map(int, self._store.get(keys)))
        with self._changed:
            self._stop_at = agreed
            self._changed.notify_all()
        if number > 2:  # its main threads have met since: nobody reads these keys any more
            self._store.delete(f"pass/{number - 2}/{self._group.rank}")
            if self._group.writer:
                self._store.delete(f"wish/{number - 2}")
