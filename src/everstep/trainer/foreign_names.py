"""Names that a Trainer and a task have in other libraries, for users who come from there."""

from __future__ import annotations

from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, alike

_TRAINER = {
    "fit": "run_training()",
    "test": 'evaluate("test")',
    "validate": 'evaluate("valid")',
}
_TASK = {
    "training_step": "train_step",
    "validation_step": "eval_step",
    "predict_step": "inference_step",
    "configure_optimizers": "build_optimizer",
}


def no_attribute(trainer: object, name: str) -> AttributeError:
    """Make the error for a name that a Trainer lacks."""
    known = (each for each in dir(type(trainer)) if not each.startswith("_"))
    hint = f"it is trainer.{_TRAINER[name]}" if name in _TRAINER else alike(name, known).rstrip()
    return AttributeError(f"'Trainer' object has no attribute {name!r}{hint and '; '}{hint}")


def require_our_names(task: Task) -> None:
    """Refuse a method under another library's name: nothing calls it, so it would be left out in silence.

    Raises:
        ConfigError: the task has a method under another library's name, and none under ours.
    """
    for theirs, ours in _TASK.items():
        inherited = getattr(getattr(task, ours), "__module__", "").startswith("everstep.")
        if inherited and hasattr(type(task), theirs):
            raise ConfigError(f"{type(task).__name__}.{theirs} is not called by a Trainer; name it {ours}")
