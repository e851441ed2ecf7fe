"""What only real processes show: a group opens over torch's store, a rank is lost, SIGTERM stops all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Thread
from typing import Any

from processes import ended, lines_by_rank, outputs, started
from rank_loops import HEAD
from simulation import Simulation, Store

from everstep.contracts.group import KeyValueStore


def require_contract(store: KeyValueStore, thread: type[Thread] = Thread) -> None:
    """Require of a store what a group relies upon; torch's and the simulation's do the same."""
    below, clone = store.below("a/"), store.clone().below("a/")
    assert not below.has(["x"])
    below.set("x", "")
    clone.set("y", "é\n")
    assert clone.has(["x", "y"]) and not below.has(["x", "z"]) and not store.has(["x"])
    assert below.get(["y", "x"]) == ["é\n", ""]
    below.set_all(["x", "z"], "1")
    assert clone.get(["x", "z"]) == ["1", "1"]
    assert [below.set_once("w", "first"), clone.set_once("w", "second")] == ["first"] * 2
    below.delete("x")
    below.delete("x")
    assert not clone.has(["x"])
    blocked = thread(target=clone.block, args=["b"])
    blocked.start()
    below.set("b", "")
    blocked.join()

    def use(name: str) -> None:
        for number in range(20):
            below.set(name, f"{name} {number}")
            if below.get([name]) != [f"{name} {number}"] or below.has([f"{name}/absent"]):
                wrong.append(name)

    wrong: list[str] = []
    threads = [thread(target=use, args=[f"of thread {n}"]) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong, "threads that use a connection at the same time got each other's answers"


def test_the_store_of_the_simulation_keeps_the_contract() -> None:
    for seed in range(5):
        with Simulation(seed, 1) as simulation:
            simulation.run(lambda rank: require_contract(Store(simulation), simulation.make_thread))  # type: ignore[arg-type]


def test_two_processes_are_a_group_over_torchs_store() -> None:
    program = """
from everstep.errors import DisagreementError
from test_real_ranks import require_contract
for number in range(2):
    group = find_group()
    require_contract(group.store.below(f"{rank}/"))
    value = {"é": [None, 0.1, 2**40, "x" * 100_000]}
    assert group.gather([rank, value], "values") == [[0, value], [1, value]]
    assert group.share(rank, "a choice") == 0
    try:
        group.agree(rank, "the config")
    except DisagreementError as error:
        say("the config" in str(error))
    group.close()
say(threading.active_count())
if rank == 1:
    sys.exit()  # as by `if rank == 0: trainer.evaluate("test")` after the training
try:
    find_group()
except DisagreementError as error:
    say(error)
"""
    first, second = (text.splitlines() for text in outputs(program, 2))
    assert first[:3] == ["0: True", "0: True", "0: 1"] and second == ["1: True", "1: True", "1: 1"]
    assert first[3].startswith("0: the program of rank 1 has ended, and rank 0 waits")


def test_a_rank_that_is_killed_is_named_to_those_that_wait_and_those_that_train(tmp_path: Path) -> None:
    """Also while a process that it has forked holds its connections, as the workers of a loader do."""
    os.mkfifo(tmp_path / "fifo")
    held = os.open(tmp_path / "fifo", os.O_RDWR)  # the forked process ends when it is closed
    program = f"""
from everstep.errors import GroupError
from everstep.group import Agreement, Peers, store_group
from processes import POLL
store_group.LINGER = 0  # below rank 0 waits for rank 1 itself
group = find_group()
peers = Peers(group)
asking = threading.Event()
agreement = Agreement(group, lambda: 0, asking.set)
group.barrier("all have joined")
if rank == 2:
    if os.fork() == 0:
        fifo = os.open({str(tmp_path / "fifo")!r}, os.O_RDONLY)
        os.closerange(0, 3)
        os.read(fifo, 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if rank == 0:
        group.barrier("the lost rank does not come")
    asking.wait()
    agreement.ask(1)
except GroupError as error:
    say(type(error).__name__, error.ranks)
open(f"{tmp_path}/{{rank}}", "w").close()
while not os.path.exists("{tmp_path}/1"):
    threading.Event().wait(POLL)  # rank 0 hosts the store, and leaves last
agreement.close()
peers.close()
group.close()
say(threading.active_count())
"""
    with started(program, 3) as processes:
        try:
            said = lines_by_rank("".join(ended(processes)))
            assert processes[2].returncode == -signal.SIGKILL
        finally:
            os.close(held)
    assert said == {rank: ["PeerFailedError (2,)", "1"] for rank in (0, 1)}


def test_sigterm_of_one_rank_stops_all_with_one_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    program = """
def connections():  # to the store: each costs seconds where a name server does not answer
    mine = {os.path.realpath(f"/proc/self/fd/{number}").partition("socket:")[2] for number in range(200)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    return sum(row[2].endswith(port) and f"[{row[9]}]" in mine for row in rows)

def inside(loop, step):
    if step == 2:
        say(connections())
    if step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)

say(*ended("run", inside, epochs=10**6))
dist.barrier()
say(checkpoints("run"))
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    assert said[0] == said[1]
    connections, line, saved = said[0]
    assert connections == "3", "two and the process group's own"
    assert line.startswith("Interrupted: SIGTERM (exit code 143) ")
    step = int(line.split()[-2])  # one more than was saved
    assert step > 3 and f"step-{step - 1:08d}" in saved


def test_a_barrier_of_one_rank_is_a_hang_with_the_place_of_each(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    program = """
from everstep.record import failures
from processes import POLL

def said():
    pages = [page.what for page in failures(folder / "run") if page.rank == 0]
    return [what for what in pages if "(barrier)" in what and "rank 1 inside step 3: " in what]

def inside(loop, step):
    if step == 3:
        while rank == 1 and not said():
            threading.Event().wait(POLL)
        dist.barrier()

say(*ended("run", inside, epochs=1, services=[services.HangWatch(0.5)])[:2])
say(said()[0])
"""
    found = lines_by_rank("".join(outputs(HEAD + program, 2)))
    assert found[0] == found[1] and found[0][0] == "ended 8"
    assert "rank 0 inside step 3: the main thread is in " in found[0][1]
