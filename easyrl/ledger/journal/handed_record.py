"""A group that another rank has journalled and handed over: it is in memory, as it was sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from blake3 import blake3

from easyrl.ledger.journal.codec import (
    CodecError,
    GroupRecord,
    HandedGroup,
    decode,
    decode_record,
    to_group,
    token_bytes,
)
from easyrl.ledger.journal.record_file import DIGEST_BYTES, JournalError
from easyrl.schema import Exclusion, Prompt, RolloutGroup


@dataclass(frozen=True, slots=True)
class HandedRecord:
    """A ``StoredGroup`` of this attempt that is in another rank's journal."""

    record: GroupRecord
    prompt: Prompt
    digest: str  # of its record there, 32 hex digits
    drawn_by: int  # the other rank
    bytes_moved: int
    times_s: tuple[float, float]  # dispatched and completed, as if it had been finished just now

    refused = False  # only what is trained is handed over
    exclusion: Exclusion | None = None
    is_recovered = False

    @classmethod
    def of(cls, payload: bytes, prompt: Prompt) -> HandedRecord:
        """Raises ``JournalError`` where ``payload`` is not a group of ``prompt`` as it was sent."""
        try:
            handed = decode(HandedGroup, payload, "a group that was handed over")
            if blake3(handed.record).digest(length=DIGEST_BYTES) != handed.digest:
                raise CodecError("its bytes are not those that were sent")
            record = decode_record(handed.record)
            if record.key != prompt.key or record.prompt_token_ids != token_bytes(prompt):
                raise CodecError(f"rank {handed.rank} has another prompt at its position")
        except CodecError as error:
            raise JournalError(
                f"the group of prompt {prompt.index} of epoch {prompt.epoch}, which another rank "
                f"has handed over: {error}"
            ) from error
        now_s = time.monotonic()  # the other rank's clock is another
        return cls(
            record,
            prompt,
            handed.digest.hex(),
            handed.rank,
            len(payload),
            (now_s - handed.seconds, now_s),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.record.lengths

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def load(self) -> RolloutGroup:
        """Raises ``JournalError``."""
        try:
            group = to_group(self.record, self.prompt, self.digest, self.times_s)
        except CodecError as error:
            raise JournalError(f"a group of rank {self.drawn_by}'s: {error}") from error
        return replace(group, drawn_by=self.drawn_by, bytes_moved=self.bytes_moved)
