"""The addresses of the page: files and JSON.  Each answer is computed in a thread, beside the event loop."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from everstep.display.cells import with_leaves
from everstep.errors import ConfigError, EverstepError, nearest
from everstep.index.run_queries import clean
from everstep.redaction import redacted
from everstep.ui.access import Access
from everstep.ui.connections import BACKLOG, Connection, tell_faults_once
from everstep.ui.curves import MOST_POINTS, curves
from everstep.ui.curves import Asked as Curves
from everstep.ui.followed_index import FollowedIndex
from everstep.ui.list_runs import MOST, Asked, list_runs, numeric_columns, side_by_side
from everstep.ui.live import Live
from everstep.ui.one_run import one_run
from everstep.ui.run_files import MissingError, log, summary
from everstep.ui.runs_table import RunsTable, run_id
from everstep.ui.stored_rows import StoredRows

STATIC = Path(__file__).parent / "static"
"""Folder of the page's files."""

LONGEST = 10_000
"""Most characters of a filter."""

_MOST_PROBLEMS = 20
"""Most faults of journals and index in an answer."""

_LONGEST_PROBLEM = 1000
"""Most characters of a fault: names of a hostile run may be long."""

MOST_RUNS = 1000
"""Most runs of a chart or a comparison."""

Answer = Callable[[Request], Response]


def application(index: FollowedIndex, live: Live, static: Path = STATIC) -> Starlette:
    """Make the application; `everstep.ui.access.Access` belongs before it.

    Args:
        static: folder of the page's files, with index.html.
    """

    stored = StoredRows()

    def page(request: Request) -> Response:
        return Response((static / "index.html").read_bytes(), media_type="text/html")

    def runs(request: Request) -> Response:
        told = list_runs(index.table, _asked(index.table, request))
        return Json({**told, "problems": [_problem(one) for one in index.problems[-_MOST_PROBLEMS:]]})

    def columns(request: Request) -> Response:
        text = _filter(_known(request, "where"))
        return Json(numeric_columns(index.table, text))

    def run(request: Request) -> Response:
        run = _run(index, request)
        return Json(one_run(index.database, run, index.table.looks(run)))

    def log_text(request: Request) -> Response:
        after = integer_in(_known(request, "after"), "after", 0, 0, 1 << 62)
        return Json(log(index.database, _run(index, request), after))

    def one_summary(request: Request) -> Response:
        given = _known(request, "name", "step", "kind")
        step = integer_in(given, "step", 0, 0, 1 << 62)
        run, name = _run(index, request), given.get("name", "")
        content, media = summary(index.database, run, name, step, given.get("kind") or None)
        return Response(content, media_type=media, headers={"Content-Disposition": "inline"})

    def series(request: Request) -> Response:
        given = _known(request, "runs", "stream", "metric", "x", "from", "to", "points", "superseded")
        return Json(curves(stored, index.database, _runs(index, given), _asked_curves(given)))

    def compare(request: Request) -> Response:
        return Json(side_by_side(index.table, _runs(index, _known(request, "runs"))))

    async def events(request: Request) -> Response:
        return live.answer(_ids(request.query_params.get("runs", "")))

    routes = [
        Route("/", _answered(page)),
        Route("/api/runs", _answered(runs)),
        Route("/api/columns", _answered(columns)),
        Route("/api/runs/{run}", _answered(run)),
        Route("/api/runs/{run}/log", _answered(log_text)),
        Route("/api/runs/{run}/summary", _answered(one_summary)),
        Route("/api/series", _answered(series)),
        Route("/api/compare", _answered(compare)),
        Route("/api/live", events),
        Mount("/static", StaticFiles(directory=static, check_dir=False)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


def _answered(answer: Answer) -> Answer:
    """Turn errors into answers in JSON, as the commands turn them into messages."""

    @wraps(answer)
    def answered(request: Request) -> Response:
        try:
            return answer(request)
        except MissingError as error:
            return Json({"error": str(error)}, 404)
        except ConfigError as error:
            return Json({"error": _problem(str(error))}, 400)
        except EverstepError as error:
            return Json({"error": _problem(str(error))}, 503)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"a file was not written by everstep, or is damaged: {type(error).__name__}: {error}"
            place = f"({Path(last.filename).name}, line {last.lineno})"
            return Json({"error": _problem(f"{told} {place}; check the run's files")}, 500)

    return answered


def _problem(text: str) -> str:
    told = str(redacted(text))
    return told if len(told) <= _LONGEST_PROBLEM else f"{told[:_LONGEST_PROBLEM]}..."


class _Server(uvicorn.Server):
    """Server that ends the live connections at a signal; they would keep it waiting."""

    def __init__(self, config: uvicorn.Config, live: Live) -> None:
        super().__init__(config)
        self._live = live

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tell_faults_once(asyncio.get_running_loop())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._live.close()
        super().handle_exit(sig, frame)


def serve(index: FollowedIndex, port: int, hosts: Sequence[str], started: Callable[[str], object]) -> None:
    """Serve the page on 127.0.0.1 until a signal.

    Args:
        port: 0 to 65535; 0 for a free port.
        hosts: further names by which browsers reach the page.
        started: called with a link that works once: when the page is there, and when the link was used.
    """
    try:
        line = socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be had: {error.strerror}; give another --port, or none"
        ) from None
    address = f"http://127.0.0.1:{line.getsockname()[1]}/"
    live = Live(index)
    access = Access(application(index, live), hosts, used=lambda token: started(f"{address}?token={token}"))
    config = uvicorn.Config(
        access,
        http=Connection,
        backlog=BACKLOG,
        log_level="critical",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
    )
    gc.collect()
    gc.freeze()  # or a request's garbage would be looked for among the values of 10,000 runs
    with line:
        started(f"{address}?token={access.token}")
        _Server(config, live).run(sockets=[line])


class Json(Response):
    """Answer in JSON: arrays of NumPy as lists; whatever a run's files say, it is not markup."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        try:
            return orjson.dumps(content, option=options)
        except TypeError:  # a lone surrogate, or an integer of more than 64 bits
            return orjson.dumps(with_leaves(content, _writable), option=options)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    is_long = isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63
    return str(value) if is_long else value


# ------------------------------------------------------------------------------------- questions


def _asked(table: RunsTable, request: Request) -> Asked:
    given = _known(request, "where", "sort", "desc", "grouped", "columns", "offset", "limit")
    default = Asked()
    sort = given.get("sort") or default.sort
    return Asked(
        _filter(given),
        sort,
        _flag(given, "desc", "sort" not in given and default.descending),
        _flag(given, "grouped", False),
        _columns(table, request.query_params.getlist("columns")),
        integer_in(given, "offset", 0, 0, 1 << 62),
        integer_in(given, "limit", default.limit, 1, MOST),
    )


def _filter(given: dict[str, str]) -> str:
    text = given.get("where", "")
    if len(text) > LONGEST:
        raise ConfigError(f"the filter has {len(text)} characters; give at most {LONGEST}")
    return text


def _columns(table: RunsTable, given: Sequence[str]) -> list[str]:
    """Return names of columns: each given alone, or several with commas between them.

    A name may have a comma in it: it is then given alone, and is known.
    """
    several = ([one] if table.values(one) else one.split(",") for one in given)
    return list(dict.fromkeys(name.strip() for names in several for name in names if name.strip()))


def _asked_curves(given: dict[str, str]) -> Curves:
    if given.get("x", "step") not in ("step", "time"):
        raise ConfigError(f"x is step or time; change {given['x'][:40]!r}")
    if not given.get("stream") or not given.get("metric"):
        raise ConfigError("a curve needs a stream and a metric; give both, as in stream=step&metric=loss")
    return Curves(
        given["stream"],
        given["metric"],
        given.get("x", "step"),
        _number(given, "from"),
        _number(given, "to"),
        integer_in(given, "points", 0, 1, MOST_POINTS) or None,
        _flag(given, "superseded", False),
    )


def _run(index: FollowedIndex, request: Request) -> dict[str, Any]:
    given = str(request.path_params["run"])
    found = index.table.run(given)
    if found is None:
        raise MissingError(f"there is no run {given[:200]!r}; open the list of runs")
    return found


def _runs(index: FollowedIndex, given: dict[str, str]) -> list[dict[str, Any]]:
    ids = _ids(given.get("runs", ""))
    if not 1 <= len(ids) <= MOST_RUNS:
        raise ConfigError(f"{len(ids)} runs; give ids of runs with commas between them, 1 to {MOST_RUNS}")
    found = index.table.chosen(ids)
    if len(found) < len(ids):
        known = {run_id(run) for run in found}
        missing = next(one for one in ids if one not in known)
        raise MissingError(f"there is no run {missing[:200]!r}; open the list of runs")
    return found


def _number(given: dict[str, str], name: str) -> float | None:
    text = given.get(name, "")
    try:
        found = float(text) if text else None
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise ConfigError(f"{name} is a number; change {text[:40]!r}")
    return found


def _known(request: Request, *names: str) -> dict[str, str]:
    """Return the parameters of a request; refuse unknown names."""
    for name in request.query_params:
        if name not in names:
            raise ConfigError(f"no parameter {name!r}; {nearest(name, names)}")
    return dict(request.query_params)


def integer_in(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return an integer parameter."""
    text = given.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(f"{name} is an integer from {least} to {most}; change {text[:40]!r}")
    return int(text)


def _flag(given: dict[str, str], name: str, default: bool) -> bool:
    text = given.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is 0 or 1; change {text[:40]!r}")
    return text == "1" if text else default


def _ids(text: str) -> list[str]:
    return list(dict.fromkeys(part for part in text.split(",") if part))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": f"{error.detail}: {request.url.path}; open /"}, error.status_code)
