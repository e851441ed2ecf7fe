"""`everstep ui`"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path

import click

from everstep.cli.output import note, say


@click.command("ui")
@click.argument("index", metavar="[FOLDER|URL]", required=False)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; default: a free one."
)
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="Further name that leads here, as of a proxy."
)
@click.option("--no-browser", is_flag=True, help="Print the link, and open no browser.")
def command(index: str | None, port: int, hosts: tuple[str, ...], no_browser: bool) -> None:
    """Show runs in the browser: a page that is live, and only reads.

    FOLDER is a folder of runs, an index file or a run directory; URL is postgresql://USER@HOST/DATABASE.
    Default: the index that the other commands use here.

    The page is on 127.0.0.1.  The printed link opens it once, in one browser; then the next link is printed.
    From another machine: ssh -L PORT:127.0.0.1:PORT, and the same link.  Ctrl-C ends the page.
    """
    from everstep.ui.followed_index import followed
    from everstep.ui.server import serve

    with followed(index) as found, tempfile.TemporaryDirectory(prefix="everstep-link-") as folder:
        note(found.problems)
        links = _Links(found.database.name, None if no_browser or not _has_display() else Path(folder))
        try:
            serve(found, port, hosts, links.tell)
        except KeyboardInterrupt:
            say()


class _Links:
    def __init__(self, name: str, folder: Path | None) -> None:
        self._name, self._folder = name, folder

    def tell(self, link: str) -> None:
        """Print a link; the first is also opened in the browser."""
        if self._name:
            say(f"{self._name}: {link}")
            if self._folder is not None:
                _open(link, self._folder)
        else:
            say(f"a browser has used the link; for another browser: {link}")
        sys.stdout.flush()
        self._name = ""


def _open(link: str, folder: Path) -> None:
    """Open a link by a file: everybody on the machine can read the arguments of a browser."""
    page = folder / "open.html"
    page.touch(stat.S_IRUSR | stat.S_IWUSR)
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(link)}">')
    webbrowser.open(page.as_uri())


def _has_display() -> bool:
    """Whether a browser could open a window: a browser in the terminal would take it away."""
    return sys.stdout.isatty() and (
        sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    )
