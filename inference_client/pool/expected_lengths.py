"""How long a response to a prompt will probably be, from those that were seen."""

from __future__ import annotations

PROMPT_WINDOW = 32  # responses; the policy changes, and lengths with it
DATASET_WINDOW = 1024


class ExpectedLengths:
    """Running means of response lengths in tokens, per prompt and of one dataset.

    A prompt that was never answered is expected to take the dataset's mean, before the first
    response half of ``max_tokens``. Only order and spread hang on it, never a result.
    """

    def __init__(self, max_tokens: int) -> None:
        self._by_prompt: dict[int, tuple[float, int]] = {}  # index → mean, number of responses
        self._dataset: tuple[float, int] = (max_tokens / 2, 0)

    def of(self, index: int) -> float:
        """Tokens expected of one response to prompt ``index`` of the dataset."""
        return self._by_prompt.get(index, self._dataset)[0]

    def saw(self, index: int, num_tokens: int) -> None:
        """A response to prompt ``index`` had ``num_tokens`` tokens."""
        self._by_prompt[index] = _moved(
            self._by_prompt.get(index, (0.0, 0)), num_tokens, PROMPT_WINDOW
        )
        self._dataset = _moved(self._dataset, num_tokens, DATASET_WINDOW)


def _moved(mean: tuple[float, int], value: float, window: int) -> tuple[float, int]:
    """The mean of all values until ``window`` of them, then an exponential one."""
    old, count = mean[0], mean[1] + 1
    return old + (value - old) / min(count, window), count
