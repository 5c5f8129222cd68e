"""The codec and the written log-probabilities, against transformers and plain JSON."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from transformers import PreTrainedTokenizerFast

from easyrl.gateway.logprobs import ChatLogprobs, generate_logprobs
from easyrl.gateway.text_codec import TextCodec
from tests.easyrl.gateway.gateway_parts import chat_tokenizer

TEXTS = [
    "",
    "a",
    "<|im_start|>user\nDas kostet 5 €.<|im_end|>\n",
    "  two  spaces, 日本語 🙂",
    "\x00é",
]


@pytest.mark.parametrize("splits_special", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_as_transformers_does(text: str, splits_special: bool) -> None:
    plain, own = chat_tokenizer(), chat_tokenizer()
    plain.split_special_tokens = own.split_special_tokens = splits_special
    own.backend_tokenizer.enable_truncation(1)  # as a tokenizer.json may say
    own.backend_tokenizer.enable_padding(length=64)
    codec = TextCodec(own)
    ids = plain.encode(text, add_special_tokens=False)
    assert codec.encode(text) == ids
    for skip in (False, True):
        expected = plain.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert codec.decode(ids, skip_special_tokens=skip) == expected


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        TextCodec(chat_tokenizer()).encode("a\ud800")


class Upper(PreTrainedTokenizerFast):
    """A tokenizer whose class has something of its own to say."""

    def _decode(self, *args: object, **kwargs: object) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


def test_a_tokenizer_of_its_own_kind_is_asked_itself() -> None:
    own = Upper(tokenizer_object=chat_tokenizer().backend_tokenizer)
    codec = TextCodec(own)
    assert codec.decode(codec.encode("abc")) == "ABC"


@pytest.mark.parametrize("number", [0, 1, 40])
def test_written_logprobs_are_what_dictionaries_would_be(number: int) -> None:
    tokenizer = chat_tokenizer()
    rng = np.random.default_rng(number)
    ids = rng.integers(0, len(tokenizer), number).astype(np.int32)
    logprobs = -rng.exponential(size=number).astype(np.float32)

    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id]))

    written = ChatLogprobs(text)
    for as_ids in (False, True):
        assert orjson.loads(orjson.dumps(written.of(ids, logprobs, tokens_as_ids=as_ids))) == [
            {
                "token": f"token_id:{i}" if as_ids else text(i),
                "logprob": logprob,
                "bytes": list(text(i).encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for i, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]
    told = [
        {"token_id": i, "logprob": logprob, "rank": None}
        for i, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    assert orjson.loads(orjson.dumps(generate_logprobs(ids, logprobs))) == [
        {**each, "top_logprobs": [each]} for each in told
    ]
