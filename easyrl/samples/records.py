"""The record of a kept group: token ids, rewards by part, advantages; a line of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from easyrl.engines.base import ResponseDifference
from easyrl.episodes.branches import tokens_by_part
from easyrl.samples.choice import Why
from easyrl.schema import MAX_TURNS, Completion, Episode, SampleKey, TrainedGroup, TrainedResponse


class SampledTurn(msgspec.Struct, omit_defaults=True, frozen=True):
    """One turn of an episode: tokens [start, end) of the response, sampled from ``sampled`` on."""

    start: int
    sampled: int
    end: int
    parent: int | None = None  # number of the turn that it continues
    finish_reason: str = "stop"
    reward: float | None = None  # None: its environment gives turns none
    endpoint: str = ""  # URL


class SampledResponse(msgspec.Struct, omit_defaults=True, frozen=True):
    """One response of a kept group."""

    token_ids: list[int]
    finish_reason: str
    endpoint: str = ""
    turns: list[SampledTurn] = []  # of an episode, whose tokens are theirs one after another
    environment: str = ""  # of an episode
    failure: str = ""  # why its environment has not come to its end
    reward: float | None = None  # None: it was not scored
    components: dict[str, float | None] = {}  # by reward name, unweighted
    reward_failed: bool = False
    advantage: float | None = None  # mean over its trained tokens; None: none is trained
    advantages: tuple[float | None, float | None] | None = None  # least, most; None: all are equal
    # of each token, where they are not all equal, and of an episode; None: it is not trained
    token_advantages: list[float | None] = []
    logprobs: list[float | None] = []  # of each token, the endpoint's; None: nobody sampled it
    # mean over its trained tokens, the trainer's minus the endpoint's; None: not compared
    logprob_diff: float | None = None
    token_logprob_diffs: list[float | None] = []  # of each token; None: it is not trained

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", MAX_TURNS)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_branches(self) -> int:
        """Turns that no other one continues."""
        return len(self.turns) - len({turn.parent for turn in self.turns} - {None})


class SampledGroup(msgspec.Struct, omit_defaults=True, frozen=True):
    """One prompt of a step with the responses that were trained."""

    step: int  # optimizer step, from 1
    epoch: int
    index: int  # of the prompt in the dataset
    position: int  # ... in the order, from the batch's first
    version: str  # of the weights that were asked for the responses
    why: Why  # it is kept
    prompt_ids: list[int]
    responses: list[SampledResponse]
    location: str = ""  # of the prompt's record, file and line
    answer: str | None = None
    has_signal: bool = True  # an advantage is not exactly zero
    skipped: bool = False  # the optimizer step was not taken

    @property
    def mean_reward(self) -> float | None:
        rewards = [r.reward for r in self.responses if r.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def truncated(self) -> bool:
        return any(response.truncated for response in self.responses)


def sampled_group(
    step: int,
    trained: TrainedGroup,
    why: Why,
    compared: Mapping[SampleKey, ResponseDifference],
    *,
    skipped: bool,
) -> SampledGroup:
    """The record of a group that optimizer step ``step`` has trained.

    ``compared``: its responses' log-probabilities, where they were.
    """
    group, prompt = trained.group, trained.group.prompt
    made_of = {response.sample: response for response in trained.responses}
    return SampledGroup(
        step=step,
        epoch=prompt.epoch,
        index=prompt.index,
        position=group.position,
        version=group.policy_version,
        why=why,
        prompt_ids=prompt.token_ids.tolist(),
        responses=[
            _response(trained, i, made_of.get(i), _difference(trained, made_of.get(i), compared))
            for i in range(len(group.completions))
        ],
        location=valid(prompt.location),
        answer=None if prompt.answer is None else valid(prompt.answer),
        has_signal=trained.has_signal,
        skipped=skipped,
    )


def sampled_turns(episode: Episode) -> list[SampledTurn]:
    """The turns of an episode, each with its reward if there are any."""
    rewards: Sequence[float | None] = episode.turn_rewards or [None] * len(episode.turns)
    return [
        SampledTurn(
            turn.start,
            turn.sampled,
            turn.end,
            turn.parent,
            turn.finish_reason,
            reward,
            turn.endpoint,
        )
        for turn, reward in zip(episode.turns, rewards, strict=True)
    ]


def encode(groups: Sequence[SampledGroup]) -> bytes:
    """A line for each."""
    return msgspec.json.Encoder().encode_lines(groups)


def decode(lines: bytes) -> list[SampledGroup]:
    """Inverse of ``encode``. Raises ``msgspec.MsgspecError``, a ``ValueError``."""
    return msgspec.json.Decoder(SampledGroup).decode_lines(lines)


def _response(
    trained: TrainedGroup,
    sample: int,
    made_of: TrainedResponse | None,
    compared: ResponseDifference | None,
) -> SampledResponse:
    completion, scores = trained.group.completions[sample], trained.group.scores
    score = scores[sample] if scores else None
    parts = {} if score is None else score.components
    advantage, spread = None, None
    by_token: list[float | None] = []
    differences: list[float | None] = []
    if made_of is not None:
        values = made_of.advantages
        least, most = float(values.min()), float(values.max())
        advantage = least
        if least != most:
            advantage, spread = float(values.mean()), (least, most)
        if least != most or completion.episode is not None:
            by_token = _placed(completion, made_of, np.round(values, 5).tolist())
        if compared is not None and compared.by_token:
            differences = _placed(completion, made_of, _three_digits(compared.by_token))
    episode = completion.episode
    return SampledResponse(
        token_ids=completion.token_ids.tolist(),
        finish_reason=completion.finish_reason,
        endpoint=completion.endpoint,
        turns=[] if episode is None else sampled_turns(episode),
        environment="" if episode is None else valid(episode.environment),
        failure="" if episode is None else valid(episode.failure or ""),
        reward=None if score is None else float(score.reward),
        components={valid(name): float(value) for name, value in parts.items()},
        reward_failed=score is not None and score.failed,
        advantage=advantage,
        advantages=spread,
        token_advantages=by_token,
        logprobs=_logprobs(completion),
        logprob_diff=None if compared is None else compared.d / compared.num,
        token_logprob_diffs=differences,
    )


def _difference(
    trained: TrainedGroup,
    made_of: TrainedResponse | None,
    compared: Mapping[SampleKey, ResponseDifference],
) -> ResponseDifference | None:
    """Of one response; of an episode its parts', put together in the order of its tokens."""
    if made_of is None:
        return None
    key = SampleKey(*trained.group.prompt.key, made_of.sample)
    completion = trained.group.completions[made_of.sample]
    if completion.episode is None:
        return compared.get(key)
    found = {
        part: (chosen, compared[key._replace(part=part)])
        for part, chosen in tokens_by_part(completion, made_of.tokens).items()
        if key._replace(part=part) in compared
    }
    if not found:
        return None
    by_token = np.zeros(len(made_of.tokens))
    whole = sum(len(chosen) for chosen, _ in found.values()) == len(by_token)
    for chosen, own in found.values():
        whole = whole and len(own.by_token) == len(chosen)
        if whole:
            by_token[chosen] = own.by_token
    differences = [own for _, own in found.values()]
    return ResponseDifference(
        key,
        sum(own.num for own in differences),
        sum(own.d for own in differences),
        tuple(by_token.tolist()) if whole else (),
    )


def _logprobs(completion: Completion) -> list[float | None]:
    said = np.round(completion.logprobs.astype(np.float64), 3).tolist()
    if completion.episode is None:
        return list(said)
    sampled = completion.loss_mask.tolist()
    return [own if is_sampled else None for own, is_sampled in zip(said, sampled, strict=True)]


def _placed(
    completion: Completion, made_of: TrainedResponse, values: Sequence[float]
) -> list[float | None]:
    """``values`` of the trained tokens at their places among all tokens."""
    placed: list[float | None] = [None] * len(completion.token_ids)
    for place, value in zip(made_of.tokens.tolist(), values, strict=True):
        placed[place] = value
    return placed


def _three_digits(values: Sequence[float]) -> list[float]:
    """``values`` to three digits each: more would only make the files larger."""
    exact = np.asarray(values)
    with np.errstate(divide="ignore", invalid="ignore"):  # of zero, of what is not finite
        scale = 10.0 ** (2 - np.floor(np.log10(np.abs(exact))))
        rounded = np.round(exact * scale) / scale
    return np.where(exact == 0, 0.0, rounded).tolist()


def valid(text: str) -> str:
    """Without lone surrogates, which a file of JSON may have and UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()
