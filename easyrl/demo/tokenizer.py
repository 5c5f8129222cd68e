"""The demo's tokenizer: one token per character, one for each of the two thinking tags."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from easyrl.demo.task import END_THINK, THINK

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer of 24 tokens with a chat template; known characters round-trip.

    The thinking tags are ordinary tokens: rewards look for them, so they must outlive
    ``decode(skip_special_tokens=True)``.
    """
    special = [PAD, END, UNKNOWN, *ROLES]
    words = [*special, THINK, END_THINK, *"0123456789+-*=; "]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=ROLES,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
