"""What reads files of a run: each target makes one input from a number, and hands it to its readers.

Every file's checksum is made right again in most inputs: behind it lies the code that damage never reaches.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import xxhash
from hostile_values import harmed, mutated, value_of

import everstep
from everstep import labels
from everstep.checkpoint import Store, format, read_checkpoint
from everstep.checkpoint.array_file import read_arrays
from everstep.checkpoint.retention import Facts
from everstep.contracts.state import Unread
from everstep.errors import EverstepError
from everstep.formats.foreign import open_foreign, read_pickle
from everstep.mirror.mirror import Contents, Holder, Part, parse
from everstep.proof.audit import audit
from everstep.record import RunDir, RunJournal, RunLock, failures, journal_format, ledger_format, rundir
from everstep.record.trail import pack_line, read_trail
from everstep.views import checkpoint_tables

Input = bytes
OURS: tuple[type[Exception], ...] = (EverstepError,)


NAMES = {
    "manifest": 1,
    "manifest of best weights": 1,
    "safetensors header": 1,
    "foreign safetensors": 1,
    "index of shards": 1,
    "torch metadata": 1,
    "journal segment": 1,
    "ledger": 1,
    "trail": 1,
    "choice": 1,
    "run.json": 1,
    "notes": 1,
    "failure page": 1,
    "mirror": 1,
    "config": 20,
}
"""Each target, and how many times fewer inputs than others it gets: its reader is so much slower."""


class Target(NamedTuple):
    """Readers of one kind of file.

    Attributes:
        make: makes an input.
        read: hands it to the readers; False where they told by a value that they refuse it.
        may: errors that these document.
    """

    make: Callable[[Random], Input]
    read: Callable[[Input], object]
    may: tuple[type[Exception], ...] = OURS


class Place:
    """A run in which the readers find each input in the place of a file.

    Args:
        run: a run with everything in it, which is changed.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        *older, newest = Store(run).names()
        self.checkpoint = run / "checkpoints" / str(newest)
        for name in older:
            shutil.rmtree(run / "checkpoints" / str(name))
        self.best = next(run.glob("best/*/*"))
        self.kept: dict[Path, bytes] = {}

    def put(self, path: Path, data: bytes) -> None:
        """Give a file this content; the one before may have been kept."""
        self.kept.setdefault(path, path.read_bytes() if path.exists() else b"")
        path.write_bytes(data)

    def restore(self) -> None:
        """Undo what was put."""
        for path, data in self.kept.items():
            path.write_bytes(data)
        self.kept.clear()


def targets(place: Place) -> Mapping[str, Target]:
    """All targets, by the name of the file that they read."""
    return {
        "manifest": _manifest(place, place.checkpoint, "checkpoints"),
        "manifest of best weights": _manifest(place, place.best, "best"),
        "safetensors header": _arrays(place),
        "foreign safetensors": _foreign(place),
        "index of shards": _shards(place),
        "torch metadata": _pickle(),
        "journal segment": _segment(place),
        "ledger": _ledger(),
        "trail": _trail(place),
        "choice": _choice(place),
        "run.json": _run_json(place),
        "notes": _notes(place),
        "failure page": _failure(place),
        "mirror": _mirror(),
        "config": _config(),
    }


def _rarely(rng: Random) -> bool:
    return rng.random() < 0.2


# ------------------------------------------------------------------------------------- checkpoints


def _manifest(place: Place, folder: Path, of: str) -> Target:
    path = folder / format.MANIFEST
    raw = path.read_bytes()
    body = json.loads(raw)["body"]
    parts = ["meta", "meta", "arrays", "files", "structure"]

    def make(rng: Random) -> Input:
        if _rarely(rng):
            return harmed(raw, rng)
        if rng.random() < 0.3:
            text = mutated(body, rng)
        else:  # the tree of a part alone: most values lie in the largest one
            part = rng.choice(parts)
            one = mutated(body[part], rng)
            text = json.dumps({**body, part: None}, separators=(",", ":")).encode()
            text = text.replace(b'"%s":null' % part.encode(), b'"%s":' % part.encode() + one, 1)
        return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)

    def read(data: Input) -> None:
        place.put(path, data)
        store = Store(place.run)
        checkpoints = checkpoint_tables.checkpoints_of(place.run)
        for one in checkpoints:
            assert not one["whole"] or all(isinstance(v, int | float) for v in one["metrics"].values())
        checkpoint_tables.best_weights(place.run)
        options = checkpoint_tables.newest_whole(checkpoints).get("options", {})
        assert all(isinstance(text, str) for each in options.values() for text in each.values())
        [_use_facts(facts) for facts in store.facts()]
        json.dumps(list(map(str, store.best().values())))
        everstep.runs.best(place.run)
        read_checkpoint(folder)

    return Target(make, read)


def _use_facts(facts: Facts) -> None:
    sorted([*facts.metrics.values(), facts.created, facts.segment])
    [name.startswith("x") for names in facts.kept.values() for name in names]


def _arrays(place: Place) -> Target:
    raw = (place.checkpoint / format.ARRAYS).read_bytes()
    path = place.run / "some.safetensors"

    def make(rng: Random) -> Input:
        return _with_header(raw, rng)

    def read(data: Input) -> None:
        path.write_bytes(data)
        record = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        found = read_arrays(path, record)
        assert sum(each.nbytes for each in found.arrays.values()) <= len(data)

    return Target(make, read)


def _with_header(raw: bytes, rng: Random) -> bytes:
    end = 8 + int.from_bytes(raw[:8], "little")
    if _rarely(rng):
        return harmed(raw[: end + 8], rng) + raw[end + 8 :]
    text = mutated(json.loads(raw[8:end]), rng)
    return len(text).to_bytes(8, "little") + text + raw[end:]


def _foreign(place: Place) -> Target:
    from safetensors.numpy import save

    raw = save({"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float16)})
    path = place.run / "foreign.safetensors"

    def read(data: Input) -> None:
        path.write_bytes(data)
        found = open_foreign(path, str)
        for each in (found.tree if found else {}).values():
            assert isinstance(each, Unread)
            each.read()

    return Target(lambda rng: _with_header(raw, rng), read)


def _shards(place: Place) -> Target:
    from safetensors.numpy import save

    folder = place.run / "shards"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(save({f"w{number}": np.ones(2)}))
    index = {
        "metadata": {"total_size": 32},
        "weight_map": {f"w{n}": f"model-{n}.safetensors" for n in (1, 2)},
    }

    def read(data: Input) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        found = open_foreign(folder, str)
        for each in (found.tree if found else {}).values():
            each.read()

    return Target(lambda rng: mutated(index, rng), read)


def _pickle() -> Target:
    import pickle

    tree = {"a": [1, 2.5, "x", b"y", None, True, (1, 2, 3, 4)], "b": {"c": 2**70, "d": {1, 2}}, "e": OURS}
    raws = [pickle.dumps(tree, protocol=protocol) for protocol in (2, 3, 4, 5)]
    return Target(lambda rng: harmed(rng.choice(raws), rng), read_pickle, (ValueError,))


# ----------------------------------------------------------------------------------------- record


def _segment(place: Place) -> Target:
    path = sorted((place.run / "journal").glob("*.evj"))[-1]
    raw = path.read_bytes()
    header = raw[: journal_format.HEADER_SIZE]
    frames = [f for f in journal_format.scan(raw, len(header)) if isinstance(f, journal_format.Frame)]

    def make(rng: Random) -> Input:
        if _rarely(rng):
            return harmed(raw, rng)
        out = bytearray(header)
        struck = rng.randrange(len(frames))
        for number, frame in enumerate(frames):
            payload = bytes(frame.payload)
            if number == struck:
                is_event = frame.kind == journal_format.EVENT
                payload = mutated(json.loads(payload), rng) if is_event else _block(payload, rng)
            out += journal_format.pack_frame(frame.kind, len(out), payload)
        return bytes(out)

    def read(data: Input) -> bool:
        place.put(path, data)
        journal = RunJournal(place.run)
        _look(journal)
        audit(place.run)
        return not journal.problems

    return Target(make, read)


def _block(payload: bytes, rng: Random) -> bytes:
    """A block of other numbers: of its time, epoch, rows and lengths."""
    head = list(journal_format._BLOCK.unpack_from(payload))
    at = rng.randrange(len(head))
    head[at] = {
        0: rng.choice((float("nan"), -1.0, 1e300, 0.0)),
        1: rng.choice((-1, 2**63 - 1, -(2**63))),
        6: rng.choice((2, 255)),
    }.get(at, rng.choice((0, 1, 2**31, 2**32 - 1)))
    rest = payload[journal_format._BLOCK.size :]
    return journal_format._BLOCK.pack(*head) + (harmed(rest, rng) if rng.random() < 0.5 else rest)


def _look(journal: RunJournal) -> None:
    """All that commands ask of a journal."""
    journal.status()
    journal.facts()
    journal.divergences()
    journal.rollbacks()
    journal.heads(3)
    for event in journal.events(valid=False):
        _ = event.completed
    for segment in journal.segments():
        journal.compared_until(segment.number, 3, ())
    json.dumps([journal.problems, [row[:6] for row in journal.rows()]])


def _ledger() -> Target:
    entries = "0 0 3 0123456789abcdef 0;0 3 4 - 1 3,2;1 0 2 fedcba9876543210 0"

    def make(rng: Random) -> Input:
        return harmed(entries.encode(), rng) if rng.random() < 0.8 else mutated([entries], rng)

    def read(data: Input) -> bool:
        text, count = data.decode("utf-8", "surrogateescape"), 0
        for given in (text, value_of(data)):
            for unpacked in (lambda one: list(ledger_format.unpack(one)), ledger_format.unpack_place):
                with contextlib.suppress(ValueError):
                    unpacked(given)
                    count += 1
        return count > 0

    return Target(make, read)


def _trail(place: Place) -> Target:
    path = max((place.run / "journal").glob("*.trail"))
    raw = path.read_bytes()
    bodies = [line[17:] for line in raw.splitlines()]
    other = place.run / "other.trail"

    def make(rng: Random) -> Input:
        if _rarely(rng):
            return harmed(raw, rng)
        struck, lines = rng.randrange(len(bodies)), [pack_line(body) for body in bodies]
        body = bodies[struck]
        lines[struck] = pack_line(mutated(json.loads(body), rng) if rng.random() < 0.8 else harmed(body, rng))
        return b"".join(lines)

    def read(data: Input) -> bool:
        other.write_bytes(data)
        return read_trail(other) is not None

    return Target(make, read)


def _choice(place: Place) -> Target:
    path, store = place.run / "checkpoint", Store(place.run)
    raw = f"{store.names()[-1]}\n".encode()
    known = ["step-00000007", "step-00000009", "epoch-0002-step-00000008"]

    def read(data: Input) -> bool:
        place.put(path, data)
        return bool(store.chosen_by_hand())

    return Target(lambda rng: harmed(raw, rng) if rng.random() < 0.9 else mutated([known], rng), read)


def _run_json(place: Place) -> Target:
    path = place.run / "run.json"
    facts = json.loads(path.read_bytes())
    del facts["checksum"]

    def make(rng: Random) -> Input:
        text = mutated(facts, rng)
        found = value_of(text)
        if _rarely(rng) or not isinstance(found, dict):
            return harmed(text, rng)
        return rundir._encode(found)

    def read(data: Input) -> None:
        place.put(path, data)
        run = RunDir.open(place.run, create=False)
        json.dumps([run.id, run.seed])

    return Target(make, read)


def _notes(place: Place) -> Target:
    """labels.json, lock.json and pins.json: small JSON files that anybody may write."""
    given = {
        place.run / "labels.json": {"tags": ["baseline", "paper"], "note": "with the old data"},
        place.run / "lock.json": {"pid": 1, "host": "other", "started": 1.0},
        place.run / "pins.json": ["step-00000009"],
    }

    def make(rng: Random) -> Input:
        number = rng.randrange(len(given))
        return bytes([number]) + mutated(list(given.values())[number], rng)

    def read(data: Input) -> None:
        place.put(list(given)[data[0]], data[1:])
        told = labels.labels(place.run)
        assert len(told.tags) <= 100 and len(told.note) <= 10_000
        labels.add_tags(place.run, ["more"])
        lock = RunLock(place.run)
        try:
            lock.acquire()
        finally:
            lock.release()
        Store(place.run).pins()

    return Target(make, read)


def _failure(place: Place) -> Target:
    path = next(place.run.glob("failures/*.json"))
    page = json.loads(path.read_bytes())

    def read(data: Input) -> bool:
        place.put(path, data)
        return bool([json.dumps([str(one), one._asdict()]) for one in failures(place.run)])

    return Target(lambda rng: mutated(page, rng), read)


# ----------------------------------------------------------------------------------------- others


def _mirror() -> Target:
    part = Part("files/00000001/journal/segment-0001.evj", 10, "0" * 32)
    holder = Holder("token", "host", 1, "/runs/a")
    whole = Contents(
        3, {"id": "a-1"}, holder, {"journal/segment-0001.evj": (part, part)}, {"checkpoint": "step"}
    )
    raw = whole.packed()
    body = json.loads(raw)["body"]

    def make(rng: Random) -> Input:
        text = mutated(body, rng)
        whole = b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)
        return harmed(raw, rng) if _rarely(rng) else whole

    def read(data: Input) -> None:
        found = parse(data, "place")
        if found is not None:
            assert f"{found.number:08d} {found.holder.pid:d}"
            assert all(found.size(path) >= 0 for path in found.files)
            [note.encode("latin-1") for note in found.notes.values()]
            found.packed()

    return Target(make, read)


def _config() -> Target:
    from everstep.experiment.config import ExperimentConfig, as_yaml, parsed, resolve

    tree = {
        "task": {"call": "nowhere:Task", "scale": 1.0},
        "optimizer": {"call": "nowhere:Momentum", "lr": 0.1},
        "streams": {"train": {"call": "nowhere:numbers", "count": 8}},
        "trainer": {"max_epoch": 3},
        "services": [{"Evaluate": {"stream": "train"}}, {"Checkpoints": {"every": [{"steps": 3}]}}],
        "seed": 7,
    }
    text = as_yaml(tree).encode()
    tags = (
        b"!!python/object/apply:os.system [ls]",
        b"&a [*a, *a]",
        b"<<: *a",
        b"? [1, 2]\n: 3",
        b"%TAG ! x:",
    )

    def make(rng: Random) -> Input:
        how = rng.random()
        if how < 0.5:
            return mutated(tree, rng)
        raw = harmed(text, rng)
        at = rng.randrange(len(raw) + 1)
        return raw if how < 0.8 else raw[:at] + rng.choice(tags) + raw[at:]

    def read(data: Input) -> None:
        found = parsed(data.decode("utf-8", "replace"), "fuzz.yaml").tree
        if isinstance(found, dict):
            resolve(ExperimentConfig, base=found, imports=False)

    return Target(make, read)
