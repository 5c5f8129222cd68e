"""A group's priority in the request queue, and the endpoint that its requests share."""

from __future__ import annotations

from dataclasses import dataclass, field

from easyrl.inference_client.pool.endpoint import Endpoint, Need

Rank = tuple[int, float, int]  # priority, expected length, order of asking: smaller goes first

PROMPT_WINDOW = 32  # responses; the policy changes, and lengths with it
DATASET_WINDOW = 1024


class ExpectedLengths:
    """Running means of response lengths in tokens, per prompt and of one dataset.

    Without one of the prompt the dataset's mean, without any response half of ``max_tokens``.
    """

    def __init__(self, max_tokens: int) -> None:
        self._by_prompt: dict[int, tuple[float, int]] = {}  # index → mean, number of responses
        self._dataset: tuple[float, int] = (max_tokens / 2, 0)

    def of(self, index: int) -> float:
        """Tokens expected of one response to prompt ``index`` of the dataset."""
        return self._by_prompt.get(index, self._dataset)[0]

    def saw(self, index: int, num_tokens: int) -> None:
        before = self._by_prompt.get(index, (0.0, 0))
        self._by_prompt[index] = _moved(before, num_tokens, PROMPT_WINDOW)
        self._dataset = _moved(self._dataset, num_tokens, DATASET_WINDOW)


@dataclass(eq=False, slots=True)
class GroupAssignment:
    """Made once per group and passed with each of its samples (``EndpointPool.group``)."""

    rank: Rank  # before which other groups it goes; its retries keep it
    version: str | None  # of the policy that has to answer, None for any
    sample_tokens: int  # expected of one sample, prompt and response
    num_samples: int
    is_of_batch: bool = True  # it is trained; not an evaluation's
    stays: bool = False  # it keeps to its endpoint as long as that can be used, also where it waits
    session_of: GroupAssignment | None = None  # the group of whose samples this is one
    need: Need = field(init=False)  # of each sample
    endpoint: Endpoint | None = field(default=None, init=False)  # has the prompt in its cache
    spread: bool = field(default=False, init=False)  # its samples go where there is least to do
    num_reserved: int = field(default=0, init=False)  # places held at ``endpoint``

    def __post_init__(self) -> None:
        self.need = Need(self.version)

    def session(self) -> GroupAssignment:
        """Of one of its samples, which asks several times; takes over one of the places that are
        held.

        It begins where the group is, and keeps to that endpoint while it lives.
        """
        own = GroupAssignment(
            self.rank, self.version, self.sample_tokens, 1, self.is_of_batch, True, self
        )
        own.endpoint = self.endpoint
        if self.num_reserved and self.endpoint is not None:
            self.release(1)
            own.reserve(self.endpoint)
        return own

    def reserve(self, endpoint: Endpoint) -> None:
        """Holds places for all of its samples there."""
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


def _moved(mean: tuple[float, int], value: float, window: int) -> tuple[float, int]:
    """The mean of all values until ``window`` of them, then an exponential one."""
    old, count = mean[0], mean[1] + 1
    return old + (value - old) / min(count, window), count
