"""What must hold after a crash in each scenario of `checkpoint_samples`, whatever the crash was."""

from __future__ import annotations

from pathlib import Path

from checkpoint_samples import at, commit, resumed, seed_of, store_in

from everstep.checkpoint import Retention
from everstep.checkpoint.format import read

BEFORE = {
    **dict.fromkeys(("save_twice", "replace_damaged", "replace_whole"), 10),
    "interim": 19,
}
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
    if scenario == "best":
        seed = _require_best(run_dir)
    elif scenario == "start_over":
        seed = _require_emptied(run_dir)
    elif scenario == "supersede":
        seed = _require_chosen(run_dir)
    elif scenario == "choose":
        names = store_in(run_dir).names()
        seed = seed_of(resumed(run_dir))
        assert seed == 10 or (seed == 30 and names == [at(10), at(20), at(30)])
        store_in(run_dir, segment=2).supersede_after(at(seed))  # as every start does
    elif scenario == "pin":
        assert store_in(run_dir).pins() <= {at(10)}
        seed = seed_of(resumed(run_dir))
        assert seed == 10
    else:
        seed = _require_newest(scenario, folder)
    goes_on(run_dir)
    return seed


def _require_newest(scenario: str, folder: Path) -> int:
    before = BEFORE.get(scenario, -1)
    said, begun = last(folder, "end", before), last(folder, "begin", before)
    store = store_in(folder / "run", segment=2)
    store.clean()
    found, _ = store.find(True)
    seed = -1 if found is None else seed_of(found)
    assert seed in {said, begun}, f"{seed} is neither {said} nor {begun}"
    return seed


def _require_chosen(run_dir: Path) -> int:
    store = store_in(run_dir, segment=2)
    store.clean()
    seed = seed_of(store.find(True)[0])
    assert seed == 10
    store.supersede_after(at(10))
    assert store.names() == [at(10)]
    return seed


def _require_emptied(run_dir: Path) -> int:
    store = store_in(run_dir, segment=2)
    store.clean()
    left = [name.step for name in store.names()]
    found, _ = store.find(True)
    assert (seed_of(found) if found else None) == (left[-1] if left else None)
    store.supersede_all()
    assert store.find(True) == (None, [])
    return left[-1] if left else -1


def _require_best(run_dir: Path) -> int:
    store_in(run_dir).clean()
    left = sorted((run_dir / "best/valid/loss").iterdir())
    seeds = {seed_of(read(path)) for path in left}
    assert seeds and seeds <= {1, 2}
    assert not list(run_dir.rglob(".tmp-*"))
    return max(seeds)
