"""The addresses of the page: files and JSON.  Each answer is computed in a thread, beside the event loop."""

from __future__ import annotations

import gc
import math
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson
import uvicorn
from sqlalchemy import func, select
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.display.cells import with_leaves
from everstep.errors import ConfigError, EverstepError, nearest
from everstep.index import IndexBusyError, UnwritableIndexError, query
from everstep.index.database import Database
from everstep.index.location import is_run, runs_of
from everstep.index.run_queries import newest_facts, run_rows
from everstep.index.shipping import is_here, sync
from everstep.index.sql_tables import segments
from everstep.labels import NAMES as LABELS
from everstep.labels import clean
from everstep.redaction import redacted
from everstep.ui import STATIC
from everstep.ui.curves import MOST_POINTS, CurveOptions, curves
from everstep.ui.one_run import MissingError, content_of, last_lines, one_run, summaries_of
from everstep.ui.runs_table import ListOptions, RunsTable, run_id

_PAUSE, _SHARE = 0.5, 4
"""Least seconds between two looks at all journals; a look that takes long pauses `_SHARE` times as long."""

_LONGEST_WAIT = 10.0
"""Most seconds that a look waits for answers."""

_MANY = 1000
"""Runs of an index that is shown at once, as it is: a look at so many journals takes seconds."""

_MOST_PROBLEMS, _LONGEST_PROBLEM = 20, 1000
"""Most descriptions of faults, and most characters of one: names of a hostile run may be long."""

_LONGEST_FILTER, MOST_LISTED = 10_000, 10_000
"""Most characters of a filter, and most runs in a list."""

_MOST_CONNECTIONS = 64  # a process may have only 256 open files, and the journals need some

Answer = Callable[[Request], Response]


class FollowedIndex:
    """Index of runs, and their table in memory.  May be used by several threads; writes no run directory.

    Args:
        index: a folder of runs, a file, a URL, or a run directory; None for the default index.
    """

    def __init__(self, index: str | None) -> None:
        place = query.index_place(index)
        self._folder = runs_of(place)
        self._is_own = isinstance(place, Path) and is_run(self._folder) and not place.exists()
        """Whether a run directory is followed, by an index of this process alone."""
        self._problems: deque[str] = deque(maxlen=_MOST_PROBLEMS)
        self._trouble: list[str] = []
        """Why the newest look has failed."""
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._curves, self._no_curve, self._waited = 0, threading.Condition(), 0.0
        """Answers with curves that are being computed; seconds that a look has waited for them."""
        self._state: object = None
        """Rows and labels of all runs, as the table has them."""
        self.version = 0
        self.database, problems = (
            (Database(None), []) if self._is_own else query.open_index(str(place), stale=True)
        )
        self._note(problems)
        if not self._is_own:
            self._read()
        if self._is_own or len(self.table.rows) < _MANY:
            self._look()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let a look at all journals wait for what is done inside: both compute, and would take turns."""
        with self._no_curve:
            self._curves += 1
        try:
            yield
        finally:
            with self._no_curve:
                self._curves -= 1
                self._no_curve.notify_all()

    @property
    def problems(self) -> list[str]:
        """Descriptions of faults in journals and index, the newest last; then why the page shows old data."""
        return [*self._problems, *self._trouble]

    def refresh(self) -> None:
        """Bring index and table up to date, if the last look is a while ago and no other thread does so."""
        if time.monotonic() < self._next_look or not self._lock.acquire(blocking=False):
            return
        start, self._waited = time.monotonic(), 0.0
        try:
            self._look()
        except Exception as error:  # a server that is away for a while: the page shows what it has
            self._trouble = [f"the page shows old data: {error}"]
        finally:
            now = time.monotonic()
            self._next_look = now + max(_PAUSE, _SHARE * (now - start - self._waited))
            self._lock.release()

    def sizes(self, ids: Collection[str]) -> dict[str, int]:
        """Return id -> bytes of the journal that are in the index, of runs whose charts are open.

        Their journals are shipped first.
        """
        runs = {run["id"]: run for run in self.table.chosen(ids)}
        watched = [run for run in runs.values() if run["status"] == "running"]
        paths = [Path(run["path"]) for run in watched if is_here(self.database, run["host"])]
        if paths and self._lock.acquire(timeout=_PAUSE):  # else a look at all journals ships these, too
            try:
                with suppress(IndexBusyError, UnwritableIndexError):  # the next look tells that
                    self._ship(paths, pause=lambda: None)
            finally:
                self._lock.release()
        query = select(segments.c.run, func.sum(segments.c.size)).where(segments.c.run.in_(runs))
        with self.database.read() as connection:
            rows = connection.execute(query.group_by(segments.c.run))
            return {run_id(runs[run]): int(size) for run, size in rows}

    def _ship(self, only: Collection[Path] | None, pause: Callable[[], object]) -> None:
        shipped = sync(self.database, [self._folder], explicit=self._is_own, only=only, pause=pause)
        self._note(shipped.problems)

    def _pause(self) -> None:
        start = time.monotonic()
        with self._no_curve:
            self._no_curve.wait_for(lambda: not self._curves, max(0.0, _LONGEST_WAIT - self._waited))
        self._waited += time.monotonic() - start

    def _note(self, problems: list[str]) -> None:
        self._problems.extend(one for one in dict.fromkeys(problems) if one not in self._problems)

    def _look(self) -> None:
        trouble = []
        try:
            self._ship(None, self._pause)
        except (IndexBusyError, UnwritableIndexError) as error:
            trouble = [f"the page may lack the newest rows: {error}"]
        self._read()
        self._trouble = trouble

    def _read(self) -> None:
        with self.database.read() as connection:
            state = run_rows(connection), newest_facts(connection, names=LABELS)
        if state != self._state:
            self.table = RunsTable(self.database)
            self.version, self._state = self.version + 1, state


def application(index: FollowedIndex) -> Starlette:
    """Make the application; `everstep.ui.server.Access` belongs before it."""

    def page(request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    def changes(request: Request) -> Response:
        index.refresh()
        ids = _parameters(request, "runs")["runs"]
        sizes = index.sizes(ids) if ids else {}
        return Json({"version": index.version, "sizes": sizes, "problems": [*map(_problem, index.problems)]})

    def runs(request: Request) -> Response:
        table, problems = index.table, [*map(_problem, index.problems)]
        return Json({**table.listed(_list_options(table, request)), "problems": problems})

    def run(request: Request) -> Response:
        return Json(one_run(index.database, _run(index, request)))

    def log(request: Request) -> Response:
        return Json(last_lines(index.database, _run(index, request)))

    def summary(request: Request) -> Response:
        fields, run = _parameters(request, "name", "step", "kind"), _run(index, request)
        key, step = (fields["name"], fields["kind"]), fields["step"]
        data = summaries_of(index.database, run["id"]).get(key, {}).get(step)
        if data is None:
            raise MissingError(f"the run has no summary {key!r:.200} at step {step}; give one that it has")
        content, media = content_of(index.database, run, data)
        return Response(content, media_type=media, headers={"Content-Disposition": "inline"})

    def series(request: Request) -> Response:
        names = ("runs", "stream", "metric", "x", "from", "to", "points", "superseded")
        runs, stream, metric, axis, begin, end, points, superseded = _parameters(request, *names).values()
        if not stream or not metric:
            raise ConfigError("a curve needs a stream and a metric; give both, as in stream=step&metric=loss")
        options = CurveOptions(stream, metric, axis or "step", begin, end, points, superseded == "1")
        with index.first():
            return Json(curves(index.database, _chosen_runs(index, runs), options))

    def compare(request: Request) -> Response:
        return Json(index.table.compared(_chosen_runs(index, _parameters(request, "runs")["runs"])))

    answers = {
        "/": page,
        "/api/changes": changes,
        "/api/runs": runs,
        "/api/runs/{run}": run,
        "/api/runs/{run}/log": log,
        "/api/runs/{run}/summary": summary,
        "/api/series": series,
        "/api/compare": compare,
    }
    routes = [Route(path, _answer(answer, index)) for path, answer in answers.items()]
    static = Mount("/static", StaticFiles(directory=STATIC))
    return Starlette(routes=[*routes, static], exception_handlers={HTTPException: _http_error})


def _answer(answer: Answer, index: FollowedIndex) -> Answer:
    """Turn errors into answers in JSON; bring the index up to date after the answer, if that is due."""

    def answered(request: Request) -> Response:
        try:
            response = answer(request)
        except EverstepError as error:
            status = 400 if isinstance(error, ConfigError) else 503
            status = 404 if isinstance(error, MissingError) else status
            response = Json({"error": _problem(str(error))}, status)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = f"a file was not written by everstep, or is damaged: {type(error).__name__}: {error}"
            place = f"({Path(last.filename).name}, line {last.lineno})"
            response = Json({"error": _problem(f"{message} {place}; check the run's files")}, 500)
        response.background = BackgroundTask(index.refresh)
        return response

    return answered


def _problem(text: str) -> str:
    text = str(redacted(text))
    return text if len(text) <= _LONGEST_PROBLEM else f"{text[:_LONGEST_PROBLEM]}..."


def serve(index: FollowedIndex, port: int, hosts: Sequence[str], report: Callable[[str], object]) -> None:
    """Serve the page on 127.0.0.1 until a signal.

    `report` is called with a link that works once: when the page is there, and when the link was used.
    """
    try:
        line = socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be had: {error.strerror}; give another --port") from None
    address = f"http://127.0.0.1:{line.getsockname()[1]}/"
    access = Access(application(index), hosts, used=lambda token: report(f"{address}?token={token}"))
    config = uvicorn.Config(
        access,
        http="h11",  # httptools reads heads of any size into memory
        limit_concurrency=_MOST_CONNECTIONS,
        log_level="critical",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
    )
    gc.collect()
    gc.freeze()  # or a request's garbage would be looked for among the values of 10,000 runs
    with line:
        report(f"{address}?token={access.token}")
        uvicorn.Server(config).run(sockets=[line])


class Json(Response):
    """Answer in JSON: arrays of NumPy as lists; whatever a run's files say, it is not markup."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        try:
            return orjson.dumps(content, option=options)
        except TypeError:  # a lone surrogate, or an integer of more than 64 bits
            return orjson.dumps(with_leaves(content, _writable), option=options)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    return str(value) if isinstance(value, int) and abs(value) >= 1 << 63 else value


def _list_options(table: RunsTable, request: Request) -> ListOptions:
    fields = _parameters(request, "where", "sort", "desc", "columns", "offset", "limit")
    # A name may have a comma in it: it is then given alone, and is known.
    columns = request.query_params.getlist("columns")
    several = ([one] if table.values(one) else one.split(",") for one in columns)
    default = ListOptions()
    return ListOptions(
        fields["where"] or "",
        fields["sort"] or default.sort,
        fields["desc"] == "1" if fields["sort"] or fields["desc"] else default.descending,
        list(dict.fromkeys(name.strip() for names in several for name in names if name.strip())),
        fields["offset"] or 0,
        fields["limit"] or default.limit,
    )


def _run(index: FollowedIndex, request: Request) -> dict[str, Any]:
    return _chosen_runs(index, [str(request.path_params["run"])])[0]


def _chosen_runs(index: FollowedIndex, ids: list[str] | None) -> list[dict[str, Any]]:
    if not ids:
        raise ConfigError("there is no run in the question; give ids of runs with commas between them")
    runs = index.table.chosen(ids)
    if len(runs) < len(ids):
        missing = next(one for one in ids if one not in map(run_id, runs))
        raise MissingError(f"there is no run {missing[:200]!r}; open the list of runs")
    return runs


def _parameters(request: Request, *names: str) -> dict[str, Any]:
    """Read the parameters of a request, None for one that is not given; refuse unknown names."""
    values: dict[str, Any] = dict.fromkeys(names)
    for name, text in request.query_params.items():
        if name not in names:
            raise ConfigError(f"no parameter {name!r}; {nearest(name, names)}")
        try:
            values[name] = _value(name, text) if text else None
        except ValueError as error:
            raise ConfigError(f"{name} is {error}; change {text[:40]!r}") from None
    return values


_WORDS = {"desc": ("0", "1"), "superseded": ("0", "1"), "x": ("step", "time")}
_LARGEST = {"offset": 1 << 62, "step": 1 << 62, "limit": MOST_LISTED, "points": MOST_POINTS}


def _value(name: str, text: str) -> Any:
    """Read a parameter; a ValueError says what it is."""
    if name == "runs":
        return list(dict.fromkeys(part for part in text.split(",") if part))
    if name == "where" and len(text) > _LONGEST_FILTER:
        raise ValueError(f"a filter of at most {_LONGEST_FILTER:,} characters")
    if text not in _WORDS.get(name, (text,)):
        raise ValueError(" or ".join(_WORDS[name]))
    if name in ("from", "to"):
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                return number
        raise ValueError("a number")
    if name in _LARGEST:
        least, most = 1 if name in ("limit", "points") else 0, _LARGEST[name]
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise ValueError(f"an integer from {least} to {most}")
        return int(text)
    return text


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": f"{error.detail}: {request.url.path}; open /"}, error.status_code)


HERE = ("127.0.0.1", "localhost")
"""Names by which a browser reaches this machine itself."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer: no foreign script, frame or referrer."""

_METHODS = ("GET", "HEAD")
_BYTES = 32  # of a token


class Access:
    """Gate before an application: answers whoever may not read, and passes on who may.

    Attributes:
        token: the token that the next browser exchanges; each works once.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] = (), used: Callable[[str], object] = lambda token: None
    ) -> None:
        self._app, self._used = app, used
        self._hosts = {_name(host) for host in (*HERE, *hosts)}
        self.token = secrets.token_urlsafe(_BYTES)
        # Browsers send a cookie to every port of a host: another server's cookie must not replace this one.
        self._cookie = f"everstep-{secrets.token_hex(4)}"
        self._sessions: list[str] = []
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else Response(status_code=403)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (answer or self._app)(scope, receive, protected)

    def _refusal(self, scope: Scope) -> Response | None:
        """Answer a request that may not pass, or that brings a token; None for all others."""
        headers, path = Headers(scope=scope), scope["path"]
        if scope["method"] not in _METHODS:
            message = f"{scope['method']} changes nothing here: the page only reads; use GET"
            return _refuse(headers, 405, message, Allow=", ".join(_METHODS))
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            message = "this name does not belong to the page; open it as http://127.0.0.1:PORT"
            return _refuse(headers, 403, message)
        # A page of another origin may send a request, though it could not read the answer.
        elsewhere = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if elsewhere and not (headers.get("sec-fetch-mode", "navigate") == "navigate" and path == "/"):
            return _refuse(headers, 403, "another page asked for this; open the page itself")
        pairs = [one.strip().partition("=") for each in headers.getlist("cookie") for one in each.split(";")]
        cookies = [value for name, _, value in pairs if name == self._cookie]
        is_known = any(_equal(one, known) for one in cookies for known in self._sessions)
        token = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get("token")
        if path == "/" and token is not None:
            if is_known:
                return RedirectResponse("/", status_code=303)  # the same link once more, in the same browser
            return self._exchange(token[0], scope["method"], headers)
        message = "the page is for whoever started it; open the link that everstep ui printed"
        return None if is_known else _refuse(headers, 401, message)

    def _exchange(self, token: str, method: str, headers: Headers) -> Response:
        with self._lock:
            fits = method == "GET" and _equal(token, self.token)
            if fits:
                self.token, session = secrets.token_urlsafe(_BYTES), secrets.token_urlsafe(_BYTES)
                self._sessions.append(session)
        if not fits:
            message = "this link was used, or is wrong; open the newest that everstep ui printed"
            return _refuse(headers, 401, message)
        self._used(self.token)
        answer = RedirectResponse("/", status_code=303)
        # lax: sent when a link elsewhere opens the page; what a page elsewhere asks for is refused above
        answer.set_cookie(self._cookie, session, httponly=True, samesite="lax", path="/")
        return answer


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())


def _name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _refuse(request: Headers, status: int, message: str, **headers: str) -> Response:
    """Say why a request is refused: as JSON to a program, as text to a person who opened a link."""
    if "text/html" in request.get("accept", ""):
        return PlainTextResponse(message, status, headers)
    return JSONResponse({"error": message}, status, headers)
