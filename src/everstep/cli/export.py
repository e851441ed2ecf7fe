"""`everstep export`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from everstep.checkpoint import Checkpoint, find_checkpoint
from everstep.cli.checkpoint_tables import store_of
from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import note, say
from everstep.contracts.state import BESIDE, HostArray
from everstep.errors import ConfigError, NoCheckpointError, nearest
from everstep.services import export
from everstep.state import array_name


@click.command("export")
@run_argument
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder to write; whole or not at all.",
)
@click.option("--best", metavar="METRIC", help="Best weights by this metric; default: the newest checkpoint.")
@click.option("--entry", default="model", show_default=True, help="Entry of the run's state, such as ema.")
@index_option
def command(run: str, out: Path, best: str | None, entry: str, index: str | None) -> None:
    """Write the weights of RUN into FOLDER, for programs without everstep.

    \b
      everstep export digits --best valid_loss --out digits-weights

    model.safetensors has the arrays by the names of the model's state_dict; export.json has the run, the
    step and the metrics.  If the entry is an average of weights, the averaged model is written.  An earlier
    export in FOLDER is replaced; a folder with anything else is refused.
    """
    found = find(run, index)
    checkpoint = _chosen(found.path, best)
    arrays = _arrays(checkpoint, entry)
    if out.exists() and export.about_export(out) is None:
        raise ConfigError(f"{out} exists and is not an export; give a folder that does not exist")
    about = export.description(
        arrays,
        _metrics(checkpoint),
        run=found.facts["name"],
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        checkpoint=str(checkpoint.name),
        entry=entry,
        format="safetensors",
    )
    export.write_export(out, export.weights(arrays), about, top=out.parent)
    say(f"{out}: {len(arrays)} arrays of {entry!r} at step {checkpoint.step}, from {checkpoint.path}")


def _chosen(run_dir: Path, metric: str | None) -> Checkpoint:
    source = run_dir
    if metric is not None:
        kept = store_of(run_dir).best()
        if metric not in kept:
            raise ConfigError(f"the run has kept no best weights by {metric!r}; {nearest(metric, kept)}")
        source = kept[metric]
    checkpoint = find_checkpoint(source, lambda text: note([text]), interim=False)
    if checkpoint is None:
        raise NoCheckpointError(f"the run in {run_dir} has no checkpoint yet; train it first")
    return checkpoint


def _arrays(checkpoint: Checkpoint, entry: str) -> dict[str, HostArray]:
    """Return the arrays of an entry by name, as the service `Export` names the arrays of a live object."""
    structure: Any = checkpoint.structure
    entries = structure["user"]
    if entry not in entries:
        raise ConfigError(f"the state of the run has no {entry!r}; {nearest(entry, entries)}")
    whole = array_name(["user", entry])
    named = {
        name.removeprefix(f"{whole}/") if name != whole else array_name([]): checkpoint.arrays[name]
        for name in _references(entries[entry])
        if not BESIDE & {*name.split("/")}
    }
    if not named:
        raise ConfigError(f"{entry!r} has no arrays; give another entry: {', '.join(entries)}")
    if "n_averaged" in named:
        return {n.removeprefix("module."): a for n, a in named.items() if n != "n_averaged"}
    return named


def _references(node: Any) -> Iterator[str]:
    """Yield the names of the arrays in an encoded tree, in its order."""
    if isinstance(node, dict) and isinstance(node.get("$array"), str):
        yield node["$array"]
    elif isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _references(part)


def _metrics(checkpoint: Checkpoint) -> dict[str, float]:
    meta: Any = checkpoint.meta or {}
    return {meta["metric"]: meta["value"]} if "metric" in meta else dict(meta.get("metrics", {}))
