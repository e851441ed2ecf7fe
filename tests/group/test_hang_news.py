"""When one rank hangs, the others that stand still write their stacks, too, before it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, lines_by_rank, started

from everstep.record import failures

pytestmark = pytest.mark.campaign("timed")

PROGRAM = """
from pathlib import Path
from everstep.record import FailurePages, Journal
from everstep.services import HangWatch
from everstep.supervisor.leaving.hangs import Hangs
from everstep.supervisor.leaving.last_words import LastWords
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.voice import Voice

run = Path("{run}")
group = find_group(limit=60)
journal, voice = Journal.open(run, rank + 1, None, {{}}), Voice()
words = LastWords(FailurePages(run, 1, rank), group, Progress(seed=1, step=12, epoch=2), journal, voice)
def mark():
    return time.monotonic() if rank == 2 else "still"
watch = HangWatch(1, "stop") if rank == 1 else HangWatch(6)
group.barrier("all are here")
hangs = Hangs(watch, {{"the loop has not moved": mark}}, group, words, journal, voice)
if rank == 1:
    time.sleep(600)
while group.failure() is None:
    time.sleep(0.05)
hangs.close()
say(group.failure()[0], group.failure()[1])
say(threading.active_count())
time.sleep(2 if rank == 0 else 0)  # it hosts the store
os._exit(0)
"""


def test_all_ranks_that_stand_write_their_stacks_before_one_ends(tmp_path: Path) -> None:
    """Rank 0 would notice by itself after 6 s; rank 2 moves."""
    (tmp_path / "run").mkdir()
    with started(PROGRAM.format(run=tmp_path / "run"), 3) as processes:
        said = ended(processes)
        statuses = [process.returncode for process in processes]
    assert statuses == [0, 1, 0], said
    pages = {page.rank: page for page in failures(tmp_path / "run")}
    assert sorted(pages) == [0, 1]
    assert pages[1].what.startswith("the loop has not moved for 1 s") and pages[1].cause is None
    assert (pages[0].kind, pages[0].cause) == ("hang", f"rank 1: {pages[1].what}")
    for rank in (0, 2):
        assert lines_by_rank(said[rank])[rank] == [f"1 hang: {pages[1].what}", "1"]
