"""What a credential looks like, and what stands in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import redaction
from everstep.record import RunJournal, redact
from everstep.record.provenance import facts
from everstep.redaction import redacted, redacted_line
from everstep.supervisor.opening.configuration import Configuration
from tiny_runs import Tiny


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    redaction._patterns.clear()


CREDENTIALS = {
    "postgresql://me:hunter2@host:5432/db": "postgresql://me:***@host:5432/db",
    "postgresql://me:hun@ter2@host/db": "postgresql://me:***@host/db",
    "postgresql://me:hun/te?r2@host/db": "postgresql://me:***@host/db",
    "postgresql://me:12/34@host/db": "postgresql://me:***@host/db",
    "postgresql://me:hun%40ter2@/db?host=/tmp": "postgresql://me:***@/db?host=/tmp",
    "postgresql://me@host/db?password=hun@ter2": "postgresql://me@host/db?password=***",
    "postgresql:///db?sslpassword=hunter2&host=h": "postgresql:///db?sslpassword=***&host=h",
    "postgresql:///db?user=me&pass%77ord=hunter2": "postgresql:///db?user=me&pass%77ord=***",
    "https://hunter2@github.com/a/b.git": "https://***@github.com/a/b.git",
    "https://me:hunter2@github.com/a.git": "https://***@github.com/a.git",
    "https://h/a.tar?access_token=hunter2#x": "https://h/a.tar?access_token=***",
    "https://h/a?X-Amz-Signature=hunter2&b=1": "https://h/a?X-Amz-Signature=***&b=1",
    "'=/tmp&sslpassword=hunter2 is": "'=/tmp&sslpassword=*** is",
    "me:hun@ter2@host:a/b.git": "me:***@host:a/b.git",
    "--index=postgresql://me:hunter2@host/db": "--index=postgresql://me:***@host/db",
    "at 'https://hunter2@h/x' and me:hunter2@h:x": "at 'https://***@h/x' and me:***@h:x",
}
NONE = (
    "postgresql://me@host:5432/db?host=/tmp/x&connect_timeout=3", "postgresql:///db", "https://[::1]:80/a",
    "https://host:8080/path@v2", "s3://bucket/key@1", "ssh://git@example.org/a.git",
    "git@example.org:a/b.git", "optimizer.lr=0.1", "torch.optim:AdamW", "me@example.org", "step=3, loss=0.1",
)  # fmt: skip


@pytest.mark.parametrize(("given", "told"), [*CREDENTIALS.items(), *((text, text) for text in NONE)])
def test_a_credential_is_known_by_its_form(given: str, told: str) -> None:
    assert redacted(given) == redacted(told) == told
    assert redacted({"a": [given, {"b": given}]}) == {"a": [told, {"b": told}]}


def test_a_pattern_of_ones_own_hides_what_its_groups_find() -> None:
    line = ["train.py", "--api-key", "hunter2", "--api-key=hunter2", "--lr", "0.1"]
    assert redacted_line(line) == line
    redact(r"api[-_]key[= ](\S+)")
    redact("sk-[a-z]+")
    assert redacted_line(line) == ["train.py", "--api-key", "***", "--api-key=***", "--lr", "0.1"]
    assert redacted_line(["--api-key", "two words"])[1] == "*** words"
    assert redacted({"api_key": "hunter2", "pin": 4, "key": "sk-abc, more"}) == {
        "api_key": "***",
        "pin": 4,
        "key": "***, more",
    }
    redact("pin=([0-9]+)")
    assert redacted({"pin": 4, "spin": True}) == {"pin": "***", "spin": True}


def test_facts_and_configurations_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:hunter2@host/db"
    told = facts(["train.py", "--index", url, f"--index={url}"], {"at": url}, 1)
    assert "hunter2" not in str(told)
    assert told["argv"][1:] == [
        "--index",
        "postgresql://me:***@host/db",
        "--index=postgresql://me:***@host/db",
    ]
    assert Configuration({"at": url}).changes({"at": "postgresql://me:other@host/db"}) == []
    assert Configuration({"at": url}).changes({"at": "postgresql://me:other@elsewhere/db"})


def test_what_a_run_says_and_why_it_ended_have_none(tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@host/db"

    def fail(loop: object, step: int) -> None:
        run.loop.println(f"asking {url}")
        if step == 2:
            raise RuntimeError(f"{url} is away")

    run = Tiny(tmp_path / "run", max_epoch=1)
    with pytest.raises(RuntimeError):
        run.train(inside=fail)
    assert "asking postgresql://me:***@host/db" in run.lines
    stopped = Tiny(tmp_path / "stopped", max_epoch=1)
    stopped.train(inside=lambda loop, step: loop.request_stop(f"{url} is away"))
    found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, data in found.items() if b"hunter2" in data] == []
    assert any(b"***@host/db is away" in data for data in found.values())


def test_a_pattern_of_ones_own_does_not_reach_what_everstep_goes_by(tmp_path: Path) -> None:
    """A pattern for hexadecimal tokens finds digests, too."""
    straight = Tiny(tmp_path / "a", max_epoch=2).train()
    redact("[0-9a-f]{6,}")
    redact(r"\d+")
    Tiny(tmp_path / "b", max_epoch=1, config={"pin": 1234}).train()
    again = Tiny(tmp_path / "b", max_epoch=2, config={"pin": 1234}).train()
    assert again.result() == straight.result()
    assert not any("differ" in line for line in again.lines)
    facts = RunJournal(tmp_path / "b").facts()
    assert facts["config"] == {"pin": "***"} and facts["resumed_from"] == "epoch-0001-step-00000004"


UNITS = ("a", "a.", "a:", "a" * 120 + ":", "://", "a://", ":@", "a@a:", "a:@a/", "&a=")


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("end", ["@", "=@", "@h:", ""])
def test_a_hostile_text_takes_time_in_proportion(unit: str, end: str) -> None:
    """Each pattern that begins again at each character takes an hour for such strings."""
    redacted(unit * (1_000_000 // len(unit)) + end)
