"""A response on the console every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.runtime.schedule import Due
from easyrl.samples.folder import SampleFolder
from easyrl.samples.show import Decode, heading, readable, response_heading, response_texts

MOST_CHARACTERS = 1000  # of a text; the rest is for ``easyrl samples``


@dataclass(frozen=True)
class ConsoleSample:
    """The first response of a group that was drawn, else of whichever was kept."""

    folder: SampleFolder
    decode: Decode
    due: Due

    def __call__(self, step: int) -> str:
        """Lines to be printed behind ``step``; empty where none is due or kept."""
        groups = self.folder.read(step) if self.due.passes(step) else []
        group = next((g for g in groups if g.why == "drawn"), groups[0] if groups else None)
        if group is None or not group.responses:
            return ""
        response = group.responses[0]
        return "\n".join(
            [
                heading(group),
                self._text(group.prompt_ids),
                response_heading(0, response),
                *(self._short(text) for text, _ in response_texts(response, self.decode)),
            ]
        )

    def _text(self, token_ids: list[int]) -> str:
        return self._short(readable(self.decode(token_ids)))

    def _short(self, text: str) -> str:
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
