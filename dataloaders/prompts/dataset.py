"""Records → tokenised prompts, and batches of them with a cursor that survives a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, overload

import numpy as np
from blake3 import blake3

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.fields import Question, read_question
from easyrl.dataloaders.prompts.records import BadRecordError, Record, read_records
from easyrl.dataloaders.prompts.templating import PromptRenderer
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataset(Sequence[Prompt]):
    """The usable prompts; ``dataset[i].index == i``."""

    def __init__(self, prompts: Sequence[Prompt], num_skipped: Mapping[str, int]) -> None:
        self.prompts = tuple(prompts)
        self.num_skipped = dict(num_skipped)  # records left out: {"bad_record": n, "too_long": n}

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.prompts[index]


def load_prompts(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, *, source_key: str = "data"
) -> PromptDataset:
    """Reads, maps and tokenises the first ``max_records`` records of ``config.files``.

    ``source_key`` is where ``config`` sits in the configuration; messages name keys below it.
    Raises ``ValueError`` for a file that cannot be read (see ``read_records``) or when no prompt
    is left, ``BadRecordError`` for a record unless ``on_bad_record`` or ``on_long_prompt`` is skip.
    """
    records = chain.from_iterable(read_records(path) for path in config.files)
    return tokenise_records(
        islice(records, config.max_records), config, tokenizer, source_key=source_key
    )


def tokenise_records(
    records: Iterable[Record],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source_key: str = "data",
) -> PromptDataset:
    """``load_prompts`` for records that are already there. Same errors."""
    render = PromptRenderer(config, tokenizer, source_key)
    left_out = _LeftOut(config, source_key)
    questions: list[Question] = []
    texts: list[str] = []
    for record in records:
        try:
            question = read_question(record, config, source_key)
            texts.append(render(question))
            questions.append(question)
        except BadRecordError as error:
            left_out.bad_record(record.location, str(error))

    prompts: list[Prompt] = []
    for question, ids in zip(questions, _encode(tokenizer, texts, config), strict=True):
        if not ids:
            problem = "the prompt has no tokens; does the tokenizer know its characters?"
            left_out.bad_record(question.location, problem)
        elif len(ids) > config.max_prompt_tokens:
            left_out.too_long(question, len(ids))
        else:
            token_ids = np.array(ids, dtype=np.int32)
            prompts.append(
                Prompt(
                    index=len(prompts),
                    token_ids=token_ids,
                    text=question.text,
                    answer=question.answer,
                    metadata=question.metadata,
                )
            )
    left_out.report(len(prompts))
    return PromptDataset(prompts, left_out.counts())


class _LeftOut:
    """The records that do not become prompts; raises where the configuration wants it."""

    def __init__(self, config: DatasetConfig, source_key: str) -> None:
        self.config, self.source_key = config, source_key
        self.problems: dict[str, list[str]] = {"bad_record": [], "too_long": []}

    def bad_record(self, location: str, problem: str) -> None:
        if self.config.on_bad_record == "fail":
            hint = f"({self.source_key}.on_bad_record=skip leaves such records out)"
            raise BadRecordError(f"{location}: {problem}\n{hint}")
        self.problems["bad_record"].append(f"{location}: {problem}")

    def too_long(self, question: Question, num_tokens: int) -> None:
        problem = (
            f"{question.location}: the prompt has {num_tokens} tokens, "
            f"{self.source_key}.max_prompt_tokens is {self.config.max_prompt_tokens}"
        )
        if self.config.on_long_prompt == "fail":
            raise BadRecordError(
                f"{problem}; raise it or set {self.source_key}.on_long_prompt=skip"
            )
        self.problems["too_long"].append(problem)

    def counts(self) -> dict[str, int]:
        return {reason: len(problems) for reason, problems in self.problems.items()}

    def report(self, num_prompts: int) -> None:
        """One warning per reason. Raises ``ValueError`` if no prompt is left."""
        for reason, problems in self.problems.items():
            if problems and num_prompts == 0:
                raise ValueError(
                    f"{self.source_key}: no usable prompt is left, {len(problems)} are {reason}; "
                    f"the first: {problems[0]}"
                )
            if problems:
                message = "%s: left out %d records (%s), kept %d; the first: %s"
                logger.warning(
                    message, self.source_key, len(problems), reason, num_prompts, problems[0]
                )


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], config: DatasetConfig
) -> list[list[int]]:
    """Token ids of all texts at once: fast tokenizers work on a batch in parallel."""
    if not texts:
        return []
    # A chat template writes its own beginning-of-text token.
    encoded = tokenizer(
        texts,
        add_special_tokens=not config.apply_chat_template,
        return_attention_mask=False,
        verbose=False,
    )
    return encoded["input_ids"]


class PromptBatches(Iterator[list[Prompt]]):
    """Iterates over ``epochs`` passes of ``dataset``, ``batch_size`` prompts at a time.

    Each epoch has its own order, a function of ``seed`` and the epoch only. Batches run across the
    ends of epochs, so that no prompt is dropped; the last batch of all may be short.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
    ) -> None:
        if not dataset:
            raise ValueError("the dataset is empty")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self._position = 0  # prompts handed out, over all epochs
        self._order: tuple[int, np.ndarray] | None = None  # of the epoch last asked for
        self._fingerprint = _fingerprint(dataset)

    @property
    def num_batches(self) -> int:
        """Batches of all epochs together, the ones already handed out included."""
        return -(-len(self.dataset) * self.epochs // self.batch_size)

    def __next__(self) -> list[Prompt]:
        end = min(self._position + self.batch_size, len(self.dataset) * self.epochs)
        if self._position >= end:
            raise StopIteration
        batch = [self._prompt(position) for position in range(self._position, end)]
        self._position = end
        return batch

    def state(self) -> dict[str, int | bool | str]:
        """The cursor, JSON-able: what ``restore`` takes."""
        return {"position": self._position, **self._identity()}

    def restore(self, state: Mapping[str, int | bool | str]) -> None:
        """Continues where ``state`` was taken. ``epochs`` may differ: a run can be extended.

        Raises ``ValueError`` if dataset, order or batch size are not those of ``state``.
        """
        identity = self._identity()
        if set(state) != {"position", *identity}:
            raise ValueError(f"not a state of PromptBatches: it has the keys {sorted(state)}")
        for key, value in identity.items():
            if state[key] != value:
                raise ValueError(
                    f"cannot resume the prompts: {key} was {state[key]!r} when the checkpoint was "
                    f"written and is {value!r} now; resume with the same data, seed and batch "
                    "size, or start a new run"
                )
        self._position = int(state["position"])

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "num_prompts": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_hash": self._fingerprint,
        }

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.dataset))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return replace(self.dataset[int(self._order[1][offset])], epoch=epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        # RandomState's stream is frozen by numpy's policy; Generator's may change between versions,
        # and a resumed run would see another order.
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        return np.random.RandomState(bits).permutation(len(self.dataset))


def _fingerprint(dataset: Sequence[Prompt]) -> str:
    """Of token ids and answers, in order: what an edited file or another tokenizer changes."""
    digest = blake3()
    for prompt in dataset:
        digest.update(np.int64(len(prompt.token_ids)).tobytes())
        digest.update(prompt.token_ids.tobytes())
        digest.update(repr(prompt.answer).encode(errors="backslashreplace"))
    return digest.hexdigest()
