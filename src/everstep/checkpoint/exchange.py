"""One checkpoint of several ranks: each writes its part, the writer makes one of them, all learn the end.

The threads that write tell each other through the group's store.  Save number n (1, 2 ... on every rank
alike) has these keys below "saves/n/":

    folder      by the writer: the name of the new folder; or the error by which the save fails
    part/R      by rank R: what it wrote there, see `Part`; or its error
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from everstep.checkpoint import files, format
from everstep.checkpoint.array_file import Record
from everstep.checkpoint.commit import Commit, CommittedCheckpoint, require_finite
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.pieces import write_pieces
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
    """What a rank reports of its part of a checkpoint.

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
    pieces: dict[str, Any]

    @classmethod
    def write(cls, folder: Path, rank: int, commit: Commit) -> Part:
        written = format.write_own(folder, rank, commit.own, commit.common)
        more, pieces = write_pieces(folder, rank, commit.common.arrays)
        return cls(written | more, commit.digest, dict(commit.replicated), pieces)


class _EndedError(Exception):
    """Carries, through the block of a save, the error by which it fails on all ranks."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Exchange(ABC):
    """Messages of one rank; `WriterExchange` or `RankExchange`, as the rank is.

    Made on the main thread, used by one other thread.  All ranks enter `save` equally often.
    """

    def __init__(self, group: Group, limit: float | None = None) -> None:
        assert group.store is not None
        self.rank, self._group = group.rank, group
        self._limit = group.limit if limit is None else limit
        self._store = group.store.below("saves/")
        self._count, self._oldest = 0, 1
        """Numbers of this save, and of the first one of which this rank has not deleted its keys."""
        self._own = ("folder", "verdict", "done") if group.writer else (f"part/{self.rank}",)
        self._done: list[Any] | None = None
        """Bytes, whether an equal one was kept, and digest of what was committed; None for no checkpoint."""
        self._knows = False
        """Of the writer, whether the others know the folder of this save; of a rank, how the save ended."""

    @contextmanager
    def save(self) -> Iterator[None]:
        """Make one save together: an error in the block fails the save on all ranks, and so do theirs.

        Raises:
            RankSaveError: a disk or memory failed on some rank, or a rank did not answer in time: a failed
                save, which the next one may make good.
            PeerFailedError: another rank had an error of another kind.
            MissingRankError: the writer has decided to commit, and has not said that it did: nobody knows.
        """
        self._count += 1
        self._done, self._knows = None, False
        try:
            yield
            self._end()
        except _EndedError as ended:
            raise self._fail(ended.error, known=True) from None
        except Exception as error:
            common = self._fail(for_all(error, self.rank), known=False)
            # its own error of a kind that other ranks only hear of
            mine = isinstance(common, PeerFailedError) and common.ranks == (self.rank,)
            raise (error if mine else common) from error

    @abstractmethod
    def _end(self) -> None:
        """Tell or hear how a save has ended that is good here."""

    @abstractmethod
    def _fail(self, error: Exception, *, known: bool) -> Exception:
        """Fail the save on all ranks, unless they know; returns the error by which it fails."""

    def committed(self, commit: Commit, folder: Path) -> CommittedCheckpoint:
        """Return what was committed in this save."""
        assert self._done is not None, "no checkpoint was committed in this save"
        size, kept, digest = self._done
        return CommittedCheckpoint(commit.name, folder / str(commit.name), size, kept, digest)

    def _forget(self) -> None:
        """Delete own keys of all saves before this one, which those who read them have left."""
        for count in range(self._oldest, self._count):
            for name in self._own:
                self._store.delete(f"{count}/{name}")
        self._oldest = self._count

    def _tell(self, name: str, value: Any) -> None:
        reach(f"checkpoint.tell_{name.partition('/')[0]}")
        self._store.set(f"{self._count}/{name}", json.dumps(value))

    def _heard(self, names: Sequence[str], late: str) -> list[Any]:
        """Return the values of keys, once they exist."""
        keys = [f"{self._count}/{name}" for name in names]
        if not wait_until(looking(lambda: self._store.has(keys), self._look), self._limit):
            lacking = [key for key in keys if not self._store.has([key])]
            ranks = [int(key.split("/")[2]) if key.count("/") > 1 else 0 for key in lacking]
            late = f"{named(ranks)} {late} within {self._limit:g} s"
            what = f"{late}; check the output there, or raise the limit"
            raise RankSaveError(errno.ETIMEDOUT, what, ranks=ranks)
        reach(f"checkpoint.heard_{names[0].partition('/')[0]}")
        heard = [json.loads(text) for text in self._store.get(keys)]
        for each in heard:
            if isinstance(each, dict):
                raise _EndedError(unpacked(each))
        return heard

    def _look(self) -> None:
        if failure := self._group.failure():
            rank, reason = failure
            what = f"rank {rank} has failed ({reason}); check its output"
            raise RankSaveError(errno.ECONNABORTED, what, ranks=[rank])

    def _decide(self, verdict: str | Exception) -> str | Exception:
        """Decide the save, unless another rank was faster; returns what was decided."""
        reach("checkpoint.verdict")
        text = verdict if isinstance(verdict, str) else json.dumps(packed(verdict))
        decided = self._store.set_once(f"{self._count}/verdict", text)
        return decided if decided == _COMMIT else unpacked(json.loads(decided))


class WriterExchange(Exchange):
    """Messages of the writer, which leads each save."""

    def _end(self) -> None:
        self._tell("done", self._done)

    def _fail(self, error: Exception, *, known: bool) -> Exception:
        with suppress(GroupError):  # the store is gone: each rank finds that out by itself
            decided = self._decide(error)
            if isinstance(decided, Exception):
                error = decided
            if not self._knows:
                self._tell("folder", packed(error))
            self._tell("done", packed(error))
        return error

    def leading(
        self, commit: Commit, segment: int = 0, held: Checkpoint | None = None
    ) -> Callable[[Path], int]:
        """Make the function by which the writer fills a folder together with all ranks.

        Args:
            segment: number of this start; 0 for best weights.
            held: the whole checkpoint that has the name; an equal one is kept, and the function returns 0.
        """

        def write(folder: Path) -> int:
            self._tell("folder", folder.name)
            self._knows = True
            written = format.write_common(folder, commit.common)
            own, ranks = Part.write(folder, 0, commit), range(1, self._group.size)
            heard = self._heard([f"part/{rank}" for rank in ranks], "did not report its part")
            self._forget()
            parts = [own, *(Part(*part) for part in heard)]
            _require_replicas([part.replicated for part in parts])
            digest = xxhash.xxh3_128_hexdigest("\n".join(part.digest for part in parts).encode())
            size = 0
            if held is None or held.digest != digest:
                files_of, pieces = [part.files for part in parts], [part.pieces for part in parts]
                body = commit.body(segment, digest)
                size = format.write_manifest(folder, body, commit.common, written, files_of, pieces)
            self._done = [size, size == 0, digest]
            # last: when the verdict is commit, nothing is left but the rename, which must follow at once
            if isinstance(decided := self._decide(_COMMIT), Exception):
                raise _EndedError(decided)
            return size

        return write


class RankExchange(Exchange):
    """Messages of a rank that is not the writer."""

    def _end(self) -> None:
        if not self._knows:
            self.outcome()

    def _fail(self, error: Exception, *, known: bool) -> Exception:
        if not known and not self._knows:
            self._tell(f"part/{self.rank}", packed(error))
            try:
                self.outcome(error)
            except _EndedError as ended:
                return ended.error
        return error

    def write_part(self, folder: Path, commit: Commit) -> CommittedCheckpoint:
        """Write this rank's part of a checkpoint, inside `save`, once the writer has made its folder."""
        held = {name: array for name, array in commit.common.arrays.items() if array.region is not None}
        require_finite(commit.name, {**commit.own.arrays, **held}, commit.guarded)
        (name,) = self._heard(["folder"], "did not begin the save")
        self._forget()
        part = Part.write(folder / str(name), self.rank, commit)
        if part.files:
            files.fsync_folder(folder / str(name))
        self._tell(f"part/{self.rank}", part)
        self.outcome()
        return self.committed(commit, folder)

    def outcome(self, own: Exception | None = None) -> None:
        """Hear what was committed, once it is; if the writer does not answer, withdraw by the error `own`."""
        try:
            (self._done,) = self._heard(["done"], "did not end the save")
        except RankSaveError as late:
            if isinstance(decided := self._decide(own or late), Exception):
                raise _EndedError(decided) from None
            self._await_rename()
        self._knows = True

    def _await_rename(self) -> None:
        """Wait for the writer, which was about to rename the folder when this rank wanted to give up."""

        def look() -> None:
            failure = self._group.failure()
            if failure is not None and failure[0] == 0:
                why = f"the writer has failed while it committed a checkpoint ({failure[1]})"
                raise _EndedError(PeerFailedError(why + advice, ranks=[0]))

        advice, key = "; check its output, then start all ranks again", f"{self._count}/done"
        if not wait_until(looking(lambda: self._store.has([key]), look), self._limit):
            why = f"the writer began to commit a checkpoint, and did not end within {self._limit:g} s"
            raise _EndedError(MissingRankError(why + advice, ranks=[0]))
        (self._done,) = self._heard(["done"], "")


def _require_replicas(ranks: Sequence[Mapping[str, str]]) -> None:
    for name in sorted({name for digests in ranks for name in digests}):
        telling = [rank for rank, digests in enumerate(ranks) if name in digests or "#" not in name]
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
        number = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
        return RankSaveError(number, f"rank {rank}: {_described(error)}", ranks=[rank])
    if isinstance(error, NonFiniteError):
        return NonFiniteError(f"rank {rank}: {error}", step=error.step)
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {error}")
    return PeerFailedError(
        f"rank {rank} has failed in a save ({type(error).__name__}: {error}); check its output, then start "
        "all ranks again",
        ranks=[rank],
    )


def first_error(group: Group, error: Exception | None, what: str) -> Exception | None:
    """Return the error of the first rank that has one, alike on all ranks; None where no rank has one.

    An error of a disk goes before others.  An operation of the group: `what` names it.
    """
    if group.size == 1:
        return error
    gathered = group.gather(None if error is None else packed(for_all(error, group.rank)), what)
    errors = [unpacked(each) for each in gathered if each is not None]
    return min(errors, key=lambda each: not isinstance(each, RankSaveError), default=None)


_KINDS: dict[type[Exception], tuple[str, ...]] = {
    RankSaveError: ("ranks",),
    DivergedRanksError: ("name", "ranks"),
    PeerFailedError: ("ranks",),
    NonFiniteError: ("step",),
    CheckpointError: (),
}
"""Classes of such errors, with the attributes that each is made of."""


def packed(error: Any) -> dict[str, Any]:
    """Return as JSON what `for_all` has made."""
    kind = next(kind for kind in _KINDS if isinstance(error, kind))
    facts = {name: getattr(error, name) for name in _KINDS[kind]}
    text = [error.errno, error.strerror] if kind is RankSaveError else [str(error)]
    return {"error": kind.__name__, "text": text, "facts": facts}


def unpacked(message: dict[str, Any]) -> Exception:
    """Make the error again."""
    kind: Any = next(kind for kind in _KINDS if kind.__name__ == message["error"])
    error: Exception = kind(*message["text"], **message["facts"])
    return error


def _described(error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__} {error}".strip() + f"; {remedy(error)}"
    where = f" ({error.filename})" if error.filename else ""
    advice = "" if isinstance(error, RunDirError) else f"; {remedy(error)}"
    return f"{error.strerror}{where}{advice}"
