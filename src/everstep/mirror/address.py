"""Address of a mirror, as a user gives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from everstep.errors import ConfigError, MirrorError
from everstep.mirror.place import Folder, Place
from everstep.record import located, user_path
from everstep.redaction import HIDDEN, redacted


class MirrorAt:
    """Address of a mirror, as a user gave it; `repr` and `str` have no credentials.

    Args:
        url: a path, "file://...", or a URL of a scheme that fsspec knows.

    Raises:
        ConfigError: not a string or a path, or a URL whose credentials were removed from a record.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        if isinstance(url, str) and HIDDEN in url:
            raise ConfigError(
                f"mirror={url!r} comes from a record, without its credentials: give the URL again"
            )
        scheme, found, rest = str(url).partition("://")
        self.folder: Path | None = None
        if not found or scheme == "file":
            path = user_path(rest if found else url, "mirror").absolute()
            # a drill's starts, each with a root of its own, must not meet in one mirror
            self.folder = located(path)
        self.url = str(url)

    def __str__(self) -> str:
        return str(redacted(self.url))

    __repr__ = __str__

    def told(self, error: BaseException) -> str:
        """Describe an error of the place, without credentials."""
        text = f"{type(error).__name__}: {error}".replace(self.url, str(self))
        for secret in self._secrets():
            text = text.replace(secret, HIDDEN)
        return str(redacted(text))

    def _secrets(self) -> Iterator[str]:
        password = urlsplit(self.url).password if "@" in self.url else None
        if password:
            yield from {password, unquote(password)}

    def open(self) -> Place:
        """Connect to the place; what is written there comes later.

        Raises:
            ConfigError: no such scheme, or a package is missing.
        """
        if self.folder is not None:
            return Folder(self.folder)
        try:
            from everstep.mirror.object_store import ObjectStore

            return ObjectStore(self.url, str(self))
        except ImportError as error:
            raise ConfigError(f"mirror={self}: {_remedy(self.url, error)}") from error
        except ValueError as error:
            known = "a folder, s3://BUCKET/PATH or gs://BUCKET/PATH"
            raise ConfigError(f"mirror={self}: {self.told(error)}; give {known}") from error
        except Exception as error:
            raise MirrorError(
                f"the mirror {self} cannot be used ({self.told(error)}): check its address, the credentials "
                "and the network, or start without mirror="
            ) from None


def _remedy(url: str, error: ImportError) -> str:
    scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a") or (error.name or "").startswith("fsspec"):
        return "it needs packages that are missing: pip install 'everstep[mirror]'"
    if scheme in ("gs", "gcs"):
        return "it needs a package that is missing: pip install 'everstep[mirror]' gcsfs"
    return f"it needs a package that is missing ({error}); install it beside 'everstep[mirror]'"
