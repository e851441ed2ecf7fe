"""The console on real terminals (pseudo-terminals), pipes and files, and in a notebook."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import tty
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ, tcgetattr
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

import warm
from everstep.contracts.services import Boundary, Moment
from everstep.metrics.collector import Collector, Reader
from everstep.services.console import Console
from everstep.testing import ManualClock, armed
from everstep.timing import Estimator
from waiting import left_open

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d "


def screen(output: str) -> list[str]:
    """What a person sees in the end: the lines, colours left out."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", output):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return lines


class Run:
    """A run of 4000 steps in 10 epochs, 100 steps a second."""

    segment = 0

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = ManualClock()
        self.estimator = Estimator(self.clock)
        self.get_rate = self.estimator.rate
        self.step = self.epoch = 0
        self.max_step: int | None = 4000
        self.max_epoch: int | None = 10
        self.readings = Collector(lambda: self.epoch).reader("console", Reader())

    def get_progress(self) -> float | None:
        return None if self.max_step is None else self.step / self.max_step

    def get_eta(self) -> float | None:
        return None if self.max_step is None or not self.step else (self.max_step - self.step) / 100

    def train(self, console: Console, steps: int, **metrics: float) -> None:
        """Train for `steps` steps, and stand at a boundary."""
        self.step += steps
        self.epoch = 1 + (self.step - 1) // 400
        self.clock.advance(steps / 100)
        self.estimator.update(self.step)
        for name, value in metrics.items():
            self.readings.add_outside(name, self.step, value)
        console.run(Boundary(Moment.AFTER_STEP, self.step, self.epoch, self.readings))

    def log(self) -> list[str]:
        return (self.run_dir / "logs" / "run.log").read_text(encoding="utf-8").splitlines()


class Terminal:
    """A pseudo-terminal that keeps what a person would see: the lines, colours left out."""

    def __init__(self, columns: int = 120, encoding: str = "utf-8") -> None:
        self.master, slave = pty.openpty()
        tty.setraw(slave)
        ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.encoding = encoding
        self.stream = open(slave, "w", encoding=encoding, buffering=1)  # noqa: SIM115
        self.raw = ""

    def show(self, console: Console, run: Run) -> None:
        """Open `console` here; in the test's own phase, as pytest replaces sys.stdout between phases."""
        sys.stdout = self.stream
        console.open(run)

    def read(self, patience: float = 0.0) -> None:
        while select.select([self.master], [], [], patience)[0]:
            self.raw += os.read(self.master, 65536).decode(self.encoding)

    def screen(self) -> list[str]:
        self.read()
        return screen(self.raw.replace("\n", "\r\n"))  # in raw mode the line feed does not return

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """A person before an ordinary terminal, whatever runs these tests."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CI", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    made = Terminal(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture
def console() -> Iterator[Console]:
    made = Console()
    yield made
    made.close()


def test_the_live_line(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    console.bests = lambda: [SimpleNamespace(metric="valid_loss", value=0.2)]
    run.train(console, 100, loss=0.5)
    run.train(console, 300, loss=0.25, valid_loss=0.2, step_time=0.0102)
    progress = "Epoch 1/10  Step 400/4000  ━━──────────────────  10%  100 steps/s  ETA 36s"
    assert terminal.screen() == [f"{progress}  loss: 0.25; valid loss: 0.2 (*); step time…"]
    run.max_step = run.max_epoch = None  # an unbounded run has no bar; names cannot move the cursor
    run.train(console, 1, valid_loss=0.3, **{"a\nb\x1b[2J": 1.0})
    metrics = "loss: 0.25; valid loss: 0.3; a?b?[2J: 1; step time: 0.0102s"
    assert terminal.screen() == [f"Epoch 2  Step 401  100 steps/s  {metrics}"]


def test_lines_scroll_above_it_and_nothing_is_left(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    console.print("hello")
    run.train(console, 1, loss=0.5)
    live = terminal.screen()[-1]
    console.print("two\nlines")
    print("the user's own, [/x] and ±")
    sys.stdout.writelines(["x", "y\n"])
    assert terminal.screen() == ["hello", "two", "lines", "the user's own, [/x] and ±", "xy", live]
    for _ in range(2):
        console.close()
    assert terminal.screen() == ["hello", "two", "lines", "the user's own, [/x] and ±", "xy", ""]
    assert sys.stdout is terminal.stream and left_open(run.run_dir) == []


def test_a_line_the_user_has_begun_is_left_alone(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    run.train(console, 1)
    print("evaluating", end="", flush=True)
    run.train(console, 1)
    assert terminal.screen() == ["evaluating"]
    print(" done")
    assert terminal.screen()[0] == "evaluating done"
    assert terminal.screen()[1].startswith("Epoch 1/10  Step 2/4000")
    print("-> stopped here")
    sys.stdout.flush()  # what input() and pdb do first: a prompt gets a clean line
    assert terminal.screen()[1:] == ["-> stopped here", ""]


def test_stderr_a_child_a_stand_in(terminal: Terminal, run: Run, console: Console, monkeypatch: Any) -> None:
    with open(os.dup(terminal.stream.fileno()), "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        terminal.show(console, run)
        run.train(console, 1)
        print("careful", file=sys.stderr)
        assert terminal.screen()[0] == "careful" and terminal.screen()[1].startswith("Epoch")
        console.close()
        assert sys.stderr is stderr
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # in a file it stays there
    terminal.show(console, run)
    print("in a file", file=sys.stderr)
    assert sys.stderr.getvalue() == "in a file\n" and "in a file" not in "".join(terminal.screen())
    assert sys.stdout.fileno() == terminal.stream.fileno() and sys.stdout.isatty()
    subprocess.run(["echo", "from a child"], stdout=sys.stdout, check=True)
    ours = sys.stdout
    sys.stdout = theirs = io.StringIO()
    console.close()
    assert sys.stdout is theirs
    print("still works", file=ours)
    assert terminal.screen()[1:] == ["from a child", "still works", ""]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # that is the point
def test_a_forked_worker_draws_nothing(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    run.train(console, 1)
    with_lock_held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with console._lock:
            with_lock_held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    with_lock_held.wait()
    child = os.fork()
    if child == 0:
        print("\nworker")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    holder.join()
    assert terminal.screen()[1:] == ["worker", ""]


LOG_LINE = "[Step 400/4000] loss: 0.5 (±0.1); valid loss: 0.25; 重み: 1; epoch time: 12s; ETA 1m 3.2s"


@pytest.mark.parametrize("terminal", [{"columns": n} for n in (1, 2, 27, 56, 60, 89, 200)], indirect=True)
def test_it_never_wraps_and_the_log_has_lines_whole(terminal: Terminal, run: Run, console: Console) -> None:
    columns = os.get_terminal_size(terminal.master).columns
    terminal.show(console, run)
    console.print(LOG_LINE, shorten=True)
    console.print(LOG_LINE)
    run.train(console, 1200, loss=0.5, 重み=1.0)
    cut, whole, live = terminal.screen()
    assert whole == LOG_LINE and run.log()[0].endswith(f" {LOG_LINE}")
    for line, full, room in ((cut, LOG_LINE, columns), (live, "Epoch 3/10  Step 1200/4000", columns - 1)):
        assert len(line) + 2 * line.count("重み") <= max(room, 0)
        assert full.startswith(line.removesuffix("…")) or line.startswith(full)
    assert (cut == LOG_LINE) == (columns >= 89) and ("重み" in live) == (columns == 200)


@pytest.mark.parametrize("terminal", [{"encoding": "ascii"}], indirect=True)
def test_a_terminal_without_unicode(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    run.train(console, 500, 重み=1.0)
    console.print("loss: 0.5 (±0.1)")
    above, live = terminal.screen()
    assert above == "loss: 0.5 (?0.1)" and live.endswith(f"{'?' * 20}  12%  100 steps/s  ETA 35s  ??: 1")


def test_a_terminal_that_goes_away_ends_nothing(terminal: Terminal, run: Run, console: Console) -> None:
    terminal.show(console, run)
    run.train(console, 1)
    os.close(terminal.master)
    terminal.master = os.open(os.devnull, os.O_RDONLY)
    run.train(console, 1)
    console.print("one")
    print("the user's")
    run.train(console, 1)
    console.close()
    first, second = run.log()
    assert re.fullmatch(STAMP + r"standard output fails \(.*\); lines go to this file only", first)
    assert re.fullmatch(STAMP + "one", second)


def test_where_no_live_line_is_drawn(terminal: Terminal, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CI": "true", "SLURM_JOB_ID": "7", "TERM": "dumb"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            console = Console()
            terminal.show(console, run)
            run.train(console, 1)
            assert terminal.screen() == [""] and sys.stdout is terminal.stream
            console.close()


def test_a_progress_line_now_and_then(run: Run, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    console.open(run)
    console.bests = lambda: [SimpleNamespace(metric="valid_loss", value=0.25)]
    run.train(console, 1000, loss=0.5)
    run.train(console, 1000, loss=0.25)
    assert capsys.readouterr().out == ""
    run.train(console, 1000, loss=0.75, valid_loss=0.25)
    losses = "loss: 0.5 (±0.204124); valid loss: 0.25 (*)"
    expected = f"Epoch 8/10  Step 3000/4000  75%  100 steps/s  ETA 10s  {losses}"
    assert capsys.readouterr().out == expected + "\n"
    run.train(console, 500)
    assert capsys.readouterr().out == ""
    assert re.fullmatch(STAMP + re.escape(expected), run.log()[0])
    run.train(console, 2500, loss=0.25)  # its window begins at the last line, whatever was cleared
    console.print(LOG_LINE, shorten=True)  # whole in a pipe
    second, third = capsys.readouterr().out.splitlines()
    assert "loss: 0.25; " in second and third == LOG_LINE


def test_lines_can_go_elsewhere_and_need_no_open_console(terminal: Terminal, run: Run, capsys: Any) -> None:
    silent = Console()
    silent.print("before")
    silent.close()
    assert capsys.readouterr().out == "before\n" and not (run.run_dir / "logs").exists()
    lines: list[str] = []
    console = Console(sink=lines.append, plain_seconds=1)
    terminal.show(console, run)
    console.print("hello")
    run.train(console, 200)
    console.close()
    assert lines == ["hello", "Epoch 1/10  Step 200/4000  5%  100 steps/s  ETA 38s"]
    assert terminal.screen() == [""] and len(run.log()) == 2


def test_no_standard_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream, lines in ((None, 2), (closed, 5)):
        console = Console()
        monkeypatch.setattr(sys, "stdout", stream)
        console.open(run)
        console.print("one")
        console.print("two")
        console.close()
        assert [line.split(" ", 1)[1] for line in run.log() if "fails" not in line][-2:] == ["one", "two"]
        assert len(run.log()) == lines, "of a closed one it is told once"


def test_a_broken_pipe_ends_nothing_and_leaves_exit_code_0(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from everstep.services.console import Console
from everstep.testing import ManualClock
class Run: clock = ManualClock(); run_dir = Path(sys.argv[1]); step = 0
console = Console()
console.open(Run())
sys.stdin.read()
for i in range(3): console.print(f"line {i}")
print("the user has the last word")
console.close()
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **pipes)
    assert child.stdin and child.stdout and child.stderr
    child.stdout.close()
    child.stdin.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0
    log = (tmp_path / "logs" / "run.log").read_text().splitlines()
    fails = "standard output fails ([Errno 32] Broken pipe); lines go to this file only"
    assert [line.split(" ", 1)[1] for line in log] == ["line 0", fails, "line 1", "line 2"]


def test_the_log_has_every_line_with_its_time_and_comes_back_after_a_full_disk(run: Run, capsys: Any) -> None:
    for text in ("one\ntwo ±", "three"):
        console = Console()
        console.open(run)
        console.print(text)
        console.close()
    assert [re.sub(STAMP, "", line) for line in run.log()] == ["one", "two ±", "three"]
    console = Console()
    console.open(run)
    capsys.readouterr()
    with armed("ENOSPC:console.log:1-2"):
        for word in ("four", "five", "six"):
            console.print(word)
    console.close()
    out = capsys.readouterr().out.splitlines()
    assert re.match(r"the log .*run\.log cannot be written \(.*No space left.*\); lines are missing", out[0])
    assert out[1:] == ["four", "five", "six"] and re.sub(STAMP, "", run.log()[-1]) == "six"
    assert len(run.log()) == 4


PROGRAM = """
import os, signal, sys
import everstep
what = sys.argv[2]
services = [everstep.services.Console(everstep.Every(steps=1)), everstep.Best("valid_loss")]
with everstep.TrainLoop(sys.argv[1], {}, max_epoch=3, services=services, seed=1) as loop:
    for epoch in loop.iter_epochs():
        for step, _ in loop.iter_steps(range(4)):
            loop.collect_metrics({"loss": 1 / step, "[x/]": step})
            if step == 6 and what == "error":
                raise RuntimeError("as planned")
            if step == 6 and what == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
        loop.collect_metrics(valid_loss=1 / epoch)
        loop.print_logs()
print("the last line")
"""


@pytest.mark.parametrize(
    ("what", "status", "last"),
    [
        ("", 0, "the last line"),
        ("error", 1, "RuntimeError: as planned"),
        ("SIGTERM", 128 + signal.SIGTERM, "start again to continue"),
    ],
)
def test_a_program_leaves_the_terminal_in_order(tmp_path: Path, what: str, status: int, last: str) -> None:
    terminal = Terminal(60)
    before = tcgetattr(terminal.master)
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "SLURM_JOB_ID")}
    ends = {"stdin": terminal.stream, "stdout": terminal.stream, "stderr": terminal.stream}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), what]
    with warm.Popen(command, env={**environment, "TERM": "xterm"}, **ends) as process:
        ended = False
        while not ended:  # what it wrote before it ended is there to be read then
            ended = process.poll() is not None
            terminal.read(0.05)
    lines = terminal.screen()
    assert tcgetattr(terminal.master) == before
    terminal.close()
    assert process.returncode == status
    assert lines[-1] == "" and any(last in line for line in lines[-6:])
    # what a signal handler says begins a line of its own, below the live line that stood there
    assert sum("━" in line for line in lines) == (what == "SIGTERM")
    # no mode, no hidden cursor
    assert set(re.findall(r"\x1b\[[?0-9;]*([A-Za-z])", terminal.raw)) <= set("mJ")
    printed = [line for line in lines if line.startswith("[Epoch ")]
    assert len(printed) == (1 if what else 3) and max(map(len, printed)) <= 60 and "━" in terminal.raw


TRAIN = """
import numpy as np
import everstep

w = np.zeros(2)
console = everstep.services.Console(everstep.Every(steps=1))
with everstep.TrainLoop({run!r}, {{"w": w}}, max_epoch=2, services=[console]) as loop:
    for epoch in loop.iter_epochs():
        for step, batch in loop.iter_steps(everstep.data.arrays(np.arange(8.0), batch_size=2)):
            w += batch[0].sum()
            loop.collect_metrics(loss=float(w[0]))
        print("epoch is over:", epoch)
"""


def outputs_of(client: Any, cell: str) -> list[tuple[str, dict[str, Any]]]:
    """Execute a cell; its outputs as (kind, content)."""
    outputs: list[tuple[str, dict[str, Any]]] = []
    reply = client.execute_interactive(
        cell, output_hook=lambda m: outputs.append((m["msg_type"], m["content"])), timeout=120
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return outputs


@pytest.mark.campaign("long")
def test_a_training_has_one_live_line_in_its_cell_and_a_query_is_a_table(tmp_path: Path) -> None:
    environment = {**os.environ, "EVERSTEP_INDEX": "", "IPYTHONDIR": str(tmp_path / "ipython")}
    # a kernel says on its standard error that nobody else listens on its ports
    manager, client = start_new_kernel(kernel_name="python3", env=environment, stderr=subprocess.DEVNULL)
    try:
        outputs = outputs_of(client, TRAIN.format(run=str(tmp_path / "run")))
        table = outputs_of(client, f"everstep.query('metrics', index={str(tmp_path)!r})")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    drawn = [content for kind, content in outputs if kind.endswith("display_data")]
    assert [kind for kind, _ in outputs].count("display_data") == 1, "one output, replaced"
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    lines = [content["data"]["text/plain"] for content in drawn]
    assert "Step 1 " in lines[0] and "loss: 1" in lines[0]
    assert len(lines) >= 8 and "Step 8 " in lines[-1] and "100%" in lines[-1]
    assert not any("\x1b" in line or "\r" in line for line in lines)
    printed = "".join(content["text"] for kind, content in outputs if kind == "stream")
    assert printed.count("epoch is over") == 2 and "ended: max_epoch 2 is reached" in printed
    assert "\x1b" not in printed and "Step 4" not in printed, "progress is in the live line alone"
    (shown,) = [content["data"] for kind, content in table if kind == "execute_result"]
    assert shown["text/plain"].startswith("[{'run': 'run-")
    assert shown["text/html"].count("<img") == 2 and "<table>" in shown["text/html"]
