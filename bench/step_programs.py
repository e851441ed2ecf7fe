"""The programs of bench/steps.py: everstep's doors, loops by hand, and other trainers.

A program trains `model` on the batches of `turns` until `Measured` is raised.  "Fewest": the idiomatic set-up
with the fewest features.  "All": a live line or bar of progress, the loss of every step to TensorBoard (by
everstep to its record, too), and a checkpoint every 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from turns import SAVE_EVERY, Batches, Model, Stream, Turns

Run = Callable[[Model, Turns, Path], None]


class Program(NamedTuple):
    """What is measured.

    Attributes:
        run: trains.
        goal: limit of the ratio to the bare loop; None: none.
        peer: whether it needs bench/requirements.txt.
        empty: whether the step does nothing.
    """

    run: Run
    goal: float | None = None
    peer: bool = False
    empty: bool = False


# ------------------------------------------------------------------------------------ by hand


def bare(model: Model, turns: Turns, folder: Path) -> None:
    for batch in Batches(model.batches, turns):
        model.step(batch)


def by_hand(model: Model, turns: Turns, folder: Path) -> None:
    import torch
    from torch.utils.tensorboard.writer import SummaryWriter
    from tqdm import tqdm  # type: ignore[import-untyped]

    writer = SummaryWriter(folder)
    for step, batch in enumerate(tqdm(Batches(model.batches, turns)), 1):
        writer.add_scalar("loss", model.step(batch).item(), step)
        if step % SAVE_EVERY == 0:
            state = {"model": model.module.state_dict(), "optimizer": model.optimizer.state_dict()}
            torch.save(state, folder / f"{step}.pt")


# ------------------------------------------------------------------------------------ everstep


def _state(model: Model) -> dict[str, Any]:
    return {"model": model.module, "optimizer": model.optimizer}


def _no_service() -> dict[str, Any]:
    import everstep

    return {"default_services": False, "services": [everstep.Checkpoints(everstep.Never())]}


def _all_services() -> dict[str, Any]:
    import everstep

    saves = everstep.Checkpoints(everstep.Every(steps=SAVE_EVERY))
    return {"services": [saves, everstep.services.TensorBoard(), everstep.EarlyStop("loss", patience=9)]}


def _train_loop(collect: bool, given: Callable[[], dict[str, Any]] = _no_service) -> Run:
    def run(model: Model, turns: Turns, folder: Path) -> None:
        import everstep

        state = _state(model) if type(model) is Model else {"model": model.module}
        with everstep.TrainLoop(folder / "run", state, **given()) as loop:
            for _ in loop.iter_epochs():
                if collect:
                    for _, batch in loop.iter_steps(Stream(model.batches, turns)):
                        loop.collect_metrics(loss=model.step(batch))
                else:
                    for _, batch in loop.iter_steps(Stream(model.batches, turns)):
                        model.step(batch)

    return run


def supervisor(model: Model, turns: Turns, folder: Path) -> None:
    import everstep

    with everstep.Supervisor(folder / "run", _state(model), **_no_service()) as sv:
        batches = sv.stream(Stream(model.batches, turns))
        while not sv.should_stop():
            sv.advance(loss=model.step(next(batches)))


def _trainer(given: Callable[[], dict[str, Any]]) -> Run:
    def run(model: Model, turns: Turns, folder: Path) -> None:
        import everstep

        class Task(everstep.torch.Task):
            def build_model(self) -> Any:
                return model.module

            def build_optimizer(self, module: Any) -> Any:
                return model.optimizer

            def forward(self, batch: Any) -> Any:
                x, y = batch
                return {"loss": model.loss_of(self.model(x), y)}

        streams = {"train": Stream(model.batches, turns)}
        everstep.Trainer(Task(), streams, folder / "run", **given()).run_training()

    return run


# --------------------------------------------------------------------------------- other trainers


def ignite(model: Model, turns: Turns, folder: Path) -> None:
    from ignite.engine import Engine  # type: ignore[import-not-found]

    trainer = Engine(lambda engine, batch: model.step(batch))
    trainer.run(Batches(model.batches, turns), epoch_length=10**9)


def ignite_all(model: Model, turns: Turns, folder: Path) -> None:
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver, ProgressBar, TensorboardLogger  # type: ignore[import-not-found]

    trainer = Engine(lambda engine, batch: model.step(batch).item())
    ProgressBar().attach(trainer)
    logger = TensorboardLogger(log_dir=str(folder / "logs"))
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss}
    )
    saves = Checkpoint({**_state(model), "trainer": trainer}, DiskSaver(str(folder), require_empty=False))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVE_EVERY), saves)
    trainer.run(Batches(model.batches, turns), epoch_length=10**9)


def fabric(model: Model, turns: Turns, folder: Path) -> None:
    from lightning import Fabric  # type: ignore[import-not-found]

    runner = Fabric(accelerator="cpu", devices=1)
    module, optimizer = runner.setup(model.module, model.optimizer)
    for x, y in Batches(model.batches, turns):
        loss = model.loss_of(module(x), y)
        optimizer.zero_grad()
        runner.backward(loss)
        optimizer.step()


def fabric_all(model: Model, turns: Turns, folder: Path) -> None:
    from lightning import Fabric
    from lightning.pytorch.loggers import TensorBoardLogger  # type: ignore[import-not-found]
    from tqdm import tqdm

    runner = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger(folder / "logs"))
    module, optimizer = runner.setup(model.module, model.optimizer)
    for step, (x, y) in enumerate(tqdm(Batches(model.batches, turns)), 1):
        loss = model.loss_of(module(x), y)
        optimizer.zero_grad()
        runner.backward(loss)
        optimizer.step()
        runner.log("loss", loss.item(), step)
        if step % SAVE_EVERY == 0:
            runner.save(folder / f"{step}.ckpt", {"model": module, "optimizer": optimizer})


def accelerate(model: Model, turns: Turns, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(model.module, model.optimizer)
    for x, y in Batches(model.batches, turns):
        loss = model.loss_of(module(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


def torchtnt(model: Model, turns: Turns, folder: Path) -> None:
    from torchtnt.framework.train import train  # type: ignore[import-not-found]
    from torchtnt.framework.unit import TrainUnit  # type: ignore[import-not-found]

    class Unit(TrainUnit[Any]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module, self.optimizer = model.module, model.optimizer

        def train_step(self, state: Any, data: Any) -> None:
            model.step(data)

    train(Unit(), Batches(model.batches, turns), max_epochs=1)


def _lightning(everything: bool) -> Run:
    def run(model: Model, turns: Turns, folder: Path) -> None:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found]
        from lightning.pytorch.loggers import TensorBoardLogger

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = model.module

            def training_step(self, batch: Any, index: int) -> Any:
                x, y = batch
                loss = model.loss_of(self.net(x), y)
                if everything:
                    self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                return model.optimizer

        given: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        if everything:
            saves = ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_top_k=-1)
            logger = TensorBoardLogger(folder / "logs")
            given = {"logger": logger, "callbacks": [saves], "log_every_n_steps": 1}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **given
        )
        trainer.fit(Module(), Batches(model.batches, turns))

    return run


def _hf_trainer(everything: bool) -> Run:
    def run(model: Model, turns: Turns, folder: Path) -> None:
        import torch
        from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

        class Wrapped(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model.module

            def forward(self, x: Any, labels: Any) -> Any:
                return {"loss": model.loss_of(self.net(x), labels)}

        class Ready(Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                return Batches([{"x": x, "labels": y} for x, y in model.batches], turns)

        given: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
        if everything:
            given = {"save_steps": SAVE_EVERY, "logging_steps": 1, "report_to": "tensorboard"}
        arguments = TrainingArguments(
            str(folder), max_steps=10**8, use_cpu=True, max_grad_norm=0, disable_tqdm=not everything, **given
        )
        trainer = Ready(Wrapped(), arguments, train_dataset=[0], optimizers=(model.optimizer, None))
        trainer.run_training()

    return run


PROGRAMS = {
    "bare loop": Program(bare),
    "TrainLoop, nothing due": Program(_train_loop(False), 1.01),
    "TrainLoop, one metric a step": Program(_train_loop(True), 1.03),
    "Supervisor, one metric a step": Program(supervisor, 1.03),
    "Trainer with torch's Task": Program(_trainer(_no_service), 1.04),
    "TrainLoop, all": Program(_train_loop(True, _all_services), 1.08),
    "Trainer, all": Program(_trainer(_all_services), 1.08),
    "by hand, all": Program(by_hand),
    "Ignite, fewest": Program(ignite, peer=True),
    "Fabric, fewest": Program(fabric, peer=True),
    "torchtnt, fewest": Program(torchtnt, peer=True),
    "Accelerate, fewest": Program(accelerate, peer=True),
    "Lightning, fewest": Program(_lightning(False), peer=True),
    "HF Trainer, fewest": Program(_hf_trainer(False), peer=True),
    "Fabric, all": Program(fabric_all, peer=True),
    "Ignite, all": Program(ignite_all, peer=True),
    "Lightning, all": Program(_lightning(True), peer=True),
    "HF Trainer, all": Program(_hf_trainer(True), peer=True),
    "bare loop, empty": Program(bare, empty=True),
    "TrainLoop, nothing due, empty": Program(_train_loop(False), empty=True),
    "TrainLoop, one metric a step, empty": Program(_train_loop(True), empty=True),
}
"""Name -> program, in the order of the table."""
