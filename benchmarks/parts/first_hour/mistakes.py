"""Mistakes that new users make, through ``easyrl train``, ``easyrl up`` and ``train_policy``."""

from __future__ import annotations

import json

from benchmarks.parts.bad_input.scene import CONFIG, Mistake

UP = ("up", "{folder}/config.yaml")
SCRIPT = ("python", "{folder}/script.py")
OWN_SERVER = CONFIG.replace(
    'inference: {endpoints: ["{url:good}"], startup_timeout_s: 2}',
    "inference: {launch: {engine: embedded}}",
)
assert OWN_SERVER != CONFIG
_NO_ANSWER = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="}]

TOO_SHORT = "def reward_func(prompt, texts, token_ids):\n    return [1.0]\n"
AMBIGUOUS = "def reward_func(prompt, completions, solution_str):\n    return [0.0]\n"
RAISING = "def reward_func(prompt, texts, token_ids):\n    return [float(t) for t in texts]\n"
PROMPTS = "[{'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(8)]"
SETTINGS = "'data.apply_chat_template': False, 'rollout.max_tokens': 8, 'trainer.max_steps': 1"


def _with_reward(title: str, location: str, source: str, **how: tuple[str, ...] | str) -> Mistake:
    overrides = ("rewards=[{file: '{folder}/reward.py'}]",)
    return Mistake(title, location, overrides, files={"reward.py": source}, **how)  # type: ignore[arg-type]


def _script(
    title: str,
    location: str,
    *,
    model: str = "'{model}'",
    prompts: str = PROMPTS,
    reward: str = "'exact'",
    more: str = "",
    settings: str = "",
    before: str = "",
) -> Mistake:
    """As README's eight lines have it, without a handler for what is raised."""
    source = (
        f"from easyrl import train_policy\n{before}\n"
        "if __name__ == '__main__':\n"
        f"    settings = {{{SETTINGS}, {settings}}}\n"
        f"    train_policy({model}, {prompts}, {reward}, output_dir='{{folder}}/run',\n"
        f"                 settings=settings{more})\n"
    )
    return Mistake(
        f"train_policy: {title}", location, command=SCRIPT, files={"script.py": source}, status=1
    )


MISTAKES = [
    Mistake("train: a model folder that is missing", "model.path", ("model.path=models/qwen",)),
    Mistake("train: a data file that is missing", "data.files[0]", ("data.files=[mine.jsonl]",)),
    Mistake(
        "train: a record without its answer",
        "{folder}/prompts.jsonl:2",
        files={"prompts.jsonl": "".join(json.dumps(record) + "\n" for record in _NO_ANSWER)},
    ),
    Mistake("train: a misspelt key", "trainer.batch_sise", ("trainer.batch_sise=8",)),
    Mistake("train: text for a number", "trainer.batch_size", ("trainer.batch_size=many",)),
    Mistake(
        "train: slices of a batch that are not equal",
        "trainer.updates_per_batch",
        ("trainer.updates_per_batch=3", "trainer.max_steps=3"),
    ),
    Mistake("train: no endpoint listens", "{url:closed}", ("inference.endpoints=[{url:closed}]",)),
    Mistake(
        "train: an endpoint of another model",
        "{url:other-model}",
        ("inference.endpoints=[{url:other-model}]",),
    ),
    _with_reward("train: a reward that returns too few", "rewards[0]", TOO_SHORT),
    _with_reward("train: a reward of no known form", "rewards[0].signature", AMBIGUOUS),
    Mistake("up: no servers to start", "inference.launch", command=UP),
    Mistake(
        "up: a data file that is missing",
        "data.files[0]",
        ("data.files=[mine.jsonl]",),
        config=OWN_SERVER,
        command=UP,
    ),
    Mistake(
        "up: an engine that is none",
        "inference.launch.engine",
        ("inference.launch.engine=sglang",),
        config=OWN_SERVER,
        command=UP,
    ),
    _with_reward(
        "up: a reward that raises", "{folder}/reward.py:2", RAISING, config=OWN_SERVER, command=UP
    ),
    Mistake(
        "up: a model folder that is missing",
        "model.path",
        ("model.path=models/qwen",),
        config=OWN_SERVER,
        command=UP,
    ),
    _script("a model folder that is missing", "model.path", model="'models/qwen'"),
    _script("one text instead of prompts", "prompts", prompts="'1+1='"),
    _script("a prompt that is a number", "prompts", prompts="[1, 2, 3]"),
    _script("records without the answer", "answer", prompts="[{'prompt': '1+1='}] * 8"),
    _script(
        "a reward that returns too few",
        "reward_func",
        reward="reward_func",
        before=TOO_SHORT,
    ),
    _script(
        "a reward of no known form",
        "rewards[0].signature",
        reward="reward_func",
        before=AMBIGUOUS,
    ),
    _script("a built-in reward's name misspelt", "rewards[0].name", reward="'exactly'"),
    _script("a misspelt setting", "trainer.batch_sise", settings="'trainer.batch_sise': 8"),
    _script("text for a number", "trainer.learning_rate", settings="'trainer.learning_rate': '1'"),
    _script("torch's name of a dtype", "model.dtype", settings="'model.dtype': 'bfloat16'"),
    _script(
        "a setting of NumPy's type",
        "trainer.max_steps",
        settings="'trainer.max_steps': numpy.int64(3)",
        before="import numpy",
    ),
    _script(
        "no endpoint listens",
        "{url:closed}",
        more=", endpoints=['{url:closed}']",
        settings="'inference.startup_timeout_s': 2",
    ),
]
