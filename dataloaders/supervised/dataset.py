"""Supervised records, tokenised, and what identifies them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from easyrl.config.records import RecordDatasetConfig, RecordFormat
from easyrl.dataloaders.prompts.left_out import LeftOut
from easyrl.dataloaders.prompts.records import BadRecordError
from easyrl.dataloaders.prompts.sources import source_records
from easyrl.dataloaders.supervised.conversations import Conversation, ConversationReader
from easyrl.schema import GivenCompletion, Prompt, SupervisedRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ANCHOR = "\n"  # a token of its own in front of a piece, where a tokenizer adds a space to a text


@dataclass(frozen=True, slots=True)
class RecordDataset:
    """Records of one format; ``records[i].prompt.index == i``."""

    records: tuple[SupervisedRecord, ...]
    format: RecordFormat

    @property
    def prompts(self) -> list[Prompt]:
        return [record.prompt for record in self.records]

    @property
    def digest(self) -> str:
        """blake3 over all records' tokens, 64 hex digits."""
        digest = blake3()
        for record in self.records:
            digest.update(bytes.fromhex(record_digest(record)))
        return digest.hexdigest()


def record_digest(record: SupervisedRecord) -> str:
    """blake3 of a record's tokens and of which of them are trained, 32 hex digits."""
    digest = blake3()
    arrays = [record.prompt.token_ids]
    arrays += [a for each in record.completions for a in (each.token_ids, each.loss_mask)]
    for array in arrays:
        digest.update(np.int64(len(array)).tobytes())
        digest.update(array.tobytes())
    return digest.hexdigest(length=16)


def load_records(
    config: RecordDatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    *,
    source_key: str = "data",
) -> RecordDataset:
    """Reads, renders and tokenises the first ``max_records`` records.

    ``end_ids``: tokens that end a response; a turn is trained up to the last of them in it.
    ``source_key`` is where ``config`` sits in the configuration; messages name keys below it.
    Raises ``ValueError`` for a file that cannot be read (see ``source_records``) or when no record
    is left, ``BadRecordError`` for a record unless ``on_bad_record`` or ``on_long_record`` is skip.
    """
    read = ConversationReader(config, tokenizer, source_key)
    left_out = LeftOut(
        source_key,
        "record",
        on_bad_record=config.on_bad_record,
        on_long=("on_long_record", config.on_long_record),
        limit=("max_tokens", config.max_tokens),
    )
    conversations: list[Conversation] = []
    for line in source_records(config):
        try:
            conversations.append(read(line))
        except BadRecordError as error:
            left_out.bad_record(line.location, str(error))
    tokenise = _Tokeniser(tokenizer, end_ids, with_template=config.apply_chat_template)
    records: list[SupervisedRecord] = []
    for conversation, (prompt_ids, completions) in zip(
        conversations, tokenise(conversations), strict=True
    ):
        longest = max(len(each.token_ids) for each in completions)
        if not len(prompt_ids) or not all(each.loss_mask.any() for each in completions):
            problem = "prompt or completion has no tokens; does the tokenizer know its characters?"
            left_out.bad_record(conversation.location, problem)
        elif len(prompt_ids) + longest > config.max_tokens:
            left_out.too_long(conversation.location, len(prompt_ids) + longest)
        else:
            prompt = Prompt(
                index=len(records),
                token_ids=prompt_ids,
                text=conversation.prompt,
                answer=None,
                location=conversation.location,
            )
            records.append(SupervisedRecord(prompt, completions))
    left_out.report(len(records))
    assert read.format is not None
    unended = [record for record in records if not _ends(record, end_ids)]
    if unended:
        logger.warning(
            "%s: %d of %d records do not end with a token that ends a response, so that nothing "
            "shows the model where to stop; the first: %s; does %s.chat_template write one?",
            source_key,
            len(unended),
            len(records),
            unended[0].prompt.location,
            source_key,
        )
    return RecordDataset(tuple(records), read.format)


def _ends(record: SupervisedRecord, end_ids: Collection[int]) -> bool:
    return all(int(each.token_ids[-1]) in end_ids for each in record.completions)


class _Tokeniser:
    """Tokenises prompts and the spans behind them one by one.

    So the tokens of a prompt are those that a server is given, and a response begins with a token
    of its own, as it does when it is sampled.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], *, with_template: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = np.array(sorted(end_ids), dtype=np.int32)
        self._with_template = with_template
        one = self._ids(["a"])[0]
        # of SentencePiece: a text begins as if a space were in front of it
        self._anchor = _ANCHOR if tokenizer.decode(one + one) == "a a" else ""

    def __call__(
        self, conversations: Sequence[Conversation]
    ) -> list[tuple[np.ndarray, tuple[GivenCompletion, ...]]]:
        """Token ids of each prompt, int32 [P], and its completions."""
        if not conversations:
            return []
        prompts = self._ids(
            [conversation.prompt for conversation in conversations],
            # a chat template writes its own beginning-of-text token
            add_special_tokens=not self._with_template,
        )
        spans = [s for each in conversations for spans in each.completions for s in spans]
        behind = iter(self._continuations([span.text for span in spans]))
        return [
            (
                np.array(ids, dtype=np.int32),
                tuple(
                    self._completion([(next(behind), span.trained) for span in spans])
                    for spans in conversation.completions
                ),
            )
            for conversation, ids in zip(conversations, prompts, strict=True)
        ]

    def _completion(self, spans: Sequence[tuple[list[int], bool]]) -> GivenCompletion:
        """Of spans' token ids, each trained or not; without what is behind the last trained."""
        ids, masks = [], []
        for span, trained in spans:
            own = np.array(span, dtype=np.int32)
            ends = np.flatnonzero(np.isin(own, self._end_ids))
            # what a template writes behind a turn's end is never sampled
            num_trained = int(ends[-1]) + 1 if len(ends) else len(own)
            ids.append(own)
            masks.append(np.arange(len(own)) < (num_trained if trained else 0))
        end_id = self._tokenizer.eos_token_id
        if not self._with_template and end_id is not None and not np.isin(end_id, ids[-1][-1:]):
            ids.append(np.array([end_id], dtype=np.int32))
            masks.append(np.ones(1, bool))
        token_ids, loss_mask = np.concatenate(ids), np.concatenate(masks)
        end = int(np.flatnonzero(loss_mask)[-1]) + 1 if loss_mask.any() else 0
        return GivenCompletion(token_ids[:end], loss_mask[:end])

    def _continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that continue others."""
        if not self._anchor:
            return self._ids(texts)
        anchor = self._ids([self._anchor])[0]
        anchored = self._ids([self._anchor + text for text in texts])
        # a text that begins with the anchor may melt with it
        return [
            ids[len(anchor) :] if ids[: len(anchor)] == anchor else self._ids([text])[0]
            for ids, text in zip(anchored, texts, strict=True)
        ]

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(
            list(texts),  # at once: fast tokenizers work on a batch in parallel
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return encoded
