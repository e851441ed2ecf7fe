"""What must hold after a crash in each scenario of `checkpoint_samples`, whatever the crash was."""

from __future__ import annotations

from pathlib import Path

from checkpoint_samples import at, commit, seed_of, store_in

from everstep.checkpoint import Retention
from everstep.checkpoint.format import read

BEFORE = {**dict.fromkeys(("save_twice", "replace_damaged", "replace_whole"), 10), "interim": 19}
"""Seed of the newest checkpoint before a scenario that saves."""


def last(folder: Path, word: str, default: int) -> int:
    """Seed of the last save that the victim began or ended."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return next((int(line.split()[1]) for line in reversed(lines) if line.startswith(word)), default)


def goes_on(run_dir: Path) -> None:
    """After any crash the next save works, nothing is left behind, and pins can be read."""
    store = store_in(run_dir, segment=3)
    commit(store, at(500))
    store.retain(Retention(keep_last=1))
    assert seed_of(store.find(True)[0]) == 500
    assert not list(run_dir.rglob(".tmp-*"))
    store.pins()


def require_sound(scenario: str, folder: Path) -> int:
    """Require that nothing is lost or half done in `folder`/run; returns the seed of the next start."""
    run_dir = folder / "run"
    store = store_in(run_dir, segment=2)
    store.clean()
    if scenario == "best":
        seeds = {seed_of(read(path)) for path in (run_dir / "best/valid/loss").iterdir()}
        assert seeds and seeds <= {1, 2} and not list(run_dir.rglob(".tmp-*"))
        goes_on(run_dir)
        return max(seeds)
    names, found = store.names(), store.find(True)[0]
    seed = -1 if found is None else seed_of(found)
    if scenario == "start_over":
        assert seed == (names[-1].step if names else -1)
        store.supersede_all()
        assert store.find(True) == (None, [])
    elif scenario in ("supersede", "choose"):
        assert seed == 10 or (scenario, seed, names) == ("choose", 30, [at(10), at(20), at(30)])
        store.supersede_after(at(seed))  # as every start does
        assert store.names() == [at(step) for step in (10, 20, 30) if step <= seed]
    elif scenario == "pin":
        assert store.pins() <= {at(10)} and seed == 10
    else:
        before = BEFORE.get(scenario, -1)
        said, begun = last(folder, "end", before), last(folder, "begin", before)
        assert seed in {said, begun}, f"{seed} is neither {said} nor {begun}"
    goes_on(run_dir)
    return seed
