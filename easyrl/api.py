"""Training from Python: a model, prompts and a reward function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from easyrl.config import ConfigError
from easyrl.config.file import resolve_config
from easyrl.config.machine import check_paths

Reward = Callable[..., Any]  # (prompt, texts, token_ids) -> one float per response


def train_policy(
    model: str | Path,
    prompts: Sequence[str | Mapping[str, Any]],
    reward: Reward,
    *,
    output_dir: str | Path = "runs/easyrl",
    endpoints: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    seal: str | Path | None = None,
) -> Path:
    """Trains ``model`` with GRPO and returns the folder of the trained one.

    Args:
        model: folder of a Hugging Face causal language model.
        prompts: texts, or records with ``prompt`` and, for the reward, ``answer`` and other fields.
        reward: a function of a file, sync or async, called as ``reward(prompt, texts, token_ids)``
            with the responses of one group; returns one float for each. Worker processes import its
            file, so that a script needs ``if __name__ == "__main__":`` around its call of this.
        output_dir: receives everything that the run writes.
        endpoints: URLs of inference endpoints. Without any, an embedded server is started on this
            machine's processors, and training runs there too, in fp32.
        settings: any keys of the configuration, as ``{"trainer.max_steps": 20}``.
        resume: go on with the run in ``output_dir``, from its last checkpoint. One that is finished
            is left as it is, unless the settings now give it more to do.
        seal: file with a key, outside ``output_dir``: the certificate's lines are sealed with it.

    Raises ``ConfigError`` for settings and data that cannot be used, and for an ``output_dir`` that
    holds another run; then nothing in it has changed.
    """
    output = Path(output_dir)
    prompts_file = output / f"prompts-rank{os.environ.get('RANK', '0')}.jsonl"  # each rank's own
    content = _prompt_lines(prompts)
    with_answers = any(not isinstance(prompt, str) and "answer" in prompt for prompt in prompts)
    tree = OmegaConf.create(
        {
            "run": {"output_dir": str(output)},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {
                "files": [str(prompts_file)],
                "fields": {"answer": "answer" if with_answers else None},
            },
            "inference": _own_server() if endpoints is None else {"endpoints": list(endpoints)},
            "rewards": [{"file": _source_file(reward), "function": reward.__name__}],
            "trainer": {"batch_size": min(32, len(prompts)), "zero_stage": 0},
        }
    )
    settings = settings or {}
    if not {"recipe", "recipe.name", "recipe.file"} & set(settings):  # another has other keys
        tree.recipe = {"name": "grpo", "aggregation": "token", "kl_coef": 0.0}
    for key, value in settings.items():
        OmegaConf.update(tree, key, value)
    config = resolve_config(tree, source="train_policy")
    check_paths(config, written_later=[prompts_file])
    if resume and prompts_file.exists() and prompts_file.read_bytes() != content:
        raise ConfigError(
            f"prompts: are not those that the run in {output} was begun with, {prompts_file}; give "
            "the same ones, or start a new run in another output_dir"
        )
    from easyrl.train import run

    def write_prompts() -> None:
        if not (resume and prompts_file.exists()):
            prompts_file.write_bytes(content)

    seal_file = None if seal is None else Path(seal)
    run(config, resume=resume, on_folder=write_prompts, seal=seal_file)
    return output / "model"


def _prompt_lines(prompts: Sequence[str | Mapping[str, Any]]) -> bytes:
    """The prompts as the file that the run reads."""
    if isinstance(prompts, str | Path):
        raise ValueError(
            f"prompts: {str(prompts)!r:.80} is one text; give a list of texts or of records (those "
            "of a file are read with data.files of a configuration)"
        )
    if not prompts:
        raise ValueError("prompts: the list is empty; give at least one")
    records = [{"prompt": p} if isinstance(p, str) else dict(p) for p in prompts]
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def _source_file(reward: Reward) -> str:
    try:
        file = inspect.getsourcefile(reward)
    except TypeError:
        file = None
    named = reward.__name__ == reward.__qualname__ and reward.__name__.isidentifier()
    if file is None or not Path(file).is_file() or not named:
        raise ValueError(
            f"reward: {reward!r} is not a function at the top level of a file; worker processes "
            "have to import it; define it with def in a file of its own"
        )
    return file


def _own_server() -> dict[str, Any]:
    """Section ``inference`` with an embedded server."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("endpoints: several ranks need endpoints that were started before")
    return {"launch": {"engine": "embedded"}}
