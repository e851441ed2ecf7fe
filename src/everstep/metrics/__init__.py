"""Metrics: running statistics of a window of values, and their format as strings."""

from everstep.metrics.formatting import (
    MetricFormatter,
    TimesFirst,
    environment_table,
    humanize_duration,
    log_line,
    log_tag,
    parameter_table,
)
from everstep.metrics.statistics import Stats, Window
