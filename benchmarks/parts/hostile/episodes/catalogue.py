"""The catalogue of hostile environments and clients: a coroutine each, played in a host process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.parts.hostile.episodes.scene import Scene

Kind = Literal["life", "reward", "request", "socket", "process", "tool"]
# What has to become of an episode: trained; failed, and left out with its turns, or without one; or
# of its group, all of whose samples act: rejected, excluded, with a reason.
Ends = Literal["counts", "fails", "silent", "rejected", "excluded"]
Act = Callable[["Scene"], Awaitable[Any]]


@dataclass(frozen=True)
class EpisodeBehaviour:
    """One.

    Attributes:
        once: not again in a run in which it has happened, as in an episode that starts again.
    """

    name: str
    kind: Kind
    says: str  # one line
    ends: Ends
    once: bool
    act: Act


BEHAVIOURS: dict[str, EpisodeBehaviour] = {}


def behaviour(kind: Kind, ends: Ends = "counts", *, once: bool = False) -> Callable[[Act], Act]:
    """Decorates what an environment does; its docstring's first line says what happens."""

    def register(act: Act) -> Act:
        name = act.__name__.replace("_", "-")
        says = (act.__doc__ or "").strip().split("\n")[0]
        assert says and name not in BEHAVIOURS
        BEHAVIOURS[name] = EpisodeBehaviour(name, kind, says, ends, once, act)
        return act

    return register
