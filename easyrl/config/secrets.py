"""Secrets in a configuration: told by their key's name, and left out of what a run writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

REDACTED = "<redacted>"
SECRET = frozenset(
    "apikey authorization credential credentials key passphrase passwd password secret secrets"
    " token".split()
)
# in front of the word above: tokens of a vocabulary, fields of a record
HARMLESS = frozenset(
    "bos eos pad unk sep cls mask stop think answer prompt question label field".split()
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(=?)(.*)", re.S)

Key = str | int
KeyPath = tuple[Key, ...]  # of a value in the tree


def is_secret_key(name: str) -> bool:
    """Whether values called ``name`` are secrets: api_key, HF_TOKEN, password; not max_tokens."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and words[-1] in SECRET and not HARMLESS & set(words[-2:-1])


def redact(values: Any) -> Any:
    """``values``, a tree as loaded, with ``REDACTED`` in place of secrets."""
    return _redact(values, secret=False)


def secret_paths(values: Any) -> list[KeyPath]:
    """Where secrets are in ``values``."""
    hidden = dict(leaves(redact(values)))
    return [path for path, value in leaves(values) if hidden[path] != value]


def redacted_paths(values: Any) -> list[KeyPath]:
    """Where ``values`` has lost a secret."""
    texts = [(path, value) for path, value in leaves(values) if isinstance(value, str)]
    return [path for path, text in texts if text.endswith(REDACTED)]


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


def _redact(values: Any, *, secret: bool) -> Any:
    if isinstance(values, dict):
        return {k: _redact(v, secret=secret or is_secret_key(str(k))) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return _redact_list(list(values), secret=secret)
    return REDACTED if secret and not _is_empty(values) else values


def _redact_list(values: list[Any], *, secret: bool) -> list[Any]:
    """Also options of a command line: ``--hf-token=…``, ``--hf-token …``."""
    found = []
    follows = False  # the value of the option before
    for value in values:
        option = _OPTION.fullmatch(value) if isinstance(value, str) else None
        if option is None:
            found.append(_redact(value, secret=secret or follows))
            follows = False
            continue
        name, equals, given = option.groups()
        is_secret = is_secret_key(name)
        follows = is_secret and not equals
        found.append(f"--{name}={REDACTED}" if is_secret and given else value)
    return found


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or isinstance(value, bool)
