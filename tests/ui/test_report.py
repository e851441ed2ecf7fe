"""`everstep report`: one file with nothing from elsewhere, equal for equal runs, whatever a run is called."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from page_server import TEXT, pictured

from everstep.cli.looking import report_command as command
from everstep.errors import ConfigError
from everstep.ui import report as report_module
from everstep.ui.report import report_page
from tiny_runs import Boom, Tiny, boom_at

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e"


class Parsed(HTMLParser):
    """Elements, attributes and contents of the file, as a browser reads them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.contents: list[list[str]] = []
        self.feed(self.text)
        self.data: Any = json.loads(self.within("script")[0])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self.contents.append([tag, ""])

    def handle_endtag(self, tag: str) -> None:
        self.contents.append(["", ""])

    def handle_data(self, data: str) -> None:
        if self.contents:
            self.contents[-1][1] += data

    def within(self, tag: str) -> list[str]:
        return [content for name, content in self.contents if name == tag]


def report(*arguments: str | Path, **environment: str) -> Result:
    """Run the command in this process; errors come as exceptions."""
    environment = {"SOURCE_DATE_EPOCH": "1790000000", **environment}
    return CliRunner().invoke(command, [*map(str, arguments)], env=environment, catch_exceptions=False)


@pytest.fixture(scope="module")
def written(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    """A report of three runs; no test changes it."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    report("long", "failed", made / "good", "--index", made, "-o", out)
    return Parsed(out)


def test_it_has_nothing_from_elsewhere(written: Parsed) -> None:
    tags = [tag for tag, _ in written.elements]
    assert not {"link", "img", "iframe", "object", "embed", "form", "base", "a", "audio", "video"} & set(tags)
    for _, attributes in written.elements:
        assert not {"src", "href", "srcset", "action", "style", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    hosts = set(re.findall(r"(?:https?|wss?|ftp):\\?/\\?/[^\s\"'`<)]+", written.text))
    in_words = ("http://www.w3.org/", "https://github.com/leeoniya/uPlot")  # formats, a licence: not opened
    assert all(host.startswith(in_words) for host in hosts)
    assert not re.search(r"@import|url\(", "".join(written.within("style")))


def test_its_policy_allows_its_own_scripts_and_no_connection(written: Parsed) -> None:
    metas = [attributes for tag, attributes in written.elements if tag == "meta"]
    (policy,) = [one for one in metas if one.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy["content"]).split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert rules.pop("img-src") == "data:", "pictures stand in the data"
    assert rules.keys() == {"script-src", "style-src"}
    for name, texts in (("script-src", written.within("script")[1:]), ("style-src", written.within("style"))):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[name].split() == [f"'sha256-{digest}'" for digest in digests]


def test_it_shows_the_hash_of_its_data(written: Parsed) -> None:
    """A browser verifies it (browser/test_report_file.py)."""
    assert written.within("code")[0] == hashlib.sha256(written.within("script")[0].encode()).hexdigest()


def test_it_tells_what_happened_to_each_run(written: Parsed) -> None:
    """What the page of a run tells, too: `one_run` makes both."""
    runs = {one["name"].rpartition("-")[0]: one for one in written.data["runs"]}
    assert list(runs) == ["long", "failed", "good"]
    assert written.data["settings"] == [], "they are equal"
    assert all(one["checkpoints"] for one in runs.values())
    (end,), (failure,) = runs["failed"]["starts"], runs["failed"]["failures"]
    assert (end["status"], end["reason"]) == ("failed", "ValueError: at the step")
    assert runs["failed"]["status"] == "failed" and failure["kind"] == "error"
    long = runs["long"]
    first, second = long["starts"]
    assert (first["status"], first["badge"], first["from_step"]) == ("killed", "first", 0)
    assert (second["status"], second["badge"], second["diverged_at"]) == ("finished", "verified", None)
    assert second["from_step"] in (4, 8) and second["step"] == 16, "the newest save that the kill left"
    assert second["how"].startswith("resume verified: ") and second["started"] >= first["last"]
    assert first["step"] >= 8 and (long["status"], long["step"]) == ("finished", 16)
    assert long["facts"]["config"]["optimizer"]["lr"] == 0.1 and "numpy" in long["facts"]["packages"]
    assert {"stream": "step", "metrics": ["loss"]} in written.data["streams"]
    best = {(one["phase"], one["name"]): (one["best"], one["best_step"]) for one in long["metrics"]}
    assert best["tail", "valid_loss"] == (0.25, 16) and 16 in [one["step"] for one in long["checkpoints"]]


@pytest.mark.campaign("long")
def test_lines_keep_their_extremes(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=4).train(boom_at(7))
    Tiny(tmp_path / "run", max_epoch=4).train()

    def line(points: int) -> dict[str, Any]:
        report(tmp_path / "run", "--points", str(points), "-o", tmp_path / "report.html")
        (found,) = Parsed(tmp_path / "report.html").data["series"]["step/loss"]
        return dict(found)

    whole, thin = line(1000), line(10)
    assert whole["n"] == thin["n"] == len(whole["x"]) == 16 and len(thin["x"]) == 10
    assert (min(thin["min"]), max(thin["max"])) == (min(whole["last"]), max(whole["last"]))
    assert thin["last"][-1] == whole["last"][-1]
    assert [step for step, *_ in whole["superseded"]] == [5, 6], "of the start that failed in step 7"
    assert len(whole["times"]) == 16 and whole["times"] == sorted(whole["times"])
    replaced = [time for *_, time in whole["superseded"]]
    assert whole["times"][3] <= replaced[0] <= replaced[1] < whole["times"][4]
    assert set(thin["times"]) <= set(whole["times"])


def test_it_carries_pictures_texts_histograms_and_the_log(tmp_path: Path, monkeypatch: Any) -> None:
    run, out = pictured(tmp_path / "run", epochs=12), tmp_path / "report.html"
    report(run, "-o", out)
    data = Parsed(out).data
    (told,), (contents,), (log,) = data["runs"], data["summaries"], data["logs"]
    newest = list(range(12, 52, 4))
    kinds = {"seen/noise": "image", "seen/weights": "histogram", "note": "text"}
    listed = [(one["name"], one["kind"], one["steps"]) for one in told["summaries"]]
    assert listed == [(name, kind, newest) for name, kind in kinds.items()]
    assert contents["text note 48"] == f"{TEXT}12"
    assert json.loads(contents["histogram seen/weights 48"])["num"] == 1000
    media, _, picture = contents["image seen/noise 48"].partition(",")
    (file,) = (run / "logs" / "media").glob("*-00000048-*.png")
    assert media == "data:image/png;base64" and base64.b64decode(picture) == file.read_bytes()
    assert log == {"text": (run / "logs" / "run.log").read_text(), "is_cut": False}
    monkeypatch.setattr(report_module, "_SUMMARY_BYTES", 3 * file.stat().st_size)  # for two pictures
    report(run, "-o", out)
    assert len(Parsed(out).data["runs"][0]["summaries"][0]["steps"]) == 2, "what does not fit is left out"


def test_equal_runs_are_equal_files_but_for_the_time(made: Path, tmp_path: Path) -> None:
    def page(name: str, **environment: str) -> list[str]:
        report("long", "good", "--index", made, "-o", tmp_path / name, **environment)
        return (tmp_path / name).read_text().splitlines()

    first, again, later = page("a.html"), page("b.html"), page("c.html", SOURCE_DATE_EPOCH="1800000000")
    assert first == again
    differing = [old for old, new in zip(first, later, strict=True) if old != new]
    assert len(differing) == 1 and differing[0].startswith("<time ")
    assert page("d.html", SOURCE_DATE_EPOCH="") != first


def test_names_are_data_never_markup(tmp_path: Path) -> None:
    tail = lambda loop, epoch: loop.collect_metrics(**{HOSTILE: float("nan")})  # noqa: E731
    Tiny(tmp_path / "odd", max_epoch=1, config={HOSTILE: HOSTILE}).train(tail=tail)
    report(tmp_path / "odd", "-o", tmp_path / "report.html", "--title", HOSTILE)
    parsed = Parsed(tmp_path / "report.html")
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("script") == 6 and "img" not in tags and "\u202e" not in parsed.text
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert parsed.data["runs"][0]["facts"]["config"] == {shown: shown}
    (line,) = parsed.data["series"][f"tail/{shown}"]
    assert line["last"] == ["NaN"]


def test_any_value_of_json_survives_the_embedding(tmp_path: Path) -> None:
    odd = ["\u2028", "\x00", "\ud800"]
    plain = ["<!--", "]]>", "&lt;", "é", "'\"\\", 0.1, -0.0, 1e308, None, True, []]
    (tmp_path / "page.html").write_bytes(report_page({"values": odd + plain, "<b>": 1}, "t", "0", 0))
    data = Parsed(tmp_path / "page.html").data
    assert data == {"values": ["\\u2028", "\\x00", "\\ud800", *plain], "<b>": 1}


OUTS = {f"{name}.html": f"{name}.html is not a report of everstep, and stays" for name in ("pipe", "away")}
OUTS["mine.html"] = "mine.html is not a report of everstep, and stays; give another file"
OUTS |= {"report.pdf": "give a file that ends in .html", "none/report.html": "in a folder that exists"}


@pytest.mark.parametrize(("out", "said"), OUTS.items())
def test_only_a_report_is_replaced(made: Path, tmp_path: Path, monkeypatch: Any, out: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("<p>mine</p>")
    os.mkfifo("pipe.html")
    Path("away.html").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=re.escape(said)):
        report("good", "-o", out, "--index", made)
    assert Path("mine.html").read_text() == "<p>mine</p>" and not Path("report.html").exists()
