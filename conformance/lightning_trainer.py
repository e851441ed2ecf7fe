"""Lightning's Trainer: python lightning_trainer.py [--stateful] FOLDER

After its pages "Saving and loading checkpoints (basic)" and "(intermediate)" (ModelCheckpoint with
every_n_train_steps and save_last, fit(ckpt_path="last")), and "Reproducibility"'s seed_everything. With
--stateful the loader is torchdata's StatefulDataLoader ("Stateful DataLoader Tutorial"), whose state
Lightning saves.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import lightning
import task
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = task.network()

    def training_step(self, batch, index):
        x, y, self.numbers = batch
        self.loss = cross_entropy(self.model(x), y)
        return self.loss

    def configure_optimizers(self):
        optimizer, schedule = task.optimizer_and_schedule(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tell(lightning.Callback):
    """Its hook runs before that of ModelCheckpoint, the module's own after it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        witness.step(trainer.global_step, module.numbers, module.loss.item())


torch.set_num_threads(1)
lightning.seed_everything(7)
witness = task.witness("lightning", "torchdata")
folder = Path(sys.argv[-1])
loader = (StatefulDataLoader if "--stateful" in sys.argv else DataLoader)(
    task.Samples(), task.BATCH, shuffle=True
)
saves = ModelCheckpoint(
    folder,
    filename="{step}",
    every_n_train_steps=task.SAVE_EVERY,
    save_top_k=2,
    monitor="step",
    mode="max",
    save_last=True,
)
trainer = lightning.Trainer(
    max_epochs=task.EPOCHS, accelerator="cpu", callbacks=[Tell(), saves], default_root_dir=folder,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
module = Module()
trainer.fit(module, loader, ckpt_path="last")
witness.end(weights=module.state_dict(), optimizer=task.moments(trainer.optimizers[0]))
