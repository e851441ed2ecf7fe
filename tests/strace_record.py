"""What strace, which is not ours, sees of a process: the calls that change files, in their order.

No word of `everstep.hazard` is trusted: a call before which no hazard stands is seen like any other.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import warm
from waiting import until

CLASSES = {
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2"), "write"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
    **dict.fromkeys(("rename", "renameat", "renameat2"), "rename"),
    **dict.fromkeys(("link", "linkat"), "link"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    **dict.fromkeys(("truncate", "ftruncate", "fallocate"), "truncate"),
    "unlink": "unlink",
    "rmdir": "rmdir",
}
"""Calls that change files, and their class; `_class_of` has those whose class depends on their arguments."""
SEEN = ("open", "openat", "creat", "unlinkat", "mmap", *CLASSES)
UNKNOWN = ("copy_file_range", "sendfile", "splice", "symlink", "symlinkat", "mknod", "mknodat", "openat2")
"""Calls that change files as well, in a way that is not modelled."""

_FOUND = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?|\b(AT_FDCWD|\d+)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?')
_LINE = re.compile(r"(?:(\d+) +)?(\w+)\((.*)\) += (\?|-?\d+|0x[0-9a-f]+)(.*)", re.DOTALL)


class Call(NamedTuple):
    """A call that changes files below the folder.

    Attributes:
        kind: its class.
        path, target: of the file, below the folder; `target` is the new name.
        data, offset: of a write; `offset` is None where it follows from the descriptor, or the new size.
        descriptor: number, of the file that is open or comes to be.
        flags: the other arguments, as text.
        thread: its number.
        failed: the name of the error; "" if the call succeeded.
        hazard: the hazard that its thread has passed most recently, where the record has hazards.
    """

    name: str
    kind: str
    path: str
    target: str = ""
    data: bytes = b""
    offset: int | None = None
    descriptor: int = -1
    flags: str = ""
    thread: str = ""
    failed: str = ""
    hazard: str = ""

    @property
    def role(self) -> str:
        """What the file is, without numbers that differ from run to run."""
        return f"{self.kind} {role(self.path)}" + (f" -> {role(self.target)}" if self.target else "")

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} {self.path}{self.target and ' -> '}{self.target})"


def role(path: str) -> str:
    """A path without process ids, random tokens and numbers of steps."""
    path = re.sub(r"-[0-9a-f]{8}(?=\.(copy\.)?safetensors)", "-TOKEN", path)
    path = re.sub(r"(\.tmp-.*?)-\d+(?=/|$)", r"\1-PID", path)
    path = re.sub(r"step-\d+", "step-N", path)
    path = re.sub(r"epoch-\d+", "epoch-N", path)
    return re.sub(r"segment-\d+", "segment-N", path)


WAITING = """
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # where Yama asks for that
os.write(0, b"%d" % os.getpid()), os.read(0, 1)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a file when it is traced."""


def record(command: list[str], folder: Path, log: Path, **environment: str) -> list[Call]:
    """Run a program of Python to its good end; return its calls that change files below `folder`.

    Args:
        command: a file and its arguments.
        log: where strace writes.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.fail("power cuts are made from strace's record: sh tools/strace.sh, or install strace")
    ours, theirs = socket.socketpair()
    output = log.with_suffix(".output")
    with ours, theirs, open(output, "wb") as said:
        victim = warm.Popen(
            [sys.executable, "-c", WAITING, *command],
            env={**os.environ, **warm.ONE_THREAD, **environment},
            stdin=theirs,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        number = ours.recv(64).decode()
        what = "trace=" + ",".join((*SEEN, *UNKNOWN))
        options = [strace, "-f", "-y", "-xx", "-s", "9999999", "-o", str(log), "-p", number, "-e", what]
        with subprocess.Popen(options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
            assert tracer.stderr is not None
            first = tracer.stderr.readline().decode()
            assert "attached" in first, f"strace cannot trace a process here: {first}"
            until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{number}/status").read_text())
            ours.sendall(b"!")
            status = victim.wait(120)
            tracer.communicate()
    assert status == 0, output.read_text(errors="replace")
    return _calls(log.read_text(), folder)


def _calls(log: str, folder: Path) -> list[Call]:
    """In the order in which they ended; a call whose class is not known is an AssertionError."""
    hazards, calls = dict[str, str](), list[Call]()
    for thread, name, arguments, result, more in _lines(log):
        texts, files = _told(arguments)
        if name == "write" and files and files[0].endswith(".hazards"):
            hazards[thread] = _data(arguments).decode().strip()
            continue
        call = _call(name, arguments, texts, files, folder)
        if call is not None:
            opens = name.startswith("open") or name == "creat"
            failed = more.split()[0] if result == "-1" else ""
            descriptor = int(result) if opens else call.descriptor
            hazard = hazards.get(thread, "")
            calls.append(call._replace(thread=thread, failed=failed, descriptor=descriptor, hazard=hazard))
    return calls


def _lines(log: str) -> Iterator[tuple[str, str, str, str, str]]:
    """(thread, call, arguments, result, what follows) of each call; interrupted ones are put together."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        number = line.partition(" ")[0] if line[:1].isdigit() else ""
        if line.endswith("<unfinished ...>"):
            begun[number] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        if resumed := re.match(r"(?:\d+ +)?<\.\.\. \w+ resumed>(.*)", line, re.DOTALL):
            line = begun.pop(number, "") + resumed[1]
        if found := _LINE.fullmatch(line):
            yield number, found[2], found[3], found[4], found[5]


def _told(arguments: str) -> tuple[list[str], list[str]]:
    """The strings of a call, and the paths of its descriptors."""
    texts, files = [], []
    for text, cut, _, file, gone in _FOUND.findall(arguments):
        if file or gone:
            files.append(_bytes(file).decode(errors="replace") + (" (deleted)" if gone else ""))
        else:
            assert not cut, f"strace has cut a string: {arguments[:200]}"
            texts.append(_bytes(text).decode(errors="replace"))
    return texts, files


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _data(arguments: str) -> bytes:
    return b"".join(_bytes(text) for text, _, number, _, _ in _FOUND.findall(arguments) if not number)


def _call(name: str, arguments: str, texts: list[str], files: list[str], folder: Path) -> Call | None:
    """A call that changes files below the folder; None of another call."""
    top = f"{folder}/"
    named = name in ("open", "creat") or name.endswith(("at", "at2"))
    paths = _resolved(name, texts, files) if named or not files else files[:1]
    paths = [os.path.normpath(path) for path in paths]
    below = [path.removeprefix(top) if path.startswith(top) else "" for path in paths]
    if str(folder) in paths:
        below = [b or ("." if path == str(folder) else "") for b, path in zip(below, paths, strict=True)]
    if not any(below):
        return None
    kind = _class_of(name, arguments)
    if not kind:
        return None
    assert all(below), f"a file comes from, or goes to, another place: {name}({paths})"
    path, target = below[0], below[1] if len(below) > 1 and kind in ("rename", "link") else ""
    offset: int | None = None
    if name in ("pwrite64", "ftruncate", "truncate"):
        offset = int(arguments.rpartition(", ")[2])
    number = re.match(r"(\d+)<", arguments)
    data = _data(arguments) if kind == "write" else b""
    descriptor = int(number[1]) if number else -1
    return Call(name, kind, path, target, data, offset, descriptor, _flags(arguments))


def _flags(arguments: str) -> str:
    return " ".join(re.findall(r"\b[A-Z]+_[A-Z_|]+", arguments))


def _resolved(name: str, texts: list[str], files: list[str]) -> list[str]:
    if not texts:
        return files[:1]
    folders = files if name.endswith(("at", "at2")) else []
    folders = [*folders, *[""] * (len(texts) - len(folders))]
    return [os.path.join(folder, text) for folder, text in zip(folders, texts, strict=False)]


def _class_of(name: str, arguments: str) -> str:
    flags = _flags(arguments)
    if name in ("open", "openat", "creat"):
        # O_TMPFILE and the like are not known, and shall be
        if "O_CREAT" in flags or name == "creat":
            return "create"
        if "O_TRUNC" in flags:
            return "truncate"
        return "open" if "O_WRONLY" in flags or "O_RDWR" in flags else ""
    if name == "unlinkat":
        return "rmdir" if "AT_REMOVEDIR" in flags else "unlink"
    if name == "mmap":
        return "map" if "MAP_SHARED" in flags and "PROT_WRITE" in flags else ""
    assert name in CLASSES, f"what does {name} do to a file?  Name it here: {arguments[:200]}"
    return CLASSES[name]
