"""`python fuzz_child.py RUN TARGET SEED FIRST COUNT`: hand hostile inputs to readers, within limits.

Prints one JSON object: how many inputs were read, how many ended in a value, and what went wrong.
An input follows from seed, target and number alone: to repeat number 17, give FIRST 17 and COUNT 1.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

ROOM = 1 << 29
"""Bytes of address space that all inputs of a process may take, beside those of the imports."""
SECONDS = 10.0
"""Seconds of the processor for one input: YAML of a thousand levels takes three."""
MOST = 5
"""Most faults that are told."""

ACTS = {
    *("pickle.find_class", "marshal.loads", "marshal.load", "exec", "compile", "import", "code.__new__"),
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
    *("ctypes.dlopen", "ctypes.dlsym", "socket.connect", "socket.bind", "webbrowser.open"),
    *("os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"),
    *("shutil.rmtree", "shutil.copyfile", "shutil.move", "open"),
}


class Watch:
    """Audit hook of this process: what readers do that a file must not make them do.

    While it learns, the readers are handed files as everstep wrote them; what they compile then (the
    annotations of their own classes) they may compile again.

    Args:
        home: the folder in which files may be written.
    """

    def __init__(self, home: Path) -> None:
        self._home = os.path.realpath(home)
        self._known: set[Any] = set()
        self._learns = True
        self.imported: set[str] = set()
        self.acts: list[str] = []
        sys.addaudithook(self._heard)

    def arm(self) -> None:
        """From here on nothing new may be compiled or executed."""
        self._learns = False

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in ACTS:
            return
        if event == "import":
            top = str(given[0]).partition(".")[0]
            self.imported.add(top)
            if not self._learns and top not in {*sys.stdlib_module_names, "everstep"}:
                self.acts.append(f"import of {given[0]!r:.100}")
        elif event == "open":
            self._opened(*given)
        elif event.startswith(("os.r", "os.l", "os.m", "os.t", "os.c", "os.symlink", "shutil")):
            self._require_home(event, given[0])
        elif event in ("exec", "compile", "code.__new__", "marshal.loads", "marshal.load"):
            self._compiled(event, given)
        else:
            self.acts.append(f"{event} {given!r:.100}")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self._require_home("open for writing", path)

    def _require_home(self, event: str, path: Any) -> None:
        if isinstance(path, int):  # a descriptor: the file was opened before
            return
        place = os.path.realpath(os.fsdecode(path))
        if not self._learns and not place.startswith((self._home + os.sep, "/dev/null")):
            self.acts.append(f"{event} {place!r:.200}")

    def _compiled(self, event: str, given: tuple[Any, ...]) -> None:
        if _is_importing():  # of a module that the event "import" has told
            return
        one = given[0]
        key = (event, *((one.co_code, one.co_names) if isinstance(one, CodeType) else (repr(one),)))
        if self._learns:
            self._known.add(key)
        elif key not in self._known:
            self.acts.append(f"{event} {one!r:.100}")


def _is_importing() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def limit_memory() -> None:
    """Let this process take `ROOM` bytes beside those that it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))


def one_input(target: Any, data: bytes, watch: Watch) -> tuple[bool, str]:
    """Read an input; whether it ended in a value, and what is wrong with how that went, or ""."""
    begun, before = time.process_time(), len(watch.acts)
    left: BaseException | None = None
    is_value = False
    try:
        is_value = target.read(data) is not False
    except target.may:
        pass
    except BaseException as error:
        left = error
    took, acts = time.process_time() - begun, watch.acts[before:]
    if acts or took > SECONDS:
        return False, "; ".join(acts) or f"it took {took:.1f} s"
    return is_value, "" if left is None else "".join(traceback.format_exception(left)[-3:])


def main(run: Path, name: str, seed: str, first: int, count: int) -> dict[str, Any]:
    watch = Watch(run)
    from fuzz_targets import Place, targets

    place = Place(run)
    target = targets(place)[name]
    learn(target, watch, seed, name)
    place.restore()
    limit_memory()
    watch.arm()
    faults: list[str] = []
    done = values = 0
    for number in range(first, first + count):
        data = target.make(Random(f"{seed}/{name}/{number}"))
        is_value, told = one_input(target, data, watch)
        if told:
            faults.append(f"input {number} ({data[:200]!r}, {len(data)} bytes): {told}")
        done, values = done + 1, values + is_value
        if len(faults) == MOST:
            break
    return {"done": done, "values": values, "faults": faults, "imported": sorted(watch.imported)}


def learn(target: Any, watch: Watch, seed: str, name: str) -> None:
    """Import what the readers import, by inputs whose outcome does not count."""
    for number in range(30):
        one_input(target, target.make(Random(f"{seed}/{name}/warm {number}")), watch)


if __name__ == "__main__":
    arguments: list[str] = sys.argv[1:]
    told: Callable[[str], None] = print
    told(json.dumps(main(Path(arguments[0]), *arguments[1:3], *map(int, arguments[3:5]))))
