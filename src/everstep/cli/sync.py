"""`everstep sync`"""

from __future__ import annotations

from pathlib import Path

import click

from everstep.cli.common_options import index_option, json_option
from everstep.cli.output import in_line, note, print_json, say
from everstep.index.database import Database
from everstep.index.location import FILE, is_said, runs_of
from everstep.index.query import index_place
from everstep.index.shipping import forget_gone, sync


@click.command("sync")
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@index_option
@json_option
def command(folders: tuple[Path, ...], index: str | None, as_json: bool) -> None:
    """Bring the index up to what the journals say, or make it anew.

    FOLDERS are run directories or folders of them; default: the folder that the index lies in; with a
    database ./runs, or else here.  Runs copied from another machine are merged, and a run whose directory
    moved there is known by its new place.  Runs of this machine below FOLDERS whose directories are not
    there any more are forgotten, and said.  A torn last record is
    dropped, and said; what is damaged in the middle is reported, with its place, and the rest indexed.
    """
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
    for name, where in forgotten.items():
        say(f"forgotten: {in_line(name)}, whose directory {in_line(where)} is not there any more")
