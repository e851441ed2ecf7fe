"""JSON in rows of the index: what everstep wrote there, or a malformed index."""

from __future__ import annotations

import json
from typing import Any


class UnknownContentError(ValueError):
    """A row has content that everstep does not write; `Database` reports the index as malformed."""


def stored(text: str, kind: type = dict) -> Any:
    """Parse the JSON of a row.

    Args:
        kind: the type that everstep writes there.

    Raises:
        UnknownContentError: the content is something else.
    """
    try:
        found = json.loads(text)
    except (ValueError, TypeError) as error:
        raise UnknownContentError(f"a row has {str(text)[:40]!r} for JSON") from error
    if not isinstance(found, kind):
        raise UnknownContentError(f"a row has {str(text)[:40]!r} for a {kind.__name__}")
    return found
