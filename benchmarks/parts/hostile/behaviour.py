"""The catalogue of hostile behaviours: what each is called, what it meets, what it does.

A behaviour is a function with a decorator of this file; its docstring's first line says what
happens. The catalogue's files are imported by ``catalogue``.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from easyrl.inference_client.client import GENERATE
from easyrl.inference_client.sample_stream import SAMPLES

if TYPE_CHECKING:
    from benchmarks.parts.hostile.endpoint import Exchange
    from benchmarks.parts.hostile.files import RunFiles
    from benchmarks.parts.hostile.sockets import Listener

Kind = Literal[
    "body", "protocol", "status", "stamp", "content", "stream", "weights", "socket", "file"
]
RESPONSES = (GENERATE, SAMPLES)  # routes: one at a time; several, streamed as they finish
When = Literal["live", "killed"]  # while the run trains; between a kill and the resume

Act = Callable[["Exchange"], Awaitable[None]]
Visit = Callable[["Listener", random.Random], Awaitable[int]]
Damage = Callable[["RunFiles", random.Random], str]


class NotNow(Exception):  # noqa: N818 (not an error)
    """A behaviour cannot happen at this request, in this folder or at this port."""


@dataclass(frozen=True)
class Behaviour:
    """What all have in common."""

    name: str
    kind: Kind
    says: str  # one line

    @property
    def needs_killed_run(self) -> bool:
        return False

    @property
    def ends_75(self) -> bool:
        """Whether a run among it may end with status 75, and goes on with ``--resume``."""
        return False


@dataclass(frozen=True)
class EndpointBehaviour(Behaviour):
    """Of an endpoint: what it does instead of answering.

    Attributes:
        routes: paths on which it happens; empty: all.
        act: answers the exchange, or raises ``NotNow``.
        share: of the requests on these routes, 0 to 1; of a stream's samples, of which one spoils
            the stream.
        may_end_75: it shows itself behind the certificate's line only, so that the run may end with
            status 75 and go on with ``--resume`` (docs/on_policy.md, *Withdrawal*).
        either: it happens on one of ``RESPONSES``, drawn for each run, and leaves the other alone.
        refuses: prompts, while it serves others. Two such endpoints are believed: they never meet.
    """

    routes: frozenset[str]
    act: Act
    share: float = 1.0
    may_end_75: bool = False
    either: bool = False
    refuses: bool = False

    def is_for(self, path: str, *, streams: bool) -> bool:
        """Whether it happens on ``path``, at an endpoint that says whether it streams samples."""
        if self.either and path in RESPONSES:
            return (path == SAMPLES) is streams
        return not self.routes or path in self.routes

    @property
    def ends_75(self) -> bool:
        return self.may_end_75


@dataclass(frozen=True)
class SocketBehaviour(Behaviour):
    """Of a stranger at the ports that the run opens; ``visit`` returns the connections it made."""

    visit: Visit


@dataclass(frozen=True)
class FileBehaviour(Behaviour):
    """Of a disk.

    Attributes:
        damage: changes the run's files and says what it did.
        refused: the resume has to be refused (status 2, one sentence that names this), and goes on
            when ``RunFiles.put_back`` has undone the change.
    """

    when: When
    damage: Damage
    refused: str | None = None
    # nobody can be given the weights any more but by a resume, or ``put_back`` has to come before
    may_end_75: bool = False

    @property
    def needs_killed_run(self) -> bool:
        return self.when == "killed"

    @property
    def ends_75(self) -> bool:
        return self.may_end_75


@dataclass
class Catalogue:
    """Behaviours by name."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)

    def add(self, behaviour: Behaviour) -> None:
        assert behaviour.name not in self.behaviours, f"{behaviour.name} is there twice"
        assert behaviour.says, f"{behaviour.name} has no docstring"
        self.behaviours[behaviour.name] = behaviour


CATALOGUE = Catalogue()


def endpoint(
    kind: Kind,
    *routes: str,
    share: float = 1.0,
    may_end_75: bool = False,
    both: bool = False,
    refuses: bool = False,
) -> Callable[[Act], Act]:
    """Decorates what an endpoint does on ``routes``; on one of ``RESPONSES`` if not on ``both``."""

    def register(act: Act) -> Act:
        name, says = _names(act)
        CATALOGUE.add(
            EndpointBehaviour(
                name,
                kind,
                says,
                frozenset(routes),
                act,
                share,
                may_end_75,
                either=not both and set(RESPONSES) <= set(routes),
                refuses=refuses,
            )
        )
        return act

    return register


def socket(visit: Visit) -> Visit:
    """Decorates what a stranger does at one port of the run."""
    name, says = _names(visit)
    CATALOGUE.add(SocketBehaviour(name, "socket", says, visit))
    return visit


def file(
    when: When, refused: str | None = None, may_end_75: bool = False
) -> Callable[[Damage], Damage]:
    """Decorates what happens to the run's files."""

    def register(damage: Damage) -> Damage:
        name, says = _names(damage)
        CATALOGUE.add(FileBehaviour(name, "file", says, when, damage, refused, may_end_75))
        return damage

    return register


def _names(function: Callable[..., object]) -> tuple[str, str]:
    """A behaviour's name, and what it does."""
    says = (function.__doc__ or "").strip().split("\n")[0]
    return function.__name__.replace("_", "-"), says
