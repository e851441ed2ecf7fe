"""Ledger of a stream: the batches that went into complete steps, for `everstep audit`.

A step adds a number to a list, and nothing else; the rest is done at boundaries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from everstep.contracts.data import Cursor, Share
from everstep.record import ledger_format
from everstep.record.ledger_format import LEFT_OUT, Chain, Entry, Place, link


class Ledger:
    """Accounts for the batches of one stream, pass by pass.

    Digests of parts of batches are a rank's own, so several ranks keep none.  `account` is the text for the
    state tree: the batches of the open pass and their chain.
    """

    def __init__(self, name: str, share: Share) -> None:
        self.drawn: list[int | None] = []
        """Digests of the batches that were handed out and not accounted for; None: nothing to digest."""
        self._name, self._share = name, share
        self.entries: list[Entry] = []
        self.last: tuple[int, int, int] | None = None
        """Pass, number from 1 and digest of the batch that was accounted for last, if it has one."""
        self._earlier: list[dict[str, Any]] = []
        """News of data that the program has read before it gave other data."""
        self._of: str | None = None
        """What the chains are of, "samples" or "digests"; None: not known."""
        self._data: tuple[dict[str, Any], str | None] | None = None
        """Description of the data in the last event of this start, and what the chains were of."""
        self._begin_pass(0)
        self._from: str | None = self._here()
        """Where this start continues, until its first event says so."""

    def _begin_pass(self, pass_index: int) -> None:
        self._stand_at(pass_index, 0, ledger_format.first_link(self._name, pass_index))

    def _stand_at(self, pass_index: int, place: int, chain: Chain) -> None:
        self._pass, self._place, self._chain = pass_index, place, chain
        self.entry: Entry | None = None
        self.account = self._here().partition(" ")[2]

    def _here(self) -> str:
        return str(Place(self._pass, self._place, self._chain))

    def take(self, cursor: Cursor | None) -> None:
        """Account for what the open pass has handed out; all of it is in complete steps."""
        drawn, place = self.drawn, self._place
        if cursor is None:
            return
        end = place + len(drawn) if cursor.done is None else cursor.done
        if end == place and not drawn:
            return
        # each save comes here: what was passed over is asked for only where the numbers say so
        left_out = [] if end - place == len(drawn) else cursor.passed_over()
        first = end - len(drawn) - len(left_out)
        if drawn:
            # one that was left out may be the last
            self.last = None if left_out or (last := drawn[-1]) is None else (self._pass, end, last)
        if self._chain is not None:
            chain = self._chain
            batches, of = cursor.sample_numbers(first, end), "samples"
            if batches is None and self._share.size == 1 and None not in drawn:
                of = "digests"
                batches = [digest.to_bytes(8, "little") for digest in drawn if digest is not None]
            if batches is not None and left_out:
                batches = _with(left_out, batches, range(first, end))
            if batches is not None:
                self._of = of
                for batch in batches:
                    chain = link(batch, chain)
            self._chain = None if batches is None else chain
        before, self._place = self._place, end
        self.account = f"{end} -" if self._chain is None else f"{end} {self._chain:016x}"
        if self.entry is not None and first == before:
            self.entry = self.entry._replace(
                end=end, chain=self._chain, left_out=self.entry.left_out + tuple(left_out)
            )
        else:
            # where the cursor says that it stands: an audit compares it with the entry before
            self.entries += [] if self.entry is None else [self.entry]
            self.entry = Entry(self._pass, first, end, self._chain, False, tuple(left_out))
        drawn.clear()  # the same list: the verifier adds to it

    def agrees(self, drawn: Sequence[int | None], left_out: Collection[int]) -> bool:
        """Whether batches `drawn` again from the start of the pass are the open one's, if these are known."""
        # on several ranks a chain of digests is of whole batches, read by one process before
        if self._chain is None or self._share.size > 1 or len(drawn) != self._place or None in drawn:
            return True
        chain = ledger_format.first_link(self._name, self._pass)
        for number, digest in enumerate(drawn):
            assert digest is not None
            chain = link(LEFT_OUT if number in left_out else digest.to_bytes(8, "little"), chain)
        return chain == self._chain

    def end_pass(self, cursor: Cursor | None) -> None:
        """End the account of a pass, which has come to its end or was left."""
        self.take(cursor)
        place = self._place
        entry = self.entry or Entry(self._pass, place, place, self._chain)
        self.entries.append(entry._replace(over=True))
        self._begin_pass(self._pass + 1)

    def begin_again(self) -> None:
        self.last = None
        self._begin_pass(self._pass)
        self._from = self._here()

    def load(self, account: str, pass_index: int) -> None:
        self._stand_at(*ledger_format.unpack_place(f"{pass_index} {account}"))
        self._from = self._here()

    def give_other_data(self, before: dict[str, Any]) -> None:
        """Keep the entries so far together with the description of their data: later entries have another."""
        if self.entry is not None or self.entries:
            self._earlier.append(self._event(before))

    def news(self, cursor: Cursor | None, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Account for all batches; return what the journal is to have of this stream, an event for each."""
        if self.drawn:
            self.take(cursor)
        events, self._earlier = self._earlier, []
        if self.entry is not None or self.entries:
            events.append(self._event(data))
        return events

    def _event(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.entry is not None:
            self.entries.append(self.entry)
            self.entry = None
        event: dict[str, Any] = {"entries": ";".join(map(str, self.entries))}
        self.entries.clear()
        if self._from is not None:
            event["from"], self._from = self._from, None
        if (data, self._of) != self._data:
            self._data, event["data"] = (data, self._of), data
            if self._of is not None:
                event["of"] = self._of
            if self._share.size > 1:
                event["share"] = [self._share.size, self._share.uneven]
        return event


def _with(left_out: Collection[int], batches: Sequence[Any], numbers: range) -> list[Any]:
    """Return what a chain takes of all batches, or of the others alone, and `LEFT_OUT` for the left out."""
    handed = [n for n in numbers if n not in left_out] if len(batches) < len(numbers) else numbers
    known = dict(zip(handed, batches, strict=True))
    return [LEFT_OUT if number in left_out else known[number] for number in numbers]
