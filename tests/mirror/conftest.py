"""The run that nobody disturbed, and a local S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mirror_program import make, train
from s3_server import server, settings


@pytest.fixture
def right(tmp_path: Path) -> Any:
    """Its result."""
    return train(make(tmp_path / "plain", None)).result()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL of an empty bucket; this process and its children reach the server."""
    import s3fs

    for name, value in settings(s3_server).items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{abs(hash(tmp_path)):x}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"
