"""Commit of one checkpoint folder: it is there whole or not at all, whatever operation fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everstep.checkpoint import files, format
from everstep.checkpoint.array_file import chunks
from everstep.checkpoint.format import Checkpoint, Phase, read_body
from everstep.checkpoint.retention import CheckpointName
from everstep.contracts.state import HostArray, Json
from everstep.durable import require_no_link, temporary
from everstep.errors import CheckpointError, NonFiniteError, some
from everstep.redaction import without_credentials
from everstep.state import Encoded


@dataclass(frozen=True)
class Draft:
    """A checkpoint before its commit: the state, on the way from the snapshot to the folder.

    Attributes:
        name: name of the checkpoint to be.
        common: the tree that all ranks have, of which the writer writes what is whole.
        digest: of this rank's whole state, by which equal checkpoints are recognised.
        epoch, phase, partial: as in `Checkpoint`.
        meta: JSON without NaN.  `keep_best` reads `meta["metrics"]` ({name: value}), without values of
            other steps by `meta["metric_steps"]` ({name: step}).
        guarded: names of arrays that must be finite.
        own: the tree that this rank has alone.
        replicated: digest of each thing that must be the same on all ranks, by name.
    """

    name: CheckpointName
    common: Encoded
    digest: str
    epoch: int = 0
    phase: Phase = "step"
    partial: bool = False
    meta: Json = None
    guarded: Collection[str] = ()
    own: Encoded = field(default_factory=lambda: Encoded({}))
    replicated: Mapping[str, str] = field(default_factory=dict)

    def body(self, segment: int, digest: str = "") -> dict[str, Json]:
        """Return the facts of a manifest's body; `digest` is that of the states of several ranks."""
        facts: dict[str, Json] = {name: getattr(self, name) for name in ("epoch", "phase", "partial", "meta")}
        facts |= {"name": str(self.name), "step": self.name.step, "digest": digest or self.digest}
        body: dict[str, Json] = without_credentials({**facts, "segment": segment})
        return body


@dataclass(frozen=True)
class CommittedCheckpoint:
    """Result of a commit.

    Attributes:
        bytes: size of the files that were written; 0 if `kept`.
        kept: whether an equal checkpoint had the name already, so that nothing was written.
        digest: digest of the state; on several ranks, of the states of all.
    """

    name: CheckpointName
    path: Path
    bytes: int
    kept: bool
    digest: str


def require_finite(name: CheckpointName, arrays: Mapping[str, HostArray], guarded: Collection[str]) -> None:
    """Require that the guarded arrays have neither NaN nor infinity."""
    bad = [key for key in arrays if key in guarded and not is_finite(arrays[key])]
    if not bad:
        return
    remedy = (
        "the checkpoint before is intact: resume from that with a lower learning rate, clipped gradients or "
        "other data"
        if name.step
        else "no step has run: give each of these its first values (memory that was only allocated, by "
        "to_empty(), holds anything), or check the weights that were loaded"
    )
    what = f"after step {name.step}, NaN or infinity in {some(bad, 5)}: not saved"
    raise NonFiniteError(f"{what}; {remedy}", step=name.step)


_NON_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "C64": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),  # no infinity, one NaN per sign
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),  # the one NaN is "minus zero"
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}
"""Type, mask and pattern by dtype: an element is NaN or infinite if its bits & mask == pattern."""


def is_finite(array: HostArray) -> bool:
    """Whether all elements are finite, of complex numbers both parts; looks at the bytes, chunk by chunk."""
    name = str(array.extra.get("dtype", "")).removeprefix("torch.") if array.dtype == "U8" else ""
    rule = _NON_FINITE.get("F16" if name == "complex32" else array.dtype)
    pieces = chunks(array.data.data)
    if rule is not None:
        kind, mask, pattern = rule
        return not any(((np.frombuffer(c, kind) & kind(mask)) == kind(pattern)).any() for c in pieces)
    try:
        wide = np.dtype(name or "u1")
    except (TypeError, ValueError):
        return True
    return wide.kind not in "fc" or all(np.isfinite(np.frombuffer(c, wide)).all() for c in pieces)


def place(
    target: Path, write: Callable[[Path], int], make_room: Callable[[], Path | None], token: str = ""
) -> tuple[int, Path | None]:
    """Write a folder beside `target`, then give it that name; returns the bytes written, and the old folder.

    Args:
        write: fills the new folder durably, and returns the number of bytes; 0 if the folder is not needed.
        make_room: moves an old folder of that name away and returns its new path; None without one.
        token: makes the folder's first name one that nobody has ever used.
    """
    new = temporary(target.with_name(f"{target.name}.{token}") if token else target)
    files.discard(new)  # a killed process with the same pid may have left such a folder
    moved = None
    try:
        files.make_dir(new)
        size = write(new)
        if size:
            # room is made last: until the new folder is durable, the old folder keeps the name
            moved = make_room()
            _swap_in(new, target, moved)
    finally:
        files.discard(new)
    return size, moved


def place_apart(target: Path, write: Callable[[Path], int], *, top: Path, token: str = "") -> int:
    """Place a folder and its parents; an old folder of that name is deleted after the new folder is there."""
    require_no_link(target, top)
    files.make_dirs(target.parent)
    make_room = lambda: files.to_trash(target) if target.exists() else None  # noqa: E731
    size, trash = place(target, write, make_room, token)
    # only after the swap: a swap that fails puts the old folder back
    if trash is not None:
        files.discard(trash)
    return size


def retire_others(folder: Path, keep: Collection[str], *, top: Path) -> None:
    """Delete the checkpoints in `folder` whose names are not in `keep`."""
    require_no_link(folder, top)
    for other in sorted(folder.iterdir()):
        if other.name not in keep and CheckpointName.matches(other.name):
            with contextlib.suppress(OSError):  # an old folder harms nobody; the next call tries again
                files.retire(other, top=top)


def filler(draft: Draft, segment: int = 0) -> Callable[[Path], int]:
    """Make the function that fills a folder on one process, and returns the number of bytes."""

    def write(folder: Path) -> int:
        written = format.write_common(folder, draft.common)
        ranks = [format.write_own(folder, 0, draft.own, draft.common)]
        return format.write_manifest(folder, draft.body(segment), draft.common, written, ranks)

    return write


def copying(checkpoint: Checkpoint, segment: int, meta: Json) -> Callable[[Path], int]:
    """Make the function that fills a folder with a copy of a checkpoint, of another segment and `meta`."""
    facts = without_credentials({"segment": segment, "meta": meta})
    return lambda folder: format.copy(checkpoint.path, folder, facts)


def _swap_in(new: Path, target: Path, moved: Path | None) -> None:
    try:
        files.rename(new, target)
        files.fsync_folder(target.parent)
    except BaseException:
        # also if only the sync failed: a folder that may not be durable does not count as saved
        if not new.exists():
            files.put_back(target, new)
        if moved is not None:
            files.put_back(moved, target)
        raise


def save_apart(
    folder: Path,
    draft: Draft,
    *,
    keep: Collection[str] = (),
    top: Path,
    filler: Callable[[Draft], Callable[[Path], int]] = filler,
    token: str = "",
) -> CommittedCheckpoint:
    """Commit best weights, which lie apart from the checkpoints of a run."""
    require_finite(draft.name, draft.common.arrays, draft.guarded)
    target = folder / str(draft.name)
    is_kept, size = is_equal(target, draft.digest, draft.meta), 0
    if not is_kept:
        size = place_apart(target, filler(draft), top=top, token=token)
    # last: older weights stay until the new weights are durable
    retire_others(folder, {target.name, *keep}, top=top)
    return CommittedCheckpoint(draft.name, target, size, is_kept, draft.digest)


def is_equal(target: Path, digest: str, meta: Json) -> bool:
    """Whether `target` holds a whole checkpoint with this digest, of this run and value by its `meta`."""
    try:
        if not target.exists():
            return False
        format.verify(target)
        body = read_body(target)
        return bool(body["digest"] == digest and body["meta"] == meta)
    except CheckpointError:
        return False
