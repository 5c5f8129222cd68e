"""What a response has to be before it is kept or trained; imports nothing heavy.

Fetchers apply it to what endpoints send, the journal to what an earlier attempt left of the open
batch, ``easyrl verify`` to what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from easyrl.schema import Completion

FINISH_REASONS = ("stop", "length")
MISSING_LOGPROB = -9999.0  # vLLM writes this where a log-probability is NaN or was not recorded
# Above 0 by rounding alone: a log-softmax in float32 errs by 6e-8 of logits that stay below 100.
LOGPROB_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class CompletionLimits:
    """What bounds a response: the policy's vocabulary, and what was asked for."""

    vocab_size: int  # rows of the policy's embedding
    max_tokens: int | None = None


INT32_ALONE = CompletionLimits(2**31)  # where neither is known


def completion_problem(
    completion: Completion, limits: CompletionLimits = INT32_ALONE
) -> str | None:
    """Why ``completion`` cannot be trained, naming the field; None if it can."""
    token_ids, logprobs = completion.token_ids, completion.logprobs
    num_tokens = len(token_ids)
    if num_tokens == 0:
        return "token_ids: has no tokens"
    if limits.max_tokens is not None and num_tokens > limits.max_tokens:
        return f"token_ids: {num_tokens} tokens, max_tokens is {limits.max_tokens}"
    if len(logprobs) != num_tokens or len(completion.loss_mask) != num_tokens:
        return f"logprobs: {num_tokens} tokens but {len(logprobs)} log-probabilities"
    if token_ids.min() < 0 or token_ids.max() >= limits.vocab_size:
        at = int(np.argmax((token_ids < 0) | (token_ids >= limits.vocab_size)))
        return (
            f"token_ids[{at}] is {token_ids[at]}, the policy's vocabulary has ids 0 to "
            f"{limits.vocab_size - 1}"
        )
    # a NaN is neither above nor below
    if not (logprobs.min() > MISSING_LOGPROB and logprobs.max() <= LOGPROB_ROUNDING):
        at = int(np.argmin((logprobs > MISSING_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)))
        if logprobs[at] > 0:
            return f"logprobs[{at}] is {logprobs[at]}, above 0"
        return f"logprobs[{at}] is {logprobs[at]}: missing or not a number"
    if completion.finish_reason not in FINISH_REASONS:
        return f"finish_reason is {completion.finish_reason!r:.80}, the response is not usable"
    return _span_problem(completion)


def _span_problem(completion: Completion) -> str | None:
    """Version spans have to cover the tokens one after another."""
    end = 0
    for span in completion.version_spans:
        if span.start != end or span.end <= end:
            break
        end = span.end
    else:
        if end == len(completion.token_ids):
            return None
    spans = str([tuple(span) for span in completion.version_spans])
    return f"weight_versions {spans:.200} do not cover {len(completion.token_ids)} tokens"
