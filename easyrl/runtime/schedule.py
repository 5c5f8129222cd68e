"""When something that happens every so many steps is due."""

from __future__ import annotations


class Due:
    """Every so many steps, also where a batch takes several at once."""

    def __init__(self, every_steps: int, step: int) -> None:
        self._every_steps = every_steps
        self._step = step

    def passes(self, step: int) -> bool:
        """Whether a multiple lies between the step that was asked for last and this one."""
        before, self._step = self._step, step
        return bool(self._every_steps) and step // self._every_steps > before // self._every_steps
