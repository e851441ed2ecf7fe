"""`everstep sync`"""

from __future__ import annotations

from pathlib import Path

import click

from everstep.cli.common_options import index_option, json_option
from everstep.cli.output import note, print_json, say
from everstep.display.cells import in_line


@click.command("sync")
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@index_option
@json_option
def command(folders: tuple[Path, ...], index: str | None, as_json: bool) -> None:
    """Update the index from the journals, or make it.

    FOLDERS are run directories or folders of them.  Default: the folder of the index; for a database ./runs,
    or else the current folder.  Runs that were copied from another machine are added; a run that was moved
    gets its new path.  Runs of this machine below FOLDERS whose directories are gone are removed from the
    index.  A torn last record is dropped; damage in the middle of a journal is reported with its place, and
    the rest is indexed.  All of this is printed.
    """
    from everstep.index.database import Database
    from everstep.index.location import FILE, is_said, runs_of
    from everstep.index.query import index_place
    from everstep.index.shipping import forget_gone, sync

    place = index_place(index)
    meant = index is not None or is_said()
    if len(folders) == 1 and not meant and isinstance(place, Path) and not place.exists():
        place = folders[0].absolute() / FILE
    database, asked = Database(place), folders or (runs_of(place),)
    found = sync(database, asked)
    forgotten = forget_gone(database, asked)
    if as_json:
        told = {"index": database.name, "runs": found.runs, "rows": found.rows}
        print_json({**told, "forgotten": list(forgotten), "problems": found.problems})
        return
    note(found.problems)
    say(f"{database.name}: {found.runs} runs, {found.rows} new rows")
    if index is None and place != index_place(None):
        say(f"to list them: everstep runs --index {database.name}")
    for name, where in forgotten.items():
        say(f"forgotten: {in_line(name)}, whose directory {in_line(where)} is gone")
