"""Comparison of the ranks at their start: all have to run the same program, with the same arguments."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from everstep import backends
from everstep.contracts.group import Group
from everstep.errors import DisagreementError
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.opening.configuration import NONE, differences
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.settings import Settings

OWN = frozenset({"rank", "local_rank", "node_rank", "device", "gpu"})
"""Names in a configuration whose values are a rank's own."""


def require_same_start(
    group: Group, settings: Settings, user: UserState, board: ServiceBoard, limits: Mapping[str, int | None]
) -> None:
    """Require that all ranks were started with the same program and arguments.

    Raises:
        DisagreementError: lists each value that differs, on every rank.
    """
    if group.size == 1:
        return
    found = group.gather(_facts(settings, user, board, limits), "the arguments of the loop")
    lines, ranks = [], []
    for rank, theirs in enumerate(found):
        differing = [each for each in differences(found[0], theirs) if each.path.split(".")[-1] not in OWN]
        lines += [
            f"{each.path}: rank 0 has {each.stored}, rank {rank} has {each.given}" for each in differing
        ]
        ranks += [rank] if differing else []
    if lines:
        told = "\n  ".join(lines)
        raise DisagreementError(
            f"the ranks were started differently:\n  {told}\nstart all of them again, and give them the "
            "same program, arguments and versions",
            ranks=ranks,
        )


def _facts(
    settings: Settings, user: UserState, board: ServiceBoard, limits: Mapping[str, int | None]
) -> dict[str, Any]:
    frameworks = {backend.name: backend.describe() for backend in backends.active()}
    return {
        "everstep": version("everstep"),
        "python": platform.python_version(),
        **{name: facts.get(name, NONE) for name, facts in frameworks.items()},
        "program": _program(),
        "seed": settings.seed,
        "resume": str(settings.resume),
        "on_change": settings.on_change,
        "uneven": settings.uneven,
        "config": {} if settings.config is None else dict(settings.config.tree),
        "state": user.described(),
        "services": {service.name: type(service).__name__ for service in board},
        "controllers": board.controllers(),
        **limits,
    }


def _program() -> str:
    """Return the name and the digest of the program's first file; of a prompt or notebook its name alone."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return str(sys.argv[0])
    return f"{Path(path).name} ({xxhash.xxh3_64_hexdigest(Path(path).read_bytes())})"
