"""Messages to people about a run that needs them, or needs them no more."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from everstep import unattended
from everstep.arguments import number
from everstep.contracts.services import RunView, Service
from everstep.contracts.state import Json
from everstep.errors import ConfigError, nearest
from everstep.record import DIVERGED, RunDir, RunJournal
from everstep.redaction import redacted

EVENTS = {
    "failed": "has failed",
    "diverged": "has diverged",
    "stuck": "is stuck",
    "finished": "is finished",
}
_AGAIN = ("diverged", "finished")
"""Events that a resume meets again: the same step is compared again, a finished run is opened again."""
_NOTE = "notified"
"""Kind of the journal's event that a message was sent."""
_LAST_WORDS = 3.0
"""Seconds that a process which ends itself waits for a message."""


class Target(NamedTuple):
    """Command with its arguments that takes messages, each within `timeout` seconds."""

    command: tuple[str, ...]
    timeout: float

    def send(self, facts: Mapping[str, Any]) -> str | None:
        """Send facts as JSON, and wait; return what went wrong, None if nothing did."""
        try:
            # a session of its own: Ctrl-C ends the training, and must not end its message
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            quiet |= {"input": json.dumps(facts).encode() + b"\n", "start_new_session": True}
            status = subprocess.run(self.command, timeout=self.timeout, **quiet).returncode
        except subprocess.TimeoutExpired:
            return f"it took longer than {self.timeout:g} s"
        except OSError as error:
            return str(error.strerror)
        return f"exit status {status}" if status else None


def facts_of(run_dir: Path, event: str, reason: str, **more: Any) -> dict[str, Any]:
    """Collect the facts of a message about a run; `text` is one sentence for people."""
    with suppress(OSError):
        more = {"run": RunDir.open(run_dir, create=False).id, **more}
    facts = {"run": run_dir.name, "event": event, "reason": redacted(reason)[:2000], **more}
    place = f" after step {facts['step']}" if "step" in facts else ""
    text = f"{facts['run']} {EVENTS[event]}{place}" + (f": {facts['reason']}" if reason else "")
    where = {"run_dir": str(run_dir), "host": socket.gethostname(), "time": time.time()}
    return {"text": text, **facts, **where}


class Notify(Service):
    """Tell a command when the run fails, diverges, is stuck or finished.

        Notify(["mail", "-s", "a run", "me@example.org"])
        Notify(["curl", "--json", "@-", "https://hooks.example.org/services/..."])

    The command gets JSON on its standard input: "text" (a sentence, which chats show), "event", "reason",
    "run", "run_dir", "step", "epoch", "start", "host", "time" (seconds since 1970).

    "failed": an error or a guard ends a start (`everstep run` tells it of a process that was killed, too).
    "diverged": a step that is executed again has other results than the first time.  "stuck": `HangWatch`
    finds that nothing moves.  A thread sends the message; the end of a start waits for it, `timeout` seconds
    at most.  One that cannot be sent is a warning, once.  A resume does not send it again; a process that is
    killed just before sends nothing.

    Args:
        command: a program and its arguments, of which the record names the program only.
        on: the events to tell.
        timeout: seconds that one message may take.
        name: name of the service; needed if there are two.
    """

    moments = frozenset()
    isolate = False
    window = "none"

    def __init__(
        self,
        command: Sequence[str],
        *,
        on: Sequence[str] = tuple(EVENTS),
        timeout: float = 10.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "notify")
        self.on = (on,) if isinstance(on, str) else tuple(on)
        for event in self.on:
            if event not in EVENTS:
                raise ConfigError(f"on={event!r}: there is no such event; {nearest(str(event), EVENTS)}")
        words = not isinstance(command, str) and all(isinstance(word, str) and word for word in command)
        if not command or not words:
            raise ConfigError(
                f'command={command!r}: give a list of strings, as in ["mail", "me@example.org"]'
            )
        self.target = Target(tuple(command), number("timeout", timeout, of="seconds"))
        self._is_open, self._warned = False, False
        self._threads: list[threading.Thread] = []
        self._one_by_one = threading.Lock()

    def config(self) -> Json:
        return {"to": self.target.command[0], "on": list(self.on), "timeout": self.target.timeout}

    def __repr__(self) -> str:
        return f"Notify(to={self.target.command[0]!r}, on={self.on!r}, timeout={self.target.timeout!r})"

    def open(self, run: RunView) -> None:
        self._run, self._run_dir, self._threads = run, Path(run.run_dir).absolute(), []
        self._is_open = True
        unattended.tell("notify", target=self.target, on=self.on)
        run.listen(self._heard)

    def close(self) -> None:
        self._is_open = False
        for thread in self._threads:
            thread.join(self.target.timeout + 1.0)

    def _heard(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take an event of the journal, in the thread that adds it."""
        if kind == "hang":
            self._begin("stuck", str(data["what"]), data)
        elif kind == DIVERGED:
            self._begin("diverged", "a step that was executed again came out otherwise", data)
        elif kind == "closed" and data["status"] in ("finished", "failed"):
            self._begin(data["status"], str(data["reason"]), data)
            if data["status"] == "failed" and threading.current_thread() is not threading.main_thread():
                # this process ends itself (a hang, a lost rank) as soon as this thread has spoken
                for thread in self._threads:
                    thread.join(_LAST_WORDS)

    def _begin(self, event: str, reason: str, data: Mapping[str, Any]) -> None:
        if event not in self.on or not self._is_open:
            return
        run = self._run
        place = {"step": data.get("step", run.step), "epoch": data.get("epoch", run.epoch)}
        facts = facts_of(self._run_dir, event, reason, start=run.segment, **place)
        thread = threading.Thread(target=self._send, args=(facts,), name="everstep-notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send(self, facts: dict[str, Any]) -> None:
        message = {"to": self.name, "event": facts["event"], "step": facts["step"]}
        with self._one_by_one:
            # whether this start or an earlier one has sent it; only this reads the journal
            sent = (each.data for each in RunJournal(self._run_dir).events(_NOTE, valid=False))
            if facts["event"] in _AGAIN and message in sent:
                return
            # first: a process that is killed here tells nothing, rather than the same thing twice
            self._run.note(_NOTE, message, wall=True)
            self._run.flush()
            problem = self.target.send(facts)
        if problem is not None and not self._warned:
            self._warned = True
            self._run.println(
                f"warning: {self.target.command[0]} was not told that {facts['text']}: {redacted(problem)}"
            )
