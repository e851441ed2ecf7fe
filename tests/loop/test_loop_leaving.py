"""Leaving loops early, in every way, and the orders of use that a program may or may not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Every
from everstep.errors import ConfigError, DataError, UsageError
from everstep.record import RunJournal
from tiny_runs import Boom, Tiny, boom_at, rows


def loop_in(run_dir: Path, **arguments: Any) -> everstep.TrainLoop:
    services = [*arguments.pop("services", ()), everstep.Console(sink=lambda line: None)]
    return everstep.TrainLoop(run_dir, services=services, **arguments)


def run_over(loop: everstep.TrainLoop, data: Any, name: str = "train") -> None:
    with loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps(data, name))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------- leaving


def test_break_completes_the_step_ends_the_pass_and_the_tail_runs(tmp_path: Path) -> None:
    seen: list[Any] = []
    with loop_in(tmp_path / "run", max_epoch=2) as loop:
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


def test_a_left_step_has_no_snapshot_of_its_own(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(Every(steps=1), keep_last=None)
    with loop_in(tmp_path / "run", max_epoch=1, services=[saves]) as loop:
        for _ in loop.iter_epochs():
            for step, _ in loop.iter_steps([1, 2, 3]):
                if step == 2:
                    break
    assert names(tmp_path / "run") == [
        "epoch-0000-step-00000000",
        "epoch-0001-step-00000002",
        "step-00000001",
    ]


def test_a_run_with_breaks_resumes_exactly(tmp_path: Path) -> None:
    def train(run_dir: Path, boom: int | None = None) -> Tiny:
        tiny = Tiny(run_dir, max_epoch=4, services=[everstep.Checkpoints(Every(steps=2))])
        with tiny.loop as loop:
            for epoch in loop.iter_epochs():
                for step, (ids,) in loop.iter_steps(tiny.data):
                    tiny.update(ids)
                    if step == boom:
                        raise Boom
                    if step % 4 == 3 - epoch % 2:
                        break
                loop.collect_metrics(valid_loss=float(tiny.w.sum()))
        return tiny

    straight = train(tmp_path / "straight")
    for at in (1, 4, 6, 7):
        with pytest.raises(Boom):
            train(tmp_path / "run", at)
    assert train(tmp_path / "run").result() == straight.result()


def test_return_from_a_function_with_the_loop_open(tmp_path: Path) -> None:
    loop = loop_in(tmp_path / "run", max_epoch=5)

    def train() -> str:
        with loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps([1, 2, 3]):
                    if step == 5:
                        return "done"
        return "not reached"

    assert train() == "done"
    assert (loop.step, loop.epoch) == (5, 2)
    assert not loop.ending.finished and loop.ending.reason == "the loop was left before its end"
    with loop_in(tmp_path / "run", max_epoch=5) as again:
        steps = [step for _ in again.iter_epochs() for step, _ in again.iter_steps([1, 2, 3])]
    assert steps == list(range(6, 15))


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
    assert not loop.ending.finished
    with loop_in(tmp_path / "run", max_epoch=4) as again:
        steps = [step for _ in again.iter_epochs() for step, _ in again.iter_steps([1, 2])]
    assert steps == [5, 6, 7, 8] and again.ending.finished


def test_a_second_epoch_loop_goes_on_after_the_first(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=4) as loop:
        seen = []
        for epoch in loop.iter_epochs():
            for step, _ in loop.iter_steps([1, 2]):
                seen.append((epoch, step))
            if epoch == 2:
                break
        for epoch in loop.iter_epochs():
            for step, _ in loop.iter_steps([1, 2]):
                seen.append((epoch, step))
    assert seen == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6), (4, 7), (4, 8)]
    assert loop.ending.finished


def test_after_an_exception_the_last_commit_is_finished_and_none_is_started(tmp_path: Path) -> None:
    tiny = Tiny(
        tmp_path / "run", max_epoch=2, services=[everstep.Checkpoints(Every(steps=3), keep_last=None)]
    )
    with pytest.raises(Boom, match="at 4"):
        tiny.train(inside=boom_at(4))
    assert names(tmp_path / "run") == ["epoch-0000-step-00000000", "step-00000003"]
    assert (tiny.loop.ending.step, tiny.loop.ending.reason) == (3, "Boom: at 4")
    assert not tiny.loop.ending.finished


def test_an_exception_that_the_user_catches_inside_the_body(tmp_path: Path) -> None:
    def inside(loop: Any, step: int) -> None:
        try:
            raise Boom
        except Boom:
            pass

    assert Tiny(tmp_path / "run", max_epoch=1).train(inside=inside).loop.step == 4


def test_an_exception_caught_around_the_step_loop_counts_as_a_break(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            try:
                for step, _ in loop.iter_steps([1, 2, 3]):
                    if step == 2:
                        raise Boom
            except Boom:
                loop.println("never mind")
            loop.collect_metrics(valid_loss=1.0)
    assert loop.step == 5 and loop.ending.finished


def test_keyboard_interrupt_in_the_body_is_an_exception_like_others(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Tiny(tmp_path / "run", max_epoch=2).train(inside=boom_at(6, KeyboardInterrupt))
    straight = Tiny(tmp_path / "straight", max_epoch=2).train()
    assert Tiny(tmp_path / "run", max_epoch=2).train().result() == straight.result()


# ---------------------------------------------------------------------------------- generators kept alive


def test_a_step_generator_kept_alive_after_break_does_no_harm(tmp_path: Path) -> None:
    seen = []
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        for _ in loop.iter_epochs():
            steps = loop.iter_steps([1, 2, 3])  # the one before is dropped only here
            for step, batch in steps:
                seen.append((step, batch, loop.within_step))
                loop.collect_metrics(loss=float(batch))
                if batch == 2:
                    break
    assert seen == [(1, 1, True), (2, 2, True), (3, 1, True), (4, 2, True), (5, 1, True), (6, 2, True)]
    assert [r[1] for r in rows(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]


def test_a_step_generator_of_an_epoch_that_is_over_says_so(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        kept: list[Any] = []
        for epoch in loop.iter_epochs():
            if epoch == 1:
                kept.append(loop.iter_steps([1, 2, 3]))
                next(kept[0])
            if epoch == 2:
                with pytest.raises(UsageError, match="do not keep the iterator"):
                    next(kept[0])
            if epoch > 1:
                list(loop.iter_steps([1, 2]))
    assert loop.step == 5


def test_a_step_generator_that_is_closed_late_leaves_the_new_one_alone(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=2) as loop:
        old = None
        for epoch in loop.iter_epochs():
            steps = loop.iter_steps([1, 2, 3])
            for step, _ in steps:
                if epoch == 1:
                    old = steps
                    break
                if old is not None:
                    old.close()
                    old = None
                assert loop.within_step and loop.step == step
                with pytest.raises(UsageError, match="one step loop at a time"):
                    loop.iter_steps([1])
            del steps
    assert loop.step == 4


def test_an_epoch_generator_kept_beyond_the_block_says_so(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        epochs = loop.iter_epochs()
        next(epochs)
        list(loop.iter_steps([1, 2]))
    with pytest.raises(UsageError, match="after the with block"):
        next(epochs)


def test_a_step_generator_kept_beyond_the_block_says_so(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        for _ in loop.iter_epochs():
            steps = loop.iter_steps([1, 2, 3])
            next(steps)
            break
    with pytest.raises(UsageError, match="do not keep the iterator"):
        next(steps)
    assert loop.step == 1


def test_iter_steps_called_and_not_iterated_blocks_nothing(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            loop.iter_steps([1, 2])
            assert [step for step, _ in loop.iter_steps([1, 2])] == [1, 2]


# ------------------------------------------------------------------------------------------------ streams


def two_streams(run_dir: Path, boom: int | None = None, **arguments: Any) -> tuple[list[Any], Tiny]:
    """Two step loops in one epoch over two streams; both draw random numbers."""
    tiny = Tiny(run_dir, max_epoch=2, services=[everstep.Checkpoints(Every(steps=1))], **arguments)
    other = everstep.data.arrays(np.arange(100, 106), batch_size=2, shuffle=True)
    seen: list[Any] = []
    with tiny.loop as loop:
        for _ in loop.iter_epochs():
            loop.collect_metrics(lr=0.1 * loop.epoch)
            for data, name in ((tiny.data, "train"), (other, "extra")):
                for step, (ids,) in loop.iter_steps(data, name):
                    tiny.update(ids)
                    if step == boom:
                        raise Boom
                    seen.append((step, name, tuple(ids)))
                loop.collect_metrics(gap=float(tiny.w.sum()))
    return seen, tiny


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("at", [1, 2, 4, 5, 6, 7, 8, 9, 12, 13, 14])
def test_two_step_loops_in_one_epoch_resume_exactly(tmp_path: Path, at: int) -> None:
    seen, straight = two_streams(tmp_path / "straight")
    with pytest.raises(Boom):
        two_streams(tmp_path / "run", at)
    again, tiny = two_streams(tmp_path / "run")
    first = at - 1 if at in (5, 12) else at  # after a loop's last step that step runs again
    assert again == seen[first - 1 :]
    assert tiny.result() == straight.result()


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


@pytest.mark.parametrize("name", ["", "a/b"])
def test_stream_names(tmp_path: Path, name: str) -> None:
    with loop_in(tmp_path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            with pytest.raises(ConfigError, match="without '/'"):
                loop.iter_steps([1], name)


def interrupted(run_dir: Path) -> None:
    with pytest.raises(Boom):
        Tiny(run_dir, max_epoch=2, services=[everstep.Checkpoints(Every(steps=1))]).train(inside=boom_at(3))


def test_another_stream_on_resume(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    tiny = Tiny(tmp_path / "run", max_epoch=2)
    with pytest.raises(UsageError, match="over stream 'train', this one reads 'training'; run the program"):
        run_over(tiny.loop, tiny.data, "training")


def test_a_program_without_the_step_loop_on_resume(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    tiny = Tiny(tmp_path / "run", max_epoch=2)

    def forgets() -> None:
        with tiny.loop as loop:
            list(loop.iter_epochs())

    with pytest.raises(UsageError, match=r"loop number 1 of epoch 1.*entered only 0; run the program"):
        forgets()


@pytest.mark.parametrize("samples", [6, 10])
def test_data_that_changed_its_length_on_resume(tmp_path: Path, samples: int) -> None:
    interrupted(tmp_path / "run")
    before = names(tmp_path / "run")
    with pytest.raises(DataError, match=rf"8.*{samples}|{samples}.*8"):
        Tiny(tmp_path / "run", samples=samples, max_epoch=2).train()
    assert names(tmp_path / "run") == before
    assert Tiny(tmp_path / "run", max_epoch=2).train().loop.ending.finished


def test_a_changed_batch_size_on_resume(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    with pytest.raises(DataError, match="batch"):
        Tiny(tmp_path / "run", batch=4, max_epoch=2).train()


def test_data_without_any_batch(tmp_path: Path) -> None:
    for data in ([], iter(())):
        with pytest.raises(DataError, match="gave no batch in a whole pass; give it data"):
            run_over(loop_in(tmp_path / "run", max_epoch=1), data)


def test_an_iterator_that_is_used_up(tmp_path: Path) -> None:
    data = iter([1, 2])
    with pytest.raises(DataError):
        run_over(loop_in(tmp_path / "run", max_epoch=2), data)


def test_an_error_in_the_data_is_the_users_error_and_the_run_resumes_there(tmp_path: Path) -> None:
    class Data:
        def __init__(self, bad: int | None) -> None:
            self.bad = bad

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Any]:
            if i == self.bad:
                raise Boom(f"sample {i}")
            return (np.array([i, i + 1]),)

    from everstep.data.adapters import SequenceStream

    def train(run_dir: Path, bad: int | None) -> Tiny:
        tiny = Tiny(run_dir, max_epoch=2, services=[everstep.Checkpoints(Every(steps=1))])
        tiny.data = SequenceStream(Data(bad))  # type: ignore[arg-type,assignment]
        return tiny.train()

    straight = train(tmp_path / "straight", None)
    with pytest.raises(Boom, match="sample 3"):
        train(tmp_path / "run", 3)
    assert train(tmp_path / "run", None).result() == straight.result()


def test_steps_per_epoch_continues_the_pass(tmp_path: Path) -> None:
    def train(run_dir: Path, boom: int | None = None) -> tuple[str, Tiny]:
        tiny = Tiny(run_dir, steps_per_epoch=3, max_epoch=4, services=[everstep.Checkpoints(Every(steps=1))])
        epochs: dict[int, str] = {}
        data = [0, 1, 2, 3, 4]
        with tiny.loop as loop:
            for epoch in loop.iter_epochs():
                for step, batch in loop.iter_steps(data):
                    tiny.update(np.array([batch]))
                    if step == boom:
                        raise Boom
                    epochs[epoch] = epochs.get(epoch, "") + str(batch)
        return ",".join(epochs.values()), tiny

    text, straight = train(tmp_path / "straight")
    assert text == "012,340,123,401"
    for at, rest in ((2, "12,340,123,401"), (4, "340,123,401"), (6, "0,123,401"), (7, "123,401")):
        run_dir = tmp_path / f"run{at}"
        with pytest.raises(Boom):
            train(run_dir, at)
        text, tiny = train(run_dir)
        assert text == rest
        assert tiny.result() == straight.result()


# ------------------------------------------------------------------------ what a resumed epoch does again


def heads_and_tails(run_dir: Path, boom: int | None = None, again: Callable[..., None] | None = None) -> Tiny:
    tiny = Tiny(run_dir, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))])
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            if again is not None:
                again(epoch, "head", loop.resumed_mid_epoch)
            loop.collect_metrics(lr=1.0 / epoch)
            for step, (ids,) in loop.iter_steps(tiny.data):
                tiny.update(ids)
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
def test_head_metrics_are_not_written_twice_and_tails_write_the_same_keys(tmp_path: Path, at: int) -> None:
    straight = heads_and_tails(tmp_path / "straight")
    with pytest.raises(Boom):
        heads_and_tails(tmp_path / "run", at)
    calls: list[Any] = []
    tiny = heads_and_tails(tmp_path / "run", None, lambda *call: calls.append(call))
    assert calls[:4] == [(2, "head", True), (2, "tail", True), (3, "head", False), (3, "tail", False)]
    assert tiny.result() == straight.result()
    heads = rows(tmp_path / "run", "head")
    assert [(r[0], r[1], r[4]) for r in heads] == [(1, 0, 0), (2, 4, 0), (3, 8, 0)]
    tails = rows(tmp_path / "run", "tail")
    assert [(r[0], r[1], r[4]) for r in tails] == [(e, 4 * e, seq) for e in (1, 2, 3) for seq in (0, 1, 2)]
    every = [(r.epoch, r.step, r.phase, r.name, r.seq) for r in RunJournal(tmp_path / "run").rows()]
    assert len(every) == len(set(every))


def test_values_of_one_name_in_one_step_fold_into_their_mean(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for step, _ in loop.iter_steps([1, 2]):
                for part in range(step):
                    loop.collect_metrics(loss=float(part))
    assert [(r[1], r[5], r[6]) for r in rows(tmp_path / "run", "step")] == [
        (1, (0.0).hex(), 1),
        (2, (0.5).hex(), 2),
    ]


def test_the_mean_of_a_resumed_epoch_is_that_of_the_whole(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=1).train(tail=lambda loop, e: loop.print_logs())
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=1, services=[everstep.Checkpoints(Every(steps=1))]).train(
            inside=boom_at(3)
        )
    tiny = Tiny(tmp_path / "run", max_epoch=1).train(tail=lambda loop, e: loop.print_logs())
    printed = [line.partition("loss: ")[2] for line in tiny.lines + straight.lines if "loss: " in line]
    loss = [part.partition(";")[0] for part in printed]
    assert loss[0] == loss[1]
    assert rows(tmp_path / "run", "epoch") == rows(tmp_path / "straight", "epoch")
