"""Removal of credentials: `***` is recorded and printed in their place.

Credentials are known by their form: the password of a URL, its user if the user may be a token, its
parameters such as `?access_token=`, and `user:token@host:path`.  If a password has an "@" or a "/", more of
the URL may be removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
"""String in place of a credential."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://(\S+)")
_DATABASE = re.compile(r"(postgres|mysql|mariadb|mssql|oracle)", re.IGNORECASE)
_USER_IS_A_NAME = re.compile(rf"{_DATABASE.pattern}|(git\+)?ssh|sftp|rsync", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&;#])([^=&;#?\s]+)=([^&\s]*)")
_SECRET_NAME = re.compile(
    r"passw(or)?d|passphrase|^pwd$|token|secret|api[_-]?key|access[_-]?key|signature|credential|"
    r"^(sig|key|auth|authorization)$",
    re.IGNORECASE,
)
_NO_TOKEN = re.compile(r"token(?!$)", re.IGNORECASE)
"""A setting such as `tokenizer`, `max_tokens`, `pad_token_id`: a token itself is the last word of a name."""
_BLANKS = re.compile(r"(\s+)")
_AFTER_USER = re.compile(r"(?<=[\w.+%-]):(?!//)")
_BEFORE_HOST = re.compile(r"@(?=[\w.-]+[:/])")
"""Parts of the form of git and scp, user:token@host:path.

A hostile string may have megabytes, and a search holds all threads: no pattern here may be tried from each
character to the end.
"""

_Pattern = re.Pattern[str]
_patterns: list[_Pattern] = []


def redact(pattern: str | re.Pattern[str]) -> None:
    """Replace what a pattern finds in everything that this process records or prints from now on.

        everstep.record.redact(r"api[-_]key[= ](\\S+)")

    Call this before the loop, or the Trainer, is made.  It is applied to each string; to the command line,
    with blanks between the arguments; and to each value of a configuration, as "name=value".

    Args:
        pattern: regular expression of what must not be recorded; if it has groups, only these are replaced.
    """
    compiled = re.compile(pattern)
    if compiled not in _patterns:
        _patterns.append(compiled)


def redacted(value: Any) -> Any:
    """Return a string or a tree of JSON values without credentials and without what the user's patterns find.

    A second call changes nothing.
    """
    return _redacted(value, "", _patterns)


def without_credentials(value: Any) -> Any:
    """Remove credentials by form alone: a user's pattern must not hide what everstep itself reads."""
    return _redacted(value, "", ())


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the values whose names are those of secrets: `hf_token`, but no `tokenizer` or `max_tokens`."""
    kept = dict[str, Any]()
    for name, value in values.items():
        is_secret = _SECRET_NAME.search(_NO_TOKEN.sub("", name)) and value
        kept[name] = HIDDEN if is_secret else without_secrets(value) if isinstance(value, dict) else value
    return kept


def redacted_line(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without credentials."""
    clean = [_by_form(str(each)) for each in arguments]
    hidden = _matching_spans(" ".join(clean), _patterns)
    result, at = [], 0
    for each in clean:
        result.append(_without(each, [(a - at, b - at) for a, b in hidden]))
        at += len(each) + 1
    return result


def _redacted(value: Any, name: str, patterns: Sequence[_Pattern]) -> Any:
    if isinstance(value, str):
        clean = _by_form(value) if "@" in value or "=" in value else value
        return _without_matches(clean, name, patterns) if patterns else clean
    if isinstance(value, Mapping):
        return {key: _redacted(part, str(key), patterns) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(part, name, patterns) for part in value]
    if patterns and isinstance(value, int | float) and not isinstance(value, bool):
        text = _without_matches(str(value), name, patterns)
        return value if text == str(value) else text
    return value


def _without_matches(text: str, name: str, patterns: Sequence[_Pattern]) -> str:
    """Return a value without what patterns find in "name=value"."""
    prefix = f"{name}=" if name else ""
    hidden = _matching_spans(prefix + text, patterns)
    return _without(text, [(a - len(prefix), b - len(prefix)) for a, b in hidden])


def _matching_spans(text: str, patterns: Sequence[_Pattern]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for pattern in patterns:
        for match in pattern.finditer(text):
            groups = range(1, pattern.groups + 1) if pattern.groups else (0,)
            spans += [match.span(group) for group in groups]
    return sorted(span for span in spans if span[0] < span[1])


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    result, at = "", 0
    for begin, end in spans:
        begin, end = max(begin, at, 0), min(end, len(text))
        if begin < end:
            result, at = result + text[at:begin] + HIDDEN, end
    return result + text[at:]


def _by_form(text: str) -> str:
    return "".join(_word(word) if "@" in word or "=" in word else word for word in _BLANKS.split(text))


def _word(word: str) -> str:
    word = _PARAMETER.sub(_parameter, word)
    if url := _URL.search(word):
        return _remote(word[: url.start()]) + _url(*url.groups())
    return _remote(word)


def _remote(word: str) -> str:
    """Hide what lies between the first user and the last host of a word such as `user:token@host:path`."""
    user = _AFTER_USER.search(word)
    hosts = [match.start() for match in _BEFORE_HOST.finditer(word)]
    if user is None or not hosts or hosts[-1] <= user.end():
        return word
    return f"{word[: user.end()]}{HIDDEN}{word[hosts[-1] :]}"


def _url(scheme: str, rest: str) -> str:
    info = _user_information(scheme, rest)
    user, _, password = info.partition(":")
    if info and not _USER_IS_A_NAME.match(scheme):
        rest = HIDDEN + rest[len(info) :]
    elif password:
        rest = f"{user}:{HIDDEN}{rest[len(info) :]}"
    return f"{scheme}://{rest}"


def _user_information(scheme: str, rest: str) -> str:
    """Return the part before the host; rather too much than too little of an odd password."""
    head = re.split("[/?#]", rest, maxsplit=1)[0]
    first = head.partition("@")[0]
    if "@" in head and ":" not in first:
        return head[: head.rindex("@")]
    port = head.partition(":")[2]
    if "@" in head or (port and not head.startswith("[") and not port.isdecimal()):
        return rest[: max(rest.rfind("@"), 0)]
    area = rest.partition("?")[0] if _DATABASE.match(scheme) else ""
    return area[: max(area.rfind("@"), 0)]


def _parameter(match: re.Match[str]) -> str:
    sign, name, value = match.groups()
    return f"{sign}{name}={HIDDEN if value and _SECRET_NAME.search(unquote(name)) else value}"
