"""Fixed prompts; their responses' log-probabilities tell what an endpoint serves (DESIGN §2.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.agreement import Agreement
from easyrl.config import SamplingConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.client import parse_generate_response
from easyrl.inference_client.pool import Endpoint
from easyrl.schema import Completion, MicroBatch, Prompt, RolloutGroup, Score

Pack = Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]

CANARY_TOKENS = 16  # generated per prompt, but never more than the prompt has
CANARY_PROMPT_TOKENS = 96  # several cache blocks of 16
CANARY_PROMPTS = 4
FEWEST_TOKENS = 8  # prompt and response together


def canary_prompts(prompts: Sequence[Prompt], max_model_len: int | None) -> list[Prompt]:
    """A few prompts of several cache blocks each, made of the dataset's own tokens.

    With the tokens that ``Canary`` generates they fit into ``max_model_len``, shorter if need be.
    Raises ``ValueError`` if not even that leaves enough to compare.
    """
    length = CANARY_PROMPT_TOKENS
    if max_model_len is not None:
        if max_model_len < FEWEST_TOKENS:
            raise ValueError(
                f"an endpoint serves at most {max_model_len} tokens, the canary of the weight sync "
                f"needs {FEWEST_TOKENS}; raise the server's --max-model-len"
            )
        length = min(length, max(max_model_len - CANARY_TOKENS, max_model_len // 2))
    stream = np.concatenate([prompt.token_ids for prompt in prompts[:256]])
    stream = np.resize(stream, CANARY_PROMPTS * length)
    return [
        Prompt(index=i, token_ids=tokens, text="", answer=None)
        for i, tokens in enumerate(stream.reshape(CANARY_PROMPTS, length))
    ]


@dataclass(frozen=True, slots=True)
class CanaryReading:
    """|Δ log-prob| between endpoint and trainer over the canary's generated tokens, in nats."""

    mean: float
    maximum: float


class Canary:
    """Samples from an endpoint and compares with the trainer's log-probabilities."""

    def __init__(
        self, prompts: Sequence[Prompt], temperature: float, pack: Pack, timeout_s: float
    ) -> None:
        self._prompts = prompts
        self._sampling = SamplingConfig(
            max_tokens=min(CANARY_TOKENS, *(len(prompt.token_ids) for prompt in prompts)),
            temperature=temperature,
            ignore_eos=True,
        )
        self._pack = pack
        self._timeout_s = timeout_s

    async def sample(self, endpoint: Endpoint) -> list[Completion]:
        """One response per canary prompt from ``endpoint``."""

        async def one(prompt: Prompt) -> Completion:
            body = await endpoint.client.generate(
                prompt.token_ids, self._sampling, seed=prompt.index, timeout_s=self._timeout_s
            )
            return parse_generate_response(body, endpoint.url, len(prompt.token_ids))[0]

        return list(await asyncio.gather(*(one(prompt) for prompt in self._prompts)))

    def micro_batches(self, completions: Sequence[Completion]) -> list[MicroBatch]:
        """The samples as packed rows, in the order of ``served_logprobs``."""
        groups = [
            RolloutGroup(prompt, (completion,), (Score(0.0, {}),), "", 0.0, 0.0)
            for prompt, completion in zip(self._prompts, completions, strict=True)
        ]
        return self._pack(groups, [np.zeros(1, dtype=np.float32)] * len(groups))


def trainer_logprobs(
    engine: TrainEngine,
    agreement: Agreement,
    micro_batches: Sequence[MicroBatch],
    dummy: Callable[[], MicroBatch],
) -> np.ndarray:
    """Log-probabilities of rank 0's rows, float32 [N of all rows]; other ranks join with dummies.

    Collective: with sharded weights every rank has to run equally many forwards.
    """
    rows = agreement.from_rank_zero(len(micro_batches))
    mine = list(micro_batches) if agreement.rank == 0 else [dummy() for _ in range(rows)]
    outputs = [engine.logprobs(micro_batch).numpy() for micro_batch in mine]
    return np.concatenate(outputs) if outputs else np.zeros(0, dtype=np.float32)


def served_logprobs(micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """What the endpoint said of the same tokens, float32 [N of all rows]."""
    outputs = [m.inference_logprobs.numpy() for m in micro_batches]
    return np.concatenate(outputs) if outputs else np.zeros(0, dtype=np.float32)


def compare(served: np.ndarray, trained: np.ndarray) -> CanaryReading:
    """|Δ log-prob| over equally many tokens; a NaN on either side reads as infinity.

    Without a token there is nothing that could agree: that reads as infinity too.
    """
    if len(served) == 0:
        return CanaryReading(np.inf, np.inf)
    difference = np.nan_to_num(np.abs(served - trained), nan=np.inf)
    return CanaryReading(float(difference.mean()), float(difference.max()))
