"""What a peer's keys are here: rows of a table, the values of a file, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from easyrl.config import ConfigError

Settings = dict[str, Any]  # by our key, dotted
TYPES = {bool: "true or false", str: "text", int: "a number", float: "a number"}


@dataclass(frozen=True)
class Row:
    """A key of a peer, and its counterpart.

    With ``value`` the setting is made of this key alone; without, together with others. Without
    ``ours`` there is no counterpart, and ``how`` is what to do instead.
    """

    theirs: str  # dotted; * stands for the rest of a key
    default: Any  # the peer's
    ours: str = ""
    how: str = ""
    value: Callable[[Any], Any] | None = None
    is_silent: bool = False  # what is trained does not depend on it


def same(value: Any) -> Any:
    """For a key whose value is ours."""
    return value


def has_none(theirs: str, default: Any, how: str) -> Row:
    """A key without a counterpart; it is told of where it is not ``default``."""
    return Row(theirs, default, how=how)


def ignored(theirs: str, how: str) -> Row:
    """A key that is never told of."""
    return Row(theirs, None, how=how, is_silent=True)


@dataclass(frozen=True)
class Note:
    """What the user has to know of one key."""

    theirs: str
    value: Any
    text: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={self.value}"
        return f"{self.theirs}{shown}: {self.text}"


@dataclass
class Values:
    """A peer's file: what it gives, else the peer's defaults. Raises ``ConfigError`` by key."""

    source: str
    given: Mapping[str, Any]
    rows: Mapping[str, Row]
    world_size: int | None = None
    notes: list[Note] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        """Of the type of the default; a number may stand in the file as text."""
        return self._of_type(key, self.as_given(key), self.rows[key].default)

    def as_given(self, key: str) -> Any:
        """Whatever its type."""
        return self.given.get(key, self.rows[key].default)

    def note(self, key: str, text: str) -> None:
        self.notes.append(Note(key, self.as_given(key), text))

    def is_changed(self, key: str) -> bool:
        """Whether the file gives another value than the peer's default."""
        return self[key] != self.rows[key].default

    def integer(self, key: str, least: int = 1) -> int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"is no whole number of at least {least}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            raise self.wrong(key, f"is no number of at least {least:g}")
        return float(value)

    def one_of(self, key: str, known: Sequence[str]) -> str:
        value = self[key]
        if value not in known:
            raise self.wrong(key, f"is none of {', '.join(known)}")
        return str(value)

    def wrong(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key}: {self.as_given(key)!r} {what}; correct it there")

    def _of_type(self, key: str, value: Any, default: Any) -> Any:
        if value is None or type(default) not in TYPES:
            return value
        wanted = type(default)
        if wanted in (bool, str):
            if not isinstance(value, wanted):
                raise self.wrong(key, f"is not {TYPES[wanted]}")
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.wrong(key, "is no number") from None
        if isinstance(value, bool):
            raise self.wrong(key, "is no number")
        return int(number) if wanted is int and number.is_integer() else number


@dataclass(frozen=True)
class Peer:
    """Another trainer."""

    name: str  # as --from has it
    title: str
    rows: tuple[Row, ...]
    together: Sequence[Callable[[Values], Settings]]  # settings that several keys decide
    own_keys: Sequence[str]  # a file of the peer has one of them, or keys below

    @property
    def by_key(self) -> dict[str, Row]:
        return {row.theirs: row for row in self.rows}

    def row(self, key: str) -> Row | None:
        """Of a file's key: its own, or the pattern that it fits."""
        exact = self.by_key.get(key)
        if exact is not None:
            return exact
        return next((r for r in self.rows if "*" in r.theirs and fnmatchcase(key, r.theirs)), None)
