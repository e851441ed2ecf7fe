"""Provenance of a run: its command line, code and machine.  Never the environment."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from everstep.display.cells import with_leaves
from everstep.redaction import redacted, redacted_line

GIT_SECONDS = 2.0
"""Seconds that git may take in all; an answer that is late is recorded as a problem."""

SWEEP_VARIABLE = "EVERSTEP_SWEEP"
"""Environment variable by which `everstep sweep` tells a trial the sweep's name."""


def facts(
    argv: Sequence[str],
    config: Any,
    seed: int | None,
    backends: Mapping[str, Mapping[str, str]] | None = None,
    code: Path | None = None,
) -> dict[str, Any]:
    """Collect a start's provenance, as JSON, without credentials (`everstep.redaction`).

    `backends` are name -> `Backend.describe()`; the git state is that of `code`, or of the script's folder.
    """
    collected = {
        "argv": redacted_line(argv),
        "cwd": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "pid": os.getpid(),
        "packages": packages(),
        "git": git_facts(code or code_folder(argv)),
        "config": as_json(config),
        "seed": seed,
        "backends": as_json(backends or {}),
    }
    if sweep := os.environ.get(SWEEP_VARIABLE):
        collected["sweep"] = sweep
    without_secrets: dict[str, Any] = redacted(collected)
    return without_secrets


def machine() -> dict[str, str]:
    """Collect facts that may change the last bits of a result, outside any framework: names to strings."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE):
            processor = model[1]
    libc = " ".join(platform.libc_ver()).strip() or platform.system()
    return {"processor": processor, "python": platform.python_version(), "libc": libc}


def as_json(value: Any) -> Any:
    """Convert `value` to JSON: dicts with string keys, lists, and reprs for the rest."""
    return with_leaves(
        value, lambda leaf: leaf if isinstance(leaf, bool | int | float | str | None) else repr(leaf)
    )


def packages() -> dict[str, str]:
    """Map import names to versions: everstep, numpy and the other packages that are imported now."""
    names = {name for name in list(sys.modules) if "." not in name and not name.startswith("_")}
    versions = {}
    for name in sorted((names - sys.stdlib_module_names) | {"everstep", "numpy"}):
        # None in place of a module keeps it from being imported
        version = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
        if version := version if isinstance(version, str) else _installed_version(name):
            versions[name] = str(version)
    return versions


@cache  # a search of every folder of sys.path, for each module of the program itself at each of its starts
def _installed_version(name: str) -> str | None:
    from importlib import metadata  # 20 ms, and not needed before a run starts

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def code_folder(argv: Sequence[str]) -> Path:
    """Choose the folder whose git state matters: the script's; for installed commands the working folder."""
    script = Path(argv[0]) if argv else Path()
    return script.resolve().parent if script.suffix == ".py" and script.exists() else Path.cwd()


def git_facts(folder: Path) -> dict[str, Any] | None:
    """Read the state of the repository around `folder`; None outside a repository and without git.

    Returns:
        commit, branch (None when detached), dirty, diff (16 hexadecimal digits of the uncommitted
        changes' hash, None when clean), pushed (a remote branch holds the commit), remote (its
        address without any credential).  Untracked files count as clean: looking for them among
        millions of outputs takes minutes.  {"problem": ...} where git fails or does not answer in time.
    """
    deadline = time.monotonic() + GIT_SECONDS
    try:
        status = _git(folder, deadline, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
        heads = dict(re.findall(r"^# branch\.(\S+) (.*)$", status, re.MULTILINE))
        commit = None if heads["oid"] == "(initial)" else heads["oid"]
        dirty = bool(re.search(r"^[^#]", status, re.MULTILINE))
        urls = _git(folder, deadline, "config", "--get-regexp", r"^remote\..*\.url$", empty=True)
        remotes = dict(re.findall(r"^remote\.(.*)\.url (.*)$", urls, re.MULTILINE))
        git = {
            "commit": commit,
            "branch": None if heads["head"] == "(detached)" else heads["head"],
            "dirty": dirty,
            "diff": None,
            "pushed": False,
            "remote": redacted(remotes.get("origin") or next(iter(remotes.values()), None)),
        }
        if commit and dirty:
            diff = _git(folder, deadline, "diff", "HEAD", "--no-ext-diff", "--binary")
            git["diff"] = xxhash.xxh3_64_hexdigest(diff.encode())
        if commit:
            holding = ("for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes")
            git["pushed"] = bool(_git(folder, deadline, *holding))
        return git
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        return {"problem": f"git did not answer within {GIT_SECONDS:g} seconds"}
    except subprocess.CalledProcessError as error:
        stderr = error.stderr.decode(errors="replace").strip()
        return None if "not a git repository" in stderr else {"problem": redacted(stderr.partition("\n")[0])}
    except KeyError:
        return {"problem": "the answer of git cannot be parsed"}
    except OSError as error:
        return {"problem": f"git cannot be run: {error.strerror}"}


def _git(folder: Path, deadline: float, *command: str, empty: bool = False) -> str:
    """Return the output of a git command; `empty` allows exit status 1 (`git config`: no such key)."""
    process = subprocess.run(
        ["git", "-C", str(folder), *command],
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},  # an observer takes no index lock
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(0.01, deadline - time.monotonic()),
        check=False,
    )
    if process.returncode and not (empty and process.returncode == 1):
        raise subprocess.CalledProcessError(process.returncode, command, process.stdout, process.stderr)
    return process.stdout.decode(errors="backslashreplace")
