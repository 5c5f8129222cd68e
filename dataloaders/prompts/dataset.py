"""Records → tokenised prompts, and the order in which a run draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.left_out import LeftOut
from easyrl.dataloaders.prompts.questions import Question, QuestionReader
from easyrl.dataloaders.prompts.records import BadRecordError
from easyrl.dataloaders.prompts.sources import source_records
from easyrl.dataloaders.prompts.template_values import TemplatedPrompts, every_variant, prompt_of
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source_key: str = "data",
    seed: int = 0,
    is_held_out: bool = False,
) -> Sequence[Prompt]:
    """Reads, maps and tokenises the first ``max_records`` records; ``prompts[i].index == i``.

    ``source_key`` is where ``config`` sits in the configuration; messages name keys below it.
    ``seed`` draws the values of ``template_values``; a record with all of them is tokenised here.
    Raises ``ValueError`` for a file that cannot be read (see ``source_records``) or when no prompt
    is left, ``BadRecordError`` for a record unless ``on_bad_record`` or ``on_long_prompt`` is skip.
    """
    read_question = QuestionReader(config, tokenizer, source_key)
    left_out = LeftOut(
        source_key,
        "prompt",
        on_bad_record=config.on_bad_record,
        on_long=("on_long_prompt", config.on_long_prompt),
        limit=("max_prompt_tokens", config.max_prompt_tokens),
    )
    asked: list[list[Question]] = []  # a record's, one for each of the values of its templates
    for record in source_records(config):
        try:
            asked.append(read_question(record))
        except BadRecordError as error:
            left_out.bad_record(record.location, str(error))

    tokenised: Iterator[list[int]] = iter(())
    if asked:  # at once: fast tokenizers work on a batch in parallel
        tokenised = iter(
            tokenizer(
                [question.rendered for questions in asked for question in questions],
                # a chat template writes its own beginning-of-text token
                add_special_tokens=not config.apply_chat_template,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
        )
    variants: list[list[Prompt]] = []
    for questions in asked:
        token_ids = list(islice(tokenised, len(questions)))
        location, longest = questions[0].location, max(map(len, token_ids))
        if not all(token_ids):
            problem = "the prompt has no tokens; does the tokenizer know its characters?"
            left_out.bad_record(location, problem)
        elif longest > config.max_prompt_tokens:
            left_out.too_long(location, longest)
        else:
            variants.append(
                [
                    _prompt(len(variants), question, ids, is_held_out)
                    for question, ids in zip(questions, token_ids, strict=True)
                ]
            )
    left_out.report(len(variants))
    if config.template_values:
        return TemplatedPrompts(config.template_values, variants, seed=seed)
    return tuple(prompt for (prompt,) in variants)


def _prompt(index: int, question: Question, token_ids: list[int], is_held_out: bool) -> Prompt:
    return Prompt(
        index=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        text=question.text,
        answer=question.answer,
        metadata=question.metadata,
        location=question.location,
        system=question.system,
        messages=question.messages,
        answer_column=question.answer_column,
        is_held_out=is_held_out,
    )


class PromptOrder:
    """The prompts of a run in the order in which they are drawn: position → prompt.

    Each of the ``epochs`` (None: endless) has its own order, a function of ``seed`` and it only.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        dataset_hash: str | None = None,  # where a prompt's tokens and answer are not all of it
    ) -> None:
        if not dataset:
            raise ValueError("the dataset is empty")
        self.dataset, self.seed, self.shuffle, self.epochs = dataset, seed, shuffle, epochs
        self._order: tuple[int, np.ndarray] | None = None  # of the epoch last asked for
        self._identity: dict[str, int | bool | str] = {
            "num_prompts": len(dataset),
            "seed": seed,
            "shuffle": shuffle,
            "dataset_hash": dataset_hash or _fingerprint(dataset),
        }

    def num_left(self, position: int) -> int | None:
        """Prompts from ``position`` on; None: the order has no end.

        A run that is resumed with fewer epochs may be behind the end.
        """
        return None if self.epochs is None else max(len(self.dataset) * self.epochs - position, 0)

    def prompt(self, position: int) -> Prompt:
        """The prompt at ``position``, counted over all epochs from 0."""
        assert position >= 0 and self.num_left(position) != 0
        epoch, place = divmod(position, len(self.dataset))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return replace(prompt_of(self.dataset, int(self._order[1][place]), epoch), epoch=epoch)

    def cursor(self, position: int) -> dict[str, int | bool | str]:
        """``position`` and what it is a position of, JSON-able."""
        return {"position": position, **self._identity}

    def position(self, cursor: Mapping[str, int | bool | str]) -> int:
        """The position in ``cursor``. ``epochs`` may differ: a run can be extended.

        Raises ``ValueError`` if dataset or order are not those of ``cursor``.
        """
        if set(cursor) != {"position", *self._identity}:
            raise ValueError(f"not a cursor of PromptOrder: it has the keys {sorted(cursor)}")
        for key, value in self._identity.items():
            if cursor[key] != value:
                raise ValueError(
                    f"cannot resume the prompts: {key} was {cursor[key]!r} when the checkpoint was "
                    f"written and is {value!r} now; resume with the same data and seed, or start a "
                    "new run"
                )
        return int(cursor["position"])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        # RandomState's stream is frozen by numpy's policy; Generator's may change between versions,
        # and a resumed run would see another order.
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        return np.random.RandomState(bits).permutation(len(self.dataset))


def _fingerprint(dataset: Sequence[Prompt]) -> str:
    """Of token ids and answers, in order: what an edited file, another tokenizer or other values of
    a template change."""
    digest = blake3()
    for prompt in every_variant(dataset):
        digest.update(np.int64(len(prompt.token_ids)).tobytes())
        digest.update(prompt.token_ids.tobytes())
        digest.update(repr(prompt.answer).encode(errors="backslashreplace"))
    return digest.hexdigest()
