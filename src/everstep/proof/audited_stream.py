"""Audit of one stream: the entries of its ledger, checked one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from everstep.contracts.data import Share
from everstep.data.order import Plan, Sampling
from everstep.record import ledger_format
from everstep.record.ledger_format import LEFT_OUT, Chain, Entry, Place

Verdict: TypeAlias = Literal["proven", "not provable", "wrong"]

OWN = ("arrays", "loader")
"""Kinds of data whose order follows from (seed, stream, pass), so that an audit can compute it again."""
LARGEST = 1 << 26
"""Limit of the samples of a pass whose order is computed again: a record may claim any number."""


class Finding(NamedTuple):
    """What is known of a pass, or of several passes in a row of which the same is known.

    Attributes:
        stream: name of the stream.
        first, last: numbers of the passes, from 1.
        verdict: of all of them.
        found: in words.
    """

    stream: str
    first: int
    last: int
    verdict: Verdict
    found: str

    @property
    def passes(self) -> str:
        """The passes in words."""
        return f"pass {self.first}" if self.first == self.last else f"passes {self.first} to {self.last}"


class Order:
    """Order of the samples in one pass of everstep's own data, computed again."""

    def __init__(self, plan: Plan, length: int, drop_last: bool) -> None:
        self.plan, self.length, self.batches = plan, length, len(plan)
        # tried, not believed: with this each place in the pass stands for a sample of its own
        self.is_whole = bool((np.bincount(plan.order, minlength=length) == 1).all())
        self.rule = "drop_last" if drop_last else 'uneven="drop"'

    def count(self, first: int, end: int) -> int:
        """Number of samples that are used of batches `first` to `end` - 1."""
        if first >= end:
            return 0
        # only the last batch of a pass may be smaller
        return (end - first - 1) * len(self.plan.used(first)) + len(self.plan.used(end - 1))


def order_of(
    data: Mapping[str, Any], share: Share, name: str, pass_index: int, *, digests: bool
) -> Order | str:
    """Compute the order of a pass again, or say why it cannot be computed.

    Args:
        digests: whether the entries have digests: a stream of the user's may have the name of our kind.
    """
    kind = data.get("kind")
    if kind not in OWN or digests:
        return f"data of kind {str(kind)!r:.40} does not tell the numbers of its samples"
    length, batch_size, seed = data.get("length"), data.get("batch_size"), data.get("seed")
    shuffle, drop_last = bool(data.get("shuffle")), bool(data.get("drop_last"))
    if not (_is_size(length) and _is_size(batch_size) and isinstance(seed, int | None)):
        return "its description is not that of everstep's own data"
    if length > LARGEST:
        return f"the order of {length:,} samples is not computed again, as the audit is bounded"
    sampling = Sampling(str(kind), length, batch_size, shuffle, seed, drop_last, share=share)
    return Order(sampling.plan(name, pass_index, 0), length, drop_last)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


class _Pass:
    """Account of one pass, from the entries so far."""

    def __init__(self, number: int, order: Order | str) -> None:
        self.number, self.order = number, order
        self.place = 0
        self.used = 0
        """Number of samples in the batches so far, where they are known."""
        self.left_out: list[int] = []
        self.before = 0
        """Batches at the beginning for which there is no entry and no chain."""
        self.wrong: list[str] = []
        self.chain: Chain = None
        """The chain of the entries so far, as it should be; of unknown samples as it was recorded."""
        self.unknown = ""
        """Why nothing is known of the contents of the batches; "" where something is."""


class AuditedStream:
    """A stream whose entries are read in the order of the steps that stand.

    Args:
        name: the stream's name.
        quarantined: (pass, batch) of the batches that rollbacks have quarantined -> the rollback's number.

    Attributes:
        findings: what is known of the passes that are over.
    """

    def __init__(self, name: str, quarantined: Mapping[tuple[int, int], int]) -> None:
        self.name, self._quarantined = name, quarantined
        self.findings: list[Finding] = []
        self.place: Place | None = None
        """Where the entries so far end; None before the first."""
        self.goes_on: dict[int, str] = {}
        """Start -> where it continues in the data, for starts that continue where the entries end."""
        self._data: Mapping[str, Any] = {}
        self._of: str | None = None
        """What the chains are of; None: not known."""
        self._share = Share()
        self._pass: _Pass | None = None

    def event(self, told: Mapping[str, Any], start: int, *, earlier: str, chosen: bool) -> None:
        """Take what an event says of this stream.

        Args:
            start: number of the start that wrote the event.
            earlier: why entries before the first may be missing.
            chosen: whether a person has chosen other data for this start.
        """
        entries = list(ledger_format.unpack(told.get("entries")))
        place = ledger_format.unpack_place(told["from"]) if "from" in told else None
        if chosen and place is not None:
            self._begin_again(place)
        if "data" in told:
            self._describe(told)
        if place is not None:
            self._continue(place, start, earlier)
        if self.place is None and entries:
            self._begin_at(Place(entries[0].pass_index, entries[0].first, None), earlier)
        for entry in entries:
            self._add(entry, start)

    def _describe(self, told: Mapping[str, Any]) -> None:
        data, share = told["data"], told.get("share", [1, None])
        if not isinstance(data, dict) or not (isinstance(share, list) and len(share) == 2):
            raise ValueError(f"its data is {data!r:.60}")
        size, rule = share
        if not (type(size) is int and 0 < size < 1 << 20 and rule in (None, "weight", "drop", "pad")):
            raise ValueError(f"its share is {share!r:.60}")
        of = told.get("of")
        if of not in (None, "samples", "digests"):
            raise ValueError(f"its chains are of {of!r:.60}")
        now = Share(0, size, rule)
        changed = (data, of, now) != (self._data, self._of, self._share)
        self._data, self._of, self._share = data, of, now
        if changed and self._pass is not None:
            self._pass.order = self._order(self._pass.number)

    def _order(self, pass_index: int) -> Order | str:
        try:
            digests = self._of == "digests"
            return order_of(self._data, self._share, self.name, pass_index, digests=digests)
        except Exception as error:  # whatever odd values do: the run's own start would have refused them
            return f"its order cannot be computed again ({error})"

    # -------------------------------------------------------------------------- where starts continue

    def _begin_again(self, place: Place) -> None:
        """Take note of a pass that began again, over other data, as a person chose."""
        here = self.place
        if here is not None and here.batches and (place.pass_index, place.batches) == (here.pass_index, 0):
            self._close("left for other data, as a person chose")
            self.place = place

    def _continue(self, place: Place, start: int, earlier: str) -> None:
        """Compare where a start continues with where the entries so far end."""
        if self.place is None:
            self._begin_at(place, earlier)
            return
        if place == self.place:
            self.goes_on[start] = f"batch {place.batches + 1} of pass {place.pass_index + 1}"
            return
        if place[:2] == self.place[:2]:
            self._is_wrong(f"start {start} continues after other samples than those recorded before")
        self._jump(place.pass_index, place.batches, f"start {start} continues")
        self.place = place
        if self._pass is not None and self._pass.number == place.pass_index:
            self._pass.place, self._pass.chain = place.batches, place.chain

    def _begin_at(self, place: Place, earlier: str) -> None:
        """Begin with the first entry that there is."""
        if place.pass_index:
            self._found(0, place.pass_index - 1, "not provable", earlier)
        self.place = place
        found = self._open(place.pass_index)
        found.place, found.chain = place.batches, place.chain
        if place.chain is None or (place.batches and place.chain != self._replayed(found.order, place)):
            found.before, found.unknown = place.batches, earlier
        elif not isinstance(found.order, str):
            found.used = found.order.count(0, place.batches)

    def _replayed(self, order: Order | str, place: Place) -> Chain:
        """Return the chain of the first batches of a pass, computed again; None if it cannot be."""
        if isinstance(order, str) or place.batches > order.batches:
            return None
        first = ledger_format.first_link(self.name, place.pass_index)
        return ledger_format.linked(first, (order.plan.used(each) for each in range(place.batches)))

    def _open(self, pass_index: int) -> _Pass:
        self._pass = _Pass(pass_index, self._order(pass_index))
        self._pass.chain = ledger_format.first_link(self.name, pass_index)
        return self._pass

    # ---------------------------------------------------------------------------------- the entries

    def _add(self, entry: Entry, start: int) -> None:
        assert self.place is not None
        inside = all(entry.first <= each < entry.end for each in entry.left_out)
        if not (inside and entry.first <= entry.end):
            raise ValueError(f"an entry is {str(entry)!r:.60}")
        if entry[:2] != self.place[:2]:
            self._jump(entry.pass_index, entry.first, f"an entry of start {start} begins")
        if self._pass is None or self._pass.number != entry.pass_index:
            self._close("")
            self._open(entry.pass_index)
        found = self._pass
        assert found is not None
        if found.chain is not None:
            found.chain = self._checked(found, entry, start)
        found.place = entry.end
        found.left_out += entry.left_out
        self.place = Place(entry.pass_index, entry.end, entry.chain)
        if entry.over:
            self._close("")
            following = entry.pass_index + 1
            self.place = Place(following, 0, ledger_format.first_link(self.name, following))

    def _checked(self, found: _Pass, entry: Entry, start: int) -> Chain:
        """Compare an entry's chain with that of the samples that it must have; return how it continues."""
        if isinstance(found.order, str) or entry.end > found.order.batches:
            if not isinstance(found.order, str):
                found.wrong.append(
                    f"start {start} used batches up to {entry.end}, and the pass has {found.order.batches}"
                )
            elif entry.chain is None:
                found.unknown = "their contents are not digested (several ranks, or nothing to digest)"
            return entry.chain
        out, plan = frozenset(entry.left_out), found.order.plan
        batches = range(entry.first, entry.end)
        assert found.chain is not None
        out_of_it = sum(found.order.count(each, each + 1) for each in out)
        found.used += found.order.count(entry.first, entry.end) - out_of_it
        chain = ledger_format.linked(
            found.chain, (LEFT_OUT if each in out else plan.used(each) for each in batches)
        )
        if chain != entry.chain and not found.wrong:
            found.wrong.append(
                f"the chain differs in {_batches(entry.first, entry.end)} (start {start}): these are not the "
                f"samples of the pass from {self._sample(found, entry.first)} on"
            )
        return entry.chain

    def _jump(self, pass_index: int, first: int, what: str) -> None:
        """Note that batches come twice, or are missing, before a place."""
        assert self.place is not None
        here = self.place
        if self._pass is None:
            self._open(here.pass_index)
        found = self._pass
        assert found is not None
        at = f"{what} at batch {first + 1} of pass {pass_index + 1}"
        if pass_index == here.pass_index and first < here.batches:
            found.wrong.append(
                f"{_batches(first, here.batches)} were used twice ({at}); the first: "
                f"{self._sample(found, first)}"
            )
        elif pass_index == here.pass_index and first > here.batches:
            found.wrong.append(
                f"{_batches(here.batches, first)} are missing ({at}); the first: "
                f"{self._sample(found, here.batches)}"
            )
        elif pass_index != here.pass_index:
            found.wrong.append(
                f"from batch {here.batches + 1} on nothing follows ({at}); the first: "
                f"{self._sample(found, here.batches)}"
            )
            self._close("")
            if pass_index > here.pass_index + 1:
                self._found(here.pass_index + 1, pass_index - 1, "wrong", "no entry of it is left")
            self._open(pass_index)
            if first:
                self._is_wrong(f"{_batches(0, first)} are missing; the first: {self._sample(self._pass, 0)}")

    def _sample(self, found: _Pass | None, batch: int) -> str:
        """Name the first sample of a batch, where it is known."""
        if found is None or isinstance(found.order, str) or not 0 <= batch < found.order.batches:
            return f"batch {batch + 1}"
        return f"sample {int(found.order.plan.used(batch)[0])}"

    def _is_wrong(self, what: str) -> None:
        assert self.place is not None
        found = self._pass or self._open(self.place.pass_index)
        found.wrong.append(what)

    # ---------------------------------------------------------------------------------- the findings

    def end(self) -> None:
        """End the audit: the pass that is open has found its end in the record."""
        self._close("so far")

    def _close(self, how: str) -> None:
        """Note what is known of the open pass; `how`: why it is not whole, where that is no choice."""
        found, self._pass = self._pass, None
        if found is None or (how == "so far" and not (found.place or found.wrong)):
            return
        number = found.number
        if found.wrong:
            self._found(number, number, "wrong", "; ".join(found.wrong))
        elif isinstance(found.order, str):
            told = f"{found.place:,} batches, each once"
            if found.before:
                told = f"batches {found.before + 1} to {found.place}, each once"
            why = found.unknown or f"by one chain of their digests; {found.order}"
            self._found(number, number, "not provable", " ".join(filter(None, [how, f"{told}, {why}"])))
        else:
            self._found(number, number, *self._samples(found, found.order, how))

    def _samples(self, found: _Pass, order: Order, how: str) -> tuple[Verdict, str]:
        """Say what is known of a pass whose samples are known."""
        if not order.is_whole:
            return "wrong", "its order does not have each sample once"
        if found.unknown:
            what = f"batches {found.before + 1} to {found.place} of {order.batches}, each once"
            return "not provable", f"{what}; {found.unknown}"
        out = f"; left out: {', '.join(self._why_out(found))}" if found.left_out else ""
        batches, used = found.place - len(found.left_out), f"{found.used:,} of {order.length:,} samples"
        if found.place < order.batches:
            what = how or "left early"
            return "proven", f"{what}: {used}, each once, in {batches:,} of {order.batches:,} batches{out}"
        if found.used == order.length:
            used = f"each sample of {order.length:,}"
        else:
            used += ", each"
        fewer = order.length - found.used - sum(order.count(each, each + 1) for each in found.left_out)
        rule = f", {fewer:,} left out by {order.rule}" if fewer else ""
        return "proven", f"{used} exactly once, in {batches:,} batches{rule}{out}"

    def _why_out(self, found: _Pass) -> Iterator[str]:
        for batch in found.left_out[:8]:
            rollback = self._quarantined.get((found.number, batch))
            why = "by everstep.data.checked" if rollback is None else f"rollback {rollback}"
            yield f"batch {batch + 1} ({why})"
        if len(found.left_out) > 8:
            yield f"{len(found.left_out) - 8} more"

    def _found(self, first: int, last: int, verdict: Verdict, words: str) -> None:
        """Note a finding, together with the passes before of which the same is known."""
        before = self.findings[-1] if self.findings else None
        if before is not None and (before.last, before.verdict, before.found) == (first, verdict, words):
            self.findings[-1] = before._replace(last=last + 1)
        else:
            self.findings.append(Finding(self.name, first + 1, last + 1, verdict, words))


def _batches(first: int, end: int) -> str:
    return f"batch {first + 1}" if end == first + 1 else f"batches {first + 1} to {end}"
