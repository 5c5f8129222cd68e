"""The limit on each endpoint's mean difference of log-probabilities."""

import math

import pytest

from easyrl.config.file import validate_config
from easyrl.engines.base import LogprobComparison
from easyrl.metrics.logprob_agreement import (
    LIMITS,
    MIN_TOKENS,
    agreement,
    agreement_limit,
    disagreements,
    not_judged,
)
from easyrl.schema import EndpointAgreement

URL = "http://one"


def judged(num_tokens, mean, maximum=None, limit=0.2):
    seen = EndpointAgreement(URL, num_tokens, mean, mean if maximum is None else maximum)
    return disagreements([seen], limit).get(URL)


def test_the_mean_is_held_to_the_limit_and_numbers_are_named():
    assert judged(5000, 0.2) is None
    problem = judged(5000, 0.2001, 3.5)
    for said in ("0.2 nats", "5000 trained tokens", "maximum 3.5", "limit 0.2"):
        assert said in problem
    assert judged(5000, 0.2001, limit=None) is None


@pytest.mark.parametrize("num_tokens, nats, is_over", [(1, 20, False), (7, 4.2, True),
                                                       (6, 4.2, False), (64, 0.41, True),
                                                       (64, 0.39, False)])  # fmt: skip
def test_few_tokens_count_as_if_the_missing_ones_agreed(num_tokens, nats, is_over):
    assert (judged(num_tokens, nats) is not None) == is_over


def test_outliers_of_nats_among_many_tokens_pass():
    """As bf16 and a mixture of experts have them; the same sum on few tokens does not."""
    total = 10 * 4.0
    assert judged(1000, total / 1000, 4.0) is None
    assert judged(MIN_TOKENS, total / MIN_TOKENS, 4.0) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_over_every_limit(value):
    one = LogprobComparison(num=3.0, abs=value, maximum=value)
    [seen] = agreement({URL: one})
    assert (seen.mean, seen.num_tokens) == (None, 3)
    assert "3 trained tokens are not finite" in disagreements([seen], 1e9)[URL]


def test_an_endpoint_whose_tokens_were_all_masked_is_not_in_the_account():
    assert agreement({URL: LogprobComparison()}) == []


def test_sums_add_up_and_the_largest_difference_stays():
    total = LogprobComparison()
    total.add(LogprobComparison(num=2, abs=0.5, maximum=0.4))
    total.add(LogprobComparison(num=3, abs=0.5, maximum=0.3))
    assert agreement({URL: total}) == [EndpointAgreement(URL, 5, 0.2, 0.4)]


def config(tmp_path, **sections):
    model = {"path": str(tmp_path), "dtype": sections.pop("dtype", "bf16")}
    return validate_config(
        {
            "model": model,
            "data": {"files": [str(tmp_path / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            **sections,
        }
    )


@pytest.mark.parametrize("sections, limit", [
    ({}, LIMITS["bf16"]),
    ({"dtype": "fp32"}, LIMITS["fp32"]),
    ({"weight_sync": {"agreement_tolerance": 0.5}}, 0.5),
    ({"rollout": {"allow_off_policy_sampling": True, "top_p": 0.9}}, None),
    ({"rollout": {"allow_off_policy_sampling": True}, "weight_sync": {"agreement_tolerance": 1.0}},
     1.0),
    ({"recipe": {"name": "grpo", "importance_correction": "truncated"}}, LIMITS["bf16"]),
])  # fmt: skip
def test_the_limit_is_the_dtypes_unless_the_configuration_says_otherwise(tmp_path, sections, limit):
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    judged = config(tmp_path, **sections)
    assert agreement_limit(judged) == limit
    if limit is None:
        assert "weight_sync.agreement_tolerance" in not_judged(judged)
    else:
        assert not_judged(judged) is None
