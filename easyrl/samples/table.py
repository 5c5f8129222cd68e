"""The samples of every so many steps as rows of a table, for a tracker that shows tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from easyrl.runtime.schedule import Due
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledResponse
from easyrl.samples.show import Decode, response_texts

COLUMNS = (
    "step",
    "epoch",
    "prompt",
    "kept as",
    "prompt text",
    "answer",
    "response",
    "text",
    "reward",
    "advantage",
    "logprob diff",
    "tokens",
    "truncated",
    "environment",
    "turns",
    "failure",
)


@dataclass(frozen=True)
class SampleTable:
    """A row for each response that is kept of a step."""

    folder: SampleFolder
    decode: Decode
    due: Due

    def __call__(self, step: int) -> list[list[Any]]:
        """In the order of ``COLUMNS``; empty where no table is due or nothing is kept."""
        groups = self.folder.read(step) if self.due.passes(step) else []
        rows: list[list[Any]] = []
        for group in groups:
            prompt = self.decode(group.prompt_ids)
            of_group = [group.step, group.epoch, group.index, group.why, prompt, group.answer]
            for number, response in enumerate(group.responses):
                own = [
                    number,
                    self._text(response),
                    response.reward,
                    response.advantage,
                    response.logprob_diff,
                    len(response.token_ids),
                    response.truncated,
                    response.environment,
                    response.num_turns,
                    response.failure,
                ]
                rows.append([*of_group, *own])
        return rows

    def _text(self, response: SampledResponse) -> str:
        """Of an episode turn by turn."""
        if not response.turns:
            return self.decode(response.token_ids)
        return "\n".join(text for text, _ in response_texts(response, self.decode))
