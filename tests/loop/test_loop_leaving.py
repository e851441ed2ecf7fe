"""Leaving loops early, in every way, and the orders of use that a program may or may not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Every
from everstep.errors import ConfigError, DataError, UsageError
from everstep.record import RunJournal
from tiny_runs import Boom, Tiny, boom_at, rows


def loop_in(run_dir: Path, **arguments: Any) -> everstep.TrainLoop:
    services = [*arguments.pop("services", ()), everstep.services.Console(sink=lambda line: None)]
    return everstep.TrainLoop(run_dir, services=services, **arguments)


def run_over(loop: everstep.TrainLoop, data: Any, name: str = "train") -> None:
    with loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps(data, name))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_break_completes_the_step_ends_the_pass_and_the_tail_runs(tmp_path: Path) -> None:
    seen: list[Any] = []
    saves = everstep.Checkpoints(Every(steps=1), keep_last=None)
    with loop_in(tmp_path / "run", max_epoch=2, services=[saves]) as loop:
        loop.on("AFTER_STEP", lambda b: seen.append(f"after {b.step}"))
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(list("abcd")):
                seen.append(f"{step}{batch}")
                loop.collect_metrics(loss=float(step))
                if batch == "b":
                    break
            assert not loop.within_step and loop.step_data is None
            loop.collect_metrics(valid_loss=float(epoch))
            seen.append(f"tail {loop.step}")
    assert seen == ["1a", "after 1", "2b", "after 2", "tail 2", "3a", "after 3", "4b", "after 4", "tail 4"]
    assert [r[1] for r in rows(tmp_path / "run", "step")] == [1, 2, 3, 4]
    assert [r[1] for r in rows(tmp_path / "run", "tail")] == [2, 4]
    assert loop.ending.finished and loop.step == 4
    of_steps = [name for name in names(tmp_path / "run") if name.startswith("step")]
    assert of_steps == ["step-00000001", "step-00000003"], "a step that was left has no snapshot of its own"


def test_an_epoch_loop_left_by_break_is_closed_at_the_exit_and_resumable(tmp_path: Path) -> None:
    epochs: list[int] = []
    with loop_in(tmp_path / "run", max_epoch=4) as loop:
        loop.on("AFTER_EPOCH", lambda b: epochs.append(b.epoch))
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                loop.collect_metrics(loss=1.0)
            if epoch == 2:
                break
        with pytest.raises(UsageError, match="outside an epoch"):
            loop.iter_steps([1])
    assert epochs == [1, 2]
    assert "epoch-0002-step-00000004" in names(tmp_path / "run")
    assert not loop.ending.finished and loop.ending.reason == "the loop was left before its end"
    with loop_in(tmp_path / "run", max_epoch=4) as again:
        steps = [step for _ in again.iter_epochs() for step, _ in again.iter_steps([1, 2])]
    assert steps == [5, 6, 7, 8] and again.ending.finished


def test_after_an_exception_the_last_commit_is_finished_and_none_is_started(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(Every(steps=3), keep_last=None)
    tiny = Tiny(tmp_path / "run", samples=20, max_epoch=2, services=[saves])
    with pytest.raises(Boom, match="at 6"):
        tiny.train(inside=boom_at(6))
    assert names(tmp_path / "run") == ["epoch-0000-step-00000000", "step-00000003"]
    assert (tiny.loop.ending.step, tiny.loop.ending.reason) == (5, "Boom: at 6")
    assert not tiny.loop.ending.finished
    assert list(RunJournal(tmp_path / "run").series("loss", "step")[0]) == [1, 2, 3, 4, 5]


def test_a_generator_that_is_kept_too_long_says_so(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        epochs, old = loop.iter_epochs(), None
        for epoch in epochs:
            if epoch == 2:
                with pytest.raises(UsageError, match="do not keep the iterator"):
                    next(old)
            if epoch > 1:
                list(loop.iter_steps([1, 2]))
            loop.iter_steps([1, 2, 3])  # not iterated, it blocks nothing
            old = loop.iter_steps([1, 2, 3])
            next(old)
            if epoch == 2:
                break
    assert loop.step == 4
    with pytest.raises(UsageError, match="do not keep the iterator"):
        next(old)
    with pytest.raises(UsageError, match="after the with block"):
        next(epochs)


def test_two_streams_under_one_name(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                break
            list(loop.iter_steps([3, 4]))  # the pass of the first is over: another object may follow
    with loop_in(tmp_path / "other", max_epoch=1, steps_per_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2, 3]):
                pass
            with pytest.raises(ConfigError, match=r"'train' is in the middle of a pass.*name="):
                loop.iter_steps([4, 5, 6])


def without_step_loops(tiny: Tiny) -> None:
    with tiny.loop as loop:
        list(loop.iter_epochs())


CHANGED: dict[str, tuple[dict[str, int], Callable[[Tiny], object], type[Exception], str]] = {
    "another stream": (
        {},
        lambda tiny: run_over(tiny.loop, tiny.data, "training"),
        UsageError,
        "over stream 'train', this one reads 'training'; run the program",
    ),
    "no step loop": ({}, without_step_loops, UsageError, "loop number 1 of epoch 1.*entered only 0; run"),
    "fewer samples": ({"samples": 6}, Tiny.train, DataError, "8.*6|6.*8"),
    "more samples": ({"samples": 10}, Tiny.train, DataError, "8.*10|10.*8"),
    "larger batches": ({"batch": 4}, Tiny.train, DataError, "batch"),
}


@pytest.mark.parametrize(("arguments", "train", "error", "message"), CHANGED.values(), ids=CHANGED)
def test_what_has_changed_at_a_resume_is_refused(
    tmp_path: Path, arguments: Any, train: Any, error: Any, message: str
) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path, max_epoch=2, services=[everstep.Checkpoints(Every(steps=1))]).train(boom_at(3))
    before = names(tmp_path)
    with pytest.raises(error, match=message):
        train(Tiny(tmp_path, max_epoch=2, **arguments))
    assert names(tmp_path) == before
    assert Tiny(tmp_path, max_epoch=2).train().loop.ending.finished


def test_an_epoch_loop_less_than_before_is_refused(tmp_path: Path) -> None:
    def start(loops: int) -> None:
        with loop_in(tmp_path / "run", max_epoch=3) as loop:
            for _ in range(loops):
                for epoch in loop.iter_epochs():
                    for _ in loop.iter_steps([0]):
                        if epoch == 3:
                            raise Boom
                    break

    with pytest.raises(Boom):
        start(loops=3)
    with pytest.raises(UsageError, match="loop number 3, but the program entered only 1"):
        start(loops=1)


def test_data_without_any_batch(tmp_path: Path) -> None:
    for number, data in enumerate(([], iter(()), iter([1, 2]))):
        with pytest.raises(DataError, match=r"gave no batch|one pass"):
            run_over(loop_in(tmp_path / str(number), max_epoch=2), data)


def heads_and_tails(run_dir: Path, boom: int | None = None, again: Callable[..., None] | None = None) -> Tiny:
    tiny = Tiny(run_dir, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))])
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            if again is not None:
                again(epoch, "head", loop.resumed_mid_epoch)
            loop.collect_metrics(lr=1.0 / epoch)
            loop.print_logs()
            assert loop.batch_index is None
            for step, (ids,) in loop.iter_steps(tiny.data):
                tiny.update(ids)
                loop.collect_metrics(number=loop.batch_index)
                if step == boom:
                    raise Boom
            if again is not None:
                again(epoch, "tail", loop.resumed_mid_epoch)
            for value in (1.0, 2.0, 3.0):
                loop.collect_metrics(score=value * epoch)
            if boom == -epoch:
                raise Boom
            loop.print_logs()
    return tiny


@pytest.mark.parametrize("at", [6, 8, -2])
def test_a_resumed_epoch_has_the_rows_and_lines_of_the_whole_and_those_of_its_head_once(
    tmp_path: Path, at: int
) -> None:
    def printed(tiny: Tiny) -> list[str]:
        """What lines say of metrics, without times."""
        parts = [part for line in tiny.lines for part in line.partition("] ")[2].split("; ")]
        return [part for part in parts if part.startswith(("loss: ", "lr: ", "number: ", "score: "))]

    straight = heads_and_tails(tmp_path / "straight")
    with pytest.raises(Boom):
        heads_and_tails(tmp_path / "run", at)
    calls: list[Any] = []
    tiny = heads_and_tails(tmp_path / "run", None, lambda *call: calls.append(call))
    assert calls[:4] == [(2, "head", True), (2, "tail", True), (3, "head", False), (3, "tail", False)]
    assert tiny.result() == straight.result()
    resumed = printed(tiny)
    assert len(resumed) > 5 and resumed == printed(straight)[-len(resumed) :]
    numbers = [row[5] for row in rows(tmp_path / "run", "step") if row[3] == "number"]
    assert numbers == [float(n).hex() for n in range(4)] * 3
    heads = rows(tmp_path / "run", "head")
    assert [(r[0], r[1], r[4]) for r in heads] == [(1, 0, 0), (2, 4, 0), (3, 8, 0)]
    tails = rows(tmp_path / "run", "tail")
    assert [(r[0], r[1], r[4]) for r in tails] == [(e, 4 * e, seq) for e in (1, 2, 3) for seq in (0, 1, 2)]
    every = [(r.epoch, r.step, r.phase, r.name, r.seq) for r in RunJournal(tmp_path / "run").rows()]
    assert len(every) == len(set(every))


def test_the_best_names_no_weights_that_are_not_its_own(tmp_path: Path) -> None:
    def best(save: bool, *values: float) -> tuple[float, bool]:
        services = [everstep.Best("valid_loss", save=save)]
        with loop_in(tmp_path, state={"w": [0]}, max_epoch=len(values), services=services) as loop:
            for epoch in loop.iter_epochs():
                list(loop.iter_steps([1, 2]))
                loop.collect_metrics(valid_loss=values[epoch - 1])
        assert loop.best is not None
        return loop.best.value, str(loop.best.path).endswith("step-00000004")

    assert best(True, 3.0, 2.0) == (2.0, True)
    assert best(False, 3.0, 2.0, 1.0) == (1.0, False)


def test_weights_that_were_trained_on_since_the_measurement_are_not_kept_as_the_best(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=1, watch="valid_loss")
    with tiny.loop as loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps([1, 2]))
            loop.collect_metrics(valid_loss=1.0)
            list(loop.iter_steps([1, 2], "more"))
    assert loop.best is not None and (loop.best.value, loop.best.path) == (1.0, None)
    assert "measured at step 2 and its weights were trained on until step 4" in "".join(tiny.lines)
