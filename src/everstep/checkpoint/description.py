"""Description of an array in a manifest, or in the file of a rank's own tree; `format` says what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from everstep.contracts.state import HostArray, Json

Piece: TypeAlias = Mapping[str, Any]
"""{"file", "key", "offset", "shape"} and perhaps "xxh3_128", see `format`."""


def describe(array: HostArray, shape: Sequence[int], size: int, **more: Json) -> dict[str, Json]:
    """Describe an array.

    Args:
        array: the array, or a box of it.
        shape: shape of the whole array.
        size: number of bytes of the whole array.
        more: "xxh3_128", "pieces" or both.
    """
    return {
        "dtype": array.dtype,
        "shape": list(shape),
        "backend": array.backend,
        "extra": array.extra,
        "bytes": size,
        **more,
    }


def pieces_of(name: str, facts: Mapping[str, Any], file: str) -> list[Piece]:
    """List the pieces of a described array, each with its checksum where that is known.

    Args:
        file: the own file of the array's tree.  An array that lies whole in it is one piece.
    """
    shape = facts["shape"]
    whole = {"file": file, "key": name, "offset": [0] * len(shape), "shape": shape}
    pieces: list[Piece] = facts.get("pieces", [whole])
    if len(pieces) == 1 and facts.get("xxh3_128") is not None:
        return [{"xxh3_128": facts["xxh3_128"], **pieces[0]}]
    return pieces


def checked(described: dict[str, Any]) -> dict[str, Any]:
    """Return descriptions of arrays, all of which have the facts that a `HostArray` needs.

    Raises:
        KeyError: names an array whose description does not.
    """
    if odd := [name for name, facts in described.items() if not _is_description(facts)]:
        raise KeyError(f"arrays/{odd[0]}")
    return described


def _is_description(facts: object) -> bool:
    return (
        isinstance(facts, dict)
        and isinstance(facts.get("dtype"), str)
        and isinstance(facts.get("backend"), str)
        and isinstance(facts.get("extra"), dict)
        and isinstance(facts.get("shape"), list)
        and all(map(_is_length, [facts.get("bytes"), *facts["shape"]]))
    )


def _is_length(value: object) -> bool:
    return type(value) is int and value >= 0
