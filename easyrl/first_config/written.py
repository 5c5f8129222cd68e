"""The first configuration as a file: few keys, each with what a beginner would change it for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.demo.prepared import DEMO_HELD_OUT, DEMO_MODEL
from easyrl.first_config.answers import Answers

VLLM_PYTHON = Path(".venv-vllm/bin/python")  # where README.md and make setup-vllm put it


@dataclass(frozen=True)
class _Numbers:
    """What suits a model of this size."""

    max_prompt_tokens: int
    max_tokens: int
    batch_size: int
    max_steps: int
    learning_rate: str


_OF_DEMO = _Numbers(16, 40, 32, 60, "1e-4")
_OF_OTHERS = _Numbers(1024, 512, 16, 100, "1e-6")

_TEMPLATE = """\
# Written by easyrl init. This starts servers and trainer, and Ctrl-C ends all:
#   easyrl up {file}
# with another value of any key, for this start only:
#   easyrl up {file} trainer.max_steps=5
# What the model has written: easyrl samples {output_dir}
# Every key with its meaning: docs/configuration.md

run:
  output_dir: {output_dir}  # receives the trained model, checkpoints, metrics and samples

model:
  path: {model}  # folder of a Hugging Face model{model_note}
  dtype: {dtype}  # fp32 on processors, bf16 on GPUs

data:
  files: [{data}]  # .jsonl, .json or .parquet
  fields: {{prompt: {prompt_field}, answer: {answer_field}}}  # their names in a record
  max_prompt_tokens: {max_prompt_tokens}  # longer prompts are left out

rollout:
  num_generations: 8  # responses to each prompt, which are compared with each other
  max_tokens: {max_tokens}  # of a response; what is longer is cut off

inference:
  launch: {launch}  # servers that the run starts itself

rewards:
  - {reward}  # what counts as good; others, and your own: docs/rewards.md

recipe:
  name: grpo  # easyrl recipes lists the others
  kl_coef: 0.0  # above 0: stay near the starting model, at the cost of a second one in memory

trainer:
  num_devices: {num_devices}  # training processes that easyrl up starts, one per device
  batch_size: {batch_size}  # prompts of an optimizer step
  max_steps: {max_steps}  # optimizer steps in all
  learning_rate: {learning_rate}  # {rate_note}
  zero_stage: {zero_stage}  # what devices share of the optimizer's state: 0 nothing, 3 all
{evaluation}
samples:
  console_every: 5  # steps between two responses on the console; 0: none

checkpoint:
  every_steps: 20  # what --resume goes on from
  export_at_end: true  # the trained model in output_dir/model
"""
_EVALUATION = """
evaluation:
  data:
    files: [{held_out}]  # problems that are never trained
    max_prompt_tokens: 16
    max_records: 256
  every_steps: 20
  sampling: {{max_tokens: 40, temperature: 1.0}}
"""


def written(answers: Answers, file: Path) -> str:
    """The YAML of ``answers``, to be kept as ``file``."""
    is_demo = answers.model == DEMO_MODEL
    numbers = _OF_DEMO if is_demo else _OF_OTHERS
    on_devices = answers.num_accelerators > 0
    built = "; easyrl up builds it where it is not there" if is_demo else ""
    evaluation = _EVALUATION.format(held_out=DEMO_HELD_OUT) if answers.data.is_demos else ""
    num_devices = answers.training_devices
    batch_size = min(numbers.batch_size, answers.data.num_records)
    return _TEMPLATE.format(
        file=file,
        output_dir=_yaml(f"runs/{file.stem}"),
        model=_yaml(str(answers.model)),
        model_note=built,
        dtype="bf16" if on_devices else "fp32",
        data=_yaml(str(answers.data.file)),
        prompt_field=_yaml(answers.data.prompt_field),
        answer_field=_yaml(answers.data.answer_field),
        max_prompt_tokens=numbers.max_prompt_tokens,
        max_tokens=numbers.max_tokens,
        launch=_yaml(_launch(answers)),
        reward=_yaml(answers.reward.model_dump(mode="json", exclude_defaults=True)),
        num_devices=num_devices,
        batch_size=max(batch_size - batch_size % num_devices, num_devices),
        max_steps=numbers.max_steps,
        learning_rate=numbers.learning_rate,
        rate_note="small models stand more" if is_demo else "the first thing to try out",
        zero_stage=2 if on_devices or num_devices > 1 else 0,
        evaluation=evaluation,
    )


def _launch(answers: Answers) -> dict[str, Any]:
    """``inference.launch``: vLLM where its environment is, else the embedded server."""
    count = answers.inference_devices
    if answers.num_accelerators == 0 or count == 0:
        return {"engine": "embedded", "count": max(count, 1)}
    if VLLM_PYTHON.is_file():
        return {"engine": "vllm", "count": count, "python": str(VLLM_PYTHON)}
    return {"engine": "embedded", "count": count, "devices": [[index] for index in range(count)]}


def _yaml(value: Any) -> str:
    """JSON is YAML; plain where that reads the same."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    text = json.dumps(value, ensure_ascii=False)
    plain = text[1:-1]
    is_plain = (
        isinstance(value, str)
        and plain[:1].isalpha()
        and all(letter.isalnum() or letter in "/_.-" for letter in plain)
    )
    return plain if is_plain and plain.lower() not in _NO_TEXT else text


_NO_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
