"""Contracts of several processes that train together: `Group`, and the `KeyValueStore` below it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from everstep.errors import DisagreementError

LIMIT = 600.0
"""Seconds that an operation of a group waits for the other ranks, if nothing else is given."""
PIECE = 20_000
"""Number of values of all ranks that one message carries; torch's store takes 8 MiB."""


class KeyValueStore(Protocol):
    """Strings under keys that all processes of a group see.

    Each method but `block` is one short request, and threads may share a connection.  It carries one request
    at a time, so a thread that blocks needs a connection of its own, made by `clone`.  Connections are few:
    torch asks a name server for the names of both ends of each, which takes seconds where none answers.

    Every method raises `StoreLostError` when the store cannot be reached any more; `set`, which waits for no
    answer, may leave this to the request after it.
    """

    def clone(self) -> KeyValueStore:
        """Open another connection, to the same keys."""

    def below(self, prefix: str) -> KeyValueStore:
        """Return this connection with keys that all begin with this store's prefix and `prefix`."""

    def set(self, key: str, value: str) -> None:
        """Set a key, in place of an earlier value."""

    def set_all(self, keys: Sequence[str], value: str) -> None:
        """Set several keys to one value, in one request."""

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys exist."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys that exist."""

    def set_once(self, key: str, value: str) -> str:
        """Set a key that does not exist; return the value that the key has then, by whomever."""

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""

    def block(self, key: str) -> None:
        """Wait, without a limit, until the key exists."""


class DataRanks:
    """Which part of each batch every rank reads, by the number of the part: the *data rank*.

    Ranks that compute with one batch together (tensor parallelism) have the same data rank.  Each of the
    numbers 0 to `size` - 1 is that of equally many ranks.

    Args:
        of: the data rank of each rank, in the order of ranks.

    Attributes:
        size: number of parts, 1 to the number of ranks.
        shared: whether several ranks read the same part.
        in_order: whether each rank reads the part of its own number.
        first: the first rank of each part, in the order of parts.
    """

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)
        self.size = max(self.of) + 1
        self.shared = self.size < len(self.of)
        self.in_order = self.of == tuple(range(len(self.of)))
        self.first = tuple(self.of.index(part) for part in range(self.size))

    def together(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that read the same part as `rank`, which is one of them."""
        return tuple(other for other, part in enumerate(self.of) if part == self.of[rank])

    def covered_by(self, ranks: Iterable[int]) -> bool:
        """Whether a mean over these ranks is the mean over the batch: each part counts equally often."""
        counts = [0] * self.size
        for rank in ranks:
            counts[self.of[rank]] += 1
        return 0 < min(counts) == max(counts)

    def of_parts(self, values: Sequence[Any]) -> list[Any]:
        """Return the value of the first rank of each part, in the order of parts."""
        return [values[rank] for rank in self.first]

    def unlike(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the ranks whose value is not that of the first rank with their part."""
        return tuple(rank for rank, part in enumerate(self.of) if values[rank] != values[self.first[part]])


class Group:
    """The processes that train one run together; each is a *rank*, and rank 0 is the *writer*.

    This class is the group of one process: every operation returns at once, without a store or a thread.

    All ranks call the same operations in the same order, from their main threads.  Values are JSON: None,
    booleans, numbers, strings, lists, and dictionaries with string keys; they are small (the store is no
    channel for weights).  `what` names an operation in errors.

    Each operation raises, beside its own errors:

        MissingRankError: ranks did not come within `limit`; names them.
        PeerFailedError: another rank has reported a failure with `fail`.
        StoreLostError: the group's store is gone.
        DisagreementError: ranks are at different operations.

    After any of these but a difference in `agree`, the group is broken: each later operation raises.

    Args:
        rank: number of this process, 0 to `size` - 1.
        size: number of processes, 1 or more.
        store: the group's own part of the store; None in a group of one.
        limit: seconds that an operation waits for the other ranks.

    Attributes:
        data: which part of each batch every rank reads; each rank a part of its own, until a loop says else.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: KeyValueStore | None = None, limit: float = LIMIT
    ) -> None:
        self.rank, self.size, self.store, self.limit = rank, size, store, limit
        self.data = DataRanks(range(size))

    @property
    def writer(self) -> bool:
        """Whether this process owns the run directory: rank 0."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of the part of each batch that this rank reads."""
        return self.data.of[self.rank]

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on every rank."""
        return [value]

    def gather_lists(self, values: Sequence[Any], what: str) -> list[list[Any]]:
        """Return the lists of all ranks, of any length, in the order of ranks."""
        step = max(PIECE // self.size, 1)
        lists: list[list[Any]] = [[] for _ in range(self.size)]
        first = longest = 0
        while not first or first < longest:
            pieces = self.gather([len(values), values[first : first + step]], what)
            for items, (_, piece) in zip(lists, pieces, strict=True):
                items += piece
            longest = max(length for length, _ in pieces)
            first += step
        return lists

    def share(self, value: Any, what: str) -> Any:
        """Return the writer's value on every rank; what other ranks give is not used."""
        return self.gather(value if self.writer else None, what)[0]

    def barrier(self, what: str) -> None:
        """Wait until every rank is here."""
        self.gather(None, what)

    def agree(self, value: Any, what: str) -> Any:
        """Require that all ranks have the same value, and return it; else every rank raises."""
        require_same(self.gather(value, what), what)
        return value

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Report, from any thread, that a rank (None: this one) cannot go on; the first report counts.

        Every operation of the other ranks raises `PeerFailedError`.
        """

    def failure(self) -> tuple[int, str] | None:
        """Return the first failure that was reported, as rank and reason; may be called from any thread."""
        return None

    def close(self) -> None:
        """Leave the group: every rank calls this at its end, also after an error; twice does no harm."""


def require_same(values: Sequence[Any], what: str) -> None:
    """Raise `DisagreementError` if the ranks' values differ, as JSON (NaN is equal to NaN there).

    Of mappings the message has the items that differ.
    """
    alike: set[str] = set()
    if all(isinstance(value, Mapping) for value in values):
        items = [{name: json.dumps(item, sort_keys=True) for name, item in each.items()} for each in values]
        alike = {name for name, text in items[0].items() if all(each.get(name) == text for each in items)}
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        differing_part = {name: item for name, item in value.items() if name not in alike} if alike else value
        ranks.setdefault(json.dumps(differing_part, sort_keys=True), []).append(rank)
    if len(ranks) > 1:
        common = max(ranks.values(), key=len)
        differing = [rank for members in ranks.values() if members is not common for rank in members]
        groups = "; ".join(f"{named(members)}: {text}" for text, members in ranks.items())
        raise DisagreementError(
            f"{what} differs between the processes ({groups}); start all of them with the same program, "
            "data and arguments",
            ranks=differing,
        )


def named(ranks: Sequence[int]) -> str:
    """Name ranks in words: "rank 2", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
