"""Commit of one checkpoint by several ranks: each writes its part, and the writer makes one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from everstep.checkpoint import files, format
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.commit import CommittedCheckpoint, body_of, require_finite
from everstep.checkpoint.exchange import Done, Part, RankExchange, WriterExchange, combined
from everstep.checkpoint.format import Checkpoint, Phase
from everstep.contracts.state import HostArray, Json
from everstep.state import Encoded


def leading(
    ranks: WriterExchange,
    name: CheckpointName,
    facts: Mapping[str, Json],
    common: Encoded,
    own: Encoded,
    replicated: Mapping[str, str],
    held: Checkpoint | None,
) -> Callable[[Path], int]:
    """Make the function by which the writer fills a folder together with all ranks.

    Args:
        facts: values of the manifest, with the digest of the writer's state.
        held: the whole checkpoint that has the name; an equal one is kept, and the function returns 0.
    """

    def write(folder: Path) -> int:
        ranks.announce(folder.name)
        record = format.write_common(folder, common)
        mine = Part(format.write_own(folder, 0, own, common), str(facts["digest"]), dict(replicated))
        parts = ranks.collect(mine)
        digest = combined([part.digest for part in parts])
        size = 0
        if held is None or held.digest != digest:
            body = body_of(name, {**facts, "digest": digest})
            size = format.write_manifest(folder, body, common, record, [part.files for part in parts])
        ranks.finish(Done(size, size == 0, digest))
        # last: when the verdict is commit, nothing is left but the rename
        ranks.decide()
        return size

    return write


class RankStore:
    """Checkpoints of a run for a rank that is not the writer, which owns them.

    Args:
        run_dir: the run directory, which the writer has opened.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = Path(run_dir) / "checkpoints"

    def commit(
        self,
        name: CheckpointName,
        structure: Json,
        arrays: Mapping[str, HostArray],
        *,
        digest: str,
        epoch: int,
        phase: Phase,
        partial: bool = False,
        meta: Json = None,
        guarded: Collection[str] = (),
        own: Encoded | None = None,
        replicated: Mapping[str, str] | None = None,
        ranks: RankExchange,
    ) -> CommittedCheckpoint:
        """Write this rank's part of a checkpoint, inside `ranks.save()`; arguments are as in `Store.commit`.

        The common tree, and what only the manifest has, are the writer's: they are not looked at here.

        Raises:
            Exception: as `WriterExchange.save`.
        """
        mine = own or Encoded({})
        require_finite(name, mine.arrays, guarded)
        folder = self._folder / ranks.folder()
        written = format.write_own(folder, ranks.rank, mine, Encoded(structure, dict(arrays)))
        if written:
            files.fsync_folder(folder)
        ranks.report(Part(written, digest, dict(replicated or {})))
        done = ranks.outcome()
        assert done is not None, "the writer has made a save without a checkpoint"
        return CommittedCheckpoint(name, self._folder / str(name), done.bytes, done.kept, done.digest)
