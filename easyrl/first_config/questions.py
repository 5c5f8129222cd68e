"""Asks for what a first run needs, each again until the answer can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.prompt import Prompt

from easyrl.demo.prepared import DEMO_MODEL, DEMO_PROMPTS
from easyrl.first_config.answers import (
    Answers,
    check_data,
    check_devices,
    check_model,
    check_reward,
    default_devices,
)

Answer = TypeVar("Answer")


class Given(NamedTuple):
    """Answers from the command line; None: to be asked for."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    inference_devices: str | None = None
    training_devices: str | None = None


def answers_of(
    given: Given, count_accelerators: Callable[[], int], console: Console | None
) -> Answers:
    """All answers: ``given``, else asked for on ``console``, else (None) the defaults.

    Raises ``ValueError`` naming the option of a given answer that cannot be used.
    """

    def answer(option: str, question: str, default: str, check: Callable[[str], Answer]) -> Answer:
        name = option.removeprefix("--").replace("-", "_")
        said: str | None = getattr(given, name)
        if said is None and console is not None:
            return _ask(console, question, default, check)
        try:
            return check(default if said is None else said)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error

    model = answer("--model", "Model (a folder)", str(DEMO_MODEL), check_model)
    data = answer("--data", "Data (a file)", str(DEMO_PROMPTS), check_data)
    reward = answer("--reward", "Reward", "exact", lambda text: check_reward(text, data))
    devices = count_accelerators()
    for_inference, for_training = default_devices(devices)
    what = f"of this machine's {devices} devices" if devices else "no GPU or NPU: processes"
    inference = answer(
        "--inference-devices",
        f"For inference ({what})",
        str(for_inference),
        lambda text: check_devices(text, int(not devices), devices - 1 if devices else None),
    )
    training = answer(
        "--training-devices",
        f"For training ({what})",
        str(devices - inference if devices else for_training),
        lambda text: check_devices(text, 1, devices - inference if devices else None),
    )
    return Answers(model, data, reward, inference, training, devices)


def _ask(console: Console, question: str, default: str, check: Callable[[str], Answer]) -> Answer:
    while True:
        said = Prompt.ask(question, default=default, console=console)
        try:
            return check(said)
        except ValueError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
