"""Rows that are prefix trees give what plain Hugging Face gives for each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from easyrl.dataloaders.packing.prefix_tree import PrefixTree
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.schema import MicroBatch, RolloutGroup, SampleKey, Segment
from tests.easyrl.models.test_policy_model import (  # noqa: F401 - a fixture
    ENTROPY_WEIGHT,
    TEMPERATURE,
    load_both,
    no_casts,
    relative_errors,
)
from tests.recipes import pack_groups
from tests.tiny_models import Family, random_group, save_tiny_model

Run = tuple[Tensor, dict[str, Tensor]]


def make_groups() -> tuple[list[RolloutGroup], list[np.ndarray]]:
    """Equal responses, one that is another's beginning, branches in branches, and prompts with a
    beginning in common, one of which is another's.
    """
    rng = np.random.default_rng(5)
    shapes = ((11, [20, 20, 7, 20, 3]), (15, [9, 9, 12]), (11, [6, 30]), (8, [5]))
    groups = [
        random_group(rng, prompt, responses, index=index, masked=0.1)
        for index, (prompt, responses) in enumerate(shapes)
    ]
    first, second, third, _ = (group.completions for group in groups)
    first[1].token_ids[:] = first[0].token_ids
    first[2].token_ids[:] = first[0].token_ids[:7]
    first[3].token_ids[:12] = first[0].token_ids[:12]
    second[1].token_ids[:4] = second[0].token_ids[:4]
    second[2].token_ids[:4] = second[0].token_ids[:4]
    system = groups[0].prompt.token_ids[:6]
    groups[1].prompt.token_ids[:6] = system
    groups[2].prompt.token_ids[:] = groups[1].prompt.token_ids[:11]
    third[0].token_ids[:4] = groups[1].prompt.token_ids[11:]  # goes on as the other prompt does
    return groups, [rng.normal(size=len(group.completions)) for group in groups]


def pack(packing: Literal["prompt", "tree"], budget: int) -> list[MicroBatch]:
    groups, advantages = make_groups()
    return pack_groups(
        groups,
        advantages,
        aggregation="sequence",
        max_tokens=64,
        mask_truncated=False,
        max_tokens_per_micro_batch=budget,
        packing=packing,
        keep_order=False,
    )


def packed_run(model: PolicyModel, rows: Sequence[MicroBatch]) -> Run:
    """Log-probabilities of all trained tokens by sequence, gradients of the test objective."""
    model.zero_grad()
    found: dict[SampleKey, Tensor] = {}
    for row in rows:
        logprobs, entropy = run_micro_batch(model, row, TEMPERATURE)
        weights, advantages = row.loss_weights.double(), row.advantages.double()
        (weights * (advantages * logprobs + ENTROPY_WEIGHT * entropy)).sum().backward()
        for place, key in enumerate(row.sequences):
            found[key] = logprobs.detach()[row.sequence_index == place]
    return torch.cat([found[key] for key in sorted(found)]), {
        name.removeprefix("model."): parameter.grad for name, parameter in model.named_parameters()
    }


def separate_run(model: PreTrainedModel) -> Run:
    """The same of a plain Hugging Face model, each sequence on its own without padding."""
    model.zero_grad()
    found = []
    for group, group_advantages in zip(*make_groups(), strict=True):
        prompt = torch.from_numpy(group.prompt.token_ids).long()
        for completion, advantage in zip(group.completions, group_advantages, strict=True):
            response = torch.from_numpy(completion.token_ids).long()
            trained = torch.from_numpy(completion.loss_mask)
            logits = model(torch.cat((prompt, response))[None]).logits[0]
            logp = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            picked = logp.gather(1, response[:, None]).squeeze(1)[trained]
            entropy = -(logp.exp() * logp).sum(-1)[trained]
            loss = float(np.float32(advantage)) * picked + ENTROPY_WEIGHT * entropy
            (loss.sum() * float(np.float32(1 / int(trained.sum())))).backward()
            found.append(picked.detach())
    return torch.cat(found), {name: p.grad for name, p in model.named_parameters()}


def test_trees_are_what_the_comparisons_are_about() -> None:
    (prompt_row,), (tree_row,) = pack("prompt", 300), pack("tree", 300)
    beginnings = {
        (*prompt.tolist(), *completion.token_ids.tolist())[:n]
        for group in make_groups()[0]
        for prompt in [group.prompt.token_ids]
        for completion in group.completions
        for n in range(1, len(prompt) + len(completion.token_ids) + 1)
    }
    assert (prompt_row.num_tokens, tree_row.num_tokens) == (186, len(beginnings))
    assert len(beginnings) < 120
    assert prompt_row.num_loss_tokens == tree_row.num_loss_tokens
    parents = [segment.parent for segment in tree_row.segments]
    depth = [0] * len(parents)
    for index, parent in enumerate(parents):
        depth[index] = 1 if parent < 0 else depth[parent] + 1
    assert parents.count(-1) == 2 and max(depth) >= 4
    assert len(pack("tree", 60)) > 2


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("budget", [300, 60])
def test_exact_in_fp64_without_casts(
    tmp_path: Path,
    no_casts: None,  # noqa: F811
    family: Family,
    budget: int,
) -> None:
    """Log-probabilities and gradients, as with prompts shared and as of separate sequences."""
    policy, plain = load_both(save_tiny_model(tmp_path, family), torch.float64)
    tree = packed_run(policy, pack("tree", budget))
    tree = tree[0], {name: gradient.clone() for name, gradient in tree[1].items()}
    assert max(relative_errors(tree, separate_run(plain))) < 1e-9  # measured 1e-15 to 1e-14
    assert max(relative_errors(tree, packed_run(policy, pack("prompt", budget)))) < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_stock_model_in_fp32(tmp_path: Path, family: Family) -> None:
    policy, plain = load_both(save_tiny_model(tmp_path, family), torch.float32, attention="eager")
    errors = relative_errors(packed_run(policy, pack("tree", 300)), separate_run(plain))
    assert max(errors) < 1e-5, errors


def test_a_branch_at_the_wrong_segment_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison sees a single segment that hangs one level too high."""
    policy, plain = load_both(save_tiny_model(tmp_path, "qwen3"), torch.float64)
    right = PrefixTree.segments.func

    def wrong(self: PrefixTree) -> tuple[Segment, ...]:
        segments = right(self)
        parent = segments[-1].parent
        return (*segments[:-1], segments[-1]._replace(parent=segments[parent].parent))

    monkeypatch.setattr(PrefixTree, "segments", property(wrong))
    errors = relative_errors(packed_run(policy, pack("tree", 300)), separate_run(plain))
    assert min(errors) > 1e-3, errors
