"""The load of ``benchmarks.gateway``: a tokenizer, sessions of chats, and what is answered to them.

The texts are this repository's documents, in a vocabulary of byte pairs made of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.parts.worktree import ROOT

VOCABULARY = 4096
NUM_VARIANTS = 64
FIRST_TOKENS, ADDED_TOKENS, SAMPLED_TOKENS = 750, 50, 200  # 750, 1,000 and 1,250: 1,000 in the mean
NUM_TURNS = 3
LATENCY_S, SPREAD = 1.0, 0.5
END = "<|im_end|>"
CHAT_TEMPLATE = (  # ChatML, as Qwen has it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Variant:
    """An answer; a request's seed chooses it."""

    token_ids: list[int]  # SAMPLED_TOKENS
    logprobs: list[float]
    text: str
    delay_s: float  # LATENCY_S ± SPREAD


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Made of the documents; ``folder`` is one that a model's tokenizer is read from."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_documents(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


class Texts:
    """Pieces of the documents, of so many tokens each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        whole = "\n".join(_documents())
        self._ids: list[int] = tokenizer.encode(whole, add_special_tokens=False)

    def ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        begin = rng.randrange(len(self._ids) - num_tokens)
        return self._ids[begin : begin + num_tokens]

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Tokenised again, it has about as many."""
        return str(self._tokenizer.decode(self.ids(rng, num_tokens)))


def write_variants(path: Path, texts: Texts, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    rng = random.Random(seed)
    variants = []
    for _ in range(NUM_VARIANTS):
        token_ids = texts.ids(rng, SAMPLED_TOKENS)
        variants.append(
            Variant(
                token_ids,
                [-rng.expovariate(1.0) for _ in token_ids],
                str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)),
                LATENCY_S * (1 + SPREAD * rng.uniform(-1, 1)),
            )
        )
    path.write_text(json.dumps([asdict(variant) for variant in variants]))


def read_variants(path: Path) -> Sequence[Variant]:
    return [Variant(**each) for each in json.loads(path.read_text())]


def _documents() -> list[str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path.read_text(encoding="utf-8") for path in paths]
