"""`everstep du`"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from everstep.cli.common_options import json_option
from everstep.cli.output import note, print_json, print_table, say
from everstep.display.cells import size
from everstep.durable import TMP
from everstep.index.location import FILE
from everstep.index.readers import is_run

_OTHER, _INDEX, _TRAILS, _UNFINISHED = "other", "index", "trails", "unfinished"
_FOLDERS = (
    *("checkpoints", "shared", "best", "journal", "superseded", "damaged", "exports", "dumps"),
    *("evaluations", "failures", "logs"),
)
"""Folders of a run directory, each a kind."""
KINDS = (*_FOLDERS[:4], _TRAILS, *_FOLDERS[4:], _UNFINISHED, _INDEX, _OTHER)
"""Kinds of files, in the order of the columns."""


@click.command("du")
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def command(folder: Path, as_json: bool) -> None:
    """Show what takes the space in FOLDER, by run and kind: the bytes on the disk.

    \b
      checkpoints  what the checkpoints have alone    superseded   what a resume or a rollback left behind
      shared       what checkpoints share             damaged      checkpoints whose bytes have changed
      best         the best weights                   unfinished   what a killed process left half written
      journal      metrics and events                 index        the database over the runs
      trails       digests of the newest steps        other        all other files

    A file with several names (hard links) counts once, where it is found first.  Links are not followed.
    `everstep checkpoints RUN prune` and `everstep prune` free space; superseded/ and damaged/ may be deleted.
    """
    used = _Used(folder.absolute())
    note(used.problems)
    runs = sorted(used.by_run.items(), key=lambda item: -sum(item[1].values()))
    total = {kind: sum(kinds.get(kind, 0) for _, kinds in runs) for kind in KINDS}
    if as_json:
        told = [{"run": str(path), "total": sum(k.values()), "kinds": dict(k)} for path, k in runs if path]
        outside = sum(used.by_run.get(None, {}).values())
        print_json(
            {"folder": str(folder.absolute()), "total": sum(total.values()), "runs": told, "outside": outside}
        )
        return
    if not sum(total.values()):
        say("nothing takes space there")
        return
    rows = [_row(_shown(path, folder.absolute()), kinds) for path, kinds in runs]
    columns = ["run", "total", *(kind for kind in KINDS if total[kind])]
    print_table([*rows, _row("total", total)] if len(rows) > 1 else rows, columns)


def _shown(run: Path | None, folder: Path) -> str:
    if run is None:
        return "(outside of runs)"
    return str(run.relative_to(folder)) if run != folder else run.name


def _row(name: str, kinds: dict[str, int]) -> dict[str, Any]:
    sizes = {kind: size(count) if (count := kinds.get(kind, 0)) else "-" for kind in KINDS}
    return {"run": name, "total": size(sum(kinds.values())), **sizes}


class _Place(NamedTuple):
    """Folder, the directory of the run in which it lies, and its path there."""

    folder: Path
    run: Path | None
    inside: tuple[str, ...]


class _Used:
    """Bytes on the disk below a folder.

    Attributes:
        by_run: bytes by kind, by the directory of the run; None for what lies outside of runs.
        problems: what could not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.by_run: dict[Path | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.problems: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        left: list[_Place] = [_Place(folder, None, ())]
        while left:  # not by recursion: a stranger's folders may be nested a thousand deep
            left += reversed(list(self._count_in(left.pop())))

    def _count_in(self, place: _Place) -> Iterator[_Place]:
        """Count the files of a folder; yield the folders in it."""
        folder, run, inside = place
        if run is None and is_run(folder):
            run, inside = folder, ()
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._left_out(folder, error)
            return
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield _Place(folder / entry.name, run, (*inside, entry.name))
            else:
                self._count(entry, run, (*inside, entry.name))

    def _count(self, entry: os.DirEntry[str], run: Path | None, inside: tuple[str, ...]) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            self._left_out(entry.path, error)
            return
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1:
            if key in self._seen:
                return
            self._seen.add(key)
        self.by_run[run][_kind(run, inside)] += status.st_blocks * 512

    def _left_out(self, path: Path | str, error: OSError) -> None:
        # a training run moves and deletes its files
        if not isinstance(error, FileNotFoundError):
            self.problems.append(f"{path} cannot be read ({error.strerror}); it is left out")


def _kind(run: Path | None, inside: tuple[str, ...]) -> str:
    """Return the kind of a file, by its path in the run's directory."""
    if any(name.startswith(TMP) for name in inside):
        return _UNFINISHED
    if run is None:
        return _INDEX if inside[-1].startswith(FILE) else _OTHER
    if inside[0] == "journal" and inside[-1].endswith(".trail"):
        return _TRAILS
    return inside[0] if len(inside) > 1 and inside[0] in _FOLDERS else _OTHER
