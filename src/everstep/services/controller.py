"""Base of the services that act on training."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from everstep.contracts.services import Service, SetValue, Stop
from everstep.contracts.state import Json
from everstep.schedule import Schedule


class Controller(Service):
    """Service whose outcome may change training.

    The settings are the parameters of `__init__`, each kept as the attribute of the same name, as in
    scikit-learn's estimators; `every` is kept as `schedule`.  `config()` and `repr` use the settings.

    Attributes:
        settings: names of the parameters, without `name`.  A subclass of a controller has the settings of
            that controller, whatever its own `__init__` takes.
    """

    controller = True
    settings: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Controller in cls.__bases__:
            parameters = inspect.signature(cls.__init__).parameters
            cls.settings = tuple(name for name in parameters if name not in ("self", "name"))

    def _given(self) -> dict[str, Any]:
        """Map names to settings that are not None, so that a setting added later changes no run."""
        values = {name: self.schedule if name == "every" else getattr(self, name) for name in self.settings}
        return {name: value for name, value in values.items() if value is not None}

    def config(self) -> Json:
        return {
            name: repr(value) if isinstance(value, Schedule | SetValue | Stop) else value
            for name, value in self._given().items()
        }

    def __repr__(self) -> str:
        told = "".join(f", {name}={value!r}" for name, value in self._given().items())
        return f"{type(self).__name__}(name={self.name!r}{told})"
