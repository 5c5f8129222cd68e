"""Builds the tokenizer and model of the demo with a tool: a small Qwen3 that sometimes calls right.

``python -m easyrl.demo.tools.build_model --output DIR [--seed N]``
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from easyrl.demo.build_model import (
    END,
    IGNORED,
    PAD,
    ROLES,
    UNKNOWN,
    Rows,
    model_config,
    train_and_save,
)
from easyrl.demo.tools.task import (
    ARGUMENT,
    ERROR,
    NO_TOOL,
    TOOL,
    Shown,
    warm_start_examples,
)

TOOL_ROLE = "<|tool|>"
MAX_POSITIONS = 1024  # room for other conversations than the demo's
# Of a call and of an error: few tokens make turns quick. Each in front of what begins it.
WORDS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}'),
    *(TOOL, ARGUMENT, NO_TOOL),
    *(word for word in re.findall(r"\w+", ERROR) if len(word) > 1 and word not in (TOOL, NO_TOOL)),
]
# Tools by name and arguments alone, which is all that a model this small could read of them.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(',') }})"
    "{% if not loop.last %} {% endif %}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_model(
    output: Annotated[Path, typer.Option(help="folder to write")],
    seed: int = 0,
    num_steps: int = 500,
    batch_size: int = 64,
) -> None:
    """Writes tokenizer and warm-started model to ``output`` in Hugging Face's layout.

    The same arguments give the same weights on one machine.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = model_config(tokenizer, tied=True)
    config.max_position_embeddings = MAX_POSITIONS
    model = Qwen3ForCausalLM(config)
    batches = conversation_batches(tokenizer, warm_start_examples(seed), batch_size)
    train_and_save(model, tokenizer, batches, num_steps, output)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and for ``WORDS`` one each: such texts round-trip.

    The tags of tool calls are ordinary tokens: they must outlive
    ``decode(skip_special_tokens=True)``.
    """
    roles = [*ROLES, TOOL_ROLE]
    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    words = [PAD, END, UNKNOWN, *roles, *WORDS, *characters]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    pieces = "|".join(map(re.escape, WORDS))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pieces}|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=roles,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def pieces_of(shown: Shown) -> list[tuple[str, bool]]:
    """The texts of a conversation as the chat template writes them, and whether the model said it.

    Rendered here: the template itself takes longer than the training step.
    """
    pieces = [(f"<|system|>{TOOL}({ARGUMENT}){END}<|user|>{shown.question}{END}", False)]
    for said, result in itertools.zip_longest(shown.said, shown.results):
        pieces += [("<|assistant|>", False), (f"{said}{END}", True)]
        if result is not None:
            pieces.append((f"{TOOL_ROLE}{result}{END}", False))
    return pieces


def conversation_batches(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[Shown], batch_size: int
) -> Iterator[list[Rows]]:
    """Endless batches, the loss on what the model said; each in two halves by length, to pad less.

    Padded on the right: a causal model needs no mask for pads that come last.
    """
    while True:
        batch = [_encode(tokenizer, each) for each in itertools.islice(examples, batch_size)]
        batch.sort(key=lambda pair: len(pair[0]))
        middle = len(batch) // 2
        yield [
            {
                "input_ids": _padded([ids for ids, _ in half], int(tokenizer.pad_token_id)),
                "labels": _padded([labels for _, labels in half], IGNORED),
            }
            for half in (batch[:middle], batch[middle:])
            if half
        ]


def _encode(tokenizer: PreTrainedTokenizerFast, shown: Shown) -> tuple[list[int], list[int]]:
    """Token ids and labels."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_said in pieces_of(shown):
        own = tokenizer.encode(text, add_special_tokens=False)
        ids += own
        labels += own if is_said else [IGNORED] * len(own)
    return ids, labels


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    """int64 [B, T]"""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


if __name__ == "__main__":
    typer.run(build_model)
