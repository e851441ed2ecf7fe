"""Commit of one checkpoint folder: it is there whole or not at all, whatever operation fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from everstep.checkpoint import files, format, reading
from everstep.checkpoint.array_file import chunks
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.content import Linked, Sharing
from everstep.checkpoint.format import Checkpoint, Phase
from everstep.checkpoint.manifest import read_body
from everstep.contracts.state import HostArray, Json
from everstep.durable import require_no_link, temporary
from everstep.errors import CheckpointError, NonFiniteError
from everstep.redaction import without_credentials
from everstep.state import Encoded


@dataclass(frozen=True)
class CommittedCheckpoint:
    """Result of a commit.

    Attributes:
        name: name of the checkpoint.
        path: folder of the checkpoint.
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
    """Refuse arrays with NaN or infinity.

    Args:
        guarded: names of the arrays that are looked at.

    Raises:
        NonFiniteError: names the step and up to five of the arrays.
    """
    bad = [key for key in arrays if key in guarded and not finite(arrays[key])]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        remedy = (
            "the checkpoint before is intact: resume from that with a lower learning rate, clipped "
            "gradients or other data"
            if name.step
            else "no step has run: give each of these its first values (memory that was only allocated, by "
            "to_empty(), holds anything), or see to the weights that were loaded"
        )
        raise NonFiniteError(
            f"after step {name.step}, NaN or infinity in {', '.join(bad[:5])}{more}: not saved; {remedy}",
            step=name.step,
        )


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


def finite(array: HostArray) -> bool:
    """Whether all elements are finite, of complex numbers both parts; looks at the bytes, chunk by chunk."""
    name = str(array.extra.get("dtype", "")).removeprefix("torch.") if array.dtype == "U8" else ""
    rule = _NON_FINITE.get("F16" if name == "complex32" else array.dtype)
    pieces = chunks(array.data.data)
    if rule is not None:
        kind, mask, pattern = rule
        return not any(((np.frombuffer(c, kind) & kind(mask)) == kind(pattern)).any() for c in pieces)
    wide = _numpy_float(name)
    return wide is None or all(np.isfinite(np.frombuffer(c, wide)).all() for c in pieces)


def _numpy_float(name: str) -> np.dtype[Any] | None:
    """Return NumPy's float or complex dtype of that name; None for other names."""
    try:
        dtype = np.dtype(name or "u1")
    except (TypeError, ValueError):
        return None
    return dtype if dtype.kind in "fc" else None


def place(
    target: Path, write: Callable[[Path], int], make_room: Callable[[], Path | None], token: str = ""
) -> int:
    """Write a folder beside `target`, then give it that name.

    Args:
        write: fills the new folder durably, and returns the number of bytes; 0 if the folder is not needed.
        make_room: moves an old folder of that name away and returns its new path; None without an old folder.
        token: makes the folder's first name one that nobody has ever used.

    Returns:
        The number of bytes written.
    """
    new = temporary(target.with_name(f"{target.name}.{token}") if token else target)
    files.discard(new)  # a killed process with the same pid may have left such a folder
    try:
        files.make_dir(new)
        size = write(new)
        if size:
            # room is made last: until the new folder is durable, the old folder keeps the name
            _swap_in(new, target, make_room())
        else:
            files.discard(new)
    except BaseException:
        files.discard(new)
        raise
    return size


def place_apart(target: Path, write: Callable[[Path], int], *, top: Path, token: str = "") -> int:
    """Place a folder and its parents; an old folder of that name is deleted after the new folder is there.

    Raises:
        RunDirError: a link below `top` leads to the folder.
    """
    require_no_link(target, top)
    files.make_dirs(target.parent)
    trash: Path | None = None

    def make_room() -> Path | None:
        nonlocal trash
        trash = files.to_trash(target) if target.exists() else None
        return trash

    size = place(target, write, make_room, token)
    # only after the swap: a swap that fails puts the old folder back
    if trash is not None:
        files.discard(trash)
    return size


def retire_others(folder: Path, keep: Collection[str], *, top: Path) -> None:
    """Delete the checkpoints in `folder` whose names are not in `keep`.

    Raises:
        RunDirError: a link below `top` leads to `folder`.
    """
    require_no_link(folder, top)
    for other in sorted(folder.iterdir()):
        if other.name not in keep and CheckpointName.matches(other.name):
            with contextlib.suppress(OSError):  # an old folder harms nobody; the next call tries again
                files.retire(other, top=top)


def writing(
    name: CheckpointName,
    facts: Mapping[str, Json],
    common: Encoded,
    own: Encoded | None = None,
    sharing: Sharing | None = None,
) -> Callable[[Path], int]:
    """Make the function that fills a checkpoint's folder, as `format.write` does.

    Args:
        facts: values of the manifest beside the name.
    """
    return lambda folder: format.write(folder, body_of(name, facts), common, own, sharing)


def copying(checkpoint: Checkpoint, **facts: Json) -> Callable[[Path], int]:
    """Make the function that fills a folder with a copy of a checkpoint.

    Args:
        facts: values of the manifest that replace those of the same name.
    """
    divided = any(array.region is not None for array in checkpoint.common.arrays.values())
    if checkpoint.ranks > 1 or divided:
        # this process has not read all that the files have: they are copied as they are
        return lambda folder: format.copy(checkpoint.path, folder, without_credentials(dict(facts)))
    # what was read is written, in today's format
    told = {name: getattr(checkpoint, name) for name in ("epoch", "phase", "partial", "digest")}
    return writing(checkpoint.name, {**told, **facts}, checkpoint.common, checkpoint.own)


Writing: TypeAlias = Callable[[CheckpointName, Mapping[str, Json], Encoded], Callable[[Path], int]]


def writing_best(sharing: Sharing) -> Writing:
    """Make a `writing` for best weights that share content with the checkpoints of their run."""

    def writing(name: CheckpointName, facts: Mapping[str, Json], user: Encoded) -> Callable[[Path], int]:
        body = body_of(name, facts)
        return lambda folder: format.write(folder, body, user, sharing=Linked(sharing, folder))

    return writing


def body_of(name: CheckpointName, facts: Mapping[str, Json]) -> dict[str, Json]:
    """Return the facts of a manifest's body, without credentials."""
    return {"name": str(name), "step": name.step, **without_credentials(dict(facts))}


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
    name: CheckpointName,
    structure: Json,
    arrays: Mapping[str, HostArray],
    *,
    digest: str,
    epoch: int,
    phase: Phase,
    meta: Json = None,
    guarded: Collection[str] = (),
    keep: Collection[str] = (),
    top: Path,
    writing: Writing = writing,
    token: str = "",
) -> CommittedCheckpoint:
    """Commit best weights, which lie apart from the checkpoints of a run.

    Args:
        folder: folder of the metric's best weights; created with its parents.
        digest, epoch, phase, meta, guarded: as in `Store.commit`.
        keep: names of older weights in `folder` that stay; all others are deleted after the commit.
        top: the run directory; no link below it is followed.
        writing: makes the function that fills the folder; see `writing`.
        token: as in `place`.

    Raises:
        NonFiniteError, CheckpointError, OSError: as `Store.commit`.
        RunDirError: a link below `top` leads to the folder.
    """
    require_finite(name, arrays, guarded)
    target = folder / str(name)
    kept, size = is_equal(target, digest, meta), 0
    if not kept:
        facts: dict[str, Json] = {
            "epoch": epoch,
            "phase": phase,
            "partial": False,
            "digest": digest,
            "segment": 0,
            "meta": meta,
        }
        size = place_apart(
            target, writing(name, facts, Encoded(structure, dict(arrays))), top=top, token=token
        )
    # last: older weights stay until the new weights are durable
    retire_others(folder, {target.name, *keep}, top=top)
    return CommittedCheckpoint(name, target, size, kept, digest)


def is_equal(target: Path, digest: str, meta: Json) -> bool:
    """Whether `target` holds a whole checkpoint with this digest, of this run and value by its `meta`."""
    try:
        if not target.exists():
            return False
        reading.verify(target)
        body = read_body(target)
        return bool(body["digest"] == digest and body["meta"] == meta)
    except CheckpointError:
        return False
