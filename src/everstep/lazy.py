"""Late imports: names that a module exports are imported when they are first used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

_IMPORT = re.compile(r"^ +from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_NAME = re.compile(r"\b(\w+) as \1\b")


def exports(
    module: str, beside: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a module that imports its names late.

    The names are those of its block `if TYPE_CHECKING:`, which type checkers read: `from HOME import NAME as
    NAME`.  Submodules, imported from the module itself, are not in `__all__`, so that a star import does not
    overwrite a program's own `data`.  The message about an unknown name may point to the module `beside`.
    """
    loader: Any = sys.modules[module].__spec__.loader  # type: ignore[union-attr]
    source: str = loader.get_source(module)
    block = source.partition("\nif TYPE_CHECKING:\n")[2].partition("\nelse:\n")[0]
    home = {name: origin for origin, names in _IMPORT.findall(block) for name in _NAME.findall(names)}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {_hint(name, home, beside)}")
        if home[name] == module:
            value = importlib.import_module(f"{module}.{name}")
        else:
            value = getattr(importlib.import_module(home[name]), name)
        # Bound last: the import may just have bound a submodule of the same name.
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home})

    return __getattr__, __dir__, [name for name, origin in home.items() if origin != module]


def _hint(name: str, known: Iterable[str], beside: str | None) -> str:
    from everstep.errors import nearest  # late: importing everstep stays cheap

    if beside is not None and name in importlib.import_module(beside).__all__:
        return f"it is {beside}.{name}"
    return nearest(name, known)
