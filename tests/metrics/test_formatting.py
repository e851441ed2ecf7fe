"""Golden tests of every text that metrics and parameters become."""

import math

import pytest

from everstep.errors import ConfigError
from everstep.metrics import (
    MetricFormatter,
    Stats,
    TimesFirst,
    environment_table,
    humanize_duration,
    log_line,
    log_tag,
    parameter_table,
)


def made(mean: float, std: float = 0.0, count: int = 1) -> Stats:
    return Stats(count, float(count), mean, std, mean, mean, mean)


def test_the_line_begins_with_the_loss_and_ends_with_the_times() -> None:
    stats = {"valid_loss": made(0.2), "loss": made(0.123, 0.02, 40), "step_time": made(0.0102, 0.0003, 40)}
    assert log_line("[Step 1]", {}) == "[Step 1]" and log_line("", {"loss": made(1.0)}) == "loss: 1"
    assert log_line(log_tag(2, 10, 400, 4000, None), stats, {"valid_loss"}, eta=63.2) == (
        "[Epoch 2/10, Step 400/4000] "
        "loss: 0.123 (±0.02); valid loss: 0.2 (*); step time: 0.0102s (±0.0003s); ETA 1m 3.2s"
    )


def test_the_seeds_order_has_a_name() -> None:
    stats = {"loss": made(0.123), "acc": made(0.5), "step_time": made(0.0102)}
    assert log_line("", stats, formatter=TimesFirst()) == "step time: 0.0102s; acc: 0.5; loss: 0.123"


def test_tags_leave_out_what_is_not_known_and_the_epoch_of_a_run_of_one() -> None:
    for max_epoch, epoch in ((None, "Epoch 2, "), (1, ""), (10, "Epoch 2/10, ")):
        for max_step, step in ((None, "Step 400"), (4000, "Step 400/4000")):
            assert log_tag(2, max_epoch, 400, max_step, None) == f"[{epoch}{step}]"
            assert log_tag(0, max_epoch, 400, max_step, None) == f"[{step.removeprefix(', ')}]"
            assert log_tag(2, max_epoch, 400, max_step, 63.2) == f"[{epoch}{step}, ETA 1m 3.2s]"


DURATIONS = {
    0: "0s", 1e-05: "1e-05s", 0.0102: "0.0102s", 1.23456: "1.235s", 59.99: "59.99s", 59.999: "1m", 60: "1m",
    60.0000001: "1m", 63.2: "1m 3.2s", 119.9999: "2m", 3600: "1h", 3599.9999: "1h", 93784.5: "1d 2h 3m 4.5s",
    86400 * 365: "365d", -63.2: "-1m 3.2s", math.inf: "inf", math.nan: "nan",
}  # fmt: skip


def test_durations() -> None:
    assert {seconds: humanize_duration(seconds) for seconds in DURATIONS} == DURATIONS


METRICS: list[tuple[str, Stats, bool, str]] = [
    ("loss", made(0.123456789), False, "loss: 0.123457"),
    ("loss", made(123456789.0), False, "loss: 1.23457e+08"),
    ("loss", made(0.5, 0.25, 2), True, "loss: 0.5 (±0.25) (*)"),
    ("loss", made(0.5, 0.0, 2), False, "loss: 0.5 (±0)"),
    ("loss", made(math.nan, math.nan, 2), False, "loss: nan (±nan)"),
    ("top_5_acc", made(0.5), False, "top 5 acc: 0.5"),
    ("valid/accuracy", made(0.5), False, "valid/accuracy: 0.5"),
    ("valid_time", made(90.0), False, "valid time: 1m 30s"),
    ("my_timer", made(90.0, 61.0, 2), False, "my timer: 1m 30s (±1m 1s)"),
    ("valid/time", made(90.0), False, "valid/time: 1m 30s"),
    ("time_left", made(90.0), False, "time left: 90"),
    ("runtime", made(90.0), False, "runtime: 90"),
    ("loss", made(math.inf, math.nan, 2), False, "loss: inf (±nan)"),
    ("loss", made(-math.inf), False, "loss: -inf"),
    ("lr", made(1e-4, 1e-5, 9)._replace(last=9.8765e-5), False, "lr: 9.88e-05"),
    ("optimizer.lr", made(0.1, 0.05, 9)._replace(last=0.05), False, "optimizer.lr: 0.05"),
    ("color", made(0.5, 0.5, 2), False, "color: 0.5 (±0.5)"),
]


def test_one_metric() -> None:
    for name, stats, best, text in METRICS:
        assert MetricFormatter().format(name, stats, best) == text


def test_losses_come_first_and_times_last() -> None:
    names = ["z_time", "valid_loss", "b", "loss", "a_timer", "timer_a", "aux/loss", "a"]
    ordered = ["loss", "aux/loss", "valid_loss", "a", "b", "timer_a", "a_timer", "z_time"]
    assert MetricFormatter().sort(names) == ordered


def test_the_formatter_can_be_replaced() -> None:
    class Terse(MetricFormatter):
        def format(self, name: str, stats: Stats, is_best: bool) -> str:
            return f"{name}={stats.last:.1f}"

    assert log_line("[Step 1]", {"b": made(1), "a": made(2)}, formatter=Terse()) == "[Step 1] a=2.0; b=1.0"


PARAMETERS = [
    ("encoder.0.weight", (64, 784), True),
    ("encoder.0.bias", (64,), True),
    ("encoder10.weight", (4, 4), True),
    ("head.weight", (10, 64), True),
    ("head.scale", (), False),
]


def test_a_table_with_groups() -> None:
    assert parameter_table("Parameters", PARAMETERS, ["head", "encoder"]) == (
        "Parameters (50,896 in total)\n"
        "============================\n"
        "\n"
        "head (640 in total)\n"
        "-------------------\n"
        "head.weight       (10, 64)      640\n"
        "head.scale        ()              1  frozen\n"
        "\n"
        "encoder (50,240 in total)\n"
        "-------------------------\n"
        "encoder.0.weight  (64, 784)  50,176\n"
        "encoder.0.bias    (64,)          64\n"
        "\n"
        "Other Parameters (16 in total)\n"
        "------------------------------\n"
        "encoder10.weight  (4, 4)         16\n"
        "\n"
        "trainable: 50,896; frozen: 1"
    )


def test_a_table_without_groups_of_nothing_and_of_groups_that_are_not_there() -> None:
    lines = parameter_table("Parameters", PARAMETERS).splitlines()
    assert lines[:3] == ["Parameters (50,896 in total)", "-" * 28, "encoder.0.weight  (64, 784)  50,176"]
    assert lines[-3:] == ["head.scale        ()              1  frozen", "", "trainable: 50,896; frozen: 1"]
    assert parameter_table("Parameters", []) == (
        "Parameters (0 in total)\n-----------------------\n\ntrainable: 0; frozen: 0"
    )
    with pytest.raises(ConfigError, match="group 'haed' names no parameter; did you mean 'head'"):
        parameter_table("Parameters", PARAMETERS, ["haed"])


def test_more_than_three_frozen_parameters_are_one_line() -> None:
    frozen = [(f"base.{number}", (2,), False) for number in range(46)]
    lines = parameter_table("Parameters", [*frozen, *PARAMETERS[:1]]).splitlines()
    assert lines[2:] == [
        "encoder.0.weight  (64, 784)  50,176",
        "and 46 frozen: base.0, base.1, base.2, ...",
        "",
        "trainable: 50,176; frozen: 92",
    ]


def test_environment() -> None:
    assert environment_table({"python": "3.11.7", "everstep": "0.1.0"}) == (
        "Execution Environment\n---------------------\npython    3.11.7\neverstep  0.1.0"
    )
