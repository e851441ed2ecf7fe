"""What the threads of all ranks that write one checkpoint tell each other, through the group's store.

Save number n (1, 2 ... on every rank alike) has these keys below "saves/n/":

    folder      by the writer: the name of the new folder; or the error by which the save fails
    part/R      by rank R: size and checksum of the file that it wrote there, digests; or its error
    boxes/R/H   by rank R, whose part/R names the hash H: names, offsets, shapes and places of its pieces;
                told once and kept, as they rarely change
    verdict     by whoever is first: "commit" by the writer, when everything but the rename is done; or the
                error by which the writer, or a rank that has waited for too long, ends the save
    done        by the writer: what was committed; or the error by which the save fails

So every save ends in the same way on all ranks.  No collective is used, and no main thread takes part.

A save that fails on the writer ends there at once, and so may several in a row, while a slow rank has still
to read how the first one ended.  So keys of earlier saves are deleted when their readers are known to have
left those saves: the writer's when all ranks have reported their parts of a later one, a rank's when the
writer has named the folder of a later one.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import xxhash

from everstep.checkpoint.array_file import Record
from everstep.checkpoint.pieces import RankPiece
from everstep.checkpoint.writer import disk_failed
from everstep.contracts.group import Group, named
from everstep.durable import remedy
from everstep.errors import (
    CheckpointError,
    DivergedRanksError,
    GroupError,
    MissingRankError,
    NonFiniteError,
    PeerFailedError,
    RankSaveError,
    RunDirError,
)
from everstep.hazard import reach
from everstep.polling import looking, wait_until

_COMMIT = "commit"


class Part(NamedTuple):
    """What a rank tells of its part of a checkpoint.

    Attributes:
        files: the record of each file that the rank wrote into the folder, by name.
        digest: digest of the rank's whole state.
        replicated: digest of each thing that must be the same on all ranks, by name.  A name with "#" is of
            what only some ranks hold, and must be the same on the ranks that tell it.
        pieces: what the rank wrote of arrays that the ranks hold together.
    """

    files: dict[str, Record]
    digest: str
    replicated: dict[str, str]
    pieces: dict[str, RankPiece]


class Done(NamedTuple):
    """What all ranks learn of a checkpoint that is committed: see `CommittedCheckpoint`."""

    bytes: int
    kept: bool
    digest: str


class Exchange:
    """Messages of one rank; `WriterExchange` or `RankExchange`, as the rank is.

    Made on the main thread, used by one other thread.  All ranks enter `save` equally often.

    Args:
        group: the group, of 2 ranks or more.
        limit: seconds for which a rank waits for the others in one save; None for the group's own.
    """

    def __init__(self, group: Group, limit: float | None = None) -> None:
        assert group.store is not None
        self.rank, self.size = group.rank, group.size
        self._group, self._limit = group, group.limit if limit is None else limit
        self._store = group.store.below("saves/")
        self._count = 0
        self._oldest = 1
        """The first save of which this rank has not deleted its keys."""
        self._own = ("folder", "verdict", "done") if group.writer else (f"part/{self.rank}",)
        """Names of the keys that this rank deletes."""

    def _forget(self) -> None:
        """Delete own keys of all saves before this one, which those who read them have left."""
        for count in range(self._oldest, self._count):
            for name in self._own:
                self._store.delete(f"{count}/{name}")
        self._oldest = self._count

    def _key(self, name: str) -> str:
        return f"{self._count}/{name}"

    def _tell(self, name: str, value: Any) -> None:
        reach(f"checkpoint.tell_{name.partition('/')[0]}")
        self._store.set(self._key(name), json.dumps(value))

    def _heard(self, names: Sequence[str]) -> list[Any]:
        """Return the values of keys that exist."""
        reach(f"checkpoint.heard_{names[0].partition('/')[0]}")
        return [json.loads(text) for text in self._store.get([self._key(name) for name in names])]

    def _wait(self, names: Sequence[str], look: Callable[[], None]) -> bool:
        keys = [self._key(name) for name in names]
        return wait_until(looking(lambda: self._store.has(keys), look), self._limit)

    def _look(self) -> None:
        """Raise the failure that a rank has reported to the group."""
        if failure := self._group.failure():
            rank, reason = failure
            raise RankSaveError(
                errno.ECONNABORTED, f"rank {rank} has failed ({reason}); see to its output", ranks=[rank]
            )

    def _late(self, what: str, ranks: Sequence[int]) -> NoReturn:
        raise RankSaveError(
            errno.ETIMEDOUT,
            f"{named(ranks)} {what} within {self._limit:g} s; see to the output there, or raise the limit",
            ranks=ranks,
        )

    def _first_to_decide(self, verdict: str) -> str:
        """Decide the save, unless another rank was faster; returns what was decided."""
        reach("checkpoint.verdict")
        return self._store.set_once(self._key("verdict"), verdict)


class _OfAnotherRankError(Exception):
    """Carries the error of another rank through the writer's block."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class WriterExchange(Exchange):
    """Messages of the writer, which leads each save."""

    _announced = False
    """Whether the other ranks know the folder of this save, or that there is none."""
    _done: Done | None = None

    def __init__(self, group: Group, limit: float | None = None) -> None:
        super().__init__(group, limit)
        self._boxes: dict[int, tuple[str, Any]] = {}
        """Hash and boxes by rank, as heard last."""

    @contextmanager
    def save(self) -> Iterator[None]:
        """Make one save together: an error in the block fails the save on all ranks, and so do theirs.

        Raises:
            RankSaveError: a disk or memory failed on some rank, or a rank did not answer in time: a failed
                save, which the next one may make good.
            NonFiniteError, CheckpointError, DivergedRanksError: as `Store.commit`, on any rank.
            PeerFailedError: another rank had an error of another kind.
        """
        self._announced, self._done = False, None
        self._count += 1
        try:
            yield
            self._tell("done", self._done)
        except Exception as error:
            told = error.error if isinstance(error, _OfAnotherRankError) else for_all(error, self.rank)
            common = self._fail(told)
            if isinstance(error, _OfAnotherRankError):
                raise common from None
            raise _local(error, common, self.rank) from error

    def _fail(self, error: Exception) -> Exception:
        """Fail the save on all ranks; returns the error by which it fails: that of the first to decide."""
        with suppress(GroupError):  # the store is gone: each rank finds that out by itself
            decided = self._first_to_decide(json.dumps(packed(error)))
            if decided != _COMMIT:
                error = unpacked(json.loads(decided))
            if not self._announced:
                self._tell("folder", packed(error))
            self._tell("done", packed(error))
        return error

    def announce(self, folder: str) -> None:
        """Name the new folder, which exists, to all ranks."""
        self._tell("folder", folder)
        self._announced = True

    def collect(self, own: Part) -> list[Part]:
        """Return the parts of all ranks, in the order of ranks, once all have written theirs.

        Raises:
            DivergedRanksError: something that must be the same on all ranks is not.
            Exception: the error of a rank.
        """
        names = [f"part/{rank}" for rank in range(1, self.size)]
        if not self._wait(names, self._look):
            came = [self._store.has([self._key(name)]) for name in names]
            self._late("did not report its part", [rank for rank, there in enumerate(came, 1) if not there])
        heard = self._heard(names)
        self._forget()
        for told in heard:
            if isinstance(told, dict):
                raise _OfAnotherRankError(unpacked(told))
        parts = [own, *(self._part(rank, told) for rank, told in enumerate(heard, 1))]
        _require_replicas([part.replicated for part in parts])
        return parts

    def _part(self, rank: int, told: list[Any]) -> Part:
        """Return what a rank told, with its boxes, which are read where they are new."""
        files, digest, replicated, boxes, digests = told
        if self._boxes.get(rank, ("",))[0] != boxes:
            (text,) = self._store.get([f"boxes/{rank}/{boxes}"])
            self._boxes[rank] = boxes, json.loads(text)
        pieces = {
            name: RankPiece(offset, shape, file, key, content)
            for (name, offset, shape, file, key), content in zip(self._boxes[rank][1], digests, strict=True)
        }
        return Part(files, digest, replicated, pieces)

    def decide(self) -> None:
        """Make sure that no rank has given up; from here on none can, so the rename must follow at once."""
        decided = self._first_to_decide(_COMMIT)
        if decided != _COMMIT:
            raise _OfAnotherRankError(unpacked(json.loads(decided)))

    def finish(self, done: Done) -> None:
        """Note what the other ranks are told when the block ends."""
        self._done = done

    @property
    def digest(self) -> str:
        """Digest of the checkpoint of this save, of the states of all ranks."""
        assert self._done is not None, "no checkpoint was committed in this save"
        return self._done.digest


class RankExchange(Exchange):
    """Messages of a rank that is not the writer."""

    _over = False
    """Whether this rank knows how the save ended."""
    _told_boxes: str | None = None
    """Hash of the boxes that are in the store."""

    @contextmanager
    def save(self) -> Iterator[None]:
        """Make one save together: an error in the block fails the save on all ranks, and so do theirs.

        Raises:
            Exception: as `WriterExchange.save`.
        """
        self._count += 1
        self._over = False
        try:
            yield
        except Exception as error:
            if not self._over:
                self._fail(error)
            raise
        if not self._over:
            self.outcome()

    def _fail(self, error: Exception) -> None:
        """Raise the error by which the save fails on all ranks, after this rank's own."""
        own = for_all(error, self.rank)
        self._tell(f"part/{self.rank}", packed(own))
        try:
            self.outcome(own)
        except Exception as common:
            raise _local(error, common, self.rank) from error

    def folder(self) -> str:
        """Return the name of the new folder, once the writer has made it.

        Raises:
            Exception: the error by which the save fails.
        """
        if not self._wait(["folder"], self._look):
            self._late("did not begin the save", [0])
        (told,) = self._heard(["folder"])
        self._forget()
        if isinstance(told, dict):
            self._over = True
            raise unpacked(told)
        return str(told)

    def report(self, part: Part) -> None:
        """Tell the writer that this rank's part is written; its boxes are told once."""
        text = json.dumps([[name, *each[:-1]] for name, each in part.pieces.items()])
        boxes = xxhash.xxh3_128_hexdigest(text.encode())
        if boxes != self._told_boxes:
            self._store.set(f"boxes/{self.rank}/{boxes}", text)
            self._told_boxes = boxes
        digests = [each.xxh3_128 for each in part.pieces.values()]
        self._tell(f"part/{self.rank}", [part.files, part.digest, part.replicated, boxes, digests])

    def outcome(self, own: Exception | None = None) -> Done | None:
        """Return what was committed, once it is; None for a save without a checkpoint.

        Args:
            own: the error of this rank, by which it withdraws if the writer does not answer.

        Raises:
            Exception: the error by which the save fails on all ranks.
            MissingRankError: the writer has decided to commit, and has not said that it did: nobody knows.
        """
        try:
            if not self._wait(["done"], self._look):
                self._late("did not end the save", [0])
        except RankSaveError as late:
            self._withdraw(own or late)
        (told,) = self._heard(["done"])
        self._over = True
        if isinstance(told, dict):
            raise unpacked(told)
        return None if told is None else Done(*told)

    def _withdraw(self, error: Exception) -> None:
        """Fail the save for all ranks; or wait, if the writer is about to rename the folder."""
        decided = self._first_to_decide(json.dumps(packed(error)))
        if decided != _COMMIT:
            self._over = True
            raise unpacked(json.loads(decided)) from None
        if not self._wait(["done"], self._require_writer):
            self._over = True
            raise MissingRankError(
                f"the writer began to commit a checkpoint, and did not say within {self._limit:g} s that it "
                "did; see to its output, then start all ranks again",
                ranks=[0],
            ) from None

    def _require_writer(self) -> None:
        """Raise the failure of the writer, which then cannot say how the save ended."""
        failure = self._group.failure()
        if failure is not None and failure[0] == 0:
            self._over = True
            raise PeerFailedError(
                f"the writer has failed while it committed a checkpoint ({failure[1]}); see to its output, "
                "then start all ranks again",
                ranks=[0],
            )


def combined(digests: Sequence[str]) -> str:
    """Return the digest of a checkpoint from the digests of its ranks' states."""
    return xxhash.xxh3_128_hexdigest("\n".join(digests).encode())


def _local(error: Exception, common: Exception, rank: int) -> Exception:
    """Return the error to raise on this rank: its own error of a kind that other ranks only hear of."""
    mine = isinstance(common, PeerFailedError) and common.ranks == (rank,)
    return error if mine else common


def _require_replicas(ranks: Sequence[Mapping[str, str]]) -> None:
    for name in sorted({name for found in ranks for name in found}):
        telling = [rank for rank, found in enumerate(ranks) if name in found or "#" not in name]
        first = ranks[telling[0]].get(name)
        differing = [rank for rank in telling if ranks[rank].get(name) != first]
        if differing:
            who = f"rank {telling[0]}" if telling[0] else "the writer"
            raise DivergedRanksError(
                f"{name!r} is not the same on all ranks: {named(differing)} and {who} have different "
                "values; declare what is each rank's own, as in state={'memory': everstep.PerRank(memory)}, "
                "or find out why they differ",
                name=name,
                ranks=differing,
            )


# -------------------------------------------------- errors that all ranks raise alike, carried as JSON


def for_all(error: Exception, rank: int) -> Exception:
    """Return the error that all ranks raise where a rank has had `error`."""
    if isinstance(error, RankSaveError | DivergedRanksError):
        return error
    if disk_failed(error):
        return RankSaveError(_number(error), f"rank {rank}: {_told(error)}", ranks=[rank])
    if isinstance(error, NonFiniteError):
        return NonFiniteError(f"rank {rank}: {error}", step=error.step)
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {error}")
    return PeerFailedError(
        f"rank {rank} has failed in a save ({type(error).__name__}: {error}); see to its output, then start "
        "all ranks again",
        ranks=[rank],
    )


def first_error(group: Group, error: Exception | None, what: str) -> Exception | None:
    """Return the error of the first rank that has one, alike on all ranks; None where no rank has one.

    An error of a disk goes before others.  An operation of the group: `what` names it.
    """
    if group.size == 1:
        return error
    told = group.gather(None if error is None else packed(for_all(error, group.rank)), what)
    found = [unpacked(each) for each in told if each is not None]
    return min(found, key=lambda each: not isinstance(each, RankSaveError), default=None)


def packed(error: Any) -> dict[str, Any]:
    """Return as JSON what `for_all` has made."""
    kind = next(kind for kind in _KINDS if isinstance(error, kind))
    text = error.strerror if isinstance(error, RankSaveError) else str(error)
    facts = {name: getattr(error, name) for name in _KINDS[kind]}
    return {"error": kind.__name__, "text": text, "facts": facts}


def unpacked(told: dict[str, Any]) -> Exception:
    """Make the error again."""
    kind: Any = next(kind for kind in _KINDS if kind.__name__ == told["error"])
    facts = dict(told["facts"])
    numbers = [facts.pop("errno")] if kind is RankSaveError else []
    error: Exception = kind(*numbers, told["text"], **facts)
    return error


_KINDS: dict[type[Exception], tuple[str, ...]] = {
    RankSaveError: ("errno", "ranks"),
    DivergedRanksError: ("name", "ranks"),
    PeerFailedError: ("ranks",),
    NonFiniteError: ("step",),
    CheckpointError: (),
}
"""Classes of such errors, with the attributes that each is made of."""


def _number(error: Exception) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM


def _told(error: Exception) -> str:
    """Say what has failed, and what to do."""
    if isinstance(error, RunDirError):
        return f"{error.strerror} ({error.filename})"
    what = str(error.strerror) if isinstance(error, OSError) else f"{type(error).__name__} {error}".strip()
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{what}{where}; {remedy(error)}"
