"""Services that measure and tell, people too, whom no step waits for; and the witness of a drilled run."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
import warm
from everstep import Every
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import FinalValues, HangWatch, LogVariables, Notify, Profile, System, Throughput
from everstep.testing import ManualClock, nothing_left
from tiny_runs import Boom, Tiny, boom_at, rows, supervised
from tiny_task import slow_data
from waiting import PATIENCE, until


def printed(tiny: Tiny, word: str) -> list[str]:
    return [line for line in tiny.lines if word in line]


def test_variables_are_printed_on_a_schedule_of_their_own(tmp_path: Path) -> None:
    services = [LogVariables(["valid_*"]), LogVariables(["mine"], every=Every(steps=2), name="mine")]
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services, show_eta=False)

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=0.5 / epoch, valid_accuracy=0.75)
        loop.print_logs()

    tiny.train(lambda loop, step: loop.collect_metrics(mine=step), tail)
    assert printed(tiny, "] valid loss") == [
        "[Epoch 1/2, Step 4] valid loss: 0.5; valid accuracy: 0.75",
        "[Epoch 2/2, Step 8] valid loss: 0.25; valid accuracy: 0.75",
    ]
    assert printed(tiny, "] mine") == [
        f"[Epoch {1 + (step > 4)}/2, Step {step}] mine: {step - 0.5} (±0.5)" for step in (2, 4, 6, 8)
    ]


def test_what_is_left_at_the_end_has_a_line(tmp_path: Path) -> None:
    """The window over a resume: `check_service`."""
    tiny = Tiny(tmp_path, max_epoch=1, services=[LogVariables(["mine"], every=Every(steps=3))])
    tiny.train(lambda loop, step: loop.collect_metrics(mine=step))
    assert [line.partition("] ")[2] for line in printed(tiny, "] mine")] == ["mine: 2 (±0.816497)", "mine: 4"]


def test_values_computed_at_the_clean_end_are_in_the_record(tmp_path: Path) -> None:
    calls: list[int] = []

    def start(crash: int = 0) -> FinalValues:
        final = FinalValues(lambda: {"calls": float(calls.append(1) or len(calls))})
        Tiny(tmp_path / "run", max_epoch=1, services=[final]).train(boom_at(crash))
        return final

    with pytest.raises(Boom):
        start(crash=2)
    assert calls == []
    assert start().values == {"calls": 1.0}
    (row,) = (row for row in rows(tmp_path / "run") if row[3] == "calls")
    assert row == (1, 4, "eval/final values", "calls", 0, (1.0).hex(), 1)
    failing = Tiny(tmp_path / "failing", max_epoch=1, services=[FinalValues(lambda: {"a": 1 / 0})]).train()
    assert failing.loop.ending.finished and "ZeroDivisionError" in failing.loop.ending.warnings[0]


def test_speed_and_shares_in_a_supervisor(tmp_path: Path) -> None:
    clock = ManualClock()
    speed = Throughput(every=Every(steps=5))
    with everstep.Supervisor(tmp_path / "run", services=[speed], max_step=10, clock=clock) as sv:
        batches = sv.stream(everstep.data.replay(slow_data(clock, 1.0)))
        while not sv.should_stop():
            next(batches)
            clock.advance(3.0)
            sv.advance()
    found = {row.name: row.value for row in RunJournal(tmp_path / "run").rows()}
    shares = [found[name] for name in ("steps_per_second", "data_share", "step_share")]
    assert shares == [0.25, 0.25, 0.75]


LINUX = {"cpu_share", "memory_share", "process_memory_gb"}
ANYWHERE = {"process_cpus", "disk_free_gb"}


def recorded(run_dir: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in RunJournal(run_dir).rows():
        if row.phase == "eval/system":
            assert row.wall
            found.setdefault(row.name, []).append(row.value)
    return found


@pytest.mark.campaign("timed")
def test_what_it_records_is_so(tmp_path: Path) -> None:
    """One step computes, one sleeps, one takes memory."""
    held: list[Any] = []

    def inside(loop: Any, step: int) -> None:
        until = time.process_time() + 0.5
        while step == 1 and time.process_time() < until:
            pass
        if step == 2:
            time.sleep(0.5)
        if step == 3:
            held.append(bytearray(os.urandom(1)) * 300_000_000)
        if step == 4:
            time.sleep(0.1)  # the kernel counts in ticks of 10 ms: in a shorter time none may pass

    Tiny(tmp_path / "run", max_epoch=1, services=[System(every=Every(steps=1))]).train(inside)
    found = recorded(tmp_path / "run")
    names = {name for name in found if not name.startswith("gpu")}
    assert ANYWHERE <= names <= ANYWHERE | LINUX
    assert {len(values) for values in found.values()} == {4}
    busy = found["process_cpus"]
    assert busy[0] > 0.05 and busy[1] < busy[0] / 2
    assert found["disk_free_gb"][-1] == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, abs=2)
    for name, values in found.items():
        assert all(value >= 0 for value in values)
        assert not name.endswith("_share") or max(values) <= 1
    if sys.platform == "linux":
        assert names >= LINUX
        assert found["process_memory_gb"][2] - found["process_memory_gb"][1] > 0.25
        assert found["cpu_share"][0] > 0


def test_a_figure_that_cannot_be_had_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr("everstep.services.measure._text", refuse)
    Tiny(tmp_path, max_epoch=1, services=[System(every=Every(steps=1))]).train()
    assert {name for name in recorded(tmp_path) if not name.startswith("gpu")} == ANYWHERE


def profiled(run_dir: Path, service: Profile, crash: int = 0) -> list[str]:
    """The names of the traces."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)

    def step(sv: everstep.Supervisor) -> None:
        with torch.no_grad():
            model.weight.copy_(model(model.weight).tanh())
        boom_at(crash)(sv, sv.step + 1)

    supervised(everstep.Supervisor(run_dir, {"model": model}, services=[service], max_step=20, seed=1), step)
    return sorted(path.name for path in (run_dir / "logs" / "profile").iterdir())


def test_traces_of_whole_windows_and_no_more_than_asked_for(tmp_path: Path) -> None:
    names = profiled(tmp_path / "run", Profile(Every(steps=4), steps=2, keep=2))
    assert names == ["step-00000012.json", "step-00000016.json"]  # that of step 20 is cut short
    found = json.loads((tmp_path / "run" / "logs" / "profile" / "step-00000012.json").read_text())
    calls = [event for event in found["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(calls) == 2


def test_a_crash_inside_a_window_and_windows_longer_than_the_schedule(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        profiled(tmp_path / "run", Profile(Every(steps=4)), crash=6)
    names = profiled(tmp_path / "run", Profile(Every(steps=8), steps=9))
    assert names == ["step-00000008.json"]


@pytest.mark.campaign("long")
def test_the_profiler_says_nothing_on_standard_error(tmp_path: Path) -> None:
    program = """
import os, sys, torch, everstep
from everstep.services import Profile
quiet = everstep.services.Console(sink=lambda line: None)
services = [Profile(everstep.Every(steps=2), steps=1, keep=2), quiet]
with everstep.Supervisor(sys.argv[1], services=services, max_step=8) as sv:
    sv.stream(None)
    while not sv.should_stop():
        torch.ones(2).sum()
        sv.advance()
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def witnessed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Optimizer:
    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"lr": 0.1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_it_writes_every_place_of_every_step_and_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def train(run: str) -> None:
        also = {"notes": {"n": 1}, "opt": Optimizer()}
        Tiny(tmp_path / run, max_epoch=1, samples=4, also=also).train()

    train("plain")
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    train("drilled")
    assert compare_runs(tmp_path / "plain", tmp_path / "drilled") == []
    found = witnessed(tmp_path / "file")
    steps = [("before", 1, 1), ("step", 1, 1), ("before", 1, 2), ("step", 1, 2)]
    places = [("enter", 0, 0), *steps, ("epoch", 1, 2), ("exit", 1, 2)]
    assert [(one["at"], one["epoch"], one["step"]) for one in found] == places
    assert {one["run"] for one in found} == {str(tmp_path / "drilled")}
    entries = {"weights/w", "weights/momentum", "state/notes", "optimizer/opt"}
    assert set(found[0]["parts"]) == entries and set(found[1]["parts"]) == {"samples/train", *entries}
    assert {"random/python", "random/numpy"} <= set(found[2]["parts"])


def test_batches_of_a_supervisor_are_noted_by_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    with everstep.Supervisor(tmp_path / "run", {"w": np.zeros(2)}, seed=0, max_step=2) as sv:
        left, right = sv.stream([1, 2, 3, 4], "left"), sv.stream([5, 6], "right")
        while not sv.should_stop():
            next(left)
            if sv.step:
                next(left), next(right)
            sv.advance()
    steps = [one["parts"] for one in witnessed(tmp_path / "file") if one["at"] == "step"]
    kinds = [{part for part in parts if not part.startswith("random")} for parts in steps]
    assert kinds == [{"samples/left", "weights/w"}, {"samples/left", "samples/right", "weights/w"}]


# ---- `Notify`: people are told of what needs them, once
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
