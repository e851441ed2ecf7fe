"""A plugin of pytest: one sitting of `make torture`.  It leaves out what is stored, and stores what ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torture_store import Store, Writer

MESSAGE = 4000
"""Most characters of a failure that are stored."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torture")
    group.addoption(
        "--sitting", metavar="STORE", help="file of the campaign; without it cases are only marked"
    )
    group.addoption("--until", type=float, default=float("inf"), help="no case begins after this time")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take in what counts, whatever its tier is."""
    for item in items:
        if "tally" in getattr(item, "fixturenames", ()):
            item.add_marker("torture")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.sitting is None:
        return
    config.pluginmanager.register(Selection(config), "torture-selection")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recording(Path(config.option.sitting)), "torture-recording")


class Selection:
    """Which cases run; in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        # Workers that replace others must find what those have found: the controller tells them.
        told = getattr(config, "workerinput", None)
        store = Store(Path(config.option.sitting))
        self.passed: list[str] = sorted(store.passed()) if told is None else told["passed"]
        self._until: float = config.option.until

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = self.passed

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = set(self.passed)
        stored = [item for item in items if item.nodeid in passed]
        items[:] = [item for item in items if item.nodeid not in passed]
        if stored:
            config.hook.pytest_deselected(items=stored)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.time() > self._until else None


class Recording:
    """Stores each case when its last report has come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        self._writer: Writer | None = None
        self._open: dict[str, dict[str, Any]] = {}

    def pytest_sessionstart(self) -> None:
        self._writer = Store(self._path).open()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = self._open.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "message": ""})
        record["seconds"] = round(record["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            record["outcome"], record["message"] = "failed", report.longreprtext[-MESSAGE:]
        if report.when in ("setup", "call"):
            return  # "???" is the one report of a worker that has crashed
        noted: dict[str, list[Any]] = {"tally": [], "run": []}
        for name, value in report.user_properties:
            if name in noted:
                noted[name].append(value)
        assert self._writer is not None
        self._writer.add(
            {
                "case": report.nodeid,
                **self._open.pop(report.nodeid),
                "sitting": self._began,
                "ended": time.time(),
                "tallies": noted["tally"],
                "runs": noted["run"],
            }
        )

    def pytest_sessionfinish(self) -> None:
        if self._writer is not None:
            self._writer.close()
