"""Small checkpoints for the tests of this folder, and the scenarios in which their saving is crashed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from everstep.checkpoint import Checkpoint, CheckpointName, Draft, Retention, Store, save_apart
from everstep.contracts.state import HostArray
from everstep.state import Encoded

Log = Callable[[str], None]

FACTS: dict[str, Any] = {"step": 20, "epoch": 1, "phase": "step", "partial": False, "digest": "of all"}
FACTS |= {"segment": 1, "meta": None}
"""Of a manifest, all but the name."""


NAMES = {
    "float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL", "uint8": "U8", "complex64": "C64",
}  # fmt: skip


def host(value: Any, **extra: Any) -> HostArray:
    value = np.asarray(value)
    data = np.frombuffer(value.tobytes(), np.uint8).copy()
    return HostArray(NAMES[value.dtype.name], value.shape, data, "numpy", extra)


def logging_to(path: Path) -> Log:
    def log(line: str) -> None:
        with path.open("a") as file:
            file.write(line + "\n")

    return log


def arrays_of(seed: int) -> dict[str, HostArray]:
    rng = np.random.default_rng(seed)
    return {
        "user/model/weight": host(rng.standard_normal((3, 4)).astype(np.float32) + 9),
        "user/model/mask": host(rng.random(5) < 2),
        "user/optimizer/step": host(np.int64(seed + 1)),
        "streams/order": host(rng.permutation(7) + 1),
    }


def at(step: int, epoch: int | None = None) -> CheckpointName:
    return CheckpointName(step, epoch)


def store_in(run_dir: Path, segment: int = 1, said: list[str] | None = None) -> Store:
    run_dir.mkdir(exist_ok=True)
    return Store(run_dir, segment, [].append if said is None else said.append)


def commit(store: Store, name: CheckpointName, seed: int | None = None, **more: Any) -> Any:
    seed = name.step if seed is None else seed
    return store.commit(Draft(name, state_of(seed), f"digest {seed}", **{"epoch": 1, **more}))


def state_of(seed: int) -> Encoded:
    return Encoded({"seed": seed}, arrays_of(seed))


def seed_of(found: Checkpoint | None) -> int:
    """The seed of a checkpoint that must be whole, every byte of it."""
    assert found is not None and isinstance(found.structure, dict)
    seed = found.structure["seed"]
    assert found.digest == f"digest {seed}" and same(found.arrays, arrays_of(seed))
    return int(seed)


def same(one: dict[str, HostArray], other: dict[str, HostArray]) -> bool:
    def facts(arrays: dict[str, HostArray]) -> dict[str, Any]:
        return {name: (a.dtype, a.shape, a.data.tobytes(), a.backend, a.extra) for name, a in arrays.items()}

    return facts(one) == facts(other)


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def resumed(run_dir: Path) -> Checkpoint:
    """What the next start goes on from."""
    store = store_in(run_dir, segment=2)
    store.clean()
    found, _ = store.find(True)
    assert found is not None
    return found


# Each scenario: prepare a run directory, then act; acting logs the seed of each save that it begins and ends.
def saved(run_dir: Path, *steps: int) -> Store:
    store = store_in(run_dir)
    for step in steps:
        commit(store, at(step))
    return store


def prepare_one(run_dir: Path) -> None:
    saved(run_dir, 10)


def prepare_three(run_dir: Path) -> None:
    saved(run_dir, 10, 20, 30)


def prepare_interim(run_dir: Path) -> None:
    commit(saved(run_dir, 10), at(19), meta={"interim": True})


def prepare_damaged(run_dir: Path) -> None:
    damage(saved(run_dir, 10, 20).path(at(20)) / "arrays.safetensors")


def prepare_edited(run_dir: Path) -> None:
    saved(run_dir, 10, 20, 30)
    (run_dir / "checkpoint").write_text(f"{at(10)}\n")


def prepare_best(run_dir: Path) -> None:
    saved(run_dir, 10)
    act_best(run_dir, lambda line: None, step=1)


def logged(run_dir: Path, log: Log, name: CheckpointName, seed: int) -> Store:
    log(f"begin {seed}")
    commit(store := store_in(run_dir), name, seed)
    log(f"end {seed}")
    return store


def act_save_twice(run_dir: Path, log: Log) -> None:
    for step in (20, 30):
        logged(run_dir, log, at(step), step).retain(Retention(keep_last=1))


def act_close_epoch(run_dir: Path, log: Log) -> None:
    logged(run_dir, log, at(20, 1), 20).retain(Retention(keep_last=None))


def act_replace_damaged(run_dir: Path, log: Log) -> None:
    logged(run_dir, log, at(20), 20)


def act_replace_whole(run_dir: Path, log: Log) -> None:
    logged(run_dir, log, at(10), 99)


def act_supersede(run_dir: Path, log: Log) -> None:
    store_in(run_dir).supersede_after(at(10))


def act_supersede_all(run_dir: Path, log: Log) -> None:
    store_in(run_dir).supersede_all()


def act_pin(run_dir: Path, log: Log) -> None:
    store = store_in(run_dir)
    store.pin(at(10))
    store.unpin(at(10))


def act_best(run_dir: Path, log: Log, step: int = 2) -> None:
    draft = Draft(at(step), state_of(step), f"digest {step}", 1)
    save_apart(run_dir / "best" / "valid/loss", draft, top=run_dir)


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Log], None]]] = {
    "save_twice": (prepare_one, act_save_twice),
    "first_saves": (lambda run_dir: None, act_save_twice),
    "interim": (prepare_interim, act_close_epoch),
    "replace_damaged": (prepare_damaged, act_replace_damaged),
    "replace_whole": (prepare_one, act_replace_whole), "supersede": (prepare_edited, act_supersede),
    "choose": (prepare_three, act_supersede), "start_over": (prepare_three, act_supersede_all),
    "pin": (prepare_one, act_pin), "best": (prepare_best, act_best),
}  # fmt: skip
