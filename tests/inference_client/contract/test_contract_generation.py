"""Token ids in, token ids out: what is sampled, where it ends, what its log-probabilities are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import RequestRejected
from tests.inference_client.contract.calls import (
    LOGPROB_TOLERANCE,
    PROMPT,
    logprob_error,
    long_response,
    sample,
)
from tests.inference_client.contract.conftest import Server
from tests.inference_client.contract.served_models import (
    EOS,
    MAX_MODEL_LEN,
    contract_model,
    text_of,
)
from tests.tiny_models import VOCAB_SIZE


async def test_served_model_says_how_long_it_may_be(client: EndpointClient) -> None:
    await client.health()
    assert (await client.served_model()).max_model_len == MAX_MODEL_LEN


# ---- log-probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 16, 100])
async def test_the_ids_sent_are_the_ids_scored(
    server: Server, client: EndpointClient, length: int
) -> None:
    """Prompts shorter and longer than a cache block, the longest with every id of the vocabulary.

    A log-probability depends on every id before it: one that was decoded and encoded again, or
    dropped, would show.
    """
    prompt = [(7 * i + length) % VOCAB_SIZE for i in range(length)]
    (completion,) = await sample(client, prompt, **long_response(40))
    assert len(completion.token_ids) == 40
    assert completion.token_ids.min() >= 0 and completion.token_ids.max() < VOCAB_SIZE
    assert logprob_error(server.model, prompt, completion) < LOGPROB_TOLERANCE


async def test_long_prompts_at_once(server: Server, client: EndpointClient) -> None:
    """More prompt tokens than a server reads in one step; every response has a seed."""
    prompts = [[(k * i + 3) % VOCAB_SIZE for i in range(1500)] for k in range(1, 5)]
    together = await asyncio.gather(
        *(sample(client, prompt, seed=7, **long_response(8)) for prompt in prompts)
    )  # first: afterwards the prefix cache may hold them
    alone = [await sample(client, prompt, seed=7, **long_response(8)) for prompt in prompts]
    for prompt, (expected,), (completion,) in zip(prompts, alone, together, strict=True):
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        assert logprob_error(server.model, prompt, completion) < LOGPROB_TOLERANCE


async def test_other_weights_would_be_seen(server: Server, client: EndpointClient) -> None:
    """The comparison above can fail."""
    (completion,) = await sample(client, **long_response(40))
    other = contract_model(server.tied, seed=99)
    assert logprob_error(other, PROMPT, completion) > 100 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 1.7])
async def test_logprobs_are_those_of_the_tempered_distribution(
    server: Server, client: EndpointClient, temperature: float
) -> None:
    (completion,) = await sample(client, temperature=temperature, **long_response(60))
    assert logprob_error(server.model, PROMPT, completion, temperature) < LOGPROB_TOLERANCE
    assert logprob_error(server.model, PROMPT, completion, 1.0) > 100 * LOGPROB_TOLERANCE


async def test_temperature_zero_takes_the_likeliest(server: Server, client: EndpointClient) -> None:
    (completion,) = await sample(client, seed=1, temperature=0, **long_response(30))
    (again,) = await sample(client, seed=2, temperature=0, **long_response(30))
    assert again.token_ids.tolist() == completion.token_ids.tolist()
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    best = server.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert completion.token_ids.tolist() == best.tolist()


# ---- seeds and several samples -------------------------------------------------------------------


async def test_a_seed_repeats_its_response_whatever_runs_beside_it(client: EndpointClient) -> None:
    (alone,) = await sample(client, seed=11, **long_response(48))
    crowd = [sample(client, (3, n + 1), seed=n, **long_response(64)) for n in range(12)]
    again, other, *_ = await asyncio.gather(
        sample(client, seed=11, **long_response(48)),
        sample(client, seed=12, **long_response(48)),
        *crowd,
    )
    assert again[0].token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(again[0].logprobs, alone.logprobs, atol=LOGPROB_TOLERANCE)
    assert other[0].token_ids.tolist() != alone.token_ids.tolist()


async def test_several_samples_are_complete_distinct_and_seeded(
    server: Server, client: EndpointClient
) -> None:
    completions = await sample(client, seed=3, n=5, **long_response(24))
    again = await sample(client, seed=3, n=5, **long_response(24))
    assert [len(c.token_ids) for c in completions] == [24] * 5
    assert len({tuple(c.token_ids) for c in completions}) == 5
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in completions]
    for completion in completions:
        assert completion.finish_reason == "length"
        assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE


async def test_samples_follow_the_distribution(server: Server, client: EndpointClient) -> None:
    """First tokens of many seeds against the model's probabilities: χ² over the likeliest ids."""
    num_samples = 640
    drawn: list[int] = []
    for seed in range(0, num_samples, 64):
        asked = [sample(client, seed=1000 * (seed + i), n=16, max_tokens=1) for i in range(4)]
        drawn += [int(c.token_ids[0]) for batch in await asyncio.gather(*asked) for c in batch]
    logits = server.model(input_ids=torch.tensor([list(PROMPT)])).logits[0, -1]
    probabilities = torch.softmax(logits.detach(), dim=-1).numpy()
    expected = probabilities * num_samples
    likely = np.flatnonzero(expected >= 8)
    observed = np.bincount(drawn, minlength=VOCAB_SIZE)
    assert len(likely) >= 5
    chi2 = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    # mean len(likely), standard deviation sqrt(2 len(likely)): five of them are one in 1e5
    assert chi2 < len(likely) + 5 * np.sqrt(2 * len(likely))


# ---- where a response ends -----------------------------------------------------------------------


async def test_length_ends_a_response(client: EndpointClient) -> None:
    for length in (1, 2, 17):
        (completion,) = await sample(client, **long_response(length))
        assert len(completion.token_ids) == length
        assert completion.finish_reason == "length" and completion.truncated


async def test_more_tokens_than_the_context_holds(client: EndpointClient) -> None:
    """Cut short as any other length (vLLM), or refused as the caller's fault."""
    prompt = [1 + i % (VOCAB_SIZE - 1) for i in range(MAX_MODEL_LEN - 5)]
    try:
        (completion,) = await sample(client, prompt, fits=False, **long_response(50))
    except RequestRejected as error:
        assert "max_tokens" in error.reason
    else:
        assert completion.finish_reason == "length"
        # one token more than fits may be sampled from the last position of the context
        assert 5 <= len(completion.token_ids) <= 6
    (completion,) = await sample(client, prompt, **long_response(5))
    assert len(completion.token_ids) == 5


async def test_end_of_sequence_is_the_last_token(server: Server, client: EndpointClient) -> None:
    completions = await sample(client, seed=5, n=8, max_tokens=400)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped, "no response of 400 tokens has ended"
    for completion in stopped:
        ids = completion.token_ids.tolist()
        assert ids[-1] == EOS and EOS not in ids[:-1]
        assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE


async def test_ignored_end_of_sequence_is_a_token_as_any_other(client: EndpointClient) -> None:
    completions = await sample(client, seed=5, n=8, **long_response(400))
    assert all(len(c.token_ids) == 400 for c in completions)
    assert any(EOS in c.token_ids[:-1] for c in completions)


async def test_a_stop_token_is_part_of_the_response(client: EndpointClient) -> None:
    (whole,) = await sample(client, seed=21, **long_response(40))
    ids = whole.token_ids.tolist()
    stop = next(token for token in ids[5:] if token != EOS)
    (stopped,) = await sample(client, seed=21, stop_token_ids=[stop], **long_response(40))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == ids[: ids.index(stop) + 1]


async def test_min_tokens_holds_back_the_end(client: EndpointClient) -> None:
    completions = await sample(client, seed=5, n=8, min_tokens=150, max_tokens=400)
    assert all(len(c.token_ids) >= 150 for c in completions)
    assert all(EOS not in c.token_ids[:149] for c in completions)


async def test_a_stop_string_keeps_the_tokens_it_is_made_of(client: EndpointClient) -> None:
    """It may lie across tokens; the response is cut behind it, never inside a token."""
    seed, ids = 0, [EOS]
    while len(ids) < 15:  # one that goes on for a while
        seed += 1
        (whole,) = await sample(client, seed=seed, max_tokens=40)
        ids = [token for token in whole.token_ids.tolist() if token != EOS]
    letters = text_of(ids)
    stop = letters[8:11]
    (stopped,) = await sample(client, seed=seed, max_tokens=40, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == ids[: letters.index(stop) + len(stop)]
