"""The manifest of a checkpoint: its bytes, its checksum, descriptions of arrays, and what is checked of it.

See `format` for what is in it.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from everstep.checkpoint.array_file import check_size, damaged, unreadable
from everstep.errors import CheckpointError, CheckpointVersionError
from everstep.untrusted_files import Count, Finite, is_file_name, misfits, parse_json, read_regular

FORMAT = 9
"""Version of these files and of the state tree in them, as written; raised with every change of the tree's
shape (tests/supervisor/test_forged_checkpoints.py).  No other is read."""

ARRAYS = "arrays.safetensors"
MANIFEST = "manifest.json"

_MANIFEST = re.compile(rb'\{"checksum":"([0-9a-f]{32})","body":(\{.*\})\}\n', re.DOTALL)


def packed(body: Mapping[str, Any]) -> bytes:
    text = json_bytes(body, f"checkpoint {body['name']}")
    return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


def json_bytes(value: Any, whose: str) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{whose}: JSON cannot hold its structure or meta ({error}); encode such values first"
        ) from error


@cache
def _own_version() -> str:
    return version("everstep")


def versions() -> dict[str, str]:
    found = {"everstep": _own_version(), "python": platform.python_version(), "numpy": np.__version__}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = str(torch.__version__)
    return found


def read_body(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest alone, and return its body."""
    path = folder / MANIFEST
    try:
        raw = read_regular(path)
    except OSError as error:
        unreadable(path, error)
    match = _MANIFEST.fullmatch(raw)
    if match is None:
        damaged(path, "is empty" if not raw else f"is torn or overwritten ({len(raw)} bytes)")
    found = xxhash.xxh3_128_hexdigest(match[2])
    if found != match[1].decode():
        damaged(path, f"has changed since it was written: checksum {match[1].decode()}, now {found}")
    try:
        body: dict[str, Any] = parse_json(match[2])
    except ValueError as error:
        damaged(path, f"is not JSON ({error})", error)
    if not isinstance(body, dict) or not isinstance(body.get("versions", {}), dict):
        damaged(path, "does not have the content of a manifest")
    _require_version(folder, body)
    if odd := list(_oddities(body)):
        damaged(path, f"does not have the content of format {FORMAT} ({', '.join(odd)})")
    return body


_BODY: dict[str, Any] = {
    "name": str,
    "step": Count,
    "epoch": Count,
    "phase": str,
    "partial": bool,
    "digest": str,
    "segment": Count,
    "created": str,
    "meta": dict[str, object] | None,
    "arrays": dict,
    "ranks": list[str | None],
    "files": dict[str, dict[str, object]],
}
"""Facts that every manifest must have, with their types."""

_RECORD: dict[str, Any] = {"bytes": Count, "xxh3_128": str}
_DESCRIPTION: dict[str, Any] = {
    "dtype": str,
    "shape": list[Count],
    "backend": str,
    "extra": dict,
    "bytes": Count,
}


def _oddities(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of facts that are missing or of a wrong kind."""
    if wrong := list(misfits(body, _BODY)):
        yield from wrong
        return
    meta, listed, own = body["meta"] or {}, body["files"], body["ranks"]
    yield from (f"meta/{name}" for name in misfits(meta, _META))
    if not _is_time(body["created"]):
        yield "created"
    if body["phase"] not in ("step", "epoch"):
        yield "phase"
    if not own:
        yield "ranks"
    # a name with a folder in it could lead anywhere
    yield from (n for n, record in listed.items() if not is_file_name(n) or any(misfits(record, _RECORD)))
    yield from (name for name in (ARRAYS, *own) if name is not None and name not in listed)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).timestamp() >= 0
    except (ValueError, OverflowError):
        return False


def _require_version(folder: Path, body: Mapping[str, Any]) -> None:
    written, writer = body.get("format"), body.get("versions", {}).get("everstep", "of its time")
    if written == FORMAT:
        return
    if isinstance(written, int) and written < FORMAT:
        remedy = f"continue with the everstep that wrote it ({writer}), or begin in another directory"
    else:
        remedy = f"install everstep {writer} or newer, or resume from an older checkpoint"
    raise CheckpointVersionError(
        f"checkpoint {folder} has format version {written}, this everstep ({version('everstep')}) reads "
        f"only {FORMAT}: {remedy}"
    )


def check_sizes(folder: Path, body: Mapping[str, Any]) -> None:
    """Verify the cheap half: all files are there and have their sizes."""
    for name, record in body["files"].items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            unreadable(folder / name, error)
        check_size(folder / name, found, record)


def size(body: Mapping[str, Any]) -> int:
    return sum(record["bytes"] for record in body["files"].values())


_META: dict[str, Any] = {
    "run?": str | None,
    "controllers?": dict,
    "options?": dict[str, dict[str, str]],
    "config?": dict[str, object] | None,
    "journal?": tuple[Count, Count] | None,
    "metrics?": dict[str, Finite],
    "metric_steps?": dict[str, Count] | None,
    "kept?": dict[str, list[str]],
    "open?": list[str] | None,
    "rollbacks?": list[tuple[dict[str, object], Count]] | None,
    "fingerprint?": dict[str, dict[str, str]] | None,
    "one_fingerprint?": bool,
    "data_ranks?": list[Count] | None,
    "interim?": bool,
    "metric?": str,
    "value?": Finite,
}
"""Types of the facts in `meta`; others may be anything."""


def checked(described: dict[str, Any]) -> dict[str, Any]:
    """Return descriptions of arrays, each of which must have the facts that a `HostArray` needs."""
    for name, facts in described.items():
        if not isinstance(facts, dict) or any(misfits(facts, _DESCRIPTION)):
            raise KeyError(f"arrays/{name}")
    return described
