"""The agreement between real processes that are steps apart, and what becomes of it when one dies."""

from __future__ import annotations

import pytest
from processes import ended, lines_by_rank, outputs, started

pytestmark = pytest.mark.campaign("timed")

LOOP = """
from everstep.errors import GroupError
from everstep.group import Agreement
NEVER = 10**9

class Loop:
    # the part of an engine that the agreement needs, with a meeting every `every` steps

    def __init__(self, group, every=NEVER):
        self.group, self.every = group, every
        self.steps, self.next_due = 0, every
        self.wished, self.heard = [], []
        self.agreement = Agreement(group, lambda: self.steps, self.look)

    def look(self):
        self.next_due = 0

    def wish(self, what):
        self.wished.append(what)
        self.agreement.wish()

    def complete(self):
        self.steps += 1
        if self.steps < self.next_due:
            return
        agreed = self.agreement.ask(self.steps)
        if agreed or self.steps % self.every == 0:
            self.meet("agreed" if agreed else "due")
        self.next_due = (self.steps // self.every + 1) * self.every
        at = self.agreement.next_ask(self.steps)
        if at is not None:
            self.next_due = min(self.next_due, at)

    def meet(self, why):
        wished, self.wished = self.wished, []
        for step, found in self.group.gather([self.steps, wished], "a meeting"):
            assert step == self.steps, (step, self.steps)
            self.heard += [(what, step, why) for what in found]

    def end(self):
        self.meet("the end")
        self.agreement.close()
        self.group.close()
"""


def test_ranks_that_are_steps_apart_stop_at_the_same_steps() -> None:
    """Wishes by signals and by threads, many, overlapping; rank 1 is slow and not held back by the others."""
    program = (
        LOOP
        + """
group = find_group(limit=30)
loop = Loop(group, every=100)
signal.signal(signal.SIGUSR1, lambda number, frame: loop.wish(f"signal of {rank}"))

def wish_often():
    for number in range(12):
        time.sleep(0.03 + 0.01 * rank)
        loop.wish(f"{number} of {rank}")
        if number % 4 == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

thread = threading.Thread(target=wish_often)
thread.start()
while loop.steps < 300:
    time.sleep(0.004 if rank == 1 else 0.001)
    loop.complete()
thread.join()
loop.end()
agreed = {step for _, step, why in loop.heard if why == "agreed"}
say(len(loop.heard), len(set(loop.heard)), len(agreed) > 5, hash(tuple(loop.heard)) and loop.heard)
assert threading.active_count() == 1
"""
    )
    said = [lines_by_rank(text)[rank][0] for rank, text in enumerate(outputs(program, 3))]
    assert said[0] == said[1] == said[2], "the ranks met at different steps, or heard of different wishes"
    assert said[0].startswith("45 "), said[0]  # 3 ranks, each 12 by a thread and 3 by signals
    assert " True " in said[0], said[0]


def test_a_step_with_nothing_due_makes_no_request() -> None:
    program = (
        LOOP
        + """
from everstep.backends.torch.key_value_store import connect
from everstep.group import StoreGroup
calls = []
class Counting:
    def __init__(self, store):
        self.store = store
    def clone(self):
        return Counting(self.store.clone())
    def below(self, prefix):
        return Counting(self.store.below(prefix))
    def __getattr__(self, name):
        calls.append(name)
        return getattr(self.store, name)
own, size, store = connect(30)
group = StoreGroup(own, size, Counting(store), 30)
loop = Loop(group)
group.barrier("both have begun")
time.sleep(0.2)
calls.clear()
for _ in range(1000):
    loop.complete()
time.sleep(0.2)
say(calls)
group.barrier("both have counted")
while loop.steps < 1050 and not (rank == 1 and loop.wished):
    loop.complete()
loop.end()
"""
    )
    assert [lines_by_rank(text)[rank] for rank, text in enumerate(outputs(program, 2))] == [["[]"], ["[]"]]


def test_a_rank_that_dies_in_an_agreement_is_named_within_the_limit() -> None:
    program = (
        LOOP
        + """
group = find_group(limit=1.5)
loop = Loop(group)
group.barrier("all have begun")
if rank == 2:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.6)
began = time.monotonic()
if rank == 1:
    loop.wish("to save")
try:
    while time.monotonic() < began + 20:
        time.sleep(0.01)
        loop.complete()
except GroupError as error:
    say(type(error).__name__, error.ranks, time.monotonic() - began < 4)
loop.agreement.close()
group.close()
say(threading.active_count())
"""
    )
    with started(program, 3) as processes:
        printed = ended(processes)
    for rank in (0, 1):
        assert lines_by_rank(printed[rank])[rank] == ["MissingRankError (2,) True", "1"], printed[rank]


def test_when_the_store_dies_a_loop_with_nothing_due_learns_it() -> None:
    program = (
        LOOP
        + """
group = find_group(limit=30)
loop = Loop(group)
group.barrier("all have begun")
if rank == 0:  # it hosts the store
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while time.monotonic() < began + 20:
        time.sleep(0.01)
        loop.complete()
except GroupError as error:
    say(type(error).__name__, time.monotonic() - began < 2)
loop.agreement.close()
group.close()
say(threading.active_count())
"""
    )
    with started(program, 2) as processes:
        printed = ended(processes)
    assert lines_by_rank(printed[1])[1] == ["StoreLostError True", "1"], printed[1]


def test_a_failure_that_a_rank_reports_reaches_a_loop_with_nothing_due() -> None:
    program = (
        LOOP
        + """
group = find_group(limit=30)
loop = Loop(group)
group.barrier("all have begun")
began = time.monotonic()
if rank == 1:
    group.fail("ValueError: no such file")
try:
    while time.monotonic() < began + (1 if rank == 1 else 20):
        time.sleep(0.01)
        loop.complete()
except GroupError as error:
    say(type(error).__name__, error.ranks, "no such file" in str(error), time.monotonic() - began < 2)
loop.agreement.close()
group.close()
"""
    )
    printed = outputs(program, 3)
    for rank in (0, 2):
        assert lines_by_rank(printed[rank])[rank] == ["PeerFailedError (1,) True True"]
