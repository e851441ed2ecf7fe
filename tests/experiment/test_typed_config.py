"""A config: files over defaults, overrides over files, types, calls; and what is said of each mistake."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import everstep
from everstep.errors import ConfigError
from everstep.experiment.calls import CallWith
from everstep.experiment.config import MAIN_SERVICES, Call, ExperimentConfig, TrainerConfig, as_yaml, resolve
from everstep.schedule import At, Every, Never, Schedule
from gate import share

HERE = __name__


@dataclass
class Layer:
    width: int = 8
    rates: tuple[float, ...] = (0.5,)


@dataclass
class Config:
    """What the tests resolve."""

    lr: float = 0.1
    steps: int | None = None
    mode: Literal["min", "max"] = "min"
    layer: Layer = field(default_factory=Layer)
    layers: list[Layer] = field(default_factory=list)
    named: dict[str, Layer] = field(default_factory=dict)
    folder: Path | None = None
    net: Call | None = None
    late: CallWith | None = None


class Net:
    """What a config makes."""

    def __init__(
        self,
        width: int = 1,
        *,
        layer: Layer | None = None,
        act: Callable[[float], float] | None = None,
        every: Schedule | None = None,
        inner: Net | None = None,
        parts: list[Net] | None = None,
    ) -> None:
        self.width, self.layer, self.act, self.every = width, layer, act, every
        self.inner, self.parts = inner, parts


class Rate:
    """With types as those of torch's optimizers, and unions."""

    def __init__(
        self, lr: float | Net = 0.1, of: str | tuple[str, str] | None = None, net: Net | None = None
    ) -> None: ...


def needs(first: object, scale: float) -> tuple[object, float]:
    return first, scale


def by_position(value: float, /, scale: float = 1.0) -> float:
    return value * scale


def odd(
    a: int = None,  # type: ignore[assignment]  # noqa: RUF013
    b: float = 1,
    c: tuple[int, ...] = (1, 2),
    d: float = math.inf,
    e: object = object,
    *,
    f: dict[str, float] = {"x": 0.5},  # noqa: B006
    **more: object,
) -> list[object]:
    return [a, b, c, d, e, f, more]


def anything(**arguments: object) -> Mapping[str, object]:
    return arguments


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "a.yaml") -> str:
        Path(name).write_text(text)
        return name

    return write


def given(*overrides: str, **options: Any) -> Config:
    return resolve(Config, (), overrides, **options).config


# ----------------------------------------------------------------------------------------- layers
def test_files_lie_over_defaults_later_ones_over_earlier_ones(write: Callable[..., str]) -> None:
    first = write("lr: 1e-3\nlayer: {width: 4, rates: [1, 2]}\nnamed: {a: {width: 1}, b: {width: 2}}\n")
    second = write("layer:\n  width: 5\nnamed:\n  b: {rates: [3]}\n", "b.yaml")
    found = resolve(Config, [first, second], ["steps=7"]).config
    assert (found.lr, found.steps, found.mode) == (1e-3, 7, "min")
    assert found.layer == Layer(5, (1.0, 2.0))
    assert found.named == {"a": Layer(1), "b": Layer(2, (3.0,))}


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("lr=0.1", "lr", 0.1),
        ("lr=1e-3", "lr", 1e-3),
        ("lr=1", "lr", 1.0),
        ("steps=null", "steps", None),
        ("mode=max", "mode", "max"),
        ("layer.width=3", "layer", Layer(3)),
        ("layer={rates: [1]}", "layer", Layer(8, (1.0,))),
        ("layers=[{width: 1}, {}]", "layers", [Layer(1), Layer()]),
        ("named.new.width=2", "named", {"new": Layer(2)}),
        ("folder=a/b", "folder", Path("a/b")),
        ("folder=2026-01-02", "folder", Path("2026-01-02")),
    ],
)
def test_an_override_has_the_type_of_the_schema(override: str, name: str, value: object) -> None:
    found = getattr(given(override), name)
    assert found == value and type(found) is type(value)


def test_an_override_reaches_into_a_list_and_replaces_what_it_names(write: Callable[..., str]) -> None:
    file = write("layers: [{width: 1}, {width: 2, rates: [9]}]\nlayer: {width: 1, rates: [9]}\n")
    found = resolve(Config, [file], ["layers.1.width=5", "layer={width: 3}"]).config
    assert found.layers == [Layer(1), Layer(5, (9.0,))]
    assert found.layer == Layer(3)
    for key in ("-1", "2"):
        words = f"layers has 2 entries, but no entry {key}; give a number from 0 to 1"
        with pytest.raises(ConfigError, match=words):
            resolve(Config, [file], [f"layers.{key}.width=3"])


def test_aliases_that_stand_for_too_much_are_refused(write: Callable[..., str]) -> None:
    """Nine lines that stand for ten to the ninth values."""
    lines = ["a0: &a0 [" + ", ".join("x" * 10) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100,000 values, with each alias written out"):
        resolve(Config, [write("\n".join(lines))])


def test_the_resolved_tree_is_yaml_that_resolves_to_the_same(write: Callable[..., str]) -> None:
    text = f"lr: 3e-5\nnet: {{call: '{HERE}:Net', width: 3, layer: {{width: 2}}}}\nmode: max\nlayers: [{{}}]"
    found = resolve(Config, [write(text)])
    again = resolve(Config, [write(as_yaml(found.tree), "again.yaml")])
    assert again == found
    assert resolve(Config, base=found.tree) == found
    assert found.tree["layer"] == {"width": 8, "rates": [0.5]}  # defaults are filled in


MISPLACED = ("[x]", "xyz", "3", "", "{}", "[]", "{x: }", "{x: [3]}", "[{x: }]", "{'': {}}", "true", "1.5")


@pytest.mark.campaign("long", gate="share")
def test_a_value_of_another_kind_under_any_key_is_an_error_with_its_line(tmp_path: Path) -> None:
    file, fields = tmp_path / "config.yaml", dataclasses.fields
    keys = [[each.name] for each in fields(ExperimentConfig)]
    keys += [["trainer", each.name] for each in fields(TrainerConfig)]
    said = []
    places = share(itertools.product(keys, MISPLACED), 70)
    for key, value in places:
        needed = {"task": f"{HERE}:Net", "streams": f"{{train: {HERE}:Net}}"}
        lines = [f"{name}: {given}" for name, given in needed.items() if name != key[0]]
        lines.append(": {".join(key) + f": {value}" + "}" * (len(key) - 1))
        file.write_text("\n".join(lines) + "\n")
        for profile in None, "x":
            try:
                resolve(ExperimentConfig, [file], profile=profile)
            except ConfigError as error:
                said.append(str(error))
    unknown = "the config has no profile 'x'"
    assert all(f"{file}, line " in each or each.startswith(unknown) for each in said)
    assert len(said) > len(places)


def test_a_profile_is_laid_over_all_lists_replaced_the_rest_merged() -> None:
    tree = {
        "task": f"{HERE}:Net",
        "streams": {"train": {"call": f"{HERE}:Net", "width": 2}},
        "services": [{"Evaluate": {}}, {"Best": {"metric": "loss"}}],
        "profiles": {"eval": {"services": ["Console"], "streams": {"train": {"width": 5}}}},
    }
    plain, profiled = (resolve(ExperimentConfig, base=tree, profile=p).config for p in (None, "eval"))
    assert [service.name for service in plain.services] == ["Evaluate", "Best"]
    assert [service.name for service in profiled.services] == ["Console"]
    assert profiled.streams["train"].arguments["width"] == 5 and profiled.task == plain.task
    with pytest.raises(ConfigError, match="no profile 'evl'; did you mean 'eval'"):
        resolve(ExperimentConfig, base=tree, profile="evl")


def test_a_config_may_be_looked_at_without_importing_what_it_calls() -> None:
    call = {"call": "nowhere:x", "y": 1}
    tree: Any = {"task": call, "streams": {"train": call}, "trainer": {"init_from": {"path": call}}}
    tree["services"] = [{"nowhere:Service": {"z": call}}]
    found = resolve(ExperimentConfig, base=tree, imports=False).tree
    assert found["task"] == call and found["services"] == tree["services"]
    with pytest.raises(ConfigError, match="3 mistakes"):
        resolve(ExperimentConfig, base=tree)


# ------------------------------------------------------------------------------------------ calls
def test_a_call_gets_its_arguments_with_the_types_of_its_signature() -> None:
    made = given(
        f"net={{call: {HERE}:Net, width: 3, layer: {{width: 2, rates: [1, 2]}}, act: math:sin, "
        f"every: {{steps: 5}}, inner: {{call: {HERE}:Net, width: 4}}, parts: [{{call: {HERE}:Net}}]}}"
    ).net
    assert made is not None
    net = made()
    assert (net.width, net.layer, net.act(0.0)) == (3, Layer(2, (1.0, 2.0)), 0.0)
    assert (net.every, net.inner.width, net.parts[0].width) == (Every(steps=5), 4, 1)
    assert given(f"net={HERE}:Net").net == given(f"net={{call: {HERE}:Net, width: 1}}").net
    assert Call(f"{HERE}:anything", {"a": 1})() == {"a": 1}
    assert Call("builtins:dict", {"a": 1})() == {"a": 1}  # written in C


def test_what_comes_late_is_not_the_configs() -> None:
    second = given(f"late={{call: {HERE}:by_position, scale: 2}}").late
    assert second is not None and second(3.0) == 6.0
    late = given(f"late={{call: {HERE}:needs, scale: 2}}").late
    assert late is not None and late("first") == ("first", 2.0)
    with pytest.raises(ConfigError, match="has no argument 'first'"):
        given(f"late={{call: {HERE}:needs, scale: 2, first: 1}}")


def test_the_plain_defaults_of_calls_are_filled_in_and_are_what_python_would_take() -> None:
    found = resolve(Config, (), [f"net={HERE}:odd"])
    assert found.tree["net"] == {"call": f"{HERE}:odd", "a": None, "b": 1, "c": [1, 2], "f": {"x": 0.5}}
    assert resolve(Config, base=found.tree) == found
    assert found.defaults == ("net.a", "net.b", "net.c", "net.f")
    assert found.config.net is not None
    called = found.config.net()
    assert called == odd() and type(called[1]) is int and called[2] == (1, 2)
    given = resolve(Config, (), [f"net={{call: {HERE}:odd, b: 1.0, d: 2, g: {{call: {HERE}:odd}}}}"])
    assert "net.b" not in given.defaults and "net.g.b" in given.defaults
    assert given.tree["net"]["d"] == 2 and given.tree["net"]["g"]["c"] == [1, 2]
    late = resolve(Config, (), [f"late={{call: {HERE}:needs, scale: 2}}"]).tree["late"]
    assert late == {"call": f"{HERE}:needs", "scale": 2}


def test_schedules() -> None:
    for text, schedule in {
        "{epochs: 2}": Every(epochs=2),
        "{at: [3, 5]}": At(3, 5),
        "never": Never(),
        "[{epochs: 1}, {steps: 10}, {at: 3}]": Every(epochs=1) | Every(steps=10) | At(3),
    }.items():
        net = given(f"net={{call: {HERE}:Net, every: {text}}}").net
        assert net is not None and net().every == schedule


def test_another_function_does_not_get_the_arguments_of_the_one_before(write: Callable[..., str]) -> None:
    file = write(f"late: {{call: '{HERE}:needs', scale: 2}}\n")
    over = write(f"late: {{call: '{HERE}:anything', a: 1}}\n", "b.yaml")
    for layers in ([file, over], []), ([file], [f"late.call={HERE}:anything", "late.a=1"]):
        found = resolve(Config, *layers).config.late
        assert found == CallWith(f"{HERE}:anything", {"a": 1})
    again = resolve(Config, [file], [f"late.call={HERE}:needs", "late.scale=3"]).config.late
    assert again == CallWith(f"{HERE}:needs", {"scale": 3})


def test_every_service_of_the_door_has_its_name() -> None:
    doors = {name for name in everstep.__all__ if isinstance(getattr(everstep, name), type)}
    exported = {name for name in doors if issubclass(getattr(everstep, name), everstep.Service)}
    assert exported - {"Service"} == set(MAIN_SERVICES)


# --------------------------------------------------------------------------------------- mistakes
def net(arguments: str) -> str:
    return f"net: {{call: '{HERE}:{arguments}}}\n"


MISTAKES = [
    ("lr: 1\nlayre: {}\n", r"a.yaml, line 2: layre: unknown key 'layre'; did you mean 'layer'"),
    ("layer:\n  widht: 4\n", r"line 2: layer.widht: unknown key .* mean 'width'.*known: rates"),
    ("named:\n  a:\n    widht: 4\n", r"line 3: named.a.widht: unknown key .* mean 'width'"),
    ("lr: fast\n", r"line 1: lr: 'fast' is a string; give a number"),
    ("lr: '0.1'\n", r"line 1: lr: '0.1' is a string; give a number$"),
    ("layers: 3\n", r"layers: 3 is an integer; give a list$"),
    ("steps: 1.5\n", r"line 1: steps: 1.5 is a number; give an integer"),
    ("steps: true\n", r"line 1: steps: True is a boolean; give an integer"),
    ("mode: mni\n", r"line 1: mode: 'mni' is a string; give 'min' or 'max'"),
    ("layer:\n  rates: [1,\n    x]\n", r"line 3: layer.rates.1: 'x' is a string; give a number"),
    (net("Rate', lr: '1e-3'"), r"net.lr: '1e-3' is a string; give a number$"),
    (net("Rate', of: [a, 3]"), r"net.of.1: 3 is an integer; give a string$"),
    (net("Rate', of: 3"), r"net.of: 3 is an integer; give a string or a list$"),
    (net("Rate', net: 3"), r"net.net: 3 is an integer, and .* is asked for; give {call"),
    ("net: 3\n", r"line 1: net: 3 names nothing to call; give {call: module:name, argument: value}"),
    ("net: numpy\n", r"net.call: 'numpy' is not an import path; give module:name"),
    ("net: nowhere_at_all:x\n", r"net.call: .*importing nowhere_at_all failed .*correct the path"),
    (net("Nte'"), r"net.call: .*no 'Nte' in .*did you mean 'Net'"),
    (net("HERE'"), r"net.call: .*give a function or a class"),
    (f"net:\n  call: {HERE}:Net\n  widht: 3\n", r"line 3: net.widht: Net\(\) has no .*mean 'width'"),
    (net("Net', width: x"), r"net.width: 'x' is a string; give an integer"),
    (net("Net', layer: {widht: 1}"), r"layer.widht: unknown key.*mean 'width'"),
    (net(f"Net', inner: {{call: '{HERE}:Nte'}}"), r"net.inner.call: .*mean 'Net'"),
    (net("Net', act: 'math:sni'"), r"net.act: .*did you mean 'sin'"),
    (net("Net', every: 5"), r"net.every: 5 is not a schedule; give {steps: 100}"),
    (net("Net', every: {step: 5}"), r"net.every: .*'step'; did you mean 'steps'"),
    (f"late: {HERE}:needs\n", r"line 1: late: needs\(\) needs 'scale'; give it"),
    (net("by_position'"), r"net: by_position\(\) takes 'value' by position only"),
    (net("anything', a: [.nan]"), r"line 1: net.a.0: nan is not a number of JSON"),
    ("lr: 1\nlr: 2\n", r'a.yaml, line 2: found duplicate key "lr"'),
    ("lr: [1\n", r"a.yaml, line \d: .*correct the YAML"),
    ("1: 2\n", r"a.yaml, line 1: the key 1 is not a string"),
    ("named: !!set {a}\n", r"line 1: named: .* is a CommentedSet; give a value of JSON"),
    ("- 1\n", r"a.yaml holds \[1\]; give keys and values"),
    ("a: " + "[" * 1000, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES)
def test_a_mistake_is_told_with_its_place(write: Callable[..., str], text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(Config, [write(text)])


def test_all_mistakes_are_told_at_once(write: Callable[..., str]) -> None:
    text = f"lrr: 1\nnet: {{call: '{HERE}:Net', widht: 3}}\nlate: {HERE}:needs\nlayers: [{{}}, 3]\n"
    with pytest.raises(ConfigError, match="5 mistakes") as raised:
        resolve(Config, [write(text)], ["layer.width=y"])
    for said in ("line 1: lrr: ", "line 2: net.widht: ", "line 3: late: ", "line 4: layers.1: "):
        assert f"a.yaml, {said}" in str(raised.value)
    assert "override 'layer.width=y': layer.width: " in str(raised.value)


def test_a_wrong_override_is_told() -> None:
    for override, said in {
        "layer.widht=3": r"override 'layer.widht=3': layer.widht: unknown key .*did you mean 'width'",
        "layr.width=3": r"override 'layr.width=3': layr: unknown key 'layr'; did you mean 'layer'",
        "lr.x=3": r"lr: {'x': 3} is a mapping; give a number",
        "layers.2.width=3": r"layers: .*is a mapping; give",
        "layers.\u00b2=3": r"layers: .*is a mapping; give",
        "lr": r"'lr' is not an override; give PATH=VALUE",
        ".lr=1": r"is not an override",
        "lr= ": r"override 'lr= ': the value is missing; give null for none, '\"\"' for",
        "lr=-.inf": r"override 'lr=-.inf', line 1: -inf is not a number of JSON",
        "lr=[1": r"override 'lr=\[1', line 1: .*correct the YAML",
    }.items():
        with pytest.raises(ConfigError, match=said):
            given(override)


def test_a_schema_whose_types_cannot_be_had() -> None:
    @dataclass
    class Local:
        net: Nowhere  # type: ignore[name-defined]  # noqa: F821

    @dataclass
    class Strange:
        net: Net

    for schema in (Local, Strange):
        with pytest.raises(ConfigError, match=r"is not a schema: .*give a dataclass whose types"):
            resolve(schema, (), ["net=1"])
