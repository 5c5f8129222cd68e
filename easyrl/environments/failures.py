"""What can go wrong with a rollout."""

from __future__ import annotations


class EnvironmentFailed(Exception):
    """An environment raised, or cannot be used: its name, the cause on one line and ``where``
    (``file:line``)."""

    def __init__(self, environment: str, cause: str, where: str | None = None) -> None:
        super().__init__(environment, cause, where)
        self.environment, self.cause, self.where = environment, cause, where

    def __str__(self) -> str:
        place = "" if self.where is None else f"{self.where}: "
        return f"environment {self.environment}: {place}{self.cause}"


class EnvironmentUnreachable(EnvironmentFailed):
    """Something that it needs could not be connected to, as a server of its own."""


class OutOfTurns(EnvironmentFailed):
    """It let the gateway's refusal of a turn beyond ``max_turns`` pass: its own end, no fault."""


class RolloutHung(EnvironmentFailed):
    """It made no request for longer than ``idle_timeout_s``, and was cancelled."""


class HostDied(EnvironmentFailed):
    """The process that ran it ended; another rollout in it may have been the reason."""
