"""The page attacked: by other users and pages, hostile addresses, hostile runs; all is its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from page_server import Answer, Page, running_page
from test_journal_reading import WRONG  # of tests/record
from test_run_page import block, written, wrote

import everstep
from everstep.errors import ConfigError
from everstep.index.database import Database
from everstep.index.run_queries import run_rows
from everstep.index.shipping import sync
from everstep.record import RunDir
from everstep.record.rundir import _encode
from everstep.ui import STATIC
from everstep.ui.one_run import LONGEST_TEXT, MissingError, content_of, one_run, summaries_of
from everstep.ui.report import MODULES, bundle
from everstep.ui.runs_table import ListOptions, RunsTable
from everstep.ui.server import Json, application
from everstep.untrusted_files import LONGEST_ID
from waiting import PATIENCE

SAFE = {
    "content-security-policy": "default-src 'self'", "x-content-type-options": "nosniff",
    "x-frame-options": "DENY", "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip


def addresses() -> list[str]:
    """Every address that the page answers, those that are added later included."""
    paths = [route.path for route in application(None).routes]  # type: ignore[arg-type, attr-defined]
    return [path.replace("{run}", "good") for path in paths] + ["/nothing", "/static/index.html"]


def is_safe(answer: Answer) -> bool:
    return all(answer.headers.get(name, "").startswith(value) for name, value in SAFE.items())


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("path", addresses())
def test_a_second_user_of_the_machine_reads_nothing(guarded: Page, path: str) -> None:
    guess = guarded.cookie.partition("=")[0] + "=guess"
    for headers in ({}, {"Cookie": guess}, {"Cookie": "token=" + guarded.token}):
        answer = guarded.ask(path, **headers)
        assert answer.status == 401 and is_safe(answer)
        assert "open the link" in answer.json["error"]


def test_the_link_works_once_and_gives_a_cookie_that_scripts_cannot_read(begun: Path) -> None:
    with running_page(begun) as page:
        again = page.ask(f"/?token={page.token}")
        assert again.status == 401 and "set-cookie" not in again.headers
        assert page.get("/", token=page.token).status == 303  # the same browser, from its history
        assert page.ask("/?token=").status == page.ask("/?token=%00%ff").status == 401
        second = page.line()  # the used link is followed by the next one
        token = second.rpartition("token=")[2].strip()
        assert page.ask(f"/?token={token}", "HEAD").status == 401  # a preview of the link does not use it up
        entered = page.ask(f"/?token={token}")
        name, *flags = entered.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(flags) and "Domain" not in str(flags)
        assert entered.status == 303 and entered.headers["location"] == "/" and is_safe(entered)
        assert token not in name and name != page.cookie
        assert page.ask("/api/runs", Cookie=name).status == page.get("/api/runs").status == 200


HOSTS = ["evil.example", "127.0.0.1.evil.example:80", "localhost.", "", "[::1]", "127.0.0.1@evil"]


@pytest.mark.parametrize("host", [*HOSTS, "127.0.0.2"])
def test_a_name_that_leads_here_is_not_enough(guarded: Page, host: str) -> None:
    """DNS rebinding: the browser sends the name of the foreign guarded."""
    assert guarded.ask("/api/runs", Host=host, Cookie=guarded.cookie).status == 403
    assert guarded.ask(f"/?token={guarded.token}", Host=host).status == 403


@pytest.mark.campaign("long")
def test_given_names_and_links_of_other_pages_are_answered_and_ctrl_c_ends_it(begun: Path) -> None:
    click = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    with running_page(begun, "--host", "box.example", "--host", "proxy.example:8443") as page:
        for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "box.example:8443", "proxy.example:8443"):
            assert page.ask("/api/runs", Host=host, Cookie=page.cookie).status == 200
        token = page.line().rpartition("token=")[2].strip()
        entered = page.ask(f"/?token={token}", **click)
        assert entered.status == 303 and "set-cookie" in entered.headers
        assert page.ask("/", Cookie=page.cookie, **click).status == 200
        assert page.ask("/", **click).status == 401
        with socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE) as line:
            line.sendall(b"GET / HT")
            assert page.end() == (0, "")


def test_two_host_headers_or_none_are_refused(guarded: Page) -> None:
    for hosts in ("Host: 127.0.0.1\r\nHost: evil.example\r\n", ""):
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=PATIENCE) as line:
            line.sendall(f"GET /api/runs HTTP/1.1\r\n{hosts}Cookie: {guarded.cookie}\r\n\r\n".encode())
            assert line.recv(64).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_methods_that_could_change_something_are_refused(guarded: Page, method: str) -> None:
    for path in ("/", "/api/runs", "/static/index.html"):
        answer = guarded.ask(path, method, Cookie=guarded.cookie)
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD" and is_safe(answer)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_in_the_browser_gets_nothing(guarded: Page, site: str) -> None:
    """Pages on another port of 127.0.0.1 are of the same site: the browser does send them the cookie."""
    for path, mode in (*(("/api/runs", mode) for mode in ("no-cors", "cors", "navigate")), ("/", "no-cors")):
        answer = guarded.ask(path, Cookie=guarded.cookie, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


UP = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%5c", "....//", "..%252f", "%00../")


@pytest.mark.parametrize("up", UP)
def test_no_file_outside_the_static_files_is_served(guarded: Page, up: str) -> None:
    for path in (f"/static/{up * 8}etc/passwd", f"/static/{up}server.py", "/static//etc/passwd"):
        answer = guarded.ask(path, Cookie=guarded.cookie)
        assert answer.status == 404 and b"root:" not in answer.body and b"import" not in answer.body


def test_it_listens_on_this_machine_alone(guarded: Page) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    port, words = f":{guarded.port:04X}", [line.split() for line in lines]
    assert [at for _, at, _, state, *_ in words if at.endswith(port) and state == "0A"] == [f"0100007F{port}"]


# ------------------------------------------------------------------- what a browser loads
VENDOR = STATIC / "vendor"
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and VENDOR not in path.parents)


def test_vendored_files_are_those_of_the_list() -> None:
    listed = {"VENDORED.json"}
    for library in json.loads((VENDOR / "VENDORED.json").read_text()):
        assert re.fullmatch(r"\d+\.\d+\.\d+", library["version"])
        assert library["licence"] in ("MIT", "Apache-2.0")
        assert f"LICENSE.{library['name']}" in {each["file"] for each in library["files"]}
        for each in library["files"]:
            found = hashlib.sha256((VENDOR / each["file"]).read_bytes()).hexdigest()
            assert found == each["sha256"], f"{each['file']} is not the file of {library['package']}"
            listed.add(each["file"])
    assert {path.name for path in VENDOR.iterdir()} == listed


def test_all_of_it_is_below_300_kb() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < 300_000


def test_no_string_becomes_markup_or_code() -> None:
    """Names and messages of runs are data: the DOM takes them as text."""
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|new Function"
    for path in OWN:
        assert not re.search(ways, path.read_text()), path.name


def test_nothing_comes_from_another_host() -> None:
    for path in OWN:
        named = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[\w./-]*", path.read_text()))
        assert named <= {"http://www.w3.org/2000/svg"}, path.name


def test_the_page_fulfils_its_own_content_security_policy() -> None:
    """`default-src 'self'` refuses scripts, styles and handlers inside markup."""
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert (STATIC / address.removeprefix("/static/")).is_file(), address


def test_the_report_can_hold_all_of_the_page_in_one_file() -> None:
    assert not re.search(r"^(?:import|export)\b", bundle(MODULES), re.MULTILINE)
    for path in STATIC.rglob("*.*s"):
        assert not re.search("</script|</style|<!--", path.read_text(), re.IGNORECASE), path.name


# ------------------------------------------------------------------- valid runs, and yet hostile
def shipped(folder: Path) -> Database:
    """The index of a folder of runs."""
    database = Database(folder / "everstep.db")
    sync(database, [folder])
    return database


def pages(database: Database) -> dict[str, Any]:
    """What the page shows of each run, by the name of its directory, as a browser gets it."""
    with database.read() as connection:
        rows = run_rows(connection).values()
    answers = {Path(run["path"]).name: Json(one_run(database, run)).body for run in rows}
    return {name: json.loads(body) for name, body in answers.items()}


def test_events_of_wrong_types_are_told_and_shown_nowhere(tmp_path: Path) -> None:
    for number, (kind, data, _) in enumerate(WRONG):
        written(tmp_path / str(number), wrote(block([1.0]), events=[(kind, data)]))
    found = pages(shipped(tmp_path))
    assert len(found) == len(WRONG)
    for number, (kind, _, told) in enumerate(WRONG):
        answer = found[str(number)]
        assert [told in one and kind in one for one in answer["problems"]] == [True]
        assert (answer["rollbacks"], answer["summaries"]) == ([], [])
        with pytest.warns(RuntimeWarning, match="is not an event"):
            assert everstep.runs.show(tmp_path / str(number)).facts["problems"] == answer["problems"]


def test_a_file_in_place_of_the_checkpoints_is_told(tmp_path: Path) -> None:
    run = written(tmp_path / "a", wrote(block([1.0])))
    (run / "checkpoints").write_text("x")
    (answer,) = pages(shipped(tmp_path)).values()
    assert answer["checkpoints"] == []
    assert "Not a directory" in answer["problems"][0]


@pytest.mark.campaign("long")
def test_a_long_id_is_no_run_and_a_fault_is_told_in_short(tmp_path: Path) -> None:
    written(tmp_path / "good", wrote(block([1.0])))
    facts = {**RunDir.open(tmp_path / "long").facts, "id": "a:" * 50_000 + "@"}
    (tmp_path / "long" / "run.json").write_bytes(_encode(facts))
    RunDir.open(tmp_path / "longest", about={"id": "b" * LONGEST_ID})
    torn = tmp_path / "longest" / "journal" / "segment-0001.evj"
    torn.parent.mkdir()
    torn.write_bytes(b"torn" * 10)
    with running_page(tmp_path) as page:
        answer = page.get("/api/runs")
        assert len(answer.body) < 20_000
        assert {row["name"][:4] for row in answer.json["rows"]} == {"good", "bbbb"}
        problems = "\n".join(answer.json["problems"])
        assert "long/run.json is damaged: its checksum is wrong, or a fact is missing or too long" in problems


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("ends", [b"", b"\r\n\r\n"])
def test_a_head_of_a_request_has_a_limit(tmp_path: Path, ends: bytes) -> None:
    written(tmp_path / "good", wrote(block([1.0])))
    with running_page(tmp_path) as page:
        line = socket.create_connection(("127.0.0.1", page.port))
        with line, contextlib.suppress(ConnectionError):
            line.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + ends)
            assert line.recv(12) == b"HTTP/1.1 400"


def test_a_metric_hides_no_setting_of_other_runs(tmp_path: Path) -> None:
    for number in (1, 2):
        facts = {"config": {"lr": 0.1 * number}, "sweep": "s1"}
        written(tmp_path / str(number), wrote(block([1.0])), facts=facts)
    odd = [block([5.0], name) for name in ("config.lr", "sweep", "tags")]
    written(tmp_path / "hostile", wrote(*odd))
    database = shipped(tmp_path)
    table = RunsTable(database)
    assert sorted(table.first("config.lr").values()) == [0.1, 0.2, 5.0], "its own alone"
    found = table.listed(ListOptions(filter="config.lr<0.15", columns=["config.lr", "sweep"]))
    assert [row["values"] for row in found["rows"]] == [{"config.lr": 0.1, "sweep": "s1"}]
    by_path = sorted(table.rows.values(), key=lambda row: row["path"])
    assert {"name": "config.lr", "values": [0.1, 0.2, None]} in table.compared(by_path)["settings"]
    assert len(everstep.query("runs", {"config.lr": {"$lt": 0.15}}, index=tmp_path)) == 1


@pytest.mark.campaign("long")
def test_a_hundred_thousand_settings_are_no_answer(tmp_path: Path) -> None:
    many = {f"setting_{number:06}": number for number in range(100_000)}
    written(tmp_path / "hostile", wrote(block([1.0])), facts={"config": many})
    for number in (1, 2):
        written(tmp_path / str(number), wrote(block([1.0])), facts={"config": {"lr": number}})
    database = shipped(tmp_path)
    table = RunsTable(database)
    answer = table.listed(ListOptions())
    assert len(Json(answer).body) < 100_000
    compared = table.compared(list(table.rows.values()))
    assert len(Json(compared).body) < 200_000
    assert "config.lr" in {row["name"] for row in compared["settings"]}
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"did you mean 'config.lr'\?.* more") as error:
        table.listed(ListOptions(sort="config.lrr"))
    assert time.process_time() - begun < 1 and len(str(error.value)) < 20_000


def test_a_long_text_is_cut_and_odd_names_of_files_are_refused(tmp_path: Path) -> None:
    odd = ["a" * 5000, "\ud800", "a\0b", "linked/x.png"]
    events: list[tuple[str, Any]] = [("summary", {"name": "text", "step": 1, "text": "word " * (1 << 20)})]
    events += [("summary", {"name": str(at), "step": 1, "image": {"file": odd[at]}}) for at in range(4)]
    run = written(tmp_path / "a", wrote(block([1.0]), events=events))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (run / "linked").symlink_to(tmp_path / "secret")
    database = shipped(tmp_path)
    with database.read() as connection:
        (row,) = run_rows(connection).values()
    summaries = summaries_of(database, row["id"])
    text, _ = content_of(database, row, summaries["text", "text"][1])
    assert len(text) < LONGEST_TEXT + 100 and text.endswith(b"characters more")
    for at in range(4):
        with pytest.raises(MissingError, match=r"cannot be read|does not lie in the run"):
            content_of(database, row, summaries[str(at), "image"][1])
