"""Formats in which `everstep.export` writes what a run has saved; the command's options name them, too."""

from __future__ import annotations

DISTRIBUTED = "torch.distributed.checkpoint"
SAVED_FORMATS = ("safetensors", DISTRIBUTED)
