"""tfutils' door: a tree of parameters is translated into a task, streams and services for a `Trainer`."""

from everstep.compat.tfutils.params import recorded_params as recorded_params
from everstep.compat.tfutils.runs import intermediate_results as intermediate_results
from everstep.compat.tfutils.runs import test_from_params as test_from_params
from everstep.compat.tfutils.runs import train_from_params as train_from_params

__all__ = ["intermediate_results", "recorded_params", "test_from_params", "train_from_params"]
