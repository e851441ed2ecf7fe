"""Trust in a run's record: each start's record bears a mark that only the run's user can make.

A run's record names code.  Commands import and call this code only where the mark is right, or the user says
so (--trust).  The mark is keyed by a secret in the user's own configuration folder, and covers the names, so
that neither an edited record nor the mark of another run passes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.record.journal_reader import RunJournal
from everstep.record.rundir import RunDir

TRUST_VARIABLE = "EVERSTEP_TRUST"
"""Environment variable that stands for `--trust`."""

MARK = "mark"
"""Name of a start's mark among its facts."""

_COVERED = ("config", "code", "argv", "cwd")
"""Facts that a mark covers: the imported code, the arguments of its calls, its place; the command line."""


def key_file() -> Path | None:
    """Locate this user's key: `everstep/key` in $XDG_CONFIG_HOME or ~/.config; None without a home."""
    variable = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(variable) if os.path.isabs(variable) else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "everstep" / "key"


def mark(run: str, facts: Mapping[str, Any]) -> str | None:
    """Make the mark of a start's record; None where this user's key cannot be made."""
    with suppress(OSError):  # the run stays without a mark: a training needs no key
        if _key() is None:
            _make_key()
    key = _key()
    return None if key is None else _mark(key, run, facts)


def distrust(run_dir: Path, facts: Mapping[str, Any]) -> str:
    """Say why a start's facts do not count as this user's; "" if they do, or if EVERSTEP_TRUST is set."""
    if _is_trusted_anyway():
        return ""
    for path in (run_dir, run_dir / "run.json", run_dir / "journal"):
        if not path.exists() or path.stat().st_uid != os.geteuid():
            return f"{path} does not belong to you"
    key = _key()
    if key is None:
        return f"this user has no key in {key_file()} (the first training makes it)"
    if not isinstance(marked := facts.get(MARK), str):
        return "its record has no mark"
    expected = _mark(key, RunDir.open(run_dir, create=False).id, facts)
    if not hmac.compare_digest(marked.encode("utf-8", "surrogatepass"), expected.encode()):
        return "its mark is not yours, or the record was changed after it was marked"
    return ""


def distrust_config(run_dir: Path, config: Any) -> str:
    """Say why a configuration does not count as this user's: as `distrust` for the start that recorded it."""
    if _is_trusted_anyway():
        return ""
    reason = "none of its starts has recorded this configuration"
    for facts in RunJournal(run_dir).facts_since(0):
        if facts.get("config") == config and not (reason := distrust(run_dir, facts)):
            return ""
    return reason


def _is_trusted_anyway() -> bool:
    return os.environ.get(TRUST_VARIABLE, "") not in ("", "0")


def _mark(key: bytes, run: str, facts: Mapping[str, Any]) -> str:
    covered = {"run": run, **{fact: facts.get(fact) for fact in _COVERED}}
    return hmac.new(key, json.dumps(covered, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """Read this user's key; None if there is no key, or if others can read it."""
    path = key_file()
    if path is None:
        return None
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_secret = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
            key = bytes.fromhex(file.read(256).decode("ascii")) if is_secret else b""
            return key if len(key) >= 32 and status.st_uid == os.geteuid() else None
    return None


def _make_key() -> None:
    """Make a key where there is none; of two that are made at once the first counts."""
    path = key_file()
    if path is None or os.path.lexists(path):
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        # A link fails where the name is taken, so a key that another process made at once is kept.
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
