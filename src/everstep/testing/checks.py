"""`check` and its kin: streams, services, sinks and objects, tried against the laws, for their authors."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import multiprocessing
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from traceback import clear_frames
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from everstep import backends, data
from everstep.checkpoint import Store
from everstep.contracts.data import Share, Stream
from everstep.contracts.services import Interrupt, Moment, Service, Stage
from everstep.contracts.state import Entry, Stateful
from everstep.data import as_stream
from everstep.data.adapt import IterableStream, is_stateful
from everstep.errors import ConfigError, DataError, Interrupted, NotResumableError, StateError, nearest
from everstep.loop import TrainLoop
from everstep.record import Row, RunJournal
from everstep.schedule import Every, Instant
from everstep.services.checkpoints import Checkpoints
from everstep.services.sink import RemoteSink
from everstep.state import Encoded, PerRank, array_name, decode, digest, encode, leaves, make_entry
from everstep.state.entries import StatefulEntry
from everstep.state.random_state import capture, isolated, restore, seed_all
from everstep.supervisor import Ending
from everstep.supervisor.board import require_service
from everstep.testing.tools import ManualClock, nothing_left

_PASSES = 3
_BEFORE, _AFTER = 128, 2
"""Most batches that `_try_stream` draws before a position, and the number that it compares after it."""
_END = object()
_GRACE = 1.0
"""Seconds in which a stream's thread may end after `close()`."""


class Verdict(NamedTuple):
    """Result of a trial.

    Attributes:
        kept: whether the data, or the object, comes back; None: it was not tried.
        why: how that is known, or why there was no trial.
    """

    kept: bool | None
    why: str

    def __str__(self) -> str:
        return f"{ {True: 'kept', False: 'not kept', None: 'not tried'}[self.kept] }: {self.why}"


def check_stream(make_stream: Callable[[], Stream], *, shares: bool = True) -> None:
    """Check a stream against the laws that concern data.

    1. A pass that is left after any batch and opened again at its position, by a fresh stream and in any
       random state, gives the rest of the pass and the following passes bit for bit.  A fresh stream also
       gives a following pass alone, unless `Stream.carries_over` says that it needs the pass before.
    2. Asking for positions changes nothing.
    3. After its end a pass gives no batch, however often it is asked; `remaining` is right.
    4. Neither a thread nor a process is left after `close`.
    5. The parts of several ranks, of a stream that can be split, are the batch (without padding); their
       positions and weights are right.

    Args:
        make_stream: makes the stream as a new process would make it; called many times.
        shares: whether law 5 is checked; False where each rank draws values of a batch for its part.
    """
    require_function(make_stream, "check_stream")
    most = [sys.maxsize] * _PASSES
    seed_all(0)
    passes, places = _read(make_stream(), most, counts=range(sys.maxsize))
    assert all(passes), f"pass {passes.index([]) if [] in passes else 0} gave no batch"
    seed_all(0)
    _require_equal(passes, _read(make_stream(), most)[0], "asking for positions changed what followed: ")
    for at in places:
        seed_all(1)  # a new process may start in any random state
        resumed, _ = _read(make_stream(), most, at)
        expected = [passes[at.pass_index][at.batches :], *passes[at.pass_index + 1 :]]
        _require_equal(expected, resumed, f"resumed at {at}: ", at.pass_index)
        if at.ended and at.pass_index + 1 < _PASSES and not make_stream().carries_over:
            # a resume at the end of a pass opens only the next one
            restore(at.random_state)
            following, _ = _read(make_stream(), most, begin=at.pass_index + 1)
            law = "opened by a new process (one that goes on from pass to pass has carries_over = True): "
            _require_equal(passes[at.pass_index + 1 :], following, law, at.pass_index + 1)
    for size in (2, 3) if shares else ():
        _check_shares(make_stream, size)
    with closing(make_stream().open("train", 0, seed=0)) as cursor:
        if cursor.remaining() is None:
            print("the cursor has no remaining(): a run killed in an epoch's tail may resume without a step")


def _try_stream(first: Stream, second: Stream, third: Stream, fourth: Stream) -> Verdict:
    """Try copies of a stream: opened at a position, it must give the batches that came after it.

    The position is one behind many batches: data that reads ahead in blocks tells the start of a block first.
    The pass is left there, and the next one must begin with the same batches, too.
    """
    (batches,), _ = _read(first, [_BEFORE + _AFTER], strict=False)
    if len(batches) < 2:
        return Verdict(None, "it gave one batch only" if batches else "it gave no batch")
    if all(batch is None for batch, _ in batches):
        return Verdict(None, "its batches hold nothing that can be compared")
    last = max(1, len(batches) - _AFTER)
    most = [last + _AFTER, _AFTER]
    passes, places = _read(second, most, counts=range(last, last + _AFTER + 1), strict=False)
    in_first = [place for place in places if place.pass_index == 0]
    at, end = in_first[0], in_first[-1]
    resumed, _ = _read(third, most, at, strict=False)
    _require_equal([passes[0][last:], passes[1]], resumed, f"opened at {at}: ")
    # a resume at the end of a pass opens the next one in a new process
    if fourth.carries_over:
        fourth.open("train", 0, end.position, seed=0).close()
    restore(end.random_state)
    fresh, _ = _read(fourth, most, begin=1, strict=False)
    _require_equal([passes[1]], fresh, "the pass after a resume: ", 1)
    return Verdict(True, f"{_AFTER} batches drawn again were the same")


def require_function(make: Any, check: str) -> None:
    assert callable(make), (
        f"{check} got a {type(make).__name__}, but makes a new object for each run: give a function, as in "
        f"{check}(lambda: {type(make).__name__}(...))"
    )


def fingerprint(tree: Any) -> Any:
    """Make a value comparable; objects of unknown types are compared by their repr."""
    return comparable(tree, lambda value: (type(value).__name__, repr(value)))


def comparable(tree: Any, other: Callable[[Any], Any] = lambda value: None) -> Any:
    """Make a comparable copy of a tree of containers, arrays, tensors and plain values, equal bit for bit."""
    if isinstance(tree, Mapping):
        return [(str(key), comparable(tree[key], other)) for key in sorted(tree, key=str)]
    if isinstance(tree, list | tuple):
        return type(tree).__name__, [comparable(value, other) for value in tree]
    home = backends.of(tree)
    if home is not None and home.pack(tree) is None:
        try:
            host = home.to_host(tree, None)
        except StateError:
            return other(tree)
        return type(tree).__name__, host.dtype, host.shape, host.data.tobytes()
    plain = isinstance(tree, type(None) | bool | int | float | complex | str | bytes)
    return (type(tree).__name__, repr(tree)) if plain else other(tree)


class _Place(NamedTuple):
    """What a checkpoint after a batch holds."""

    pass_index: int
    batches: int
    ended: bool
    position: Any
    random_state: Any

    def __str__(self) -> str:
        return f"pass {self.pass_index}, after {self.batches} batches{' and the end' if self.ended else ''}"


def _read(
    stream: Stream,
    most: Sequence[int],
    at: _Place | None = None,
    *,
    counts: Collection[int] = (),
    begin: int = 0,
    strict: bool = True,
) -> tuple[list[list[Any]], list[_Place]]:
    """Read at most `most` batches of each pass, from a place or from pass `begin`, as a training loop does.

    Return the batches of each pass, each with numbers drawn from the global generators after it, and the
    places after the numbers of batches in `counts`.  `strict`: positions, ends and what is left are checked.
    """
    passes, places, before = [], list[_Place](), set(threading.enumerate())
    marks = list[tuple[_Place, Any]]()
    for pass_index in range(begin if at is None else at.pass_index, len(most)):
        start = at if at is not None and at.pass_index == pass_index else None
        prefix = f"pass {pass_index}: " if at is None else f"resumed at {at}: pass {pass_index}: "
        cursor = stream.open("train", pass_index, None if start is None else start.position, seed=0)
        remaining, batches, ended = cursor.remaining(), list[Any](), False
        count = 0 if start is None else start.batches
        if start is not None:
            position = cursor.position() if strict else start.position
            assert fingerprint(position) == fingerprint(start.position), (
                f"{prefix}opened at {start.position!r:.200}, it says that it stands at {position!r:.200}"
            )
            restore(start.random_state)
        elif count in counts:
            places.append(_Place(pass_index, 0, False, cursor.position(), capture()))
        if start is None or not (start.batches or start.ended):
            _draw()  # a program may draw between the opening of a pass and its first batch
        while not ended and count < most[pass_index]:
            batch = next(cursor, _END)
            ended = batch is _END
            if not ended:
                count += 1
                batches.append((fingerprint(batch) if strict else comparable(batch), _draw()))
            if count in counts:
                places.append(_Place(pass_index, count, ended, cursor.position(), capture()))
                marks.append((places[-1], fingerprint(places[-1].position)))
        if strict:
            total = len(batches)
            for place, mark in marks:
                assert fingerprint(place.position) == mark, f"position() {place} changed later: return a copy"
            assert remaining in (None, total), f"{prefix}remaining() said {remaining} batches, {total} came"
            for _ in range(2):
                assert next(cursor, _END) is _END, f"{prefix}a batch came after the end of the pass"
        passes.append(batches)
        for _ in range(2):
            cursor.close()
        # foreign data may have threads of its library, which end with the process
        own = [each for each in set(threading.enumerate()) - before if strict or "everstep" in each.name]
        for thread in own:
            thread.join(_GRACE)
        threads = [each.name for each in own if each.is_alive()]
        assert not threads, f"{prefix}threads {threads} are alive after close()"
        children = multiprocessing.active_children() if strict else ()
        assert not children, f"{prefix}processes {children} are alive after close()"
    return passes, places


def _draw() -> Any:
    torch = sys.modules.get("torch")
    return random.random(), np.random.rand(), torch and torch.rand(()).item()


def _require_equal(expected: list[list[Any]], passes: list[list[Any]], law: str, first: int = 0) -> None:
    for pass_index, (left, right) in enumerate(zip(expected, passes, strict=True), first):
        prefix = f"{law}pass {pass_index}"
        assert len(right) == len(left), f"{prefix}: {len(right)} batches came instead of {len(left)}"
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            fault = f"batch {index} from there differs"
            assert one[0] == other[0], f"{prefix}: {fault}"
            assert one[1] == other[1], f"{prefix}: the global random state after {fault}"


class _Part(NamedTuple):
    """A rank's part of a batch, or a whole batch: its samples by parts of the batch, made comparable."""

    samples: dict[str, list[Any]]
    weight: float
    position: Any
    shared: Any
    """The position without what is each rank's own."""


def _check_shares(make_stream: Callable[[], Stream], size: int) -> None:
    shares = [Share(rank, size, "pad") for rank in range(size)]
    try:
        for share in shares:
            as_stream(make_stream()).split(share)
    except DataError:
        return
    batches = _parts(make_stream, None)
    for start in sorted({0, len(batches) // 2}):
        position = batches[start - 1].position if start else None
        ranks = [_parts(make_stream, share, position) for share in shares]
        prefix, counts = f"{size} ranks, opened after {start} batches", [len(parts) for parts in ranks]
        expected = len(batches) - start
        assert set(counts) == {expected}, f"{prefix}: {counts} batches came instead of {expected} each"
        for index, (batch, *parts) in enumerate(zip(batches[start:], *ranks, strict=True)):
            message = f"{prefix}: batch {index} from there"
            assert all(part.shared == batch.shared for part in parts), f"{message}: a rank is elsewhere"
            for name, samples in batch.samples.items():
                together = [each for part in parts if part.weight for each in part.samples.get(name, ())]
                assert together == samples, f"{message}: the parts of the ranks are not the batch"
                for part in parts:
                    ideal = len(part.samples[name]) * size / len(samples)
                    assert part.weight == 0 or math.isclose(part.weight, ideal), (
                        f"{message}: the weight is {part.weight}, {ideal} would make the mean over ranks"
                    )


def _parts(make_stream: Any, share: Share | None, position: Any = None) -> list[_Part]:
    seed_all(0)
    stream = as_stream(make_stream())
    stream = stream if share is None else stream.split(share)
    parts = []
    with closing(stream.open("train", 0, position, seed=0)) as cursor:
        for batch in cursor:
            position = shared = cursor.position()
            if stream.rank_keys:
                shared = {key: value for key, value in position.items() if key not in stream.rank_keys}
            parts.append(_Part(dict(_samples(batch)), cursor.weight, position, fingerprint(shared)))
    return parts


def _samples(batch: Any, name: str = "batch") -> Iterator[tuple[str, list[Any]]]:
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _samples(part, f"{name}.{key}")
    elif isinstance(batch, tuple) or (isinstance(batch, list) and all(hasattr(p, "shape") for p in batch)):
        for number, part in enumerate(batch):
            yield from _samples(part, f"{name}.{number}")
    elif hasattr(batch, "__len__") and getattr(batch, "shape", 1) != ():
        yield name, [fingerprint(sample) for sample in batch]


Change: TypeAlias = Callable[[Any], Any]
"""What training does to an object; its result is compared."""

_ROUNDS = 3
"""Number of changes to a state before it is saved, and again after."""


@dataclass(frozen=True)
class Checked:
    """Result of a check.

    Attributes:
        kind: "data" or "state".
        word: whether the object's own `state_dict` brings it back; None if it has none.
        run: whether a run of everstep brings the object back.
    """

    kind: str
    word: Verdict | None
    run: Verdict

    def __str__(self) -> str:
        return f"its own state_dict: {self.word or 'none'}\nin a run of everstep: {self.run}"


def check(obj: Any, change: Change | None = None) -> Checked:
    """Try whether an object comes back from what it saves; copies are tried, and the object stays as it is.

    Data, from which a loop can take batches, is read: a copy that is opened at a position must give the same
    two batches.  Any other object is state: a copy is changed and saved; another copy, which is given what
    was saved, must do the same as the first copy from then on.

    Args:
        obj: the object as a program makes it, not yet used.
        change: what training does to a state, such as `lambda objects: objects["scheduler"].step()`; its
            result is compared, too.  Without it, an object that is not data is only saved and loaded.
            Objects of which one changes another, as a scheduler its optimizer, are given in one dictionary.
    """
    obj = obj.value if isinstance(obj, PerRank) else obj
    no_batches = isinstance(obj, Mapping) or any(each.entry(obj) is not None for each in backends.active())
    if change is None and not no_batches and (hasattr(obj, "__iter__") or hasattr(obj, "open")):
        return _check_data(obj)
    word = _tried(obj, 2, partial(_try_state, StatefulEntry, change)) if isinstance(obj, Stateful) else None
    return Checked("state", word, _tried(obj, 2, partial(_try_state, partial(make_entry, "state"), change)))


def _check_data(data: Any) -> Checked:
    word = _try_unspent(IterableStream(data, "state")) if is_stateful(data) else None
    try:
        stream = as_stream(data)
        if stream.unsaveable:
            raise DataError(stream.unsaveable)
    except DataError as error:
        return Checked("data", word, Verdict(False, f"refused: {error}"))
    run = _try_unspent(stream)
    if run.kept and stream.source.resumes == "replay":
        run = run._replace(why="a resume draws the batches before it again and discards them")
    return Checked("data", word, run)


def _try_unspent(stream: Stream) -> Verdict:
    if stream.spent or isinstance(stream.keeps_place, Iterator):
        exact = "a resume is exact until it draws at random again, as a DataLoader does at a second pass"
        return Verdict(None, f"it is an iterator, which can be read once only; {exact}")
    return _tried(stream, 4, _try_stream)


def _tried(obj: Any, count: int, trial: Callable[..., Verdict]) -> Verdict:
    """Give copies of an object to a trial; what the trial raises is a verdict, too."""
    with isolated(), _quiet():
        try:
            copies = [copy.deepcopy(obj) for _ in range(count)]
        except Exception as error:
            return Verdict(None, f"it cannot be copied ({type(error).__name__}: {error})")
        try:
            return trial(*copies)
        except (AssertionError, NotResumableError) as broken:
            return Verdict(False, str(broken))
        except StateError as error:
            return Verdict(False, f"refused: {error}")
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {error}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of data, which would be about the trial and not about the run."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _try_state(entry_of: Callable[[Any], Entry], given: Change | None, one: Any, other: Any) -> Verdict:
    """Try two copies of an object: the one that is given the other's state must do the same."""
    first, second, change = entry_of(one), entry_of(other), given or (lambda each: None)
    for entry in (first, second):  # each notes what it was given before the first change, as in a loop
        entry.enter()
    first_content = _content(encode(first.save()))
    results = [change(one) for _ in range(_ROUNDS)]
    random_digest = digest(encode(capture()))
    saved = encode(first.save())
    state = _content(saved)
    _require_same(_content(encode(first.save())), state, "saved twice in a row, the state differs")
    assert digest(encode(capture())) == random_digest, "saving it draws random numbers"
    second.load(decode(saved))
    content = _content(encode(second.save()))
    _require_same(content, state, "an object that was given the state saves another one")
    for count in range(1, _ROUNDS + 1):
        random_state = capture()
        expected = comparable(change(one))
        restore(random_state)
        message = f"after {count} more changes the restored object differs"
        assert comparable(change(other)) == expected, f"{message} in what the change returns"
        _require_same(_content(encode(second.save())), _content(encode(first.save())), message)
    if given is not None and state == first_content and all(result is None for result in results):
        return Verdict(None, "the change shows neither in the state nor in what it returns")
    return Verdict(True, "a copy that was given its state does the same")


def _content(encoded: Encoded) -> dict[Any, Any]:
    return {path: bytes(data) for path, data in leaves(encoded)}


def _require_same(
    left: Mapping[Any, Any],
    right: Mapping[Any, Any],
    broken: str,
    is_ignored: Callable[[Any], bool] = lambda key: False,
) -> None:
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key) and not is_ignored(key)]
    assert not keys, f"{broken}: {', '.join(map(str, keys[:5]))}"


_EPOCHS, _STEPS, _SECONDS, _STARTS, _SEED = 3, 2, 100.0, 20, 7
"""Epochs, steps in an epoch, seconds of a step by the clock of the check; most starts of a run; its seed."""
_VALUES = (1.0, 0.5, 0.75)
"""Values of each metric that is collected after an epoch: first better, then worse."""
_PLACES = [
    f"{place} {number}"
    for epoch in range(_EPOCHS)
    for place, number in (("step", 2 * epoch + 1), ("step", 2 * epoch + 2), ("the tail of epoch", epoch + 1))
]

Value: TypeAlias = tuple[int, str, float]
"""Step, name of the metric, value."""


def check_service(
    make_service: Callable[[], Service],
    *,
    metrics: Sequence[str] = (),
    values: Mapping[str, Sequence[float]] = MappingProxyType({}),
    make_state: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Check a service against the laws that concern it, in a small real TrainLoop.

    The loop has 3 epochs of 2 steps of 100 seconds each.  It collects "loss" in each step, and "valid_loss"
    and "valid_accuracy" after each epoch.  Each step depends on the numbers "settings.rate" and
    "optimizer.lr" of the state, which a service may set.

    1. Name, stage, moments and schedule of the service are valid; unknown keywords are refused.
    2. An observer changes nothing: state and metric rows are those of the run without the service.
    3. The service's state survives: a run that is interrupted, or crashes, at any of its nine boundaries (the
       two in turn) and is started again ends with the same state and rows to the bit.
    4. A service that raises is closed all the same; in stage REPORT alone the training continues.
    5. The service is closed once for each time that it was opened, and leaves no thread, file or handler.
    6. The runs try the service: the metrics that it watches have values; the state changes, or a controller
       of stage DECIDE acts.

    Args:
        make_service: makes the service as a new process would make it; called many times.
        metrics: names of more metrics to collect after each epoch.
        values: values of metrics, for a service that waits for certain ones: 6 for "loss", 3 for any other.
        make_state: makes more entries of the state, for a service that looks at them, such as "model"; called
            for each start.
    """
    with isolated(), tempfile.TemporaryDirectory() as folder:
        program = _Program(make_service, metrics, values, Path(folder), make_state)
        _check_in_runs(program, lambda run_dir, label: None)


def check_sink(
    make_sink: Callable[[], Service],
    read: Callable[[Path], Iterable[Value]],
    *,
    takes: Callable[[Row], bool] = lambda row: True,
) -> None:
    """Check a sink as `check_service` does; after each run it must hold each valid row once, and no other.

    Further runs of a `RemoteSink` end, as by a kill, at each line of its file that two sends run.

    Args:
        make_sink: makes the sink as a new process would make it; called many times.
        read: returns (step, name, value) of each row that the sink of a run directory holds, in any order;
            the name as it was collected, the value perhaps rounded to float32.
        takes: whether the sink writes a row, for a sink that leaves out rows.
    """

    def inspect(run_dir: Path, label: str) -> None:
        rows = [(row.step, row.name, row.value) for row in RunJournal(run_dir).rows() if takes(row)]
        expected, actual = _count_rows(rows), _count_rows(read(run_dir))
        assert actual == expected, (
            f"{label}, the sink lacks {[*(expected - actual)][:5]} and should not have "
            f"{[*(actual - expected)][:5]} (step, name, value); write each valid row once"
        )

    with isolated(), tempfile.TemporaryDirectory() as folder:
        program, lines = _Program(make_sink, (), {}, Path(folder, "killed")), 0
        is_remote = isinstance(make_sink(), RemoteSink)
        while is_remote and not program.lines_to_kill:  # the run before was killed
            lines += 1
            program.lines_to_kill = lines
            inspect(program.run().run_dir, f"killed in {program.killed_in} and started again")
        _check_in_runs(_Program(make_sink, (), {}, Path(folder)), inspect)


def _count_rows(rows: Iterable[Value]) -> Counter[tuple[int, str, str]]:
    with np.errstate(over="ignore"):
        return Counter((int(step), name, repr(np.float32(value))) for step, name, value in rows)


def _check_in_runs(program: _Program, inspect: Callable[[Path, str], None]) -> None:
    """Check a service; `inspect` is called with the directory of each run and how it was disturbed."""
    _check_attributes(program.make)
    for name, series in program.values.items():
        count, each = (_EPOCHS * _STEPS, "step") if name == "loss" else (_EPOCHS, "epoch")
        message = f"values={{{name!r}: {list(series)}}}: give {count} values, one for each {each}"
        assert len(series) == count, message
    service = program.make()
    undisturbed = program.run()
    assert program.calls["run"] or program.calls["finish"], (
        f"the service never ran in {_EPOCHS} epochs of {_STEPS} steps; give it a schedule that is due"
    )
    known = sorted({row.name for row in RunJournal(undisturbed.run_dir).rows()})
    for metric in service.watches:
        assert metric in known, (
            f"the service watches {metric!r}, which has no values in this check "
            f"({nearest(metric, known)}); correct the name, or give metrics=[{metric!r}]"
        )
    inspect(undisturbed.run_dir, "undisturbed")
    alone = None if service.controller else program.run(without=True)
    if alone is not None:
        broken = "an observer must change nothing, but with this service these differ"
        _require_same(undisturbed.content, alone.content, broken, _is_of(service))
    # steps and tails, each kind in both ways: the pattern of places has three parts, that of ways two
    for place, strike in zip(_PLACES, cycle(("interrupted", "crashed")), strict=False):
        label = f"{strike} in {place} and started again"
        resumed = program.run(strike, place)
        broken = f"its state_dict must hold all that run() remembers, but {label} these differ"
        _require_same(resumed.content, undisturbed.content, broken)
        inspect(resumed.run_dir, label)
    program.require_tried(program.make())
    failing_run = None
    with suppress(_PlantedError):
        failing_run = program.run(failing=True)
    assert (failing_run is not None) == (service.stage is Stage.REPORT), (
        "a failure in REPORT, and in no other stage, lets the training continue"
    )
    if failing_run is not None:
        assert any("planted" in text for text in failing_run.warnings), "a failure must be warned about"
        if alone is not None:
            broken = "a failing REPORT service must change nothing, but these differ"
            _require_same(failing_run.content, alone.content, broken, _is_of(service))


def _check_attributes(make_service: Callable[[], Service]) -> None:
    require_function(make_service, "check_service")
    service, twin = make_service(), make_service()
    require_service(service, ())
    assert service is not twin, "make_service() must make a new service each time"
    assert twin.name == service.name, f"two services are called {service.name!r}, {twin.name!r}"
    assert isinstance(service.stage, Stage), f"stage {service.stage!r} is not an everstep.services.Stage"
    moments = service.moments
    known = isinstance(moments, frozenset) and all(isinstance(moment, Moment) for moment in moments)
    assert known, f"moments {moments!r}: give a frozenset of everstep.services.Moment"
    for when in (Instant(1, 1, False, 1.0), Instant(2, 1, True, 2.0)):
        assert service.due(when) == service.due(when), f"asked twice, due({when}) gives two answers"
    with suppress(ConfigError, TypeError):
        type(service)(no_such_argument=1)  # type: ignore[call-arg]
        raise AssertionError("an unknown keyword must be refused: leave out **kwargs")


def _is_empty(state: Any) -> bool:
    parts = state.values() if isinstance(state, dict) else state
    return state is None or (isinstance(state, dict | list) and all(map(_is_empty, parts)))


class _CrashError(Exception):
    """Error that ends a start without a save."""


class _KilledError(BaseException):
    """Stands for the kill of a process in a `RemoteSink`."""


class _PlantedError(Exception):
    """Error that the service raises when its failure is tried."""


class _Final(NamedTuple):
    """Result of a run: its last state, by path, and its rows, by place."""

    run_dir: Path
    content: dict[Any, Any]
    warnings: Sequence[str]


class _Program:
    """Runs of a small training program, each in a directory of its own."""

    def __init__(
        self,
        make_service: Callable[[], Service],
        metrics: Sequence[str],
        values: Mapping[str, Sequence[float]],
        folder: Path,
        make_state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.make, self.values, self._folder, self._make_state = make_service, values, folder, make_state
        collected = dict.fromkeys(("valid_loss", "valid_accuracy", *metrics, *values))
        self._metrics = [name for name in collected if name != "loss"]
        self.calls: Counter[str] = Counter()
        """How often the service's methods were called, and actions returned."""
        self.states: list[Any] = []
        """Different states of the service."""
        self._error: Exception | None = None
        """First error of the service: in stage REPORT a run only warns of it."""
        self.lines_to_kill, self.killed_in = 0, ""
        """Lines of a `RemoteSink` until its process is killed, if that is not 0, and where it was."""
        self._runs = 0

    def run(self, how: str = "", place: str = "", *, without: bool = False, failing: bool = False) -> _Final:
        """Run the program until it ends as written; it is "interrupted" or "crashed" at `place` once."""
        self._runs += 1
        run_dir = self._folder / str(self._runs)
        for _ in range(_STARTS):
            with nothing_left():
                service = None if without else self.make()
                if service is not None:
                    self._count(service, failing)
                if isinstance(service, RemoteSink) and self.lines_to_kill:
                    threading.settrace(self._killing(service))
                try:
                    ending = self._start(run_dir, service, how, place)
                except (_CrashError, _KilledError, Interrupted) as error:
                    if isinstance(error, _KilledError):  # a kill closes what its frames hold
                        clear_frames(error.__traceback__)
                        gc.collect()
                    place = ""
                    continue
                finally:
                    threading.settrace(None)
                    opened, closed = self.calls["open"], self.calls["close"]
                    assert opened == closed, f"opened {opened} times, it was closed {closed} times"
            if self._error is not None:
                raise AssertionError(
                    f"{how or 'undisturbed'}, the service raised {type(self._error).__name__}: {self._error}"
                ) from self._error
            return _final(run_dir, ending)
        raise AssertionError(f"the run does not end: interrupted {_STARTS} times")

    def require_tried(self, service: Service) -> None:
        """Require that the runs tried what the service does: a new state, or an action."""
        if len(self.states) > 1 or self.calls["action"]:
            return
        reached = (
            "so nobody knows what it does; give the values that its condition waits for, as in "
            'check_service(..., values={"valid_loss": [0.4, 0.4, 0.4]})'
        )
        state = service.state_dict()
        assert _is_empty(state), f"the state of {service.name!r} was {state!r} at each boundary, {reached}"
        decides = service.controller and service.stage is Stage.DECIDE
        assert not decides, f"the controller {service.name!r} returned no action, {reached}"

    def _count(self, service: Service, failing: bool) -> None:
        def counted(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.calls[method] += 1
                if failing and method in ("run", "finish"):
                    raise _PlantedError("planted by check_service")
                try:
                    outcome = original(*args)
                except Exception as error:
                    self._error = self._error or error
                    raise
                state = fingerprint(service.state_dict())
                if state not in self.states:
                    self.states.append(state)
                if method in ("run", "finish"):  # what is no Outcome is an error of the run
                    self.calls["action"] += len(getattr(outcome, "actions", ()))
                return outcome

            return call

        own_finish = [] if type(service).finish is Service.finish else ["finish"]
        for method in ("open", "run", "close", *own_finish):
            setattr(service, method, counted(method, getattr(service, method)))

    def _killing(self, sink: RemoteSink) -> Any:
        """Make the trace function that kills the process in a line of the sink's file."""
        file, times = type(sink).send.__code__.co_filename, Counter[tuple[str, int]]()

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                function, line = frame.f_code.co_name, frame.f_lineno
                times[function, line] += 1  # of a line that runs often two times count
                self.lines_to_kill -= times[function, line] <= 2
                if not self.lines_to_kill:
                    self.killed_in = f"{function}, line {line} of {Path(file).name}"
                    raise _KilledError
            return trace

        return trace

    def _start(self, run_dir: Path, service: Service | None, how: str, disturbed: str) -> Ending:
        services = [] if service is None else [service]
        if not isinstance(service, Checkpoints):
            services.append(Checkpoints(Every(steps=4)))
        clock = ManualClock()
        weights, settings, optimizer = np.zeros(4), {"rate": 1.0}, {"lr": 1.0}
        train = data.arrays(np.arange(12.0), batch_size=12 // _STEPS, shuffle=True)
        seed_all(_SEED)  # for new weights
        state = {"weights": weights, "settings": settings, "optimizer": optimizer, **self._make_state()}
        arguments: Any = {"max_epoch": _EPOCHS, "seed": _SEED, "default_services": False, "clock": clock}

        def disturb(place: str) -> None:
            if place == disturbed:
                if how == "crashed":
                    raise _CrashError
                loop.call_soon(Interrupt("interrupted by check_service"))

        with redirect_stdout(io.StringIO()):
            with TrainLoop(run_dir, state, services=services, **arguments) as loop:
                for epoch in loop.iter_epochs():
                    for step, batch in loop.iter_steps(train):
                        change = np.sin(batch).mean() + np.random.rand(4) + random.random()
                        weights += settings["rate"] * optimizer["lr"] * change
                        clock.advance(_SECONDS)
                        loop.collect_metrics(loss=self._value("loss", step - 1, weights.mean()))
                        disturb(f"step {step}")
                    with loop.evaluation():
                        usual = _VALUES[epoch - 1] + 0.01 * (random.random() + np.random.rand())
                        loop.collect_metrics({n: self._value(n, epoch - 1, usual) for n in self._metrics})
                    disturb(f"the tail of epoch {epoch}")
                    loop.print_logs()
        return loop.ending

    def _value(self, metric: str, index: int, usual: float) -> float:
        return self.values[metric][index] if metric in self.values else usual


def _final(run_dir: Path, ending: Ending) -> _Final:
    store = Store(run_dir, ending.segment, lambda text: None)
    content = _content(store.read(store.names()[-1]).tree)
    content = {path: data for path, data in content.items() if not _in(path, "wall")}
    for row in RunJournal(run_dir).rows():
        if not row.wall:
            content[row.epoch, row.step, row.phase, row.name, row.seq] = (row.value.hex(), row.count)
    return _Final(run_dir, content, ending.warnings)


def _in(path: str, *folders: str) -> bool:
    return any(path.removesuffix("#") == folder or path.startswith(f"{folder}/") for folder in folders)


def _is_of(service: Service) -> Callable[[Any], bool]:
    phase = f"eval/{service.name}"
    # The metrics of the service also stand in the windows of all readers.
    own = ("services", "metrics/state/readers", array_name(("metrics", "state", "seqs", phase)))
    return lambda key: _in(key, *own) if isinstance(key, str) else key[2] == phase
