"""What can go wrong with an endpoint, by who can do something about it."""

from __future__ import annotations

from collections.abc import Sequence


class EndpointError(RuntimeError):
    """An endpoint did not do what it was asked; ``url`` says which, ``reason`` what it answered."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)  # both, so that it survives pickling on its way from a worker
        self.url = url
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"


class EndpointUnavailable(EndpointError):
    """No connection, no answer in time, overload, or a 5xx: another endpoint may do better."""


class NotAnswered(EndpointUnavailable):
    """No answer came for ``waited_s``, the limit of the request."""

    def __init__(self, url: str, reason: str, waited_s: float) -> None:
        super().__init__(url, reason)
        self.args = (url, reason, waited_s)
        self.waited_s = waited_s


class MalformedResponse(EndpointError):
    """The answer arrived and cannot be used: truncated, inconsistent, or aborted by the server."""


class WrongVersion(EndpointError):
    """Tokens were sampled by other weights than those asked for."""


class RequestRejected(EndpointError):
    """A 4xx: the request is at fault and would be refused elsewhere too."""


class NoSuchModel(RequestRejected):
    """A 404 to a generate request: the adapter that it names is not loaded there."""


class PromptRejected(RequestRejected):
    """A 400, 413 or 422 to a generate request: this prompt cannot be had, others may."""


class JointRequestRejected(RequestRejected):
    """A 400, 413 or 422 to a request for several samples: it says nothing of any one of them."""


class StreamsRefused(RequestRejected):
    """A 404 or 405 of the route that streams samples, which ``/v1/models`` has promised."""


class PromptTooLong(PromptRejected):
    """The endpoints' context has no room for a single response token behind this prompt."""


class AttemptsFailed(EndpointError):
    """A request failed as often as it may; ``attempts`` says where and why."""

    def __init__(self, attempts: Sequence[EndpointError]) -> None:
        lines = "".join(f"\n  {attempt}" for attempt in attempts)
        reason = f"last of {len(attempts)} failed attempts (inference.max_retries):{lines}"
        super().__init__(attempts[-1].url, reason)
        self.args = (attempts,)
        self.attempts = attempts


class NoEndpointError(RuntimeError):
    """No endpoint can take the request, now or soon; the message names each and why."""


class Outage(NoEndpointError):
    """No endpoint was usable for ``inference.max_outage_s``; a later one may go on from here."""

    @classmethod
    def after(cls, seconds: float, problem: NoEndpointError) -> Outage:
        return cls(
            f"{problem}\nfor {round(seconds, 1):g} s (inference.max_outage_s); start the servers "
            "again"
        )


def is_outage(error: BaseException | None) -> bool:
    """Whether ``error``, or what caused it, is an ``Outage``."""
    while error is not None:
        if isinstance(error, Outage):
            return True
        error = error.__cause__
    return False
