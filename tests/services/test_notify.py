"""`Notify`: people are told of what needs them, once, and the training never waits for that."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
import warm
from everstep.record import RunJournal
from everstep.services import HangWatch, Notify
from everstep.testing import nothing_left
from tiny_runs import Tiny, rows
from waiting import PATIENCE, until

SAVE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def saving(told: Path) -> list[str]:
    """A command that adds each message to a file."""
    return [sys.executable, "-c", SAVE, str(told)]


def messages(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def events(told: Path) -> list[str]:
    return [each["event"] for each in messages(told)]


def trained(run_dir: Path, notify: Notify, inside: Callable[[Any, int], object] = lambda *_: None) -> Tiny:
    return Tiny(run_dir, max_epoch=1, services=[notify]).train(inside)


def test_the_end_of_a_run_is_told_once(tmp_path: Path) -> None:
    """A finished run that is opened again is not finished again."""
    told = tmp_path / "told"
    for _ in range(2):
        trained(tmp_path / "run", Notify(command=saving(told)))
    (message,) = messages(told)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    run_id = facts["id"]
    assert message["text"] == f"{run_id} is finished after step 4: {message['reason']}"
    assert (message["event"], message["run"], message["step"], message["start"]) == ("finished", run_id, 4, 1)
    assert message["run_dir"] == str(tmp_path / "run") and message["time"] >= facts["created"] - 1


def test_each_failed_start_is_told_with_its_error(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def inside(loop: Any, step: int) -> None:
        if step == 3:
            raise KeyError("what is missing: https://me:secret@example.org")

    for number in (1, 2):
        with pytest.raises(KeyError):
            trained(tmp_path / "run", Notify(command=saving(told)), inside)
        message = messages(told)[-1]
        assert (message["event"], message["step"], message["start"]) == ("failed", 2, number)
        assert "KeyError" in message["reason"] and "secret" not in told.read_text()
    trained(tmp_path / "run", Notify(command=saving(told)))
    assert events(told) == ["failed", "failed", "finished"]


def test_neither_an_interruption_nor_what_nobody_asked_for_is_told(tmp_path: Path) -> None:
    command = saving(tmp_path / "told")
    terminate = lambda loop, step: step == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    with pytest.raises(everstep.errors.Interrupted):
        trained(tmp_path / "run", Notify(command=command), terminate)
    trained(tmp_path / "run", Notify(command=command, on=["failed"]))
    assert not (tmp_path / "told").exists()


PROGRAM = """
import os, signal, sys, threading
import numpy, everstep
from everstep.services import Notify
run_dir, told, shift, kill, save = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
data = everstep.data.arrays(numpy.arange(8.0) + 1, batch_size=2)
w = numpy.zeros(1)
notify = Notify(command=[sys.executable, "-c", save, told])
services = [notify, everstep.Checkpoints(everstep.Every(epochs=9))]
with everstep.TrainLoop(run_dir, {"w": w}, max_epoch=2, on_divergence="warn", services=services) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            w += batch.mean() + shift
            loop.collect_metrics(loss=float(w.sum()))
            if step == kill:
                while shift and not os.path.exists(told):  # the message is sent while the steps go on
                    threading.Event().wait(1e-2)
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.campaign("long")
def test_a_divergence_is_told_once_however_often_it_is_met(tmp_path: Path) -> None:
    """The first start is killed, the second and the third execute its steps again, and differ."""
    told = tmp_path / "told"

    def start(shift: float, kill: int) -> int:
        line = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(told), str(shift), str(kill), SAVE]
        return warm.run(line, capture_output=True, timeout=PATIENCE).returncode

    assert start(0, 5) == start(0.5, 6) == -signal.SIGKILL
    assert start(0.5, 0) == 0
    diverged = [each for each in messages(told) if each["event"] == "diverged"]
    assert RunJournal(tmp_path / "run").divergences()
    assert [each["step"] for each in diverged] == [1]
    assert events(told)[-1] == "finished"


@pytest.mark.campaign("timed")
def test_a_run_that_is_stuck_is_told_while_it_is(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def inside(loop: Any, step: int) -> None:
        if step == 3:
            until(told.exists)

    Tiny(tmp_path / "run", max_epoch=1, services=[HangWatch(0.5), Notify(command=saving(told))]).train(inside)
    assert events(told) == ["stuck", "finished"]
    assert messages(told)[0]["reason"].startswith("the loop has not moved for 0.5 s; the main thread is in")


@pytest.mark.campaign("timed")
def test_a_process_that_ends_itself_is_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    stuck = "if step == kill: __import__('time').sleep(600)\n            if 0:"
    program = PROGRAM.replace("if step == kill:", stuck)
    program = program.replace("services = [", "services = [everstep.services.HangWatch(1.0, 'stop'), ")
    line = [sys.executable, "-c", program, str(tmp_path / "run"), str(told), "0", "3", SAVE]
    assert warm.run(line, capture_output=True, timeout=PATIENCE).returncode == 1
    assert events(told) == ["failed"] and "the loop has not moved for 1 s" in messages(told)[0]["reason"]


class Server(http.server.ThreadingHTTPServer):
    status, got, over = 200, [("", b"")], threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path + " " + self.headers["Content-Type"], body))
        if self.server.status == 0:
            self.server.over.wait()
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.got, made.over, made.daemon_threads, made.block_on_close = [], threading.Event(), True, False
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.over.set()
        made.shutdown()
        thread.join()


def test_a_url_gets_a_post_of_the_same_facts(tmp_path: Path, server: Server) -> None:
    assert str(Notify(url="HTTPS://hooks.example.org/T0").target).startswith("https://hooks.example.org/")
    trained(tmp_path / "run", Notify(url=f"HTTP://127.0.0.1:{server.server_port}/hook/s3cret?x=1"))
    ((how, body),) = server.got
    assert how == "/hook/s3cret?x=1 application/json"
    assert json.loads(body)["event"] == "finished"
    record = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"127.0.0.1/***" in record and b"s3cret" not in record


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("status", [0, 302, 404])
def test_what_does_not_take_it_costs_one_warning(tmp_path: Path, server: Server, status: int) -> None:
    server.status = status
    patience = PATIENCE if status else 0.2  # there is no answer until the test is over
    notify = Notify(url=f"http://127.0.0.1:{server.server_port}/s3cret", timeout=patience)
    tiny = trained(tmp_path / "run", notify)
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert log.count("http://127.0.0.1/*** was not told that") == 1 and "s3cret" not in log
    why = {0: "it took longer than 0.2 s", 302: "HTTP Error 302", 404: "HTTP Error 404: Not Found"}
    assert why[status] in log
    assert tiny.loop.ending.finished and until(lambda: server.got) and len(server.got) == 1


def test_a_command_that_fails_is_one_warning_with_the_reason(tmp_path: Path) -> None:
    failing = {"No such file or directory": ["no-such-program"], "exit status 1": ["false"]}
    boom = "import sys; sys.exit('first\\nboom: no mail')"
    failing["exit status 1: boom: no mail"] = [sys.executable, "-c", boom]
    for why, command in failing.items():
        run = tmp_path / why
        assert trained(run, Notify(command=command, timeout=PATIENCE)).loop.ending.finished
        lines = (run / "logs" / "run.log").read_text().splitlines()
        (said,) = [line for line in lines if f"{command[0]} was not told that" in line]
        assert said.endswith(f": {why}")


@pytest.mark.campaign("timed")
def test_a_step_does_not_wait_for_a_slow_receiver(tmp_path: Path) -> None:
    """It takes 3 seconds to be told that the run is stuck; the run moves on meanwhile."""
    seconds = []

    def inside(loop: Any, step: int) -> None:
        if step == 2:
            time.sleep(1.5)
            seconds.append(time.monotonic())
        if step == 4:
            seconds.append(time.monotonic())

    command = ["sh", "-c", "sleep 3; exit 7"]
    notify = Notify(command=command, on="stuck")
    Tiny(tmp_path / "run", max_epoch=1, services=[HangWatch(0.5), notify]).train(inside)
    assert seconds[1] - seconds[0] < 1
    assert "sh was not told that" in (log := (tmp_path / "run" / "logs" / "run.log").read_text())
    assert "exit status 7" in log


def test_it_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    with nothing_left():
        trained(tmp_path / "told", Notify(command=["true"]))
    Tiny(tmp_path / "untold", max_epoch=1).train()
    assert rows(tmp_path / "told") == rows(tmp_path / "untold") != []
