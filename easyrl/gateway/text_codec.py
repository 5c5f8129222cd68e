"""Texts to token ids and back, without what transformers does beside its backend's own work.

``PreTrainedTokenizerBase.encode`` makes offsets, masks and lists of them, which nobody reads here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_METHODS = ("encode", "_encode_plus", "decode", "_decode")


class TextCodec:
    """What ``tokenizer`` makes of texts and of ids: no special tokens added, no spaces tidied up.

    Its backend is asked (``tokenizers``) where its class has nothing of its own to say.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import TokenizersBackend

        self._tokenizer = tokenizer
        self._backend = None
        kind = type(tokenizer)
        if isinstance(tokenizer, TokenizersBackend) and all(
            getattr(kind, name) is getattr(TokenizersBackend, name) for name in _METHODS
        ):
            self._backend = tokenizer.backend_tokenizer
            self._backend.no_truncation()  # as ``encode`` does each time
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens

    def encode(self, text: str) -> list[int]:
        """Raises ``TypeError`` or ``UnicodeEncodeError`` at half a surrogate pair."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if self._backend is None:
            return str(
                self._tokenizer.decode(
                    token_ids,
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
            )
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
