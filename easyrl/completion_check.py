"""What a response has to be before it is kept or trained; imports nothing heavy.

Fetchers apply it to what endpoints send, the journal to what an earlier attempt left of the open
batch, ``easyrl verify`` to what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.schema import Completion, Episode, Turn

FINISH_REASONS = ("stop", "length")
MISSING_LOGPROB = -9999.0  # vLLM writes this where a log-probability is NaN or was not recorded
# Above 0 by rounding alone: a log-softmax in float32 errs by 6e-8 of logits that stay below 100.
LOGPROB_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of the policy."""

    size: int  # rows of its embedding: ids run from 0 to one less
    # of which each ends a sequence: tokenizer's, configuration's, generation_config.json's. None:
    # not known
    end_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class CompletionLimits:
    """What bounds a response: the policy's vocabulary, and what was asked for."""

    vocab_size: int  # rows of the policy's embedding
    max_tokens: int | None = None
    min_tokens: int = 0
    # the last token of a response that was not cut off ("stop") is one of them; None: any may be
    end_ids: frozenset[int] | None = None
    cut_at: int | None = None  # tokens of each that was ("length"); None: any number


def limits_of(
    sampling: SamplingConfig, vocabulary: Vocabulary, *, told_length: bool
) -> CompletionLimits:
    """Of the responses to a request with ``sampling``.

    Servers end a response behind an id of ``vocabulary.end_ids``, unless they are to ignore these,
    and behind a stop token, and keep both in it; behind which token a stop string is complete,
    only its text tells. ``told_length``: the server was given this ``max_tokens``, and not fewer
    for the sake of its context.
    """
    end_ids = vocabulary.end_ids
    if end_ids is not None:
        end_ids = (frozenset() if sampling.ignore_eos else end_ids) | set(sampling.stop_token_ids)
    return CompletionLimits(
        vocabulary.size,
        sampling.max_tokens,
        sampling.min_tokens,
        end_ids=None if sampling.stop else end_ids,
        cut_at=sampling.max_tokens if told_length else None,
    )


ANY_INT32 = Vocabulary(2**31)  # where nothing is known of it
INT32_ALONE = CompletionLimits(ANY_INT32.size)


def completion_problem(
    completion: Completion, limits: CompletionLimits = INT32_ALONE
) -> str | None:
    """Why ``completion`` cannot be trained, naming the field; None if it can."""
    if completion.episode is not None:
        return _episode_problem(completion, completion.episode, limits)
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
    return _end_problem(completion, limits) or _span_problem(completion)


def _end_problem(completion: Completion, limits: CompletionLimits) -> str | None:
    """A response that was cut short would be trained as one that the policy ended there."""
    num_tokens, last = len(completion.token_ids), int(completion.token_ids[-1])
    if num_tokens < limits.min_tokens:
        return f"token_ids: {num_tokens} tokens, min_tokens is {limits.min_tokens}"
    if completion.truncated:
        if limits.cut_at in (None, num_tokens):
            return None
        return (
            f"finish_reason is 'length' after {num_tokens} tokens, max_tokens is {limits.cut_at} "
            "(a server with a smaller context has to say so: max_model_len of /v1/models)"
        )
    if limits.end_ids is None or last in limits.end_ids:
        return None
    return (
        f"finish_reason is 'stop' after token {last}, but responses end with one of "
        f"{str(sorted(limits.end_ids)):.100} (if the server ends them there by its own tokenizer "
        "or generation_config.json, add it to stop_token_ids)"
    )


def _episode_problem(
    completion: Completion, episode: Episode, limits: CompletionLimits
) -> str | None:
    """Each turn has to be a response, and all else the environment's.

    One that failed before its first turn has none, and no tokens: nothing of it is trained.
    """
    if not episode.turns and episode.failure is not None and not len(completion.token_ids):
        return None
    at, mask = 0, np.zeros(len(completion.token_ids), dtype=bool)
    for number, turn in enumerate(episode.turns):
        if turn.start != at or not turn.start <= turn.sampled < turn.end:
            return f"turn {number}: tokens {turn.start} to {turn.end} do not follow {at}"
        if turn.parent is not None and not 0 <= turn.parent < number:
            return f"turn {number}: continues turn {turn.parent}, which is not before it"
        if turn.parent is None and turn.sampled == turn.start:
            return f"turn {number}: has no prompt"
        at = turn.end
        mask[turn.sampled : turn.end] = True
        # a shorter one may have been asked for, and other stops than training's
        own = replace(limits, min_tokens=0, end_ids=None, cut_at=None)
        if problem := completion_problem(_of_turn(completion, turn), own):
            return f"turn {number}: {problem}"
    if at != len(completion.token_ids) or not episode.turns:
        return f"token_ids: {len(completion.token_ids)} tokens, its turns have {at}"
    if len(completion.loss_mask) != at or (completion.loss_mask != mask).any():
        return "loss_mask: is not of the sampled tokens"
    if len(episode.turn_rewards) not in (0, len(episode.turns)):
        return f"turn_rewards: {len(episode.turn_rewards)} of {len(episode.turns)} turns"
    if completion.token_ids.min() < 0 or completion.token_ids.max() >= limits.vocab_size:
        return f"token_ids: not all are below {limits.vocab_size}, the policy's vocabulary"
    return None


def _of_turn(completion: Completion, turn: Turn) -> Completion:
    """The response that a turn is."""
    where = slice(turn.sampled, turn.end)
    spans = tuple(
        span._replace(start=span.start - turn.sampled, end=span.end - turn.sampled)
        for span in completion.version_spans
        if turn.sampled <= span.start < turn.end
    )
    return replace(
        completion,
        token_ids=completion.token_ids[where],
        logprobs=completion.logprobs[where],
        loss_mask=completion.loss_mask[where],
        version_spans=spans,
        finish_reason=turn.finish_reason,
        episode=None,
    )


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
