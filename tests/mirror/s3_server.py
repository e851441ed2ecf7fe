"""A local S3 server, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from waiting import PATIENCE, until

KEYS = {"AWS_ACCESS_KEY_ID": "some-key-id", "AWS_SECRET_ACCESS_KEY": "some-secret-key"}


@contextlib.contextmanager
def server(log: Path, **environment: str) -> Iterator[str]:
    """URL of a fresh server, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        until(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE):
        return True
    return False


def settings(url: str) -> dict[str, str]:
    """What a process needs in its environment to reach a server."""
    return {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
