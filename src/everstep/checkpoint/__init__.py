"""Checkpoints: format, atomic commit, verification, retention, background writing."""

from everstep.checkpoint.commit import CommittedCheckpoint, place_apart, retire_others, save_apart
from everstep.checkpoint.files import forecast, trial_write
from everstep.checkpoint.format import FORMAT, Checkpoint, CheckpointName, Phase, finite, write_arrays
from everstep.checkpoint.format import read as read_checkpoint
from everstep.checkpoint.format import read_body as read_manifest
from everstep.checkpoint.format import verify as verify_checkpoint
from everstep.checkpoint.lookup import find_checkpoint
from everstep.checkpoint.retention import Retention, is_interim, names_inside
from everstep.checkpoint.store import Store
from everstep.checkpoint.writer import Writer

__all__ = [
    "FORMAT",
    "Checkpoint",
    "CheckpointName",
    "CommittedCheckpoint",
    "Phase",
    "Retention",
    "Store",
    "Writer",
    "find_checkpoint",
    "finite",
    "forecast",
    "is_interim",
    "names_inside",
    "place_apart",
    "read_checkpoint",
    "read_manifest",
    "retire_others",
    "save_apart",
    "trial_write",
    "verify_checkpoint",
    "write_arrays",
]
