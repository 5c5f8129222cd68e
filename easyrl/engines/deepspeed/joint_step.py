"""Policy and critic step together or not at all.

Each of DeepSpeed's optimizers reduces its gradients, measures them, and either drops them where the
norm is not finite or hands them to the torch optimizer inside it. That hand-over is the last moment
before anything has changed, on all ranks alike, as the norm is that of all ranks. There the
policy's step is held up until the critic has taken its own, and dropped if the critic could not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed

from easyrl.engines.deepspeed.late_denominator import step_divided

Stepped = tuple[float, bool]  # gradient norm before the clip, and whether the step was taken


def step_together(
    policy: deepspeed.DeepSpeedEngine,
    divisor: float,
    step_critic: Callable[[], Stepped],
    discard_critic: Callable[[], None],
) -> tuple[Stepped, Stepped]:
    """Divides the policy's accumulated gradients by ``divisor``, clips, steps. Collective.

    ``step_critic`` is called in between, or ``discard_critic`` where the policy's gradient is not
    finite.

    Returns:
        what each came to; both have stepped, or neither has and weights, optimizer states and
        schedules are as before. The norm of what was discarded is NaN.
    """
    critic: list[Stepped] = []

    def critic_stepped() -> bool:
        critic.append(step_critic())
        return critic[0][1]

    with _asked_before_commit(policy.optimizer, critic_stepped):
        stepped = step_divided(policy, divisor)
    if not critic:
        discard_critic()
        critic.append((math.nan, False))
    assert stepped[1] == critic[0][1]
    return stepped, critic[0]


@contextmanager
def _asked_before_commit(optimizer: Any, agrees: Callable[[], bool]) -> Iterator[None]:
    """Inside, ``optimizer``, one of DeepSpeed's, changes nothing unless ``agrees`` says so.

    It is asked once in a step, before the first parameter group, and not at all where the gradient
    is dropped. DeepSpeed reads ``overflow`` behind the step: the schedule then stays where it is.
    The weights that it copies from unchanged masters are the same bits.
    """
    inner = optimizer.optimizer
    step, answers = inner.step, list[bool]()

    def step_if_agreed(*args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append(agrees())
        if answers[0]:
            return step(*args, **kwargs)
        optimizer.overflow = True
        return None

    inner.step = step_if_agreed
    try:
        yield
    finally:
        inner.step = step
