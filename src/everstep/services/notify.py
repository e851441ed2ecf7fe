"""Messages to people about a run that needs them, or needs them no more."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from everstep import unattended
from everstep.arguments import number
from everstep.contracts.services import BuiltIn, RunView
from everstep.contracts.state import Json
from everstep.errors import ConfigError, nearest
from everstep.record import DIVERGED, RunDir, RunJournal
from everstep.redaction import HIDDEN, redacted

EVENTS = {"failed": "has failed", "diverged": "has diverged", "stuck": "is stuck", "finished": "is finished"}
_AGAIN = ("diverged", "finished")
"""Events that a resume meets again: the same step is compared again, a finished run is opened again."""
_NOTE = "notified"  # kind of the event that a message was sent
_LAST_WORDS, _LONGEST = 3.0, 2000
"""Seconds that a process which ends itself waits for a message, and most characters of a reason."""


class Target(NamedTuple):
    """Receiver of messages: a command or a URL."""

    command: tuple[str, ...]
    url: str
    timeout: float

    def __str__(self) -> str:
        if self.command:
            return self.command[0]
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}/{HIDDEN}"  # a webhook has its secret in the path

    def send(self, facts: Mapping[str, Any]) -> str | None:
        body = json.dumps(facts).encode()
        return self._post(body) if self.url else self._call(body + b"\n")

    def _post(self, body: bytes) -> str | None:
        import urllib.request

        class NoRedirect(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                return None

        headers = {"Content-Type": "application/json", "User-Agent": "everstep"}
        request = urllib.request.Request(self.url, body, headers)
        try:
            urllib.request.build_opener(NoRedirect).open(request, timeout=self.timeout).close()
        except Exception as error:
            late = isinstance(getattr(error, "reason", error), TimeoutError)
            return self._too_long() if late else f"{type(error).__name__}: {error}"
        return None

    def _call(self, message: bytes) -> str | None:
        # a file, not a pipe: what the command leaves running would hold a pipe open
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.run(
                    self.command,
                    input=message,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    timeout=self.timeout,
                    start_new_session=True,  # Ctrl-C ends the training, and must not end its message
                )
            except OSError as error:
                return str(error.strerror)
            except subprocess.TimeoutExpired:
                return self._too_long()
            if process.returncode == 0:
                return None
            errors.seek(0)
            lines = errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        return f"exit status {process.returncode}" + (f": {lines[-1][:200]}" if lines else "")

    def _too_long(self) -> str:
        return f"it took longer than {self.timeout:g} s"


def facts_of(run_dir: Path, event: str, reason: str, **more: Any) -> dict[str, Any]:
    """Collect the facts of a message about a run; `text` is one sentence for people."""
    with suppress(OSError):
        more = {"run": RunDir.open(run_dir, create=False).id, **more}
    facts = {"run": run_dir.name, "event": event, "reason": redacted(reason)[:_LONGEST], **more}
    place = f" after step {facts['step']}" if "step" in facts else ""
    text = f"{facts['run']} {EVENTS[event]}{place}" + (f": {facts['reason']}" if reason else "")
    origin = {"run_dir": str(run_dir), "host": socket.gethostname(), "time": time.time()}
    return {"text": text, **facts, **origin}


class Notify(BuiltIn):
    """Tell a command or a URL when the run fails, diverges, is stuck or finished.

        Notify(command=["mail", "-s", "a run", "me@example.org"])
        Notify(url="https://hooks.example.org/services/...")

    A command gets JSON on its standard input, a URL a POST of the same: "text" (a sentence, which chats
    show), "event", "reason", "run", "run_dir", "step", "epoch", "start", "host", "time" (seconds since 1970).

    A message is sent by a thread; the end of a start waits for it, `timeout` seconds at most.  A message that
    cannot be sent is a warning, once.  A resume does not send it again; a process that is killed just before
    sends nothing.

    Args:
        command: a command and its arguments.
        url: an address with http or https.  The record and the warnings name its host only.
        on: the events to tell: "failed" (an error or a guard ends a start; `everstep run` tells it of a
            process that was killed, too), "diverged" (a step that is executed again has other results than
            the first time), "stuck" (the run's `HangWatch` finds that nothing moves), "finished".
        timeout: seconds that one message may take.
    """

    moments = frozenset()

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        on: Sequence[str] = tuple(EVENTS),
        timeout: float = 10.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "notify")
        self.on = (on,) if isinstance(on, str) else tuple(on)
        for event in self.on:
            if event not in EVENTS:
                raise ConfigError(f"on={event!r}: there is no such event; {nearest(str(event), EVENTS)}")
        if bool(command) == (url is not None):
            raise ConfigError('Notify: give one of command=["PROGRAM", "ARGUMENT"] and url="https://..."')
        if isinstance(command, str) or not all(isinstance(part, str) and part for part in command):
            raise ConfigError(f'command={command!r}: give a list of strings, as ["mail", "me@example.org"]')
        address = "" if url is None else _address(url)
        self.target = Target(tuple(command), address, number("timeout", timeout, of="seconds"))
        self._is_open = False
        self._threads: list[threading.Thread] = []
        self._one_by_one = threading.Lock()
        self._warned = False

    def config(self) -> Json:
        return {"to": str(self.target), "on": list(self.on), "timeout": self.target.timeout}

    def __repr__(self) -> str:
        return f"Notify(to={str(self.target)!r}, on={self.on!r}, timeout={self.target.timeout!r})"

    def open(self, run: RunView) -> None:
        self._run, self._run_dir, self._threads = run, run.run_dir, []
        self._is_open = True
        unattended.tell("notify", target=self.target, on=self.on)
        run.listen(self._on_event)

    def close(self) -> None:
        self._is_open = False
        for thread in self._threads:
            thread.join(self.target.timeout + 1.0)

    def _on_event(self, kind: str, data: Mapping[str, Any]) -> None:
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
            earlier = (each.data for each in RunJournal(self._run_dir).events(_NOTE, valid=False))
            if facts["event"] in _AGAIN and message in earlier:
                return
            # first: a process that is killed here tells nothing, rather than the same thing twice
            self._run.note(_NOTE, message, wall=True)
            self._run.flush()
            fault = self.target.send(facts)
        if fault is not None and not self._warned:
            self._warned = True
            self._run.println(f"warning: {self.target} was not told that {facts['text']}: {redacted(fault)}")


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
    except (ValueError, AttributeError, TypeError):
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or set(url) & set(" \n\r\t"):
        raise ConfigError("url: give an address with http or https, as in https://hooks.example.org/T0/B0")
    return url
