"""`everstep tag` and `everstep note`: kept with the run, found in every index, harmless in a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import as_json, everstep

import everstep as house
import warm
from everstep.labels import Labels, add_tags, labels
from tiny_runs import Tiny, rows


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        Tiny(tmp_path / "runs" / name, max_epoch=1).train()
    return tmp_path


def names(here: Path, *conditions: str, **environment: str) -> list[str]:
    found = json.loads(everstep("runs", *conditions, "--json", cwd=here, **environment)[0])
    return sorted(Path(run["path"]).name for run in found)


def test_a_tag_is_a_column_a_filter_and_part_of_a_run(here: Path) -> None:
    assert names(here, "tags=baseline") == []
    everstep("tag", "one", "baseline", "paper", cwd=here)
    everstep("note", "runs/one", "the old data", cwd=here)
    assert names(here, "tags=baseline") == names(here, "tags=paper") == ["one"]
    assert names(here, "tags!=baseline") == ["two"]
    assert names(here, "--where", '{"tags": {"$in": ["paper", "x"]}}') == ["one"]
    line = ("runs", "--sort", "name", "--columns")
    said = everstep(*line, "name,tags,note", cwd=here)[0].splitlines()
    assert said[0].split() == ["name", "tags", "note"] and said[2].split()[1:] == ["-", "-"]
    assert said[1].endswith("  baseline paper  the old data")
    assert as_json(*line, "tags", cwd=here) == [{"tags": ["baseline", "paper"]}, {"tags": None}]
    shown = as_json("show", "one", cwd=here)
    assert (shown["tags"], shown["note"]) == (["baseline", "paper"], "the old data")
    assert "  tags       baseline paper\n  note       the old data\n" in everstep("show", "one", cwd=here)[0]
    asked = house.query("runs", {"tags": "paper"}, index=here / "runs" / "everstep.db")
    assert [Path(run["path"]).name for run in asked] == ["one"]


@pytest.mark.campaign("long")
def test_a_further_start_keeps_them_and_the_run_is_the_same(here: Path) -> None:
    add_tags(here / "runs" / "one", ["kept"])
    for name in ("one", "two"):
        Tiny(here / "runs" / name, max_epoch=2).train()
    assert names(here, "tags=kept") == ["one"]
    assert rows(here / "runs" / "one") == rows(here / "runs" / "two") != []


def test_of_writers_at_once_none_undoes_another(here: Path) -> None:
    """Each adds ten tags, one by one."""
    add = "import sys; from everstep.labels import add_tags; from pathlib import Path\n"
    add += "for n in range(10): add_tags(Path(sys.argv[1]), [f'{sys.argv[2]}-{n}'])"
    run = here / "runs" / "one"
    writers = [warm.Popen([sys.executable, "-c", add, str(run), name]) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(labels(run).tags) == sorted(f"{name}-{n}" for name in "abcd" for n in range(10))


# ------------------------------------------------------------------------------- what is bad


EVIL = "\x1b[2J\u202eevil\r\nrunning\x07"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("tag", "one", EVIL), "control characters"),
        (("tag", "one", "x" * 101), "100 characters at most"),
        (("tag", "one", *(str(n) for n in range(101))), "102 tags are too many"),
        (("tag", "one", "--remove", "kep"), "did you mean 'kept'"),
        (("tag", "nobody", "x"), "there is no run 'nobody'"),
        (("note", "one", "x" * 10_001), "10,001 characters is too long"),
    ],
)
def test_a_mistake_changes_nothing(here: Path, line: tuple[str, ...], says: str) -> None:
    add_tags(here / "runs" / "one", ["kept"])
    assert says in everstep(*line, cwd=here, status=2)[1]
    assert labels(here / "runs" / "one") == Labels(("kept",), "")


@pytest.mark.campaign("long")
def test_what_a_note_says_is_data(here: Path) -> None:
    """Control characters, which a shell can give, are escaped; credentials are not kept."""
    everstep("note", "one", EVIL + " https://me:s3cret@example.org", cwd=here)
    for line in (("show", "one"), ("runs", "--columns", "name,note"), ("note", "one")):
        said = everstep(*line, cwd=here)[0]
        assert "evil" in said and not any(each in said for each in "\x1b\u202e\r\x07")
    assert "s3cret" not in (here / "runs" / "one" / "labels.json").read_text()


HOSTILE: list[Any] = [
    b"{",
    b"[" * 100_000,
    b"7",
    b'{"tags": "abc"}',
    b'{"tags": [1, {}]}',
    b'{"tags": {"a": 1}, "note": ["x"]}',
    json.dumps({"tags": [EVIL, "\ud800\0"] * 1000, "note": "x" * 900_000}).encode(),
    b"x" * (2 << 20),
]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_the_file_of_a_stranger_stops_nothing(here: Path, content: bytes) -> None:
    (here / "runs" / "one" / "labels.json").write_bytes(content)
    assert names(here) == ["one", "two"]
    said = everstep("show", "one", cwd=here)[0]
    assert len(said) < 40_000 and not any(each in said for each in "\x1b\u202e\r\x07")
