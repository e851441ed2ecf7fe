"""Late imports: names that a module exports are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(
    module: str, homes: Mapping[str, Sequence[str]], rooms: Sequence[str] = (), beside: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a module that imports its names late.

    Args:
        module: full name of the exporting module.
        homes: the names to export, by the full name of the module that defines them.
        rooms: submodules that are attributes, too; they are not in `__all__`, so that a star import does not
            overwrite a program's own `data`.
        beside: full name of a module that the message about an unknown name may point to.
    """
    home = {name: where for where, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name]), name)
        elif name in rooms:
            value = importlib.import_module(f"{module}.{name}")
        else:
            hint = _hint(name, [*home, *rooms], beside)
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")
        # Bound last: the import may just have bound a submodule of the same name.
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home, *rooms})

    return __getattr__, __dir__, [*home]


def _hint(name: str, known: Sequence[str], beside: str | None) -> str:
    from everstep.errors import nearest  # late: importing everstep stays cheap

    if beside is not None and name in importlib.import_module(beside).__all__:
        return f"it is {beside}.{name}"
    return nearest(name, known)
