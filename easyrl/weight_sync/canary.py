"""Fixed prompts; their responses' log-probabilities tell what an endpoint serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.runtime.collectives import Collectives
from easyrl.schema import Completion, MicroBatch, Prompt, RolloutGroup, Score

Pack = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]
# endpoint, prompt int32 [P], sampling, seed → one response; raises ``EndpointError``
Ask = Callable[[Endpoint, np.ndarray, SamplingConfig, int], Awaitable[Completion]]

CANARY_TOKENS = 2  # generated per prompt; every sync waits for so many decode steps
# 16 prompts, so that no single token decides. More than a cache block each: of 16 tokens as on
# GPUs, and one also of 128 as vLLM has them on a CPU; a small model generates its first groups in
# the time of a few hundred more.
CANARY_PROMPT_TOKENS = (144, *(24,) * 15)
# Where only embedded servers are asked, whose cache has prompts as a whole: about as long as short
# prompts are, with which they are then computed.
EMBEDDED_PROMPT_TOKENS = (11,) * 16
FEWEST_TOKENS = 8  # prompt and response together
# Mean |Δ log-prob|, nats, of what the proof of the bits cannot see: a tied head or a cache that was
# left from other weights is off by nats. Rounding in bf16 has means of 3e-3 to 3e-2, with outliers
# where routers of a mixture of experts flip.
GROSS_DIFFERENCE = 0.5
OUTLIERS = 1 / 8  # share of the canary's tokens that rounding may move by nats


def canary_prompts(
    prompts: Sequence[Prompt], max_model_len: int | None, *, embedded: bool = False
) -> list[Prompt]:
    """A few prompts, of a cache block and more where caches have blocks, of the dataset's tokens.

    With ``CANARY_TOKENS`` they fit into ``max_model_len``; ``ValueError`` if it is too short.
    ``embedded``: all endpoints are embedded servers.
    """
    wanted = EMBEDDED_PROMPT_TOKENS if embedded else CANARY_PROMPT_TOKENS
    longest = wanted[0]
    if max_model_len is not None:
        if max_model_len < FEWEST_TOKENS:
            raise ValueError(
                f"an endpoint serves at most {max_model_len} tokens, the canary of the weight sync "
                f"needs {FEWEST_TOKENS}; raise the server's --max-model-len"
            )
        longest = max_model_len - CANARY_TOKENS
    lengths = [min(length, longest) for length in wanted]
    stream = np.concatenate([prompt.token_ids for prompt in prompts[:256]])
    parts = np.split(np.resize(stream, sum(lengths)), np.cumsum(lengths)[:-1])
    return [Prompt(index=i, token_ids=part, text="", answer=None) for i, part in enumerate(parts)]


def without_outliers(differences: np.ndarray) -> np.ndarray:
    """Indices of all tokens but those off by more than ``GROSS_DIFFERENCE``, ``OUTLIERS`` at most.

    Args:
        differences: |Δ log-prob| per token, float [N].
    """
    order = np.argsort(differences, kind="stable")
    num_dropped = min(int(OUTLIERS * len(order)), int((differences > GROSS_DIFFERENCE).sum()))
    return order[: len(order) - num_dropped]


@dataclass(frozen=True, slots=True)
class CanaryReading:
    """|Δ log-prob| between endpoint and trainer over the canary's generated tokens, in nats."""

    mean: float
    trimmed: float  # mean ``without_outliers``
    maximum: float
    num_tokens: int

    @classmethod
    def of(cls, differences: np.ndarray) -> CanaryReading:
        """Of |Δ log-prob| per token, float [N]; infinite without any, or with a NaN."""
        if len(differences) == 0:
            return cls(np.inf, np.inf, np.inf, 0)
        found = np.nan_to_num(differences, nan=np.inf)
        trimmed = found[without_outliers(found)].mean()
        return cls(float(found.mean()), float(trimmed), float(found.max()), len(found))

    def problem(self, tolerance: float) -> str | None:
        """What is wrong with the endpoint, in words; ``tolerance`` in nats per token."""
        if self.num_tokens == 0:
            return "canary: its samples hold no token to compare"
        if not self.mean <= tolerance:
            return (
                "canary: log-probabilities differ from the trainer's by "
                f"{self.mean:.2e} nats (maximum {self.maximum:.2e}, {self.num_tokens} "
                f"tokens, tolerance {tolerance:.1e})"
            )
        return None


@dataclass(frozen=True, slots=True)
class Expected:
    """The trainer's log-probabilities of one response to each canary prompt."""

    token_ids: tuple[np.ndarray, ...]  # per prompt int32 [R]
    logprobs: tuple[np.ndarray, ...]  # per prompt float32 [R]

    def is_of(self, samples: Sequence[Completion]) -> bool:
        """Whether the trainer was asked about these very tokens."""
        pairs = zip(self.token_ids, samples, strict=True)
        return all(np.array_equal(tokens, sample.token_ids) for tokens, sample in pairs)

    def differences(self, samples: Sequence[Completion]) -> np.ndarray:
        """How far an endpoint is from the trainer: |Δ log-prob| of each token, float32 [N].

        Endpoints sample with the same seeds, so that equal weights give equal tokens but where
        rounding tips the balance. Compared are the tokens before the first that differs; without
        any there is nothing that could agree.
        """
        differences = []
        for tokens, logprobs, sample in zip(self.token_ids, self.logprobs, samples, strict=True):
            length = min(len(tokens), len(sample.token_ids))
            shared = int(np.cumprod(tokens[:length] == sample.token_ids[:length]).sum())
            differences.append(np.abs(sample.logprobs[:shared] - logprobs[:shared]))
        return np.concatenate(differences)

    def reading(self, samples: Sequence[Completion]) -> CanaryReading:
        return CanaryReading.of(self.differences(samples))

    def to_json(self) -> list[list[list[float]]]:
        """Exact: a float32 survives JSON."""
        return [[part.tolist() for part in parts] for parts in (self.token_ids, self.logprobs)]

    @classmethod
    def from_json(cls, record: Sequence[Sequence[Sequence[float]]]) -> Expected:
        tokens, logprobs = record
        return cls(
            tuple(np.array(part, dtype=np.int32) for part in tokens),
            tuple(np.array(part, dtype=np.float32) for part in logprobs),
        )


# An endpoint's URL, its canary samples → what the trainer says of them
Expect = Callable[[str, Sequence[Completion]], Awaitable[Expected]]


@dataclass(frozen=True)
class Canary:
    """Samples from an endpoint, and asks the trainer about the samples.

    Attributes:
        pack: packs groups in the given order, every token trained.
        ask: one response of an endpoint.
        timeout_s: for all its responses together.
    """

    prompts: Sequence[Prompt]
    temperature: float
    pack: Pack
    ask: Ask
    timeout_s: float

    async def sample(self, endpoint: Endpoint) -> list[Completion]:
        """One response per canary prompt, of the same seeds every time; ``EndpointError``."""
        sampling = SamplingConfig(
            max_tokens=CANARY_TOKENS, temperature=self.temperature, ignore_eos=True
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(
                    *(self.ask(endpoint, p.token_ids, sampling, p.index) for p in self.prompts)
                )
        except TimeoutError:
            reason = f"the canary's responses took longer than {self.timeout_s:g} s"
            raise EndpointUnavailable(endpoint.url, reason) from None

    def ask_trainer(
        self,
        samples: Mapping[str, Sequence[Completion]],
        engine: TrainEngine,
        collectives: Collectives,
        dummy: Callable[[], MicroBatch],
    ) -> dict[str, Expected]:
        """What the trainer says of rank 0's ``samples``, by their key; nothing on other ranks.

        Equal responses go through the model once, so that many endpoints cost what one does.
        Collective: with sharded weights every rank has to run equally many forwards.
        """
        distinct = {_tokens(responses): responses for responses in samples.values()}
        rows = []
        if collectives.ranks.rank == 0:
            groups = [
                RolloutGroup(prompt, (completion,), (Score(0.0, {}),), "", 0.0, 0.0)
                for responses in distinct.values()
                for prompt, completion in zip(self.prompts, responses, strict=True)
            ]
            rows = self.pack(groups)
        num_rows = collectives.broadcast(len(rows))
        outputs = [
            engine.logprobs(row).numpy() for row in rows or (dummy() for _ in range(num_rows))
        ]
        logprobs = np.concatenate([np.zeros(0, dtype=np.float32), *outputs])
        tokens = [c.token_ids for responses in distinct.values() for c in responses]
        if len(logprobs) != sum(map(len, tokens)):  # the packing left tokens out
            tokens, logprobs = [t[:0] for t in tokens], logprobs[:0]
        parts = np.split(logprobs, np.cumsum([len(t) for t in tokens])[:-1])
        count = len(self.prompts)
        known = {
            key: Expected(tuple(tokens[i : i + count]), tuple(parts[i : i + count]))
            for key, i in zip(distinct, range(0, len(tokens), count), strict=True)
        }
        return {url: known[_tokens(responses)] for url, responses in samples.items()}


def _tokens(responses: Sequence[Completion]) -> tuple[bytes, ...]:
    return tuple(completion.token_ids.tobytes() for completion in responses)
