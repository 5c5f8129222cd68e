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


class StopStrings:
    """One sequence's text, decoded token by token, and its stop strings in it.

    A token's text depends on its left neighbour only (a leading space, the bytes of one character),
    so each step decodes from the last token where the text was complete, twice: with and without
    the new one. (``tokenizers``' ``DecodeStream`` raises on the invalid bytes that sampling makes
    of a vocabulary with byte fallback, and takes fast tokenizers only.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self.text = ""
        self._decode = partial(decode, tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._params = params
        self._token_ids: list[int] = []
        self._context_start = 0
        self._unread_start = 0
        self._searched_from = 0  # text of the first min_tokens tokens cannot stop

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that is now complete, and cuts the text there."""
        self._token_ids.append(token_id)
        new = self._completed_text()
        self.text += new
        if len(self._token_ids) < self._params.min_tokens:
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
        self.text = self.text[: end if self._params.include_stop_str_in_output else position]
        return string

    def _completed_text(self) -> str:
        """Of the newest token; empty if it is a part of a character."""
        context = self._decode(self._token_ids[self._context_start : self._unread_start])
        extended = self._decode(self._token_ids[self._context_start :])
        if len(extended) <= len(context) or extended.endswith(INCOMPLETE):
            return ""
        self._context_start = self._unread_start
        self._unread_start = len(self._token_ids)
        return extended[len(context) :]
