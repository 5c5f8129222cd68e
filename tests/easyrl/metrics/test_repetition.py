"""Repeated n-grams, against a count with Python's own sets."""

from __future__ import annotations

import numpy as np
import pytest

from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.metrics.repetition import NGRAM, Ngrams, count_ngrams
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import Completion, Prompt, RolloutGroup, Score


def counted_plainly(token_ids: np.ndarray) -> Ngrams:
    tokens = token_ids.tolist()
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return Ngrams(len(ngrams), len(ngrams) - len(set(ngrams)))


@pytest.mark.parametrize("vocabulary", [2, 3, 150_000])
def test_as_counted_with_sets(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    some_repeat = False
    for length in [0, 1, NGRAM - 1, NGRAM, NGRAM + 1, 100, 3000]:
        token_ids = rng.integers(0, vocabulary, length).astype(np.int32)
        if length == 3000:  # goes round in a circle of 37 tokens, with a slip now and then
            token_ids = np.resize(token_ids[:37], length)
            token_ids[::400] = 1
        assert count_ngrams([token_ids]) == counted_plainly(token_ids)
        some_repeat |= count_ngrams([token_ids]).num_repeated > 0
    assert some_repeat


def test_of_several_responses_each_counts_by_itself() -> None:
    rng = np.random.default_rng(0)
    lengths = [NGRAM + 3, 0, NGRAM - 1, 40, NGRAM, NGRAM - 1, 40]
    responses = [rng.integers(0, 2, length).astype(np.int32) for length in lengths]
    responses[6] = responses[3]  # what is said in another response is not repeated
    each = [counted_plainly(token_ids) for token_ids in responses]
    expected = Ngrams(sum(of.num for of in each), sum(of.num_repeated for of in each))
    assert count_ngrams(responses) == expected
    assert count_ngrams([]) == Ngrams(0, 0)


def test_the_binary_sequence_that_fools_polynomial_hashes() -> None:
    """Thue-Morse and its complement have equal polynomial hashes modulo 2^64, whatever the base."""
    thue_morse = np.array([bin(i).count("1") % 2 for i in range(4096)], dtype=np.int32)
    assert count_ngrams([thue_morse]) == counted_plainly(thue_morse)


def group(*responses: np.ndarray) -> RolloutGroup:
    completions = tuple(
        Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop",
            version_spans=(),
            endpoint="http://fake:1",
            loss_mask=np.ones(len(ids), dtype=bool),
        )
        for ids in responses
    )
    scores = tuple(Score(0.0, {}) for _ in responses)
    prompt = Prompt(0, np.zeros(2, dtype=np.int32), "", None)
    return RolloutGroup(prompt, completions, scores, "run:0:0", 0.0, 1.0)


def test_the_metric_is_the_share_of_all_ngrams_of_a_batch() -> None:
    loop, plain = np.zeros(50, dtype=np.int32), np.arange(100, dtype=np.int32)
    first, second = BatchTotals(), BatchTotals()
    # 35 n-grams, 34 of them repeated; 85, none repeated
    first.add_counts(GroupCounts.of(group(loop, plain)))
    second.add_counts(GroupCounts.of(group(plain[: NGRAM - 1])))  # none
    first.add(second)
    totals = first.merge(Collectives(Ranks.data_parallel()))
    assert batch_metrics([Update(totals)], [])["response/repetition"] == 34 / 120
    assert batch_metrics([Update(second)], [])["response/repetition"] == 0.0
