"""Text of a growing token sequence, and the stop strings in it."""

from __future__ import annotations

from functools import partial

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from easyrl.inference_client.servers.embedded.sampling import SamplingParams

INCOMPLETE = "\ufffd"  # what a tokenizer decodes half a character to


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], *, skip_special_tokens: bool
) -> str:
    """Text of one token sequence."""
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


class IncrementalText:
    """Decodes token by token, without decoding everything again.

    A token's text depends on its left neighbour only (a leading space, the bytes of one character),
    so each step decodes from the last token where the text was complete, twice: with and without
    the new one. (``tokenizers``' ``DecodeStream`` raises on the invalid bytes that sampling makes
    of a vocabulary with byte fallback, and takes fast tokenizers only.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self.text = ""
        self._decode = partial(decode, tokenizer, skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._context_start = 0
        self._unread_start = 0

    def append(self, token_id: int) -> str:
        """Adds a token; returns the text that it completed, maybe empty."""
        self._token_ids.append(token_id)
        context = self._decode(self._token_ids[self._context_start : self._unread_start])
        extended = self._decode(self._token_ids[self._context_start :])
        if len(extended) <= len(context) or extended.endswith(INCOMPLETE):
            return ""
        self._context_start = self._unread_start
        self._unread_start = len(self._token_ids)
        new = extended[len(context) :]
        self.text += new
        return new


class StopStrings:
    """Watches one sequence for its stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self._text = IncrementalText(tokenizer, params.skip_special_tokens)
        self._params = params
        self._tokens_to_skip = params.min_tokens
        self._searched_from = 0  # text of the first min_tokens tokens cannot stop

    @property
    def text(self) -> str:
        return self._text.text

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that is now complete, and cuts the text there."""
        new = self._text.append(token_id)
        self._tokens_to_skip -= 1
        if self._tokens_to_skip >= 1:
            self._searched_from = len(self.text)
            return None
        found = []
        for string in self._params.stop:
            first = max(self._searched_from, len(self.text) - len(new) - len(string) + 1)
            if (position := self.text.find(string, first)) >= 0:
                found.append((position + len(string), position, string))
        if not found:
            return None
        end, position, string = min(found, key=lambda hit: hit[0])
        self._text.text = self.text[: end if self._params.include_stop_str_in_output else position]
        return string
