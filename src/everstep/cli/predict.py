"""`everstep predict`"""

from __future__ import annotations

from pathlib import Path

import click

from everstep.cli import experiment_commands
from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import say


@click.command("predict")
@run_argument
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@click.option("--stream", required=True, metavar="NAME", help="Stream to predict for.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write: .npy, .npz or .jsonl.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@experiment_commands.weights_option
@experiment_commands.profile_option
@experiment_commands.trust_option
@index_option
def command(
    run: str,
    overrides: tuple[str, ...],
    stream: str,
    out: Path,
    overwrite: bool,
    weights: str | None,
    profile: str | None,
    trust: bool,
    index: str | None,
) -> None:
    """Write the predictions of the newest checkpoint of RUN, or of other --weights.

    They are the results of the task's `inference_step` for each batch.

    \b
    FILE.npy    an array, all batches one after another
    FILE.npz    arrays by name if a batch's predictions are a mapping, else "predictions"
    FILE.jsonl  one line per sample

    The config is that of the run; its profile "predict", if there is one, changes it first, then PATH=VALUE.
    """
    from everstep.experiment import open_run
    from everstep.experiment.predictions import check, write

    check(out, overwrite)
    experiment = open_run(
        find(run, index).path, overrides, profile=profile, default_profile="predict", trust=trust
    )
    samples = write(out, experiment.trainer.predict(stream, weights=weights))
    say(f"{out}: {samples} predictions for {stream!r}")
