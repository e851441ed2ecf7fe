"""The wheel has the package alone; in empty environments the core works, and each extra does its part."""

from __future__ import annotations

import re
import signal
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from installed import ROOT, Environment, built

from everstep.cli.group import COMMANDS

pytestmark = pytest.mark.campaign("machine")

NUMPY_PROGRAM = """
import sys
import time
import numpy as np
import everstep

folder, pause, mirror = sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
x = np.random.default_rng(1).standard_normal((640, 8))
weights = np.zeros(8)
saves = everstep.Checkpoints(everstep.Every(steps=20), mirror=mirror)
with everstep.Supervisor(folder, {"weights": weights}, seed=0, max_step=100, services=[saves]) as sv:
    batches = sv.stream(everstep.data.arrays(x, batch_size=32, shuffle=True))
    while not sv.should_stop():
        (batch,) = next(batches)
        error = batch @ weights - batch.sum(axis=1) + np.random.standard_normal(32)
        weights -= 0.01 * error @ batch
        time.sleep(pause)
        sv.advance(loss=np.square(error).mean())
assert not {"torch", "click", "pydantic", "fsspec", "matplotlib"} & set(sys.modules), "imported without need"
print("digest", sv.ending.digest, "resumed", sv.resumed)
"""

CONFIG_TASK = """
import numpy as np
import everstep

class Line(everstep.Task):
    def __init__(self, lr: float = 0.1):
        self.lr, self.weights = lr, np.zeros(3)
    def state(self):
        return {"weights": self.weights}
    def train_step(self, batch):
        error = batch[0] @ self.weights - batch[0].sum(axis=1)
        self.weights -= self.lr * error @ batch[0] / len(error)
        return {"loss": np.square(error).mean()}

def data():
    x = np.random.default_rng(1).standard_normal((64, 3))
    return everstep.data.arrays(x, batch_size=16, shuffle=True)
"""

CONFIG = """
task: {call: line_task:Line}
streams: {train: {call: line_task:data}}
trainer: {max_epoch: 2}
seed: 1
"""


def numpy_run(env: Environment, name: str = "runs/one", *options: object) -> str:
    (env.folder / "program.py").write_text(NUMPY_PROGRAM)
    return env.python("program.py", name, 0, *options)


def core(env: Environment) -> None:
    assert not env.has("torch") and not env.has("click")
    straight = numpy_run(env, "runs/straight")
    command = env.command("python", "program.py", "runs/killed", 0.05)
    with subprocess.Popen(command, cwd=env.folder, stdout=subprocess.DEVNULL) as process:
        while not list(env.folder.glob("runs/killed/checkpoints/*-00000020")):
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    resumed = numpy_run(env, "runs/killed")
    assert "resumed True" in resumed and "resumed False" in straight
    assert re.findall("digest [0-9a-f]{32}", resumed) == re.findall("digest [0-9a-f]{32}", straight)
    assert "pip install click sqlalchemy" in env.everstep("runs", status=1)


def cli(env: Environment) -> None:
    numpy_run(env)
    assert "one" in env.everstep("runs") and "loss" in env.everstep("show", "runs/one")
    for command in COMMANDS:
        assert env.everstep(command, "--help").startswith(f"Usage: everstep {command}")
    assert "sqlalchemy pydantic ruamel.yaml" in env.everstep("config", "none.yaml", status=1)


def postgres(env: Environment) -> None:
    said = env.everstep("runs", "--index", "postgresql://nobody@127.0.0.1:1/none", status=1)
    assert "pip install" not in said and "127.0.0.1" in said


def experiment(env: Environment) -> None:
    (env.folder / "line_task.py").write_text(CONFIG_TASK)
    (env.folder / "line.yaml").write_text(CONFIG)
    assert "max_epoch 2 is reached" in env.everstep("train", "line.yaml", "--skip-check")
    assert "max_epoch 3 is reached" in env.everstep("resume", "line", "trainer.max_epoch=3")


def mirror(env: Environment) -> None:
    said = env.python("-c", "import fsspec, s3fs; print(fsspec.get_filesystem_class('s3').__name__)")
    assert said == "S3FileSystem\n"
    first = numpy_run(env, "runs/one", f"file://{env.folder}/mirror")
    (env.folder / "runs").rename(env.folder / "lost")
    again = numpy_run(env, "runs/one", f"file://{env.folder}/mirror")
    assert re.findall("digest .{32}", again) == re.findall("digest .{32}", first)


def tensorboard(env: Environment) -> None:
    program = NUMPY_PROGRAM.replace("services=[saves]", "services=[saves, everstep.services.TensorBoard()]")
    (env.folder / "events.py").write_text(program)
    env.python("events.py", "runs/one", 0)
    reader = "tensorboard.backend.event_processing.event_accumulator"
    read = f"from {reader} import EventAccumulator as E; e = E('runs/one/logs/tensorboard'); e.Reload()"
    assert env.python("-c", f"{read}; print(e.Tags()['scalars'])") == "['loss']\n"


def logger(call: str) -> Callable[[Environment], None]:
    def log(env: Environment) -> None:
        program = NUMPY_PROGRAM.replace("services=[saves]", f"services=[saves, everstep.services.{call}]")
        program = re.sub("\nassert not .*", "", program)  # the loggers import what they need
        (env.folder / "logging_program.py").write_text(program)
        said = env.python("logging_program.py", "runs/one", 0)
        assert "digest" in said and "warning" not in said

    return log


def ui(env: Environment) -> None:
    numpy_run(env)
    command = env.command("everstep", "ui", "runs", "--port", 0)
    with subprocess.Popen(command, cwd=env.folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = next(line for line in process.stdout if "http://" in line).split()[-1]
            browser = build_opener(HTTPCookieProcessor())
            page = browser.open(link).read().decode()
            scripts = re.findall(r'src="(/?static/[^"]+)"', page)
            assert scripts and all(browser.open(urljoin(link, each)).status == 200 for each in scripts)
            assert b'"total":1' in browser.open(urljoin(link, "/api/runs")).read()
        finally:
            process.send_signal(signal.SIGINT)


def demo_and_data(env: Environment) -> None:
    """Kill and resume the program of the quickstart, and drill it."""
    env.python("-c", "from torchdata.stateful_dataloader import StatefulDataLoader; import everstep.torch")
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (env.folder / "train.py").write_text(program)
    with subprocess.Popen(
        env.command("python", "train.py"), cwd=env.folder, stdout=subprocess.DEVNULL
    ) as process:
        while not list(env.folder.glob("runs/quick/checkpoints/*step-00000100")):
            assert process.poll() is None
        process.kill()
    resumed = env.python("train.py")
    (env.folder / "runs").rename(env.folder / "killed")
    straight = env.python("train.py")
    assert "resume" in resumed
    assert re.findall("digest of the state: .*", resumed) == re.findall("digest of the state: .*", straight)
    assert "exact: 1 of 1" in env.everstep("drill", "--hazard", "resume", "--kills", 1, "train.py")


def reinforcement_learning(env: Environment) -> None:
    """Run the recipe's program for some steps; it learns from step 100 on."""
    page = (ROOT / "docs" / "recipes" / "reinforcement_learning.md").read_text()
    program = page.partition("<!-- snippet: recipe -->\n```python\n")[2].partition("```")[0]
    short = program.replace("max_step=1500", "max_step=110")
    assert short != program
    (env.folder / "cartpole.py").write_text(short)
    assert re.search(r"^digest of the state: \w{32}$", env.python("cartpole.py"), re.M)


USES: dict[str, Callable[[Environment], None]] = {
    "": core,
    "cli": cli,
    "postgres": postgres,
    "experiment": experiment,
    "mirror": mirror,
    "tensorboard": tensorboard,
    "ui": ui,
    "wandb": logger("WandB('tests', mode='offline')"),
    "mlflow": logger("MLflow('sqlite:///mlflow.db')"),
    "trackio": logger("Trackio('tests')"),
    "rl": reinforcement_learning,
    "torch,data,demo": demo_and_data,
}
"""Extras -> what they are for."""


def test_every_extra_is_tried() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - {"test", "campaign"} == {name for names in USES for name in names.split(",") if name}


@pytest.mark.timeout(900)  # torch is unpacked
@pytest.mark.parametrize("extra", USES)
def test_alone_it_does_what_it_is_for(extra: str, wheel: Path, tmp_path: Path) -> None:
    USES[extra](Environment(tmp_path, wheel, extra))


USER = """
import numpy as np
import everstep

data = everstep.data.arrays(np.zeros((8, 2)), batch_size=4)
with everstep.TrainLoop("runs/typed", state={"count": {"n": 0}}, max_epoch=1) as loop:
    for epoch in loop.iter_epochs():
        for step, batch in loop.iter_steps(data):
            loop.collect_metrics(loss=float(step))
reveal_type(epoch)
reveal_type(loop.ending)
loop.collect_metric(loss=1.0)
"""


def test_a_users_type_checker_reads_the_types(wheel: Path, tmp_path: Path) -> None:
    env = Environment(tmp_path, wheel)
    env.pip("install", "mypy")
    (tmp_path / "user.py").write_text(USER)
    said = env.python("-m", "mypy", "--strict", "user.py", status=1)
    assert 'Revealed type is "int"' in said.replace("builtins.", "")
    assert "everstep.supervisor" in said and "Ending" in said
    assert re.findall("error: (.*)", said) == [
        '"TrainLoop" has no attribute "collect_metric"; maybe "collect_metrics"?  [attr-defined]'
    ]


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert "everstep/py.typed" in names


def test_the_sdist_has_every_file_of_the_repository(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == tracked(".")


def test_the_sdist_and_the_tree_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (straight,) = built(tmp_path, "--wheel").glob("*.whl")
    assert straight.name == wheel.name
    assert straight.read_bytes() == wheel.read_bytes()
