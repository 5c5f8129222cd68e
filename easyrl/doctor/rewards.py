"""Whether the reward functions prefer a record's own answer to a wrong one."""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.config import Config
from easyrl.doctor.finding import Finding, failed, not_checked, ok
from easyrl.doctor.given_responses import KnownAnswers
from easyrl.rewards.scorer import Scorer
from easyrl.schema import RewardError, Score

COMPARING = ("exact", "math")  # built-in ones that are nothing but a comparison with the answer


async def reward_finding(config: Config, scorer: Scorer, known: Sequence[KnownAnswers]) -> Finding:
    """``known``: each a group for ``scorer``; the best form of an answer counts."""
    name = "rewards"
    if not known:
        return not_checked(name, "the records have no two different answers (data.fields.answer)")
    right, wrong = [], []
    try:
        for each in known:
            scores = await _scores(scorer, each)
            if any(score.failed for score in scores):
                return failed(
                    name,
                    f"a reward fails on {each.prompt.location or 'the first prompt'}",
                    "correct it; scoring.on_reward_error=fail shows its traceback",
                )
            rewards = [score.reward for score in scores]
            right.append(max(rewards[: len(each.right)]))
            wrong.append(max(rewards[len(each.right) :]))
    except RewardError as error:
        return failed(name, str(error)[:300], "correct the reward")
    said = (
        f"a record's own answer as the response gets {_mean(right):g}, another record's "
        f"{_mean(wrong):g} (means of {len(known)} prompts)"
    )
    if any(r < w for r, w in zip(right, wrong, strict=True)):
        return failed(name, said, "correct rewards, data.fields.answer or data.answer_pattern")
    if right == wrong:
        compares = all(reward.name in COMPARING for reward in config.rewards)
        if compares:
            return failed(
                name, said, "correct data.fields.answer, data.answer_pattern or the reward's kwargs"
            )
        return ok(name, f"{said}: it does not depend on the answer alone")
    return ok(name, said)


async def _scores(scorer: Scorer, known: KnownAnswers) -> Sequence[Score]:
    responses = [*known.right, *known.wrong]
    of_samples = [await scorer.score_sample(known.prompt, response) for response in responses]
    return await scorer.score_group(known.prompt, responses, of_samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
