"""`everstep export`"""

from __future__ import annotations

import warnings
from pathlib import Path

import click

from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import note, say
from everstep.errors import ConfigError, NoCheckpointError, nearest


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
@click.option("--checkpoint", metavar="NAME", help="Checkpoint with this name, or at this step.")
@click.option("--entry", default="model", show_default=True, help="Entry of the run's state, such as ema.")
@click.option(
    "--format",
    default="safetensors",
    show_default=True,
    help="Or torch.distributed.checkpoint.",
)
@click.option(
    "--max-shard-size", metavar="SIZE", help="Largest safetensors file, as in 5GB; default: one file."
)
@index_option
def command(
    run: str,
    out: Path,
    best: str | None,
    checkpoint: str | None,
    entry: str,
    format: str,
    max_shard_size: str | None,
    index: str | None,
) -> None:
    """Write the weights of RUN into FOLDER, for programs without everstep.

    \b
      everstep export digits --best valid_loss --out digits-weights
      everstep export digits --max-shard-size 5GB --out digits-weights

    model.safetensors has the arrays by the names of the model's state_dict (or shards and an index, as
    Hugging Face writes them); export.json has the run, the step and the metrics.  If the entry is an
    average of weights, the averaged model is written.  An earlier export in FOLDER is replaced; a folder
    with anything else is refused.
    """
    if best is not None and checkpoint is not None:
        raise ConfigError("give --best or --checkpoint, not both")
    from everstep.services.export import export

    run_dir = find(run, index).path
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = export(
            _chosen(run_dir, best, checkpoint), out, entry=entry, format=format, max_shard_size=max_shard_size
        )
    note(str(each.message) for each in told)
    say(f"{out}: {done.arrays} arrays of {entry!r} at step {done.step}, from {done.source}")


def _chosen(run_dir: Path, metric: str | None, checkpoint: str | None) -> Path:
    """Return the path of the checkpoint or best weights that are meant."""
    from everstep.cli.checkpoint_actions import chosen_name
    from everstep.views.checkpoint_tables import store_of

    store = store_of(run_dir)
    if checkpoint is not None:
        return store.path(chosen_name(run_dir, checkpoint))
    if metric is None:
        if not store.names():
            raise NoCheckpointError(f"the run in {run_dir} has no checkpoint yet; train it first")
        return run_dir
    kept = store.best()
    if metric not in kept:
        raise ConfigError(f"the run has kept no best weights by {metric!r}; {nearest(metric, kept)}")
    return kept[metric]
