"""`everstep ui` in a process, and a browser's part of the talk: cookies and headers; a run with pictures."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np

import warm
from everstep.services import Histogram, Image, TensorBoard
from tiny_runs import Tiny
from waiting import PATIENCE, until


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Page:
    """A running `everstep ui`; `get` asks as the browser that has used the link.

    Attributes:
        visitors: functions that close what a browser shows of it.
    """

    def __init__(self, place: str | Path, *options: str) -> None:
        command, pipe = [sys.executable, "-m", "everstep", "ui", str(place), *options], subprocess.PIPE
        environment = {**os.environ, "EVERSTEP_INDEX": ""}
        self.process = warm.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        line = self.line()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line)
        assert found, line + (self.process.stderr.read() if self.process.stderr else "")
        self.port, self.token = int(found[1]), found[2]
        self.cookie = ""
        self.visitors: list[Callable[[], object]] = []

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def enter(self) -> None:
        """Exchange the link for the cookie."""
        answer = self.ask(f"/?token={self.token}")
        assert answer.status == 303, answer
        self.cookie = answer.headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, method: str = "GET", /, **headers: str) -> Answer:
        """Ask without the cookie; `Sec_Fetch_Site=...` is a header."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(line):
            line.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
            found = line.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def get(self, path: str, /, **parameters: Any) -> Answer:
        """Ask with the cookie."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        return self.ask(path + query, Cookie=self.cookie)

    wait_for = staticmethod(until)

    def close_visitors(self) -> None:
        """Close what browsers show: they would complain of a server that is killed while they talk to it."""
        while self.visitors:
            self.visitors.pop()()

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C: (exit status, stderr)."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate()
        return self.process.returncode, err


@contextlib.contextmanager
def running_page(place: str | Path, *options: str) -> Iterator[Page]:
    """A page that a browser has entered."""
    page = Page(place, *options)
    try:
        page.enter()
        yield page
    finally:
        page.close_visitors()
        page.process.kill()
        page.process.communicate()


TEXT = "<img src=x onerror=alert(1)> epoch "


def pictured(run_dir: Path, epochs: int = 3) -> Path:
    """Train; each epoch adds `seen/noise` (a picture), `seen/weights` (a histogram) and `note` (a text)."""

    def tail(loop: Any, epoch: int) -> None:
        draws = np.random.default_rng(epoch)
        pixels, weights = draws.random((32, 48, 3)), draws.standard_normal(1000)
        loop.add_summary({"seen": {"noise": Image(pixels), "weights": Histogram(weights)}})
        loop.add_summary({"note": f"{TEXT}{epoch}"})
        loop.collect_metrics(valid_loss=1 / epoch)

    Tiny(run_dir, max_epoch=epochs, services=[TensorBoard()]).train(tail=tail)
    return run_dir
