"""Log-probabilities of an endpoint's own responses, against the policy's as the trainer has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from easyrl.completion_check import Vocabulary, limits_of
from easyrl.config import Config, SamplingConfig
from easyrl.doctor.endpoints import Reached
from easyrl.doctor.finding import Finding, failed, ok
from easyrl.engines.base import LogprobComparison
from easyrl.inference_client.responses import parse_generate_response
from easyrl.metrics.logprob_agreement import agreement, agreement_limit, disagreement
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import run_micro_batch
from easyrl.schema import MicroBatch, Prompt, RolloutGroup, Score

MOST_TOKENS = 32  # of a response

Pack = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]  # in the given order, every token


async def sampled_groups(
    config: Config, reached: Reached, prompts: Sequence[Prompt], vocabulary: Vocabulary
) -> list[RolloutGroup]:
    """A response to each prompt, as a run would ask for it, but short. Raises ``EndpointError``."""
    own = config.rollout.model_dump(include=set(SamplingConfig.model_fields))
    short = {"max_tokens": min(MOST_TOKENS, config.rollout.max_tokens), "stop": []}
    sampling = SamplingConfig.model_validate(own | short)
    limits, groups = limits_of(sampling, vocabulary, told_length=True), []
    for prompt in prompts:
        body = await reached.client.generate(prompt.token_ids, sampling, config.run.seed)
        (made,) = parse_generate_response(body, reached.url, len(prompt.token_ids), limits, n=1)
        groups.append(RolloutGroup(prompt, (made,), (Score(0.0, {}),), "", 0.0, 0.0))
    return groups


@torch.no_grad()
def policy_logprobs(config: Config, groups: Sequence[RolloutGroup], pack: Pack) -> np.ndarray:
    """Of all tokens of ``groups`` in order, float32 [N]; on an accelerator where there is one.

    Loads the model. Raises ``ConfigError`` as ``load_policy_model``.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    policy = load_policy_model(config.model).to(device)
    temperature = config.rollout.temperature
    rows = [run_micro_batch(policy, row.to(device), temperature)[0] for row in pack(groups)]
    return torch.cat(rows).float().cpu().numpy()


def agreement_findings(
    config: Config, sampled: Mapping[str, Sequence[RolloutGroup]], pack: Pack
) -> list[Finding]:
    """``sampled``: by URL. Held to the limit of the run itself."""
    groups = [group for each in sampled.values() for group in each]
    own = policy_logprobs(config, groups, pack)
    parts = np.split(own, np.cumsum([len(g.completions[0].token_ids) for g in groups])[:-1])
    limit, found = agreement_limit(config), []
    for url, those in sampled.items():
        mine, parts = parts[: len(those)], parts[len(those) :]
        theirs = np.concatenate([group.completions[0].logprobs for group in those])
        found.append(_finding(url, np.concatenate(mine) - theirs, limit))
    return found


def _finding(url: str, differences: np.ndarray, limit: float | None) -> Finding:
    name, sizes = f"log-probabilities of {url}", np.abs(differences)
    sums = LogprobComparison(
        num=float(len(sizes)), abs=float(sizes.sum()), maximum=float(sizes.max())
    )
    (seen,) = agreement({url: sums})
    said = f"mean |difference| {sizes.mean():.2g}, maximum {sizes.max():.2g} of {len(sizes)} tokens"
    if limit is None:
        return ok(name, f"{said}; not judged (rollout.allow_off_policy_sampling)")
    if disagreement(seen, limit) is None and float(sizes.mean()) <= limit:
        return ok(name, f"{said}, limit {limit:g} nats")
    return failed(
        name,
        f"{said}, limit {limit:g} nats",
        "start the server with model.path, the run's --dtype, and vLLM with --logprobs-mode "
        "processed_logprobs; likely causes: docs/endpoints.md",
    )
