"""A mirror in S3, by a local server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from mirror_program import make, train
from s3_server import server, settings

from everstep.errors import MirrorError
from everstep.mirror.mirror import Contents, Holder
from everstep.mirror.place import ObjectStore

pytestmark = pytest.mark.campaign("machine")


def test_an_empty_machine_goes_on_exactly(tmp_path: Path, bucket: str, right: Any) -> None:
    mirror = f"{bucket}/some/run"
    train(make(tmp_path / "first", mirror, epochs=2))
    shutil.rmtree(tmp_path / "first")
    second = train(make(tmp_path / "second", mirror))
    assert second.result() == right
    held = {key for key in ObjectStore(mirror, mirror).keys("files")}
    listed = {path.parent.name for path in (tmp_path / "second" / "checkpoints").glob("*/manifest.json")}
    assert {key.split("/")[3] for key in held if "/checkpoints/" in key} == listed


def test_a_list_is_created_by_one_of_two(bucket: str) -> None:
    """The store decides: what is there stays."""
    place = ObjectStore(f"{bucket}/run", "mirror")
    lists = [Contents(1, {}, Holder(token, "host", 1, "dir")) for token in ("one", "two")]
    for each in lists:
        place.create(each.key, each.packed())
    assert place.read(lists[0].key) == lists[0].packed()


@pytest.mark.parametrize("size", [1 << 20, 101 << 20])
def test_the_bytes_in_the_store_are_verified(tmp_path: Path, bucket: str, size: int) -> None:
    """By the store's MD5, also of an upload in parts; what the store has differently is an error."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20) * (size >> 20))
    place = ObjectStore(f"{bucket}/run", "mirror")
    place._fs.open = None  # reading back is not needed
    place.put("files/1/x", source, 0, size)
    assert place.keys("files") == {"files/1/x": size}
    other = ObjectStore(f"{bucket}/run", "mirror")

    def harm(path: str, data: bytes, **given: Any) -> None:
        type(other._fs).pipe_file(other._fs, path, data[:-1] + b"?", **given)

    other._fs.pipe_file = harm
    with pytest.raises(MirrorError, match="came back from the mirror with checksum"):
        other.put("files/1/part", source, 0, 1000)


def test_wrong_credentials_are_refused_before_the_first_step(tmp_path: Path, monkeypatch: Any) -> None:
    with server(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="0") as url:
        for name, value in settings(url).items():
            monkeypatch.setenv(name, value)
        tiny = make(tmp_path / "run", "s3://bucket/run")
        with pytest.raises(MirrorError, match=r"s3://bucket/run cannot be read .*the credentials"):
            train(tiny)
    assert tiny.seen == [] and not (tmp_path / "run").exists()


def test_a_bucket_that_does_not_exist_is_refused_before_the_first_step(tmp_path: Path, bucket: str) -> None:
    tiny = make(tmp_path / "run", f"{bucket}-misspelt/run")
    with pytest.raises(MirrorError, match=r"cannot be written .*bucket does not exist"):
        train(tiny)
    assert tiny.seen == []
