"""A run that posts its values to a service on the network, which a file stands for; a program, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from everstep import Checkpoints, Every
from everstep.services import FinalValues, JSONLines, RemoteSink
from tiny_runs import Tiny


def evaluated(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=epoch / 3)


class Server:
    """Stands for a service on the network, with a store in a file; it may fail before or after it stores."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.fails: list[str] = []

    def read(self) -> Any:
        return json.loads(self.file.read_text()) if self.file.exists() else {"position": "", "lines": []}

    def post(self, lines: list[Any], position: str) -> None:
        how = self.fails.pop(0) if self.fails else ""
        if how == "before":
            raise ConnectionError("refused")
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps({"position": position, "lines": self.read()["lines"] + lines}))
        beside.replace(self.file)
        if how == "after":
            raise TimeoutError("no answer")


class Posts(RemoteSink):
    def __init__(self, server: Server, timeout: float = 30.0) -> None:
        super().__init__(timeout=timeout)
        self.server = server

    def position(self) -> str:
        return str(self.server.read()["position"])

    def send(self, lines: list[Any], position: str) -> None:
        self.server.post(lines, position)


def posting(run_dir: Path, server: Server, every: int = 3, **arguments: Any) -> Tiny:
    services = [Posts(server), JSONLines(), FinalValues(lambda: {"final": 1.0})]
    services += [Checkpoints(Every(steps=every), keep_last=None)]
    return Tiny(run_dir, max_epoch=3, services=services, **arguments)


if __name__ == "__main__":
    posting(Path(sys.argv[1]), Server(Path(sys.argv[2]))).train(tail=evaluated)
