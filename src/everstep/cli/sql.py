"""`everstep sql`: the index asked by SQL, which changes nothing."""

from __future__ import annotations

from typing import Any

import click

from everstep.cli.common_options import index_option, json_option
from everstep.cli.find_run import open_index
from everstep.cli.output import print_json, print_table
from everstep.errors import ConfigError


@click.command("sql")
@click.argument("statement")
@index_option
@json_option
def sql_command(statement: str, index: str | None, as_json: bool) -> None:
    """Ask the index by a SELECT; nothing can be changed.

    \b
      everstep sql "select name, status, step from runs where kills > 0"
      everstep sql "select run, step, value from evaluations where name = 'valid_loss'"

    Tables: runs, segments (starts), facts (the record of a run's newest start, as JSON), series, metrics,
    checkpoints, events.  Views: valid_metrics has the values that no resume superseded, with the names of
    runs and metrics; evaluations those measured outside steps.  Times are seconds since 1970, NaN is NULL.
    """
    from sqlalchemy.exc import DBAPIError

    database = open_index(index)
    with database.read() as connection:
        try:
            found = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
            rows = [dict(row) for row in found.mappings()] if found.returns_rows else None
        except DBAPIError as error:
            raise ConfigError(
                f"the index {database.name} does not take this statement: {error.orig}"
            ) from None
    if rows is None:
        raise ConfigError(f"{statement!r} returns no rows; give a SELECT")
    cells: list[dict[str, Any]] = [
        {name: f"{len(value)} bytes" if isinstance(value, bytes) else value for name, value in row.items()}
        for row in rows
    ]
    if as_json:
        print_json(cells)
    else:
        print_table(cells, list(found.keys()))
