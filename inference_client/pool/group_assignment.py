"""A group's priority in the request queue, and the endpoint that its requests share."""

from __future__ import annotations

from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.expected_lengths import ExpectedLengths

Rank = tuple[int, float, int]  # priority, expected length, order of asking: smaller goes first


class GroupAssignment:
    """Made once per group and passed with each of its samples (``EndpointPool.group``).

    Args:
        rank: before which other groups it goes; its retries keep it.
        version: of the policy that has to answer, None for any.
        sample_tokens: expected tokens of one sample, prompt and response.
        lengths, index: where the lengths of its responses are noted.
    """

    __slots__ = (
        "endpoint",
        "index",
        "lengths",
        "num_reserved",
        "num_samples",
        "rank",
        "sample_tokens",
        "spread",
        "version",
    )

    def __init__(
        self,
        rank: Rank,
        version: str | None,
        sample_tokens: int,
        num_samples: int,
        lengths: ExpectedLengths | None = None,
        index: int = 0,
    ) -> None:
        self.rank = rank
        self.version = version
        self.sample_tokens = sample_tokens
        self.num_samples = num_samples
        self.lengths = lengths
        self.index = index
        self.endpoint: Endpoint | None = None  # has the prompt in its prefix cache
        self.spread = False  # its samples go wherever there is least to do
        self.num_reserved = 0  # places held at ``endpoint``

    def reserve(self, endpoint: Endpoint) -> None:
        """Its samples are about to go to ``endpoint``."""
        self.endpoint = endpoint
        self.num_reserved = self.num_samples
        endpoint.num_reserved += self.num_reserved
        endpoint.outstanding_tokens += self.num_reserved * self.sample_tokens

    def release(self, count: int) -> None:
        """``count`` of the places are taken, or not needed."""
        count = min(count, self.num_reserved)
        if count and self.endpoint is not None:
            self.num_reserved -= count
            self.endpoint.num_reserved -= count
            self.endpoint.outstanding_tokens -= count * self.sample_tokens

    def leave(self) -> None:
        """Its endpoint cannot be used any more: the next sample chooses another."""
        self.release(self.num_reserved)
        self.endpoint = None

    def settle(self, endpoint: Endpoint) -> None:
        """A sample goes to ``endpoint``; the others shall follow unless they have a home."""
        if self.endpoint is None and not self.spread:
            self.endpoint = endpoint

    def saw(self, num_tokens: int) -> None:
        """A response of the group had ``num_tokens`` tokens."""
        if self.lengths is not None:
            self.lengths.saw(self.index, num_tokens)
