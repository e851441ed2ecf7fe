"""Commit of one checkpoint by several ranks: each writes its part, and the writer makes one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import files, format, reading
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.commit import Commit, CommittedCheckpoint, require_finite
from everstep.checkpoint.content import Known, Sharing
from everstep.checkpoint.exchange import Done, Part, RankExchange, WriterExchange, combined
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.pieces import write_pieces


def leading(
    ranks: WriterExchange, commit: Commit, segment: int, held: Checkpoint | None, sharing: Sharing | None
) -> Callable[[Path], int]:
    """Make the function by which the writer fills a folder together with all ranks.

    Args:
        segment: number of this start.
        held: the whole checkpoint that has the name; an equal one is kept, and the function returns 0.
        sharing: what this save may share with the one before; None to share nothing.
    """

    def write(folder: Path) -> int:
        if sharing is not None:
            sharing.make_folder()  # before another rank can: each kill in a save has a place of its own
        ranks.announce(folder.name)
        written = format.write_common(folder, commit.common, sharing)
        parts = ranks.collect(_part(folder, 0, commit, sharing))
        digest = combined([part.digest for part in parts])
        size = 0
        if held is None or held.digest != digest:
            body = commit.body(segment, digest)
            files, pieces = [part.files for part in parts], [part.pieces for part in parts]
            size = format.write_manifest(folder, body, commit.common, written, files, pieces)
        ranks.finish(Done(size, size == 0, digest))
        # last: when the verdict is commit, nothing is left but the rename
        ranks.decide()
        return size

    return write


def leading_apart(ranks: WriterExchange, commit: Commit) -> Callable[[Path], int]:
    """Make the function by which the writer fills a folder of best weights together with all ranks."""
    return leading(ranks, commit, 0, None, None)


def _part(folder: Path, rank: int, commit: Commit, sharing: Sharing | None) -> Part:
    """Write a rank's files, and return what the writer is told of them."""
    written = format.write_own(folder, rank, commit.own, commit.common, sharing)
    more, pieces = write_pieces(folder, rank, commit.common.arrays, sharing)
    return Part(written | more, commit.digest, dict(commit.replicated), pieces)


class RankStore:
    """Checkpoints of a run for a rank that is not the writer, which owns them.

    Args:
        run_dir: the run directory, which the writer has opened.
        apart: the folder of best weights that are written; None for checkpoints.
    """

    def __init__(self, run_dir: Path, apart: Path | None = None) -> None:
        self._folder = Path(run_dir) / "checkpoints" if apart is None else apart
        self._sharing = Sharing(Path(run_dir), self._known) if apart is None else None

    def _known(self, file: str) -> Known | None:
        names = (path.name for path in self._folder.iterdir() if CheckpointName.matches(path.name))
        newest = max(names, key=CheckpointName.parse, default=None)
        return None if newest is None else reading.known_in(self._folder / newest, file)

    def write_part(self, commit: Commit, ranks: RankExchange) -> CommittedCheckpoint:
        """Write this rank's part of a checkpoint, inside `ranks.save()`.

        Args:
            commit: of its common tree only what the ranks hold together is written here.

        Raises:
            Exception: as `WriterExchange.save`.
        """
        sharing = self._sharing
        held = {name: array for name, array in commit.common.arrays.items() if array.region is not None}
        require_finite(commit.name, {**commit.own.arrays, **held}, commit.guarded)
        folder = self._folder / ranks.folder()
        # only now: before the writer has made the folder, it may delete what no checkpoint refers to
        if sharing is not None:
            sharing.begin(str(commit.name))
        part = _part(folder, ranks.rank, commit, sharing)
        if part.files:
            files.fsync_folder(folder)
        ranks.report(part)
        done = ranks.outcome()
        assert done is not None, "the writer has made a save without a checkpoint"
        if sharing is not None:
            sharing.end(committed=not done.kept)
        path = self._folder / str(commit.name)
        return CommittedCheckpoint(commit.name, path, done.bytes, done.kept, done.digest)
