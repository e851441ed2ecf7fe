"""What examples/digits.yaml names: streams of handwritten digits; the task is that of digits_trainer.py."""

from __future__ import annotations

from typing import Any

import torch
from digits import TRAINING, Digits
from digits_trainer import Recognise
from sklearn.datasets import load_digits

import everstep

__all__ = ["Recognise", "train", "valid"]

torch.set_num_threads(1)  # so small a model gains nothing from more


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape (samples, 1, 8, 8), from 0 to 1, and what they show."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(digits.target)


def train(batch_size: int = 32) -> Any:
    """Batches to train on, each image a little shifted."""
    images, labels = tensors()
    data = Digits(images[:TRAINING], labels[:TRAINING])
    return everstep.data.loader(data, batch_size=batch_size, shuffle=True)


def valid(batch_size: int = 100) -> Any:
    """Batches to evaluate."""
    images, labels = tensors()
    return everstep.data.arrays(images[TRAINING:], labels[TRAINING:], batch_size=batch_size)
