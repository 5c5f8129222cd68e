"""Incremental decoding: any tokens that a model may sample, and nothing lost of what is text."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.inference_client.servers.embedded.text import INCOMPLETE, StopStrings
from tests.tiny_tokenizer import tiny_tokenizer

TEXT = "añb 😀 c 你好 d" * 3


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece's: bytes are tokens of their own, a word begins with its space."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(params=[tiny_tokenizer, byte_fallback_tokenizer])
def tokenizer(request) -> PreTrainedTokenizerFast:
    return request.param()


def texts(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """After each token."""
    strings = StopStrings(tokenizer, SamplingParams())
    shown = []
    for token_id in ids:
        assert strings.append(token_id) is None
        shown.append(strings.text)
    return shown


def test_the_pieces_of_a_text_are_the_text(tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    shown = texts(tokenizer, ids)
    assert shown[-1] == tokenizer.decode(ids)
    assert not any(INCOMPLETE in text for text in shown)


def test_tokens_that_are_no_text_are_taken(tokenizer):
    """Sampled at random: most bytes are no character, and none of it may raise."""
    choose = random.Random(0)
    for _ in range(200):
        shown = texts(tokenizer, [choose.randrange(256) for _ in range(40)])
        assert all(later.startswith(text) for text, later in pairwise(shown))
