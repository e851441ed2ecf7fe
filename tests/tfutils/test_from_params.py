"""`train_from_params` and `test_from_params`: tfutils' tree of parameters over a Trainer."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import digits_params
import numpy as np
import pytest
import torch
from digits_params import accuracy, features, mean_of, mnist_model, params

import everstep
from everstep.backends.torch.tfutils import parts
from everstep.checkpoint import Checkpoint, read_checkpoint
from everstep.compat.tfutils import intermediate_results, recorded_params
from everstep.errors import (
    ChangedError,
    ConfigError,
    HiLossError,
    MetricError,
    NoCheckpointError,
    RestoreError,
)
from everstep.proof.compare import compare_runs
from everstep.record import RunDir, RunJournal
from postgres_server import Server
from tiny_runs import Boom

BASIC = Path("runs/digits/tutorial/basic")
VALID = "validation_params__valid0"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For models of this size more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


start: Any = partial(everstep.compat.tfutils.train_from_params, skip_check=True)


def train(exp_id: str = "basic", **changes: Any) -> everstep.supervisor.Ending:
    ending: everstep.supervisor.Ending = start(**params(exp_id, **changes))
    return ending


def failed(**tree: Any) -> None:
    """Train until the training fails."""
    digits_params.FAILS_AT.append(8)
    with pytest.raises(Boom):
        start(**tree)
    digits_params.FAILS_AT.clear()


def weights(run_dir: Path, step: int = -1) -> dict[str, Any]:
    """The model in a run's newest checkpoint, or in that of step 0."""
    names = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name[-8:]))
    return model_in(read_checkpoint(names[step] if step < 0 else names[0]))


def model_in(saved: Checkpoint) -> dict[str, Any]:
    found = {}
    for path, array in saved.arrays.items():
        if path.startswith("user/model/"):
            found[path.removeprefix("user/model/")] = array.data.tobytes()
    return found


# ------------------------------------------------------------------------------ the tutorial's tree


def test_the_tutorial_is_trained_and_resumed_exactly() -> None:
    loop = {"train_params__train_loop": {"func": digits_params.train_loop}, "train_params__num_steps": 12}
    whole = train("whole", **loop)
    failed(**params(**loop))
    ending = train(**loop)
    assert ending.resumed_from == "step-00000005" and ending.digest == whole.digest
    assert compare_runs(BASIC, BASIC.with_name("whole")) == []
    assert train(**loop).step == 12  # finished
    more = {**loop, "train_params__num_steps": 14}
    assert train(**more).digest == train("more", **more).digest


def kept() -> list[int]:
    return sorted({int(path.name[-8:]) for path in (BASIC / "checkpoints").iterdir()})


def test_cadence_tiers_and_what_is_recorded() -> None:
    train(save_params__cache_filters_freq=3, save_params__save_filters_freq=10)
    journal = RunJournal(BASIC)
    assert journal.series("valid0/top1", "eval/valid0")[0] == [0, 10, 20]
    for name in ("loss", "learning_rate", "top3"):
        assert journal.series(name, "step")[0] == list(range(1, 21))
    assert journal.series("learning_rate", "step")[1] == [0.05] * 8 + [0.025] * 8 + [0.0125] * 4
    # the initial and the permanent ones, and the newest beside them
    assert {0, 10, 20} < set(kept()) and len(kept()) < 7


def test_neither_a_baseline_nor_the_initial_weights_nor_a_threshold() -> None:
    train(
        train_params__validate_first=False,
        train_params__thres_loss=None,
        save_params__save_initial_filters=False,
        save_params__save_valid_freq=np.int32(4),
        train_params__num_steps=np.int64(4),
        save_params__cache_filters_freq=2,
    )
    assert RunJournal(BASIC).series("valid0/top1", "eval/valid0")[0] == [4]
    assert kept()[-1] == 4 and 0 not in kept()
    facts = RunJournal(BASIC).facts()
    assert facts["config"]["train_params"]["thres_loss"] is None
    assert not any("LossBound" in each for each in facts["services"])


def test_nothing_is_saved_without_do_save_or_with_dont_run() -> None:
    assert train(save_params__do_save=False, train_params__num_steps=2).step == 2
    trainer = start(**params(), dont_run=True)
    assert isinstance(trainer, everstep.Trainer) and trainer.max_step == 20
    assert not Path("runs").exists()


def test_a_loss_above_the_threshold_is_an_error_and_not_saved() -> None:
    with pytest.raises(HiLossError, match=r"loss is .* at step 1, above its bound 1"):
        train(train_params__thres_loss=1)
    assert kept() == [0]


def test_minibatches_are_the_whole_batch() -> None:
    change: dict[str, Any] = {"model_params__dropout": 0.0, "train_params__num_steps": 4}
    train("whole", **change)
    train("parts", train_params__minibatch_size=16, **change)
    losses = [RunJournal(BASIC.with_name(n)).series("loss", "step")[1] for n in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_is_no_row_of_a_sample_is_whole_in_every_minibatch() -> None:
    batch = {"images": torch.zeros(4, 2), "names": list("abcd"), "shard": "shard"}
    batch |= {"weights": torch.ones(10), "scale": torch.tensor(2.0)}
    (whole,) = parts(batch, None)
    assert whole == (batch, 1.0)
    first, last = parts(batch, 3)
    assert [share for _, share in (first, last)] == [0.75, 0.25]
    assert (len(first[0]["images"]), last[0]["names"]) == (3, ["d"])
    for part, _ in (first, last):
        assert all(part[name] is batch[name] for name in ("shard", "weights", "scale"))


def test_clipping_around_an_optimizer_class_and_parameters_that_are_not_trained() -> None:
    clipped = {
        "optimizer": everstep.torch.ClipOptimizer,
        "optimizer_class": torch.optim.SGD,
        "clip": {"global_norm": 0.01},
        "momentum": 0.9,
        "trainable_names": "head",
    }
    train(optimizer_params=clipped, train_params__num_steps=3)
    norms = RunJournal(BASIC).series("grad_norm", "step")[1]
    assert len(norms) == 3 and min(norms) > 0.01
    first, last = weights(BASIC, 0), weights(BASIC)
    assert first["conv.weight"] == last["conv.weight"] and first["head.weight"] != last["head.weight"]


def test_aggregations_of_validations() -> None:
    online = params(train_params__num_steps=1, **{f"{VALID}__online_agg_func": digits_params.running_mean})
    valid = online["validation_params"]["valid0"]
    valid["data"], valid["agg_func"] = valid.pop("data_params"), None
    start(**online)
    train("plain", train_params__num_steps=1)
    journals = [RunJournal(BASIC.with_name(name)) for name in ("basic", "plain")]
    running, listed = (journal.series("valid0/top1", "eval/valid0")[1] for journal in journals)
    assert running == pytest.approx(listed)


def test_a_model_of_numpy_trains_itself() -> None:
    def begin(exp_id: str, num_steps: int) -> str:
        tree = params(exp_id, train_params__num_steps=num_steps, train_params__targets=None)
        tree["model_params"] = {"func": digits_params.numpy_model, "seed": 3}
        del tree["loss_params"], tree["optimizer_params"], tree["validation_params"]
        return str(start(**tree).digest)

    begin("twice", 3)
    assert begin("basic", 8) == begin("twice", 8)


# ------------------------------------------------------------------------------------------ lists


@pytest.mark.campaign("long")
def test_several_models_train_on_one_reading_each_as_if_alone() -> None:
    widths, seeds = (4, 6, 4), (3, 3, 5)
    data = {"func": digits_params.counted, "batch_size": 20}
    models = [{"func": mnist_model, "seed": seed, "width": w} for w, seed in zip(widths, seeds, strict=True)]
    tree = params("several", train_params__data_params=data, train_params__num_steps=4)
    digits_params.READS.clear()
    endings = start(**{**tree, "model_params": models})
    assert len(digits_params.READS) == 4 + 1  # and the batch that tells the models its shape
    for number, model in enumerate(models):
        changes = {"train_params__data_params": data, "train_params__num_steps": 4, "model_params": model}
        alone = train(f"alone{number}", **changes)
        assert alone.digest == endings[number].digest
        run_dir = BASIC.with_name(f"several_model_{number}")
        assert compare_runs(run_dir, BASIC.with_name(f"alone{number}")) == []


def test_lists_that_do_not_fit() -> None:
    smaller = params(train_params__data_params__batch_size=25)["train_params"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"loss_params": []}, "loss_params has 0"),
        ({"model_params": [{"func": mnist_model}] * 2, "loss_params": []}, "loss_params has 0"),
        ({"model_params": [{"func": mnist_model}] * 2, "load_params": [None] * 3}, "model_params has 2"),
        ({"train_params": [params()["train_params"], smaller]}, "data_params differ"),
    ]
    for changes, said in wrong:
        with pytest.raises(ConfigError, match=said):
            start(**{**params(), **changes})


# ---------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps, trained once."""
    root = tmp_path_factory.mktemp("made")
    train(save_params__cache_dir=str(root), train_params__num_steps=10)
    return root / BASIC.relative_to("runs")


@pytest.fixture
def trained(made: Path) -> Path:
    shutil.copytree(made, BASIC)
    return BASIC


HERE = {"dbname": "digits", "collname": "tutorial"}


def load(run: str, num_steps: int = 11, **load_params: Any) -> Path:
    """Train a second run that begins with parts of another one; its run directory."""
    place = {} if "from_ckpt" in load_params else {**HERE, "exp_id": "basic"}
    place |= load_params
    given = {"load_params": place, "model_params__seed": 9}
    train(run, train_params__num_steps=num_steps, **given)
    return BASIC.with_name(run)


def test_a_second_run_goes_on_where_another_stands(trained: Path) -> None:
    second = load("second")
    assert weights(second, 0) == weights(trained)
    assert RunJournal(second).series("learning_rate", "step") == ([11], [0.025])
    third = load("third", num_steps=2, restore_global_step=False)
    assert weights(third, 0) == weights(trained)
    assert RunJournal(third).series("learning_rate", "step") == ([1, 2], [0.05, 0.05])


def test_a_second_run_counts_from_the_weights_that_it_took_of_a_run_that_trains_on(trained: Path) -> None:
    def model(inputs: Mapping[str, Any], train: bool, seed: int, width: int = 4) -> digits_params.Net:
        if seed == 9:  # the second run is built: meanwhile the first one saves steps 11 and 12
            start(**params(train_params__num_steps=12))
        return mnist_model(inputs, train, seed, width)

    given = {**HERE, "exp_id": "basic"}
    ending = train(
        "second",
        train_params__num_steps=18,
        model_params__func=model,
        model_params__seed=9,
        load_params=given,
    )
    assert (trained / "checkpoints" / "epoch-0002-step-00000012").exists() and ending.step == 18
    steps, rates = RunJournal(BASIC.with_name("second")).series("learning_rate", "step")
    assert steps == list(range(13, 19)) and rates == [0.025] * 4 + [0.0125] * 2


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    "choice",
    [re.compile("^model/conv"), "conv", ["conv.weight", "model/conv.bias"], digits_params.only_conv],
    ids=["pattern", "regex", "list", "callable"],
)
def test_to_restore_chooses(trained: Path, choice: Any) -> None:
    second = weights(load("second", to_restore=choice), 0)
    old, fresh = weights(trained), weights(trained, 0)
    assert {name for name in old if second[name] == old[name]} == {"conv.weight", "conv.bias"}
    assert second["head.weight"] not in (old["head.weight"], fresh["head.weight"])


def test_load_param_dict_renames(trained: Path) -> None:
    name = {"conv.weight": "features.weight", "conv.bias": "features.bias"}
    load_params = {**HERE, "exp_id": "basic", "load_param_dict": name}
    renamed = {"func": digits_params.renamed_model, "seed": 9}
    train("second", load_params=load_params, model_params=renamed, train_params__num_steps=11)
    second, old = weights(BASIC.with_name("second"), 0), weights(trained)
    assert second["features.weight"] == old["conv.weight"]
    assert second["features.bias"] == old["conv.bias"]
    assert second["head.weight"] != old["head.weight"]


def test_from_ckpt_takes_a_path(trained: Path) -> None:
    ninth = read_checkpoint(trained / "checkpoints" / "step-00000009")
    second = weights(load("second", num_steps=10, from_ckpt=str(ninth.path)), 0)
    assert second == model_in(ninth) != weights(trained)


def test_a_run_with_checkpoints_of_its_own_goes_on_with_them_or_starts_over(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(load_params={**HERE, "exp_id": "other"}).resumed_from == "step-00000009"
    assert "load_params are not used" in capsys.readouterr().out
    ending = train(load_params={"do_restore": False}, train_params__num_steps=1)
    assert ending.step == 1 and ending.resumed_from is None


NO_LOAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ConfigError, r"no 'conv.wieght'; did you mean 'model/conv.weight'", {"to_restore": ["conv.wieght"]}),
    (ConfigError, "to_restore chooses nothing", {"to_restore": "^nothing$"}),
    (ConfigError, r"at step 10.*num_steps=10 would .*restore_global_step=False", {"num_steps": 10}),
    (ConfigError, "loading pointlessly", {"exp_id": "second", "query": {"step": 10}}),
    (NoCheckpointError, "nowhere", {"from_ckpt": "runs/nowhere"}),
    (NoCheckpointError, "finds no checkpoint", {"exp_id": None, "query": {"config.model_params.width": 5}}),
]


def test_what_cannot_be_loaded_or_validated(trained: Path) -> None:
    for error, said, how in NO_LOAD:
        with pytest.raises(error, match=said):
            load("second", **how)
    for error, said, where in (
        (NoCheckpointError, "none", {"exp_id": "none"}),
        (ConfigError, "load_params name no checkpoint", {}),
        (ConfigError, "validation_params name no validation", {**HERE, "exp_id": "basic"}),
    ):
        valid = {} if "validation" in said else params()["validation_params"]
        with pytest.raises(error, match=said):
            everstep.compat.tfutils.test_from_params(where, {"func": mnist_model}, valid)


def test_a_model_that_does_not_fit_is_an_error_with_the_three_lists(trained: Path) -> None:
    given = {**HERE, "exp_id": "basic"}
    with pytest.raises(RestoreError) as raised:
        train("second", load_params=given, model_params__width=6)
    assert (
        "model/conv.weight (4, 1, 3, 3) torch.float32 -> (6, 1, 3, 3) torch.float32" in raised.value.reshaped
    )
    with pytest.raises(RestoreError) as raised:
        train("third", load_params=given, model_params={"func": digits_params.renamed_model})
    assert "model/features.weight" in raised.value.missing
    assert "model/conv.weight" in raised.value.unexpected


def test_at_its_own_place_a_changed_model_is_never_silent(trained: Path) -> None:
    with pytest.raises(ChangedError, match=r"model_params\.width: stored 4, given 6"):
        train(model_params__width=6)
    wide = {**params(model_params__width=6), "on_change": "override"}
    with pytest.raises(RestoreError, match=r"reshaped .*model/conv.weight .4, 1, 3, 3. .*-> .6, 1, 3, 3."):
        start(**wide)
    assert start(**params(model_params__dropout=0.5), on_change="override").step == 20
    assert RunJournal(trained).facts()["config"]["model_params"]["dropout"] == 0.5


# ---------------------------------------------------------------------------------------- queries


def test_a_query_finds_the_run_to_load(trained: Path) -> None:
    train("wide", model_params__width=6, train_params__num_steps=1)
    second = load("second", exp_id=None, query={"config.model_params.width": 4})
    assert weights(second, 0) == weights(trained)
    early = load("early", num_steps=2, query={"step": {"$lt": 3}})
    assert weights(early, 0) == weights(trained, 0)
    assert RunJournal(early).series("loss", "step")[0] == [1, 2]
    named = "digits_params:mnist_model"
    found = everstep.query("runs", {"config.model_params.func.call": named}, index="runs/digits/tutorial")
    assert {Path(run["path"]).name for run in found} == {"basic", "wide", "second", "early"}


@pytest.mark.campaign("machine")
def test_host_and_port_are_a_database(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_INDEX", "")  # as if it were not set
    url = server.database()
    train(save_params__host=url, train_params__num_steps=3)
    assert not list(BASIC.parent.glob("everstep.db"))
    (run,) = everstep.query("runs", {"config.save_params.exp_id": "basic"}, index=url)
    assert run["step"] == 3 and os.environ["EVERSTEP_INDEX"] == ""
    both = params(train_params__num_steps=3)
    save = [{**both["save_params"], "exp_id": name, "host": host} for name, host in (("a", url), ("b", None))]
    with pytest.raises(ConfigError, match="host and port differ"):
        start(**{**both, "save_params": save})


# ------------------------------------------------------------------------------------------ tests


def validate(save_params: Any = None, **valid: Any) -> Any:
    validations = copy.deepcopy(params()["validation_params"])
    validations["valid0"] |= valid
    place = {**HERE, "exp_id": "basic"}
    model = {"func": mnist_model, "width": 4}
    return everstep.compat.tfutils.test_from_params(place, model, validations, save_params, skip_check=True)


def test_a_test_is_recorded_with_its_checkpoint(trained: Path) -> None:
    found = validate()
    inside = RunJournal(trained).series("valid0/top1", "eval/valid0")
    assert found == {"valid0": {"top1": inside[1][-1]}}
    (record,) = everstep.runs.evaluations(trained)
    assert record.metrics == {"valid0/top1": found["valid0"]["top1"]} and record.step == 10


def test_a_test_of_its_own_place_keeps_intermediate_results(trained: Path) -> None:
    save = {**HERE, "exp_id": "test1", "save_intermediate_freq": 2}
    targets: dict[str, Any] = {"targets": {"func": features}, "num_steps": None, "agg_func": mean_of}
    found = validate(save, **targets)
    assert found["valid0"]["batches"] == 4
    place = BASIC.with_name("test1")
    first, second = intermediate_results(place, "valid0")
    assert (first["batch"], second["batch"]) == (2, 4)
    assert first["results"]["scores"].shape == (30, 10) and second["results"]["scores"].shape == (10, 10)
    assert isinstance(first["results"]["hits"], float)
    validates = RunDir.open(place, create=False).facts["validates"]
    assert validates["run"] == RunDir.open(trained, create=False).id and validates["step"] == 10
    assert validate(save, **targets) == found
    assert len(intermediate_results(place)) == 2
    metrics = {f"valid0/{name}": value for name, value in found["valid0"].items()}
    assert [each.metrics for each in everstep.runs.evaluations(place)] == [metrics]


def test_a_test_is_not_recorded_in_a_training_run(trained: Path) -> None:
    other = BASIC.with_name("other")
    shutil.copytree(trained, other)
    before = sorted(other.rglob("*"))
    with pytest.raises(ConfigError, match="is not a test; give another exp_id"):
        validate({**HERE, "exp_id": "other"})
    assert sorted(other.rglob("*")) == before


# --------------------------------------------------------------------------------- what is recorded


def test_a_run_is_made_again_from_its_record(trained: Path) -> None:
    tree = recorded_params(trained)
    assert tree["model_params"]["func"] is mnist_model
    tree["save_params"]["exp_id"] = "again"
    again = start(**tree)
    assert again.digest == read_checkpoint(trained / "checkpoints" / "epoch-0002-step-00000010").digest


def test_a_pattern_is_recorded_as_a_string_that_finds_the_same() -> None:
    pattern = re.compile("a.b", re.IGNORECASE | re.DOTALL)
    tree = {"load_params": {"to_restore": pattern}, "model_params": {"func": mnist_model}}
    doors: Any = everstep.compat.tfutils
    recorded = doors.configuration(doors.check_tree(doors.TreeOfTest, tree)).tree
    assert doors.restore_tree(recorded)["load_params"]["to_restore"] == "(?is)a.b"
    assert re.search("(?is)a.b", "A\nb")


def test_functions_are_recorded_with_where_they_come_from() -> None:
    everstep.compat.tfutils.train_from_params(**params(train_params__num_steps=1))
    (start,) = RunJournal(BASIC).events("segment", valid=False)
    config = start.data["facts"]["config"]
    func, loss = config["model_params"]["func"], config["loss_params"]["loss_func"]
    assert func["call"] == "digits_params:mnist_model" and func["source"] == digits_params.__file__
    assert loss["call"] == "torch.nn.functional:cross_entropy" and loss["version"] == torch.__version__


def test_what_nobody_finds_again_is_recorded_and_says_so() -> None:
    def local(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Any]:
        return accuracy(inputs, outputs)

    train(train_params__targets={"func": local}, train_params__num_steps=1)
    with pytest.raises(
        ConfigError, match=r"train_params\.targets\.func was .*<locals>.*top level of its module"
    ):
        recorded_params(BASIC)


# ------------------------------------------------------------------------------------------- misuse


WRONG: list[tuple[str, Any, str]] = [
    ("save_params__save_valid_frq", 1, "save_params.save_valid_frq: unknown key .* mean 'save_valid_freq'"),
    ("save_params__exp_id", 7, "save_params.exp_id: 7 is an integer; give a string"),
    ("save_params__exp_id", None, "save_params.exp_id is missing"),
    ("save_params__exp_id", "", "exp_id: '': String should have at least 1 character; correct it"),
    ("save_params__cache_max_num", 0, "save_params.cache_max_num: 0 is an integer; give "),
    ("save_params__dbname", "a/b", "'a/b' names a folder"),
    ("save_params__port", 27017, "port=27017 with host=None; give a PostgreSQL's host"),
    ("save_params__save_to_gfs", ["x"], r"save_to_gfs is gone: .*save_intermediate_freq.*service"),
    ("model_params__func", "net", "model_params.func: 'net' is a string; give a function"),
    ("model_params__widht", 3, r"mnist_model\(\) has no argument 'widht'; did you mean 'width'"),
    ("model_params__func", digits_params.any_model, r"model_params: any_model\(\) needs 'depth'; give it"),
    ("model_params__width", object(), r"config\['model_params'\]\['width'\] is .*give numbers"),
    ("train_params__num_steps", True, "train_params.num_steps: True is a boolean; give an integer"),
    ("train_params__queue_params", {}, "train_params: queue_params is gone"),
    ("train_params__data_params__batch_sise", 3, "train_params.data_params: .*no argument 'batch_sise'"),
    ("train_params__data_params__batch_size", 2.5, "data_params.batch_size: 2.5 is a number; give an int"),
    ("train_params__targets", {"func": lambda inputs, outputs: {"loss": outputs.mean()}}, "'loss' is taken"),
    ("train_params__targets", {"func": lambda inputs, outputs: {"scores": outputs}}, "scores"),
    ("loss_params__loss_per_case_func", len, "loss_per_case_func is gone: it is loss_func"),
    ("loss_params__pred_targets", "label", "a batch has no 'label'; did you mean 'labels'"),
    ("loss_params__loss_func_kwargs", {"x": float("nan")}, r"\['x'\] is nan, which JSON lacks"),
    ("loss_params__loss_func_kwargs", {1: 2}, "loss_func_kwargs: the key 1 is an integer; give a string"),
    ("learning_rate_params__func", accuracy, "is called with global_step="),
    ("learning_rate_params__func", lambda global_step, **_: None, "returned None at step 0; return a number"),
    ("optimizer_params__momentun", 1, r"sgd\(\) has no argument 'momentun'; did you mean 'momentum'"),
    (f"{VALID}__targets", accuracy, "valid0.targets: <function .* is a function; give a mapping"),
    (f"{VALID}__data_params", {"func": dict}, "batch_size is missing; give the number of samples"),
    ("validation_params", [1], "validation_params: 1 is an integer; give a mapping"),
    ("train_params__data_params__func", lambda batch_size, **_: {}, "returned an empty dictionary"),
    ("train_params__data_params__func", lambda batch_size, **_: [(1, 2)], "a batch is a tuple; let "),
    ("train_params__data_params__func", lambda batch_size, **_: iter([]), "would take it from the training"),
    ("model_params__func", lambda inputs, train, seed, **_: None, "returned None; return a torch.nn.Module"),
    ("loss_params", None, "loss_params is missing; give it: a torch model needs it"),
    ("load_params", {"to_restor": 1}, "load_params.to_restor: unknown key .*did you mean 'to_restore'"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG)
def test_what_cannot_be_right_names_its_place(place: str, value: Any, said: str) -> None:
    with pytest.raises(MetricError if said == "scores" else ConfigError, match=said):
        train(**{place: value})


def test_all_mistakes_of_a_tree_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        train(
            save_params__cache_dir=3,
            train_params__num_step=3,
            load_params={"load_param_dict": {1: "conv.weight"}, "to_restore": 7},
            validation_params={"a/b": params()["validation_params"]["valid0"]},
        )
    first, *lines = str(raised.value).splitlines()
    assert first == "5 mistakes:"
    assert sorted(line.strip()[:60] for line in lines) == [
        "load_params.load_param_dict: the key 1 is an integer; give a",
        "load_params.to_restore: 7 is an integer; give a string or a ",
        "save_params.cache_dir: 3 is an integer; give a string or an ",
        "train_params.num_step: unknown key 'num_step'; did you mean ",
        "validation_params: 'a/b' cannot name a validation; give anot",
    ]
