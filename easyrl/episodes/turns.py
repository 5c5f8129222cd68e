"""Turns of an episode, as they were recorded, and the completion that they are together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.schema import Completion, Episode, Turn, VersionSpan


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One request to the model, and its answer; of the prompt what the turn that it continues has
    not, so that an episode's records are as long as its tree, however often its history is sent."""

    new_ids: np.ndarray  # int32 [n], what the model was shown behind its parent's tokens
    completion: Completion  # what it sampled
    id: str = ""  # what its client knows it by
    parent: int | None = None  # number of the turn that it continues; None: all it was shown is new
    num_before: int = 0  # tokens of its parent, prompt and answer

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [R], those that were sampled."""
        return self.completion.token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_before + len(self.new_ids) + len(self.token_ids)

    def follows_in(self, shown: np.ndarray) -> bool:
        """Whether ``shown``, int32, which begins with its parent's tokens, goes on with its own."""
        sampled = self.num_before + len(self.new_ids)
        return (
            self.num_tokens <= len(shown)
            and np.array_equal(self.new_ids, shown[self.num_before : sampled])
            and np.array_equal(self.token_ids, shown[sampled : self.num_tokens])
        )


def recorded(
    shown: np.ndarray, completion: Completion, records: Sequence[TurnRecord], id: str = ""
) -> TurnRecord:
    """The record that follows ``records``, of a prompt ``shown``, int32 [P], and its answer."""
    parent, known = continued(shown, records)
    # a copy: a view would keep the whole prompt
    return TurnRecord(shown[known:].copy(), completion, id, parent, known)


def continued(shown: np.ndarray, records: Sequence[TurnRecord]) -> tuple[int | None, int]:
    """The turn of ``records`` that a prompt continues, and how many tokens of it are that one's.

    The longest whose tokens, prompt and answer, the prompt begins with; the newest of equal ones.
    """
    parent, known = None, 0
    begun: list[bool] = []
    for number, record in enumerate(records):
        is_begun = (record.parent is None or begun[record.parent]) and record.follows_in(shown)
        begun.append(is_begun)
        if is_begun and record.num_tokens >= known:
            parent, known = number, record.num_tokens
    return parent, known


def failed_at_once(environment: str, failure: str) -> Completion:
    """An episode that has failed before its first turn: no tokens, of no endpoint."""
    return Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason="stop",
        version_spans=(),
        endpoint="",
        loss_mask=np.zeros(0, bool),
        episode=Episode((), environment, 0.0, {}, failure=failure),
    )


def rewards_of_turns(
    records: Sequence[TurnRecord], given: Sequence[float] | Mapping[str, float]
) -> tuple[float, ...]:
    """The rewards of ``records``, one each, or none where none are given.

    ``given``: in the order of ``records``; or by turn id, where a turn without one has 0. Raises
    ``ValueError`` if they are of other turns.
    """
    if isinstance(given, Mapping):
        ids = [record.id for record in records]
        if unknown := sorted(given.keys() - set(ids)):
            shown = f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else ids[0]
            raise ValueError(
                f"turn_rewards: there is no turn {unknown[0]!r:.80} in the episode; its "
                f"{len(ids)} are {shown}, the id (request_id) of each answer"
            )
        return tuple(float(given.get(turn, 0.0)) for turn in ids) if given else ()
    if len(given) not in (0, len(records)):
        raise ValueError(f"it gave {len(given)} turn rewards for {len(records)} turns")
    return tuple(map(float, given))


def episode_completion(
    records: Sequence[TurnRecord],
    environment: str,
    reward: float,
    *,
    components: Mapping[str, float] | None = None,
    turn_rewards: tuple[float, ...] = (),
    failure: str | None = None,
    finish_reason: str | None = None,
) -> Completion:
    """The tree of ``records``, at least one, in the order in which they were recorded.

    A turn whose prompt begins with another's tokens continues it (``recorded``). Any other prompt,
    of a history that was tokenised anew, cut or begun by another agent, is a root: nothing is
    aligned. ``finish_reason``: the last turn's if it is None.
    """
    assert records
    turns: list[Turn] = []
    tokens: list[np.ndarray] = []
    at = 0
    for record in records:
        made, parent = record.completion, record.parent
        sampled = at + len(record.new_ids)
        end = sampled + len(made.token_ids)
        turns.append(Turn(parent, at, sampled, end, made.finish_reason, made.endpoint, made.proof))
        tokens += [record.new_ids, made.token_ids]
        at = end
    mask = np.zeros(at, dtype=bool)
    logprobs = np.zeros(at, dtype=np.float32)
    spans: list[VersionSpan] = []
    for turn, record in zip(turns, records, strict=True):
        mask[turn.sampled : turn.end] = True
        logprobs[turn.sampled : turn.end] = record.completion.logprobs
        spans += [
            VersionSpan(span.version, turn.sampled + span.start, turn.sampled + span.end)
            for span in record.completion.version_spans
        ]
    last = records[-1].completion
    return Completion(
        token_ids=np.concatenate(tokens).astype(np.int32),
        logprobs=logprobs,
        finish_reason=finish_reason or last.finish_reason,
        version_spans=tuple(spans),
        endpoint=last.endpoint,
        loss_mask=mask,
        proof=last.proof,
        episode=Episode(
            tuple(turns), environment, reward, dict(components or {}), turn_rewards, failure
        ),
    )
