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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from everstep import errors
from everstep.checkpoint import files, format
from everstep.checkpoint.array_file import Record
from everstep.checkpoint.commit import CommittedCheckpoint, Draft, require_finite
from everstep.checkpoint.files import disk_failed
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.pieces import write_pieces
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
from everstep.polling import wait_until

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
    def write(cls, folder: Path, rank: int, draft: Draft) -> Part:
        written = format.write_own(folder, rank, draft.own, draft.common)
        more, pieces = write_pieces(folder, rank, draft.common.arrays)
        return cls(written | more, draft.digest, dict(draft.replicated), pieces)


class _EndedError(Exception):
    """Carries, through the block of a save, the error by which it fails on all ranks."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Exchange:
    """Messages of one rank in the saves of all; `leads` is the writer's.

    Made on the main thread, used by one other thread.  All ranks enter `save` equally often.
    """

    def __init__(self, group: Group) -> None:
        assert group.store is not None
        self.leads, self._rank, self._group = group.writer, group.rank, group
        self._store, self._part = group.store.below("saves/"), f"part/{group.rank}"
        self._count, self._oldest = 0, 1
        """Numbers of this save, and of the first one of which this rank has not deleted its keys."""
        self._outcome: list[Any] | None = None
        """Bytes, whether an equal one was kept, and digest of what was committed; None for no checkpoint."""
        self._is_known = False
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
        self._outcome, self._is_known = None, False
        try:
            yield
            if self.leads:
                self._send("done", self._outcome)
            elif not self._is_known:
                self._receive_outcome()
        except _EndedError as ended:
            raise self._fail(ended.error, known=True) from None
        except Exception as error:
            common = self._fail(shared_error(error, self._rank), known=False)
            # its own error of a kind that other ranks only hear of
            is_own = isinstance(common, PeerFailedError) and common.ranks == (self._rank,)
            raise (error if is_own else common) from error

    def _fail(self, error: Exception, *, known: bool) -> Exception:
        """Fail the save on all ranks, unless they know; returns the error by which it fails."""
        if self.leads:
            with suppress(GroupError):  # the store is gone: each rank finds that out by itself
                error = self._decide(error) or error
                if not self._is_known:
                    self._send("folder", error_to_json(error))
                self._send("done", error_to_json(error))
        elif not (known or self._is_known):
            self._send(self._part, error_to_json(error))
            try:
                self._receive_outcome(error)
            except _EndedError as ended:
                return ended.error
        return error

    def filler(
        self, draft: Draft, segment: int = 0, existing: Checkpoint | None = None
    ) -> Callable[[Path], int]:
        """Make the function by which the writer fills a folder together with all ranks.

        Args:
            segment: number of this start; 0 for best weights.
            existing: the whole checkpoint of that name; an equal one is kept, and the function returns 0.
        """

        def write(folder: Path) -> int:
            self._send("folder", folder.name)
            self._is_known = True
            written = format.write_common(folder, draft.common)
            own, ranks = Part.write(folder, 0, draft), range(1, self._group.size)
            answers = self._receive([f"part/{rank}" for rank in ranks], "did not report its part")
            self._delete_keys("folder", "verdict", "done")
            parts = [own, *(Part(*part) for part in answers)]
            _require_replicas([part.replicated for part in parts])
            digest = xxhash.xxh3_128_hexdigest("\n".join(part.digest for part in parts).encode())
            size = 0
            if existing is None or existing.digest != digest:
                files_of, pieces = [part.files for part in parts], [part.pieces for part in parts]
                body = draft.body(segment, digest)
                size = format.write_manifest(folder, body, draft.common, written, files_of, pieces)
            self._outcome = [size, size == 0, digest]
            # last: when the verdict is commit, nothing is left but the rename, which must follow at once
            if (decided := self._decide(None)) is not None:
                raise _EndedError(decided)
            return size

        return write

    def write_part(self, folder: Path, draft: Draft) -> CommittedCheckpoint:
        """Write the part of a rank that does not lead, inside `save`, once the writer has made its folder."""
        sharded = {name: array for name, array in draft.common.arrays.items() if array.region is not None}
        require_finite(draft.name, {**draft.own.arrays, **sharded}, draft.guarded)
        (name,) = self._receive(["folder"], "did not begin the save")
        self._delete_keys(self._part)
        part = Part.write(folder / str(name), self._rank, draft)
        if part.files:
            files.fsync_folder(folder / str(name))
        self._send(self._part, part)
        self._receive_outcome()
        return self.committed(draft, folder)

    def committed(self, draft: Draft, folder: Path) -> CommittedCheckpoint:
        """Return what was committed in this save."""
        assert self._outcome is not None, "no checkpoint was committed in this save"
        size, is_kept, digest = self._outcome
        return CommittedCheckpoint(draft.name, folder / str(draft.name), size, is_kept, digest)

    def _receive_outcome(self, own: Exception | None = None) -> None:
        """Hear what was committed, once it is; if the writer does not answer, withdraw by the error `own`."""
        try:
            (self._outcome,) = self._receive(["done"], "did not end the save")
        except RankSaveError as late:
            if (decided := self._decide(own or late)) is not None:
                raise _EndedError(decided) from None
            self._await_rename()
        self._is_known = True

    def _await_rename(self) -> None:
        """Wait for the writer, which was about to rename the folder when this rank wanted to give up."""

        def look() -> None:
            failure = self._group.failure()
            if failure is not None and failure[0] == 0:
                why = f"the writer has failed while it committed a checkpoint ({failure[1]})"
                raise _EndedError(PeerFailedError(why + advice, ranks=[0]))

        advice = "; check its output, then start all ranks again"
        if not self._exist([f"{self._count}/done"], look):
            why = f"the writer began to commit a checkpoint, and did not end within {self._group.limit:g} s"
            raise _EndedError(MissingRankError(why + advice, ranks=[0]))
        (self._outcome,) = self._receive(["done"], "")

    def _delete_keys(self, *names: str) -> None:
        """Delete own keys of all saves before this one, which those who read them have left."""
        for count in range(self._oldest, self._count):
            for name in names:
                self._store.delete(f"{count}/{name}")
        self._oldest = self._count

    def _send(self, name: str, value: Any) -> None:
        reach(f"checkpoint.tell_{name.partition('/')[0]}")
        self._store.set(f"{self._count}/{name}", json.dumps(value))

    def _exist(self, keys: Sequence[str], look: Callable[[], None]) -> bool:
        return wait_until(lambda: self._store.has(keys), self._group.limit, look=look)

    def _receive(self, names: Sequence[str], late: str) -> list[Any]:
        """Return the values of keys, once they exist."""
        keys = [f"{self._count}/{name}" for name in names]
        if not self._exist(keys, self._require_no_failure):
            lacking = [key for key in keys if not self._store.has([key])]
            ranks = [int(key.split("/")[2]) if key.count("/") > 1 else 0 for key in lacking]
            late = f"{named(ranks)} {late} within {self._group.limit:g} s"
            what = f"{late}; check the output there, or raise EVERSTEP_GROUP_LIMIT (seconds)"
            raise RankSaveError(errno.ETIMEDOUT, what, ranks=ranks)
        reach(f"checkpoint.heard_{names[0].partition('/')[0]}")
        values = [json.loads(text) for text in self._store.get(keys)]
        for each in values:
            if isinstance(each, dict):
                raise _EndedError(error_from_json(each))
        return values

    def _require_no_failure(self) -> None:
        if failure := self._group.failure():
            rank, reason = failure
            what = f"rank {rank} has failed ({reason}); check its output"
            raise RankSaveError(errno.ECONNABORTED, what, ranks=[rank])

    def _decide(self, error: Exception | None) -> Exception | None:
        """Decide the save, unless another rank was faster; returns what was decided, None for a commit."""
        reach("checkpoint.verdict")
        text = _COMMIT if error is None else json.dumps(error_to_json(error))
        decided = self._store.set_once(f"{self._count}/verdict", text)
        return None if decided == _COMMIT else error_from_json(json.loads(decided))


def _require_replicas(ranks: Sequence[Mapping[str, str]]) -> None:
    for name in sorted({name for digests in ranks for name in digests}):
        holders = [rank for rank, digests in enumerate(ranks) if name in digests or "#" not in name]
        first = ranks[holders[0]].get(name)
        differing = [rank for rank in holders if ranks[rank].get(name) != first]
        if differing:
            who = f"rank {holders[0]}" if holders[0] else "the writer"
            raise DivergedRanksError(
                f"{name!r} is not the same on all ranks: {named(differing)} and {who} have different "
                "values; declare what is each rank's own, as in state={'memory': everstep.PerRank(memory)}, "
                "or find out why they differ",
                name=name,
                ranks=differing,
            )


# -------------------------------------------------- errors that all ranks raise alike, carried as JSON


def shared_error(error: Exception, rank: int) -> Exception:
    """Return the error that all ranks raise where a rank has had `error`."""
    if isinstance(error, RankSaveError | DivergedRanksError):
        return error
    if disk_failed(error):
        number = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
        return RankSaveError(number, f"rank {rank}: {_error_text(error)}", ranks=[rank])
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
    gathered = group.gather(None if error is None else error_to_json(shared_error(error, group.rank)), what)
    errors = [error_from_json(each) for each in gathered if each is not None]
    return min(errors, key=lambda each: not isinstance(each, RankSaveError), default=None)


def error_to_json(error: Exception) -> dict[str, Any]:
    """Return as JSON what `shared_error` has made."""
    return {"error": type(error).__name__, "text": error.args, "facts": vars(error)}


def error_from_json(message: dict[str, Any]) -> Exception:
    kind: Any = getattr(errors, message["error"])
    error: Exception = kind(*message["text"], **message["facts"])
    return error


def _error_text(error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__} {error}".strip() + f"; {remedy(error)}"
    where = f" ({error.filename})" if error.filename else ""
    advice = "" if isinstance(error, RunDirError) else f"; {remedy(error)}"
    return f"{error.strerror}{where}{advice}"
