"""A trial call of the user's reward functions and endpoints, before the run's model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards import worker
from easyrl.rewards.functions import RewardFunctionError, load_reward
from easyrl.rewards.signatures import CALLED, form_of
from easyrl.runtime.user_code import definition, returns_a_value
from easyrl.runtime.workers.worker_pool import WorkerDied, WorkerPool, WorkerTimeout
from easyrl.schema import Completion, Prompt

logger = logging.getLogger(__name__)


async def try_rewards(
    rewards: Sequence[RewardConfig],
    workers: WorkerPool,
    prompt: Prompt,
    completions: Sequence[Completion],
) -> None:
    """Calls every function of a user's file, and every reward that asks endpoints, as the run will.

    Raises ``ConfigError`` naming file and line for one that raises, hangs, ends its process, or
    returns something else than a finite number or ``None`` for each response, or nothing ever. One
    without an opinion on any of them is warned of.
    """
    group = [completion.token_ids for completion in completions]
    for index, reward in enumerate(rewards):
        if reward.file is None and not reward.asks_endpoints:
            continue
        token_ids = group if reward.of_group else group[:1]
        key = f"rewards[{index}]"
        where, mend = "kwargs.urls", "start its servers, or correct what is wrong"
        if reward.file is not None:
            function = load_reward(reward)
            where = definition(function) or str(reward.file)
            called = CALLED[form_of(function, reward.signature)]
            mend = f"correct it, it is called with {called}, here for {len(token_ids)} responses"
        try:
            values = await workers.call(
                worker.score_reward, index, prompt, token_ids, timeout_s=reward.timeout_s
            )
        except RewardFunctionError as error:
            problem = f"{error.where or where}: {reward.label} {error.what}"
            remedy = mend
        except WorkerTimeout:
            problem = (
                f"{where}: {reward.label} had no result after {key}.timeout_s={reward.timeout_s:g}"
            )
            remedy = "make it faster or raise the limit"
        except WorkerDied as error:
            problem = f"{where}: {reward.label} ended its worker process ({error})"
            remedy = "correct it; a reward function must return"
        else:
            if any(value is not None for value in values):
                continue
            if reward.file is None or returns_a_value(load_reward(reward)):
                logger.warning(
                    "%s: %s: %s returned None in a trial call on %s, no opinion on any response",
                    *(key, where, reward.label, prompt.location or "the first prompt"),
                )
                continue
            problem = f"{where}: {reward.label} returned None, as it has no return with a value"
            remedy = "return a number for each response"
        raise ConfigError(
            f"{key}: {problem}, in a trial call on {prompt.location or 'the first prompt'}; "
            f"{remedy} (or set scoring.on_reward_error=zero)"
        )
