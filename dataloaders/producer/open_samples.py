"""Finished responses of groups that are not complete, for a consumer that would have to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from easyrl.schema import Completion, FinishedSamples, Key, OpenGroup, Prompt


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    num_missing: int  # responses that have not returned
    # by sample number, in order of return; not those that were taken
    finished: dict[int, Completion] = field(default_factory=dict)

    def seen(self) -> OpenGroup:
        """As the consumer sees it."""
        lengths = tuple(len(completion.token_ids) for completion in self.finished.values())
        return OpenGroup(self.prompt.key, len(self.prompt.token_ids), lengths, self.num_missing)


@dataclass
class OpenSamples:
    """What of one stream's groups is finished while the group is not.

    Consumes: responses from the producer, as they return. Waits for: nothing. Produces: each of
    them once, as long as its group is open; a consumer that never asks costs one entry of a
    dictionary for each. Holds nothing that the producer does not hold anyway. From any thread.
    """

    num_generations: int = 0  # G, responses per prompt
    # from the producer's thread, when a response has returned and the consumer listens
    wake: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _groups: dict[Key, _Group] = field(default_factory=dict, init=False)
    _listening: bool = field(default=False, init=False)

    # ---- the producer's side ---------------------------------------------------------------------

    def add(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """A response has returned."""
        with self._lock:
            group = self._groups.get(prompt.key)
            if group is None:
                group = self._groups[prompt.key] = _Group(prompt, self.num_generations)
            group.finished[sample] = completion
            group.num_missing -= 1
            wake, self._listening = self._listening, False
        if wake:
            self.wake()

    def close_group(self, prompt: Prompt) -> None:
        """The group is complete or given up."""
        with self._lock:
            self._groups.pop(prompt.key, None)

    # ---- the consumer's side ---------------------------------------------------------------------

    def listen(self) -> None:
        """The next response that returns calls ``wake``, once."""
        with self._lock:
            self._listening = True

    def groups(self) -> list[OpenGroup]:
        """Those that have finished responses which nobody has taken."""
        with self._lock:
            return [group.seen() for group in self._groups.values() if group.finished]

    def take(self, key: Key, max_tokens: int) -> FinishedSamples | None:
        """Finished responses of the group that are ``OpenGroup.within`` ``max_tokens`` tokens.

        None where none fits, or where the group is no longer open.
        """
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                return None
            samples = list(group.finished)
            taken = {
                samples[place]: group.finished.pop(samples[place])
                for place in group.seen().within(max_tokens)
            }
        return FinishedSamples(group.prompt, taken) if taken else None
