"""A group as a record's payload and back: msgpack, arrays as little-endian bytes."""

from __future__ import annotations

import time
from typing import Literal, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from easyrl.completion_check import CompletionLimits, completion_problem
from easyrl.dataloaders.producer.group_stream import Piece
from easyrl.schema import (
    Completion,
    Episode,
    Exclusion,
    Key,
    Prompt,
    RolloutGroup,
    Score,
    VersionSpan,
)

T = TypeVar("T")


EVER = -1  # number before every proof: also what the endpoint made in earlier attempts is withdrawn


class CodecError(ValueError):
    """A payload has not the shape of what was asked for."""


class StoredStruct(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a record is made of."""


class Header(StoredStruct):
    """The first record of a file: what all of its groups are made by."""

    weights: str
    settings: str  # of sampling and rewards (``group_settings``)
    version: str  # run:attempt:v


class StoredCompletion(StoredStruct):
    """A completion as a record has it."""

    token_ids: bytes  # int32 [R]
    logprobs: bytes  # float32 [R]
    loss_mask: bytes  # bool [R]
    finish_reason: str
    version_spans: list[tuple[str, int, int]]
    endpoint: str
    proof: int
    episode: Episode | None = None


class _Score(StoredStruct):
    reward: float
    components: dict[str, float]
    failed: bool
    masked: bool = False


class GroupRecord(StoredStruct):
    """One finished group, without its prompt's text and answer."""

    epoch: int
    index: int
    prompt_token_ids: bytes  # int32 [P]
    completions: list[StoredCompletion]
    scores: list[_Score]
    position: int  # of its prompt in the batch
    excluded: Exclusion | None
    rejected: str | None
    weights: str
    version: str  # last, for a version does not end in a zero byte (``record_file.py``)

    @property
    def key(self) -> Key:
        return self.epoch, self.index

    @property
    def refused(self) -> bool:
        """Not trained, but replaced by the next prompt of the order."""
        return self.excluded is not None or self.rejected is not None

    @property
    def made_by(self) -> list[tuple[str, int]]:
        """Endpoint and number of its proof, of each response or turn."""
        made = []
        for each in self.completions:
            of = [each] if each.episode is None else each.episode.turns
            made += [(one.endpoint, one.proof) for one in of]
        return made

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompt, and of each response."""
        parts = (self.prompt_token_ids, *(c.token_ids for c in self.completions))
        return tuple(len(part) // 4 for part in parts)

    def prompt(self) -> Prompt:
        """The prompt as far as the record has it: without text, answer and metadata."""
        token_ids = int32(self.prompt_token_ids)
        return Prompt(index=self.index, token_ids=token_ids, text="", answer=None, epoch=self.epoch)


class DrainRecord(StoredStruct):
    """What the trainer drained from the queue at once: groups of any attempt, in this order."""

    keys: list[Key]
    max_tokens: int  # packed, that the trainer asked for: several micro-batches' worth
    update: int  # of the batch's optimizer steps
    # What it had computed ahead since the drain before, in order; of these groups or later ones.
    ahead: list[Piece] = []
    restart: int = 0  # how often the batch had begun again in this attempt
    # last, so that it does not end in a zero byte, nor as a group does: with a version
    kind: Literal["drain"] = "drain"


class WithdrawalRecord(StoredStruct):
    """Completions that an endpoint made since a proof that it later failed to repeat, or all."""

    endpoint: str  # URL
    proof: int  # number, on this rank, of the last proof that it passed; or ``EVER``
    restart: int  # how often the batch had begun again in this attempt; it does so now
    kind: Literal["withdrawal"] = "withdrawal"


class HandoverRecord(StoredStruct):
    """This rank trains a group that another one has drawn and journalled (``balance.py``)."""

    key: Key
    digest: str  # of its record, 32 hex digits
    rank: int  # that drew it
    restart: int  # how often the batch had begun again in this attempt
    kind: Literal["handover"] = "handover"


class HandedGroup(StoredStruct):
    """A journalled group on its way to the rank that trains it."""

    rank: int  # that drew it
    seconds: float  # from its first request to its last score
    record: bytes  # its payload in that rank's journal
    digest: bytes  # of the payload, there


encode = msgspec.msgpack.encode


def to_record(group: RolloutGroup, weights: str) -> GroupRecord:
    """``group`` made by the weights of this digest. A pure function of its tokens and scores."""
    return GroupRecord(
        group.prompt.epoch,
        group.prompt.index,
        token_bytes(group.prompt),
        [to_stored(completion) for completion in group.completions],
        [
            _Score(
                float(score.reward),
                {name: float(value) for name, value in score.components.items()},
                score.failed,
                score.masked,
            )
            for score in group.scores
        ],
        group.position,
        group.excluded,
        group.rejected,
        weights,
        group.policy_version,
    )


def to_stored(completion: Completion) -> StoredCompletion:
    """``completion`` for a record."""
    return StoredCompletion(
        completion.token_ids.astype("<i4").tobytes(),
        completion.logprobs.astype("<f4").tobytes(),
        completion.loss_mask.astype(bool).tobytes(),
        completion.finish_reason,
        [(span.version, span.start, span.end) for span in completion.version_spans],
        completion.endpoint,
        completion.proof,
        completion.episode,
    )


def decode(shape: type[T], payload: bytes, what: str) -> T:
    """``payload`` as a ``shape``. Raises ``CodecError``: it is not ``what``."""
    try:
        return msgspec.msgpack.decode(payload, type=shape)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not {what}: {error}") from error


def decode_record(payload: bytes) -> GroupRecord:
    """Raises ``CodecError``."""
    return decode(GroupRecord, payload, "a group")


AnyRecord = GroupRecord | DrainRecord | WithdrawalRecord | HandoverRecord


def decode_any(payload: bytes) -> AnyRecord:
    """Whatever may come behind a header. Raises ``CodecError``."""
    if payload.endswith(_DRAIN_END):
        return decode(DrainRecord, payload, "a record of the trainer's")
    if payload.endswith(_WITHDRAWAL_END):
        return decode(WithdrawalRecord, payload, "a record of the trainer's")
    if payload.endswith(_HANDOVER_END):
        return decode(HandoverRecord, payload, "a record of the trainer's")
    return decode_record(payload)


def to_group(
    record: GroupRecord,
    prompt: Prompt,
    digest: str,
    times_s: tuple[float, float] | None = None,
) -> RolloutGroup:
    """The group of ``record`` as the trainer has it; ``times_s`` are now unless they are known.

    Raises ``CodecError`` if arrays of one response differ in length.
    """
    dispatched_s, completed_s = times_s or (time.monotonic(), time.monotonic())
    return RolloutGroup(
        prompt=prompt,
        completions=tuple(to_completion(completion) for completion in record.completions),
        scores=tuple(Score(s.reward, s.components, s.failed, s.masked) for s in record.scores),
        policy_version=record.version,
        dispatched_s=dispatched_s,
        completed_s=completed_s,
        position=record.position,
        excluded=record.excluded,
        rejected=record.rejected,
        digest=digest,
    )


def group_problem(record: GroupRecord, limits: CompletionLimits) -> str | None:
    """Which of its responses cannot be trained, and why; None if all can."""
    for number, stored in enumerate(record.completions):
        try:
            problem = completion_problem(to_completion(stored), limits)
        except CodecError as error:
            problem = str(error)
        if problem is not None:
            return f"response {number}, of {stored.endpoint}: {problem}"
    return None


def token_bytes(prompt: Prompt) -> bytes:
    return prompt.token_ids.astype("<i4").tobytes()


def token_digest(token_ids: bytes) -> bytes:
    """16 bytes that tell whether two prompts have the same tokens."""
    return blake3(token_ids).digest(length=16)


_DRAIN_END = encode("drain")
_WITHDRAWAL_END = encode("withdrawal")
_HANDOVER_END = encode("handover")


def to_completion(stored: StoredCompletion) -> Completion:
    """Inverse of ``to_stored``. Raises ``CodecError`` if its arrays differ in length."""
    num_tokens = len(stored.loss_mask)
    if len(stored.token_ids) != 4 * num_tokens or len(stored.logprobs) != 4 * num_tokens:
        raise CodecError("tokens, log-probabilities and mask of a response differ in length")
    return Completion(
        token_ids=int32(stored.token_ids),
        logprobs=np.frombuffer(stored.logprobs, "<f4").astype(np.float32),
        finish_reason=stored.finish_reason,
        version_spans=tuple(VersionSpan(*span) for span in stored.version_spans),
        endpoint=stored.endpoint,
        loss_mask=np.frombuffer(stored.loss_mask, np.uint8) != 0,
        proof=stored.proof,
        episode=stored.episode,
    )


def int32(data: bytes) -> np.ndarray:
    """The tokens of a record; a writable copy. Raises ``CodecError``."""
    if len(data) % 4:
        raise CodecError(f"{len(data)} bytes are not int32 tokens")
    return np.frombuffer(data, "<i4").astype(np.int32)
