"""What a first run needs to be told, each answer checked as it is given.

A check takes what the user typed and returns what it means, or raises ``ValueError`` with the
remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np

from easyrl.config import RewardConfig
from easyrl.config.machine import model_problem
from easyrl.config.rewards import BuiltIn
from easyrl.dataloaders.prompts.records import Record, read_records
from easyrl.demo.prepared import DEMO_MODEL, DEMO_PROMPTS
from easyrl.hub.models import local_model
from easyrl.rewards.functions import check_prompts, check_rewards
from easyrl.schema import Prompt

# names of fields that data sets have, the most usual first
PROMPT_FIELDS = ("prompt", "question", "problem", "query", "instruction", "input")
ANSWER_FIELDS = ("answer", "solution", "ground_truth", "target", "output", "response")
ENOUGH = 32  # records: more cannot make a first batch larger


@dataclass(frozen=True)
class Data:
    """A file of prompts, and the names of its fields."""

    file: Path
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    num_records: int = ENOUGH  # at least
    first: Record | None = None

    @property
    def is_demos(self) -> bool:
        return self.first is None


@dataclass(frozen=True)
class Answers:
    """All that the first configuration is made of."""

    model: Path
    data: Data
    reward: RewardConfig
    inference_devices: int
    training_devices: int
    num_accelerators: int  # GPUs or NPUs of this machine


def check_model(text: str) -> Path:
    """A folder with a model or its Hub id, or the demo's, which may be built later."""
    path = Path(text).expanduser()
    if path == DEMO_MODEL:
        return path
    if (problem := model_problem(local_model(path, "model.path"))) is not None:
        raise ValueError(problem)
    return path


def check_data(text: str) -> Data:
    """A file whose records have a prompt, or the demo's, which may be written later."""
    path = Path(text).expanduser()
    if path == DEMO_PROMPTS:
        return Data(path)
    records = list(islice(read_records(path), ENOUGH))
    if records[0].problem is not None:
        raise ValueError(f"{records[0].location}: {records[0].problem}")
    fields = list(records[0].values)
    prompt = next((name for name in PROMPT_FIELDS if name in fields), None)
    if prompt is None:
        raise ValueError(
            f"{records[0].location} has the fields {', '.join(fields)}, none of which is one of "
            f"{', '.join(PROMPT_FIELDS)}; rename the one with the question to prompt"
        )
    answer = next((name for name in ANSWER_FIELDS if name in fields), None)
    return Data(path, prompt, answer, len(records), records[0])


def check_reward(text: str, data: Data) -> RewardConfig:
    """A built-in reward by its name, or ``FILE.py:FUNCTION``, that can score ``data``."""
    file, colon, function = text.rpartition(":")
    if text.endswith(".py"):
        file, colon, function = text, ":", "reward_func"
    if not colon and text not in get_args(BuiltIn):
        raise ValueError(
            f"{text!r} is no built-in reward; choose one of {', '.join(get_args(BuiltIn))}, or "
            "give a function of your own as FILE.py:FUNCTION"
        )
    values = {"file": file, "function": function} if colon else {"name": text}
    reward = RewardConfig.model_validate(values)
    check_rewards([reward])
    if data.first is not None:
        check_prompts([reward], [_prompt(data, data.first)])
    return reward


def check_devices(text: str, least: int, most: int | None) -> int:
    """A number of devices, of those that there are."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number; write one, as 1") from None
    if number < least or (most is not None and number > most):
        at_most = "" if most is None else f" and at most {most}, which this machine has left"
        raise ValueError(f"{number} is not possible; give at least {least}{at_most}")
    return number


def default_devices(num_accelerators: int) -> tuple[int, int]:
    """For inference and for training. Without accelerators: a server and a process."""
    if num_accelerators == 0:
        return 1, 1
    return num_accelerators // 2, num_accelerators - num_accelerators // 2


def _prompt(data: Data, record: Record) -> Prompt:
    """Of ``record``, without a tokenizer."""
    answer = None if data.answer_field is None else str(record.values[data.answer_field])
    text = str(record.values[data.prompt_field])
    columns = {name: value for name, value in record.values.items() if name != data.prompt_field}
    token_ids = np.zeros(1, np.int32)
    return Prompt(0, token_ids, text, answer, metadata=columns, location=record.location)
