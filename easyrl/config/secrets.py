"""Secrets in a configuration: told by their key's name, and left out of what a run writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

REDACTED = "<redacted>"
SECRET = frozenset(
    "apikey auth authorization bearer cookie credential credentials key pass passphrase passwd"
    " password pat pwd secret secrets token".split()
)
# more than one, or a count: of these only texts are secrets
SEVERAL = frozenset("apikeys cookies keys passphrases passwords tokens".split())
# ends of words that are written as one: PGPASS, DBPASSWORD
COMPOUND = re.compile(r".*(?:passw(?:or)?d|passphrase|secret|(?<!by)(?<!com)pass)")
# behind the word above: private_key_pem, hf_token_value
FORM = frozenset("b base pem raw string text value".split())
# in front of the word above: tokens of a vocabulary, fields of a record
HARMLESS = frozenset(
    "bos eos pad unk sep cls mask stop think answer prompt question label field"
    " added allowed bad extra forbidden max min new num special target total".split()
)
# in front of keys, which are those of a record otherwise
OF_KEYS = frozenset("access api auth private secret service signing ssh".split())
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(=?)(.*)", re.S)

# Inside texts; the first group stays.
_USER = re.compile(  # of a URL; without a password it may be a token, but for git@ of ssh
    r"(\b(?:[A-Za-z][\w+.-]*://(?=[^\s/?#@]*:(?!\d*(?:/|$)))|(?i:https?)://(?=[^\s/?#]*@)))[^\s'\"]*@"
)
_ASSIGNED = re.compile(r"((?<![\w.-])([A-Za-z][\w.-]*)=)([^\s&#,;'\"<]+)")
_HEADER = re.compile(r"((?<![\w-])([A-Za-z][\w-]*):[ \t]+)([^\n'\"<]+)")
_BEARER = re.compile(r"(\b[Bb]earer[ ]+)(?=\S*\d)[\w.~+/=-]{8,}")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.S)
_NOT_ALONE = frozenset(("key", "token", "pass"))  # words of code and prose, too

Key = str | int
KeyPath = tuple[Key, ...]  # of a value in the tree


def is_secret_key(name: str) -> bool:
    """Whether texts called ``name`` are secrets: api_key, HF_TOKEN, password; not max_tokens."""
    return bool(_secret_types(name))


def redact_text(text: str) -> str:
    """``text`` without what it shows to be secret: of URLs, assignments and headers."""
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _USER.sub(rf"\1{REDACTED}@", text)
    text = _HEADER.sub(_without_value, text)
    text = _ASSIGNED.sub(_without_value, text)
    return _BEARER.sub(rf"\1{REDACTED}", text)


def redact(values: Any) -> Any:
    """``values``, a tree as loaded, with ``REDACTED`` in place of secrets."""
    return _redact(values, ())


def secret_paths(values: Any) -> list[KeyPath]:
    """Where secrets are in ``values``."""
    hidden = dict(leaves(redact(values)))
    return [path for path, value in leaves(values) if hidden[path] != value]


def redacted_paths(values: Any) -> list[KeyPath]:
    """Where ``values`` has lost a secret."""
    texts = [(path, value) for path, value in leaves(values) if isinstance(value, str)]
    return [path for path, text in texts if REDACTED in text]


def dotted(path: KeyPath) -> str:
    """As overrides write it: ``rewards[0].kwargs.api_key``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def leaves(values: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All values of a tree that are no mapping or list."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from leaves(value, (*path, index))
    else:
        yield path, values


def _secret_types(name: str) -> tuple[type, ...]:
    """Of which types a value called ``name`` is a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    types: tuple[type, ...] = (str, int, float)
    while len(words) > 2 and words[-1] in FORM:
        words.pop()
        types = (str,)
    last, before = (words or [""])[-1], set(words[-2:-1])
    if before & HARMLESS:
        return ()
    if last in SEVERAL:
        return (str,) if last != "keys" or before & OF_KEYS else ()
    return types if last in SECRET or COMPOUND.fullmatch(last) else ()


def _without_value(match: re.Match[str]) -> str:
    start, name = match[1], match[2]
    in_url = match.string[: match.start()].endswith(("?", "&"))
    is_secret = is_secret_key(name) and (in_url or name.lower() not in _NOT_ALONE)
    return f"{start}{REDACTED}" if is_secret else match[0]


def _redact(values: Any, secret: tuple[type, ...]) -> Any:
    """``secret``: the types of values that are, because of what is around them."""
    if isinstance(values, dict):
        return {k: _redact(v, secret or _secret_types(str(k))) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return _redact_list(list(values), secret)
    if isinstance(values, secret) and not _is_empty(values):
        return REDACTED
    return redact_text(values) if isinstance(values, str) else values


def _redact_list(values: list[Any], secret: tuple[type, ...]) -> list[Any]:
    """Also options of a command line: ``--hf-token=…``, ``--hf-token …``."""
    found = []
    follows: tuple[type, ...] = ()  # the value of the option before
    for value in values:
        option = _OPTION.fullmatch(value) if isinstance(value, str) else None
        if option is None:
            found.append(_redact(value, secret or follows))
            follows = ()
            continue
        name, equals, given = option.groups()
        of_option = _secret_types(name)
        follows = () if equals else of_option
        is_number = given.replace(".", "", 1).isdecimal()
        if given and (float if is_number else str) in of_option:
            found.append(f"--{name}={REDACTED}")
        else:
            found.append(_redact(value, secret))
    return found


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or isinstance(value, bool)
