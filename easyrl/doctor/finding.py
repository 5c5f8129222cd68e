"""What a check has found: a name, whether it is well, what was seen, and the remedy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from easyrl.config import ConfigError
from easyrl.runtime.user_code import describe

Verdict = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # of the check
    verdict: Verdict
    seen: str  # in words; of ``not checked``: why
    remedy: str = ""  # names a key or a command; of ``failed`` always


Check = Callable[[], Iterable[Finding]]


def ok(name: str, seen: str) -> Finding:
    return Finding(name, "ok", seen)


def failed(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, "failed", seen, remedy)


def not_checked(name: str, why: str, remedy: str = "") -> Finding:
    return Finding(name, "not checked", why, remedy)


def findings_of(name: str, check: Check) -> Iterator[Finding]:
    """What ``check`` finds; whatever it raises is a finding too, and ends no other check."""
    try:
        yield from check()
    except Exception as error:
        yield _broken(name, error)


async def finding_of(name: str, check: Awaitable[Finding]) -> Finding:
    """As ``findings_of``, of a check with one finding."""
    try:
        return await check
    except Exception as error:
        return _broken(name, error)


def _broken(name: str, error: Exception) -> Finding:
    if isinstance(error, ConfigError):  # names key and remedy itself
        seen, _, remedy = str(error).partition("; ")
        return failed(name, seen, remedy or "correct the configuration")
    seen = f"the check itself has failed: {describe(error)}"
    return failed(name, seen, "report it, or look at what it names")
