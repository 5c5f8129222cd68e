"""Episodes in the journal: as they were, and withdrawn with any endpoint that made a turn."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from easyrl.completion_check import CompletionLimits
from easyrl.ledger.journal.codec import (
    CodecError,
    decode_record,
    encode,
    group_problem,
    to_group,
    to_record,
)
from easyrl.ledger.journal.earlier_attempts import is_withdrawn
from easyrl.schema import GroupOutcome
from tests.easyrl.episodes.trees import episode, group, typical


def episodes():
    rng = np.random.default_rng(0)
    made = episode(*typical(rng, [10, 11, 12]), reward=0.25)
    assert made.episode is not None
    said = replace(
        made.episode,
        components={"moves": 3.0},
        turn_rewards=tuple(0.5 * n for n in range(len(made.episode.turns))),
    )
    failed = replace(made.episode, failure="game.py:3: KeyError", reward=0.0)
    return group(replace(made, episode=said), replace(made, episode=failed))


def test_a_record_is_the_group_again():
    before = episodes()
    record = decode_record(encode(to_record(before, "w")))
    after = to_group(record, before.prompt, "d")
    for one, other in zip(before.completions, after.completions, strict=True):
        assert one.episode == other.episode
        for name in ("token_ids", "logprobs", "loss_mask"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.version_spans, one.made_by) == (other.version_spans, other.made_by)
    assert group_problem(record, CompletionLimits(vocab_size=64)) is None
    assert "vocabulary" in str(group_problem(record, CompletionLimits(vocab_size=11)))


def test_every_endpoint_of_a_turn_has_made_it():
    made = episodes()
    record = to_record(made, "w")
    assert is_withdrawn(record.made_by, "http://b", 1)
    assert is_withdrawn(record.made_by, "http://a", 1)
    assert not is_withdrawn(record.made_by, "http://b", 2)
    assert GroupOutcome.of(made).endpoints == ["http://a", "http://b"]


def test_a_record_without_episodes_is_read_as_ever_and_a_broken_one_is_not():
    record = to_record(group(*episodes().completions), "w")
    parts = msgspec.msgpack.decode(encode(record))
    for completion in parts[3]:
        assert completion[-1] is not None
        completion.pop()  # as it was written before there were episodes
    assert [c.episode for c in decode_record(encode(parts)).completions] == [None, None]
    parts[3][0].append([1, 2])
    with pytest.raises(CodecError):
        decode_record(encode(parts))
