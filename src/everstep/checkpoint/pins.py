"""File `pins.json`: names of the checkpoints that retention never deletes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from everstep.checkpoint import files
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.errors import CheckpointError
from everstep.untrusted_files import read_note


def read(path: Path) -> set[CheckpointName]:
    """Return the pinned names; none without the file.

    Raises:
        CheckpointError: the file is not a list of names.
    """
    try:
        return {CheckpointName.parse(text) for text in read_note(path)}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a JSON list of checkpoint names ({error}): correct or delete it"
        ) from error


def write(path: Path, names: Collection[CheckpointName]) -> None:
    """Replace the pinned names."""
    files.write_whole(path, json.dumps(sorted(map(str, names)), indent=1).encode() + b"\n")
