"""The check of trained contents: it agrees with the truth and sees every kind of untruth."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.parts.memory_peak import MemoryPeak, process_tree
from benchmarks.parts.trained_contents import (
    TOLERANCE,
    ContentCheck,
    Request,
    check_trained_contents,
    group_difference,
    put_weights,
    read_masters,
    request_difference,
    requests_of,
)
from easyrl.engines.base import Columns, StatePiece
from easyrl.engines.state_file import write_state_file
from easyrl.episodes.turns import TurnRecord, episode_completion, recorded
from easyrl.schema import Completion, RolloutGroup, Score
from tests.tiny_models import VOCAB_SIZE, random_group, tiny_model

NO_PROMPT = np.zeros(0, dtype=np.int32)  # an episode's turns say what was shown


@pytest.fixture(scope="module")
def policy():
    return tiny_model("qwen3", tied=True)


def told_by(policy: torch.nn.Module, group: RolloutGroup) -> RolloutGroup:
    """``group`` with the log-probabilities that ``policy`` gives its tokens, one at a time."""

    def truth(completion: Completion) -> np.ndarray:
        seen, values = group.prompt.token_ids.tolist(), []
        for token in completion.token_ids.tolist():
            with torch.no_grad():
                logits = policy(torch.tensor([seen])).logits[0, -1]
            values.append(float(logits.log_softmax(-1)[token]))
            seen.append(token)
        return np.array(values, dtype=np.float32)

    told = tuple(replace(c, logprobs=truth(c)) for c in group.completions)
    return replace(group, completions=told)


@pytest.fixture(scope="module")
def group(policy):
    return told_by(policy, random_group(np.random.default_rng(0), 5, [6, 1, 9]))


def test_what_the_weights_said_agrees_to_rounding(policy, group):
    assert group_difference(policy, group) < 1e-5 < TOLERANCE


def test_other_tokens_prompts_numbers_and_weights_show(policy, group):
    prompt, first = group.prompt.token_ids, group.completions[0]
    tokens = first.token_ids.copy()
    tokens[3] = (tokens[3] + 1) % VOCAB_SIZE
    wrong = [
        (prompt, replace(first, token_ids=tokens)),
        (prompt[::-1].copy(), first),
        (prompt, replace(first, logprobs=first.logprobs - 0.01)),
        (prompt, replace(first, logprobs=first.logprobs * np.float32("nan"))),
    ]
    for shown, response in wrong:
        request = Request(shown, response.token_ids, response.logprobs)
        assert not request_difference(policy, request) <= TOLERANCE
    assert group_difference(tiny_model("qwen3", tied=True, seed=1), group) > 0.1


def test_an_episode_is_compared_turn_by_turn(policy):
    rng = np.random.default_rng(1)

    records: list[TurnRecord] = []

    def turn(shown: list[int], num_tokens: int) -> list[int]:
        prompt_ids = np.array(shown, dtype=np.int32)
        made = random_group(rng, len(shown), [num_tokens])
        asked = replace(made, prompt=replace(made.prompt, token_ids=prompt_ids))
        told = told_by(policy, asked).completions[0]
        records.append(recorded(prompt_ids, told, records))
        return told.token_ids.tolist()

    prompts = [[3, 4, 5]]
    prompts.append([*prompts[0], *turn(prompts[0], 4), 6, 7])
    turn(prompts[1], 3)
    prompts.append([9])
    turn(prompts[2], 2)
    made = episode_completion(records, "game", 1.0)
    requests = requests_of(NO_PROMPT, made)
    for request, record, shown in zip(requests, records, prompts, strict=True):
        assert request.prompt_ids.tolist() == shown
        assert request.token_ids.tolist() == record.completion.token_ids.tolist()
        assert request_difference(policy, request) < 1e-5
    spoilt = made.logprobs.copy()
    spoilt[made.episode.turns[1].sampled] -= 0.5
    group = replace(random_group(rng, 3, [1]), completions=(replace(made, logprobs=spoilt),))
    assert group_difference(policy, group) > 0.1
    for mask in (np.ones_like(made.loss_mask), np.zeros_like(made.loss_mask)):
        with pytest.raises(ValueError, match="each token once"):
            requests_of(NO_PROMPT, replace(made, loss_mask=mask))


def test_one_wrong_response_makes_its_group_wrong(policy, group):
    *others, last = group.completions
    spoilt = replace(last, logprobs=last.logprobs + np.float32(0.5))
    assert group_difference(policy, replace(group, completions=(*others, spoilt))) > TOLERANCE


@pytest.mark.parametrize("rewards, is_trained", [([0, 1, 0], True), ([1, 1, 1], False)])
def test_what_moves_no_weight_is_told_apart(
    policy, group, tmp_path, monkeypatch, rewards, is_trained
):
    """A recorded run of one batch: a good group and one with a response that is spoilt."""
    first, *others = group.completions
    spoilt = replace(first, logprobs=first.logprobs - np.float32(0.5))
    scores = tuple(Score(float(reward), {}) for reward in rewards)
    groups = {
        (0, 0): replace(group, scores=scores),
        (0, 1): replace(group, completions=(spoilt, *others), scores=scores),
    }
    batch = SimpleNamespace(groups=[SimpleNamespace(key=k, outcome="trained") for k in groups])
    run = SimpleNamespace(num_batches=1, batch=lambda v: batch, groups=lambda v, keys: groups)
    monkeypatch.setattr("benchmarks.parts.trained_contents.RecordedRun", lambda folder: run)
    policy.save_pretrained(tmp_path)
    check = check_trained_contents(tmp_path, tmp_path)
    found = [check.wrong_groups, check.wrong_without_gradient]
    assert [len(each) for each in found] == ([1, 0] if is_trained else [0, 1])
    assert "prompt 1" in (found[0] + found[1])[0] and check.largest < 1e-5


def test_a_checkpoints_masters_become_the_weights(policy):
    other = tiny_model("qwen3", tied=True, seed=1)
    put_weights(other, {n: p.detach().flatten() for n, p in policy.named_parameters()})
    for (name, ours), theirs in zip(other.named_parameters(), policy.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(ValueError):
        put_weights(other, {"model.norm.weight": other.model.norm.weight})


def test_a_checkpoint_of_several_ranks_is_put_together(tmp_path):
    values = torch.arange(7.0)
    files = [tmp_path / f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    for file, part, start in zip(files, values.split([3, 4]), (0, 3), strict=True):
        pieces = [StatePiece(f"{kind}/a", start, part.clone()) for kind in ("master", "exp_avg")]
        write_state_file(file, pieces)
    masters = read_masters(tmp_path)
    assert list(masters) == ["a"] and torch.equal(masters["a"], values)
    files[0].unlink()
    with pytest.raises(ValueError, match="a is not whole"):
        read_masters(tmp_path)


def test_columns_of_split_models_are_put_together(tmp_path):
    values = torch.arange(12.0).view(3, 4)
    for rank, (first, width) in enumerate([(0, 1), (1, 3)]):
        part = torch.tensor(values[:, first : first + width].flatten().tolist())
        for number, (start, stop) in enumerate([(0, 2), (2, len(part))]):
            piece = StatePiece("master/a", start, part[start:stop], Columns(first, width, 4))
            write_state_file(tmp_path / f"rank-0-of-1-{rank}-{number}.safetensors", [piece])
    assert torch.equal(read_masters(tmp_path)["a"], values.flatten())
    (tmp_path / "rank-0-of-1-0-1.safetensors").unlink()
    with pytest.raises(ValueError, match="a is not whole"):
        read_masters(tmp_path)


def test_a_check_that_could_not_see_old_weights_says_so():
    check = ContentCheck(2, 8, 100, (), (), 1e-6, visible=0.1)
    assert check.sees_old_weights
    assert not replace(check, visible=2 * TOLERANCE).sees_old_weights


def test_the_peak_is_the_kernels_and_counts_whom_it_has_seen_twice(monkeypatch):
    marks = {11: 1024, 12: 2048}
    monkeypatch.setattr("benchmarks.parts.memory_peak._high_water_kb", marks.__getitem__)
    tree = [type("Process", (), {"pid": pid})() for pid in marks]
    peak = MemoryPeak()
    peak.look(tree)
    assert peak.peak_mb == 0
    peak.look(tree)
    assert peak.peak_mb == 3
    peak.look(tree[:1])
    assert peak.peak_mb == 3


def test_the_tree_of_a_process_that_has_ended_is_empty():
    assert process_tree(2**22) == []
