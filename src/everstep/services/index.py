"""Updates of the index over runs while this run trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from everstep.contracts.services import RunView, Service, Stage
from everstep.index.location import as_location, index_of, lacks_credential
from everstep.index.shipping_thread import IndexWriter


class Index(Service):
    """Ship the journal to the index, on a separate thread.

    Every run has this service.  It asks for no moment, so it costs the training thread nothing.  Without
    SQLAlchemy, or with EVERSTEP_INDEX=off, there is no index; `everstep sync` makes one from the journals at
    any time.

    Args:
        at: a file, or the URL of a PostgreSQL database; None: `everstep.db` beside the run directory.
            EVERSTEP_INDEX overrides this argument.  The password in a URL is not recorded: to resume a run
            from its recorded settings, name the index again.

    Raises:
        ConfigError: a URL of anything but PostgreSQL.
    """

    stage = Stage.REPORT
    moments = frozenset()
    isolate = False
    window = "none"

    def __init__(self, at: str | Path | None = None) -> None:
        super().__init__("run index")
        self._at = None if at is None else as_location(str(at))
        self._writer: IndexWriter | None = None

    def open(self, run: RunView) -> None:
        run_dir = Path(run.run_dir).absolute()  # the program may change its working directory
        found = index_of(run_dir, self._at)
        if lacks_credential(found):
            run.println(
                "warning: the run has recorded its index without the password: set EVERSTEP_INDEX, or pass "
                "--index. The training continues; nothing is lost: the journal has all rows"
            )
        elif isinstance(found, str) and find_spec("sqlalchemy") is None:
            run.println(
                "warning: the index is a database, which needs SQLAlchemy: pip install "
                "'everstep[postgres]'. The training continues; nothing is lost: the journal has all rows"
            )
        elif found is not None and find_spec("sqlalchemy") is not None:
            first = run.step
            self._writer = IndexWriter(found, run_dir, lambda: run.step > first, run.println)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
