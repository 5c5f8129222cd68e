"""Whole runs with agents that do what makes trainers train other tokens than were sampled.

What was trained is compared with the endpoint's own log, which a proxy before it has written:
every sampled token, with all that stood before it, is trained once, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from easyrl.inference_client.servers.managed.launch import (
    EmbeddedServerProcess,
    VllmServerProcess,
)
from easyrl.ledger.verify import verify
from tests.end_to_end.exactness.agents import Behaviour
from tests.end_to_end.exactness.endpoint_log import (
    LoggedTurn,
    RecordingProxy,
    recorded_turns,
    sampled_tokens,
    trained_tokens,
)
from tests.end_to_end.exactness.model import QUESTIONS, odd_ids, write_model
from tests.end_to_end.exactness.played_run import (
    LENGTH,
    NUM_TURNS,
    SAMPLES,
    STEPS,
    TREES,
    PlayedRun,
    played,
    turns_of,
)
from tests.vllm_environment import VLLM_PYTHON


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded", marks=pytest.mark.runs),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    folder = tmp_path_factory.mktemp(f"exactness-{request.param}")
    model = write_model(folder / "model")
    if request.param == "vllm":
        started: Any = VllmServerProcess(model, Path(VLLM_PYTHON), LENGTH)
    else:
        started = EmbeddedServerProcess(model, ["--num-threads", "1", *LENGTH])
    with started as server:
        proxy = RecordingProxy(server.url)
        try:
            return played(folder, request.param, model, [proxy])
        finally:
            proxy.close()


def test_the_journal_has_what_the_endpoint_was_shown_and_has_sampled(run: PlayedRun) -> None:
    assert len(run.groups) == STEPS * len(QUESTIONS)
    recorded = run.recorded
    assert Counter(recorded) == Counter(run.log)
    assert len(recorded) == NUM_TURNS
    num_tokens = sum(len(turn.sampled) for turn in run.log)
    print(f"{run.server}: {NUM_TURNS} turns, {num_tokens} sampled tokens compared")


def test_each_sampled_token_is_trained_once_behind_what_the_endpoint_was_shown(
    run: PlayedRun,
) -> None:
    sampled = sampled_tokens(run.log)
    assert trained_tokens(run.rows()) == sampled
    lines = map(orjson.loads, (run.folder / "certificate.jsonl").read_bytes().splitlines())
    batches = [line for line in lines if line["kind"] == "batch"]
    agreement = [seen for line in batches for seen in line["agreement"]]
    assert len(batches) == STEPS
    # the trainer's own count, and its log-probabilities, in fp32 as the endpoint's
    assert sum(seen["num_tokens"] for seen in agreement) == sampled.total()
    largest = max(seen["maximum"] for seen in agreement)
    assert largest < 1e-3
    print(f"{run.server}: log-probabilities differ from the trainer's by {largest:.1e} at most")


def test_it_was_on_policy(run: PlayedRun) -> None:
    verdict = verify(run.folder)
    assert verdict.on_policy and verdict.ended, verdict
    assert verdict.trained == len(run.groups)
    for group in run.groups:
        stamps = {s for c in group.completions for turn in recorded_turns(c) for s in turn.versions}
        assert stamps == {group.policy_version}


@pytest.mark.parametrize("behaviour", list(TREES))
def test_turns_continue_what_they_extend_exactly_and_nothing_else(
    run: PlayedRun, behaviour: Behaviour
) -> None:
    episodes = run.episodes(behaviour)
    assert len(episodes) == STEPS * SAMPLES
    for completion in episodes:
        assert completion.episode is not None and completion.episode.failure is None
        parents = [turn.parent for turn in completion.episode.turns]
        if behaviour == "sub_agent":
            assert parents[0] is None and len(parents) == 5
            assert Counter(parents)[None] == 2 and len(set(parents)) == 4  # two lines of turns
        else:
            assert parents == TREES[behaviour]


def test_a_history_is_kept_where_its_text_has_other_ids(run: PlayedRun) -> None:
    """What was planted is there: these would not be the ids if they were made of the text."""
    for completion in run.episodes("retokenised"):
        first, second, changed, by_ids, again, continued, anew = recorded_turns(completion)
        assert list(first.sampled) == odd_ids(run.tokenizer, "the answer is in there")
        text = run.tokenizer.decode(first.sampled)
        own = run.tokenizer.encode(text, add_special_tokens=False)
        assert tuple(own) != first.sampled
        assert second.prompt[: len(first.prompt + first.sampled)] == first.prompt + first.sampled
        assert by_ids.prompt[: len(first.prompt) + len(own)] == (*first.prompt, *own)
        assert "there <|im_end|>" in run.tokenizer.decode(changed.prompt)
        assert continued.prompt[:-1] == again.prompt + again.sampled
        assert run.tokenizer.decode(anew.prompt) == run.tokenizer.decode(by_ids.prompt)


def test_reasoning_stays_or_a_branch_begins_without_it(run: PlayedRun) -> None:
    assert "it leaves out the reasoning of earlier turns" in run.said
    for completion in run.episodes("reasoned"):
        texts = [run.tokenizer.decode(turn.prompt) for turn in recorded_turns(completion)]
        assert ["the long way" in text for text in texts] == [False, True, True]
    for completion in run.episodes("as_template"):
        first, second, third = recorded_turns(completion)
        assert "the long way" in run.tokenizer.decode(first.sampled)
        assert "the long way" not in run.tokenizer.decode(second.prompt)
        assert list(second.sampled) == odd_ids(run.tokenizer, "then the end")
        assert third.prompt[: len(second.prompt + second.sampled)] == second.prompt + second.sampled


def test_two_tools_are_called_at_once_and_answered(run: PlayedRun) -> None:
    for completion in run.episodes("tools"):
        assert completion.episode is not None
        assert completion.episode.components == {"calls": 2.0}
        first, second = recorded_turns(completion)
        behind = run.tokenizer.decode(second.prompt[len(first.prompt + first.sampled) :])
        assert behind.count("<tool_response>") == 2


def test_a_request_that_is_sent_again_is_a_turn_of_its_own_unless_it_has_an_id(
    run: PlayedRun,
) -> None:
    asked = Counter(turn.prompt for turn in run.log)
    episodes = [recorded_turns(completion) for completion in run.episodes("retried")]
    assert all(first.prompt == again.prompt for first, again, _ in episodes)
    assert sum(asked[p] for p in {first.prompt for first, _, _ in episodes}) == 2 * len(episodes)
    # each was sent twice as well
    assert sum(asked[p] for p in {with_id.prompt for _, _, with_id in episodes}) == len(episodes)


def test_turns_of_a_client_that_has_gone_are_trained(run: PlayedRun) -> None:
    for completion in run.episodes("hung_up"):
        assert completion.episode is not None
        assert completion.episode.components == {"left": 2.0}
        assert len(recorded_turns(completion)) == 4


def test_a_stream_tells_what_was_sampled(run: PlayedRun) -> None:
    for completion in run.episodes("streamed"):
        assert completion.episode is not None
        said, first = completion.episode.components, recorded_turns(completion)[0]
        assert [said[f"id/{n}"] for n in range(len(first.sampled))] == list(first.sampled)
        told = np.array([said[f"logprob/{n}"] for n in range(len(first.sampled))], np.float32)
        assert tuple(told.tolist()) == first.logprobs


def test_a_stop_string_ends_a_turn_where_the_endpoint_can(run: PlayedRun) -> None:
    for completion in run.episodes("stopped"):
        assert completion.episode is not None
        can = completion.episode.components["refused"] == 0.0
        assert can or run.server == "embedded"
        assert completion.episode.components["cut"] == float(can)
        first, _, _ = recorded_turns(completion)
        text = "the winner i" if can else "the winner is there<|im_end|>"
        assert run.tokenizer.decode(first.sampled) == text
        assert first.finish_reason == "stop"


def with_turn(log: Sequence[LoggedTurn], **changed: Any) -> list[LoggedTurn]:
    return [*log[:-1], log[-1]._replace(**changed)]


@pytest.mark.parametrize("where", ["sampled", "prompt", "logprobs", "shift", "missing", "twice"])
def test_the_comparisons_see_one_token(run: PlayedRun, where: str) -> None:
    """Of thousands: an id, a log-probability, or what stands before it."""
    last = run.log[-1]
    changed = {
        "sampled": {"sampled": (*last.sampled[:-1], last.sampled[-1] ^ 1)},
        "prompt": {"prompt": (last.prompt[0] ^ 1, *last.prompt[1:])},
        "logprobs": {"logprobs": (*last.logprobs[:-1], last.logprobs[-1] - 1e-6)},
        "shift": {
            "prompt": last.prompt[:-1],
            "sampled": (last.prompt[-1], *last.sampled),
            "logprobs": (0.0, *last.logprobs),
        },
    }
    if where == "missing":
        log = run.log[:-1]
    elif where == "twice":
        log = [*run.log, last]
    else:
        log = with_turn(run.log, **changed[where])
    assert Counter(run.recorded) != Counter(log)
    assert trained_tokens(run.rows()) != sampled_tokens(log)


def test_the_comparisons_see_a_history_that_was_aligned(run: PlayedRun) -> None:
    """An episode as it would be with the tokenizer's own ids of a sampled text, packed."""
    number = next(
        n
        for n, group in enumerate(run.groups)
        if group.prompt.index == list(QUESTIONS).index("tools")
    )
    group = run.groups[number]
    completion = group.completions[0]
    assert completion.episode is not None
    first, second = completion.episode.turns
    ids, text = completion.token_ids, ""
    text = run.tokenizer.decode(ids[first.sampled : first.end])
    own = run.tokenizer.encode(text, add_special_tokens=False)
    moved = len(own) - (first.end - first.sampled)
    assert moved < 0
    aligned = replace(
        completion,
        token_ids=np.concatenate([ids[: first.sampled], own, ids[first.end :]]).astype(np.int32),
        logprobs=np.delete(completion.logprobs, slice(first.end + moved, first.end)),
        loss_mask=np.delete(completion.loss_mask, slice(first.end + moved, first.end)),
        episode=replace(
            completion.episode,
            turns=(
                first._replace(end=first.end + moved),
                second._replace(
                    start=second.start + moved,
                    sampled=second.sampled + moved,
                    end=second.end + moved,
                ),
            ),
        ),
    )
    groups = list(run.groups)
    groups[number] = replace(group, completions=(aligned, *group.completions[1:]))
    assert Counter(turns_of(groups)) != Counter(run.log)
    assert trained_tokens(run.rows(groups)) != sampled_tokens(run.log)
