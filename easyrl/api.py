"""Training from Python: a model, prompts and a reward function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from easyrl.config.file import resolve_config
from easyrl.config.machine import check_paths
from easyrl.inference_client.api_keys import new_api_key
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.runtime.machine import usable_cpus

SERVER_KEY = "EASYRL_TRAIN_POLICY_KEY"  # environment variable: the key of the server started here
Reward = Callable[..., Any]  # (prompt, texts, token_ids) -> one float per response


def train_policy(
    model: str | Path,
    prompts: Sequence[str | Mapping[str, Any]],
    reward: Reward,
    *,
    output_dir: str | Path = "runs/easyrl",
    endpoints: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
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

    Raises ``ConfigError`` for settings and data that cannot be used.
    """
    output, settings = Path(output_dir), settings or {}
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        own_endpoints: list[Any] = list(endpoints or [])
        if endpoints is None:
            server = opened.enter_context(_embedded_server(Path(model), output))
            os.environ[SERVER_KEY] = server.api_key or ""
            opened.callback(os.environ.pop, SERVER_KEY, None)
            own_endpoints = [{"url": server.url, "api_key_env": SERVER_KEY}]
        with_answers = any(not isinstance(prompt, str) and "answer" in prompt for prompt in prompts)
        tree = OmegaConf.create(
            {
                "run": {"output_dir": str(output)},
                "model": {"path": str(model), "dtype": "fp32"},
                "data": {
                    "files": [str(_write_prompts(prompts, output))],
                    "fields": {"answer": "answer" if with_answers else None},
                },
                "inference": {"endpoints": own_endpoints},
                "rewards": [{"file": _source_file(reward), "function": reward.__name__}],
                "trainer": {"batch_size": min(32, len(prompts)), "zero_stage": 0},
            }
        )
        if not {"recipe", "recipe.name", "recipe.file"} & set(settings):  # another has other keys
            tree.recipe = {"name": "grpo", "aggregation": "token", "kl_coef": 0.0}
        for key, value in settings.items():
            OmegaConf.update(tree, key, value)
        config = resolve_config(tree, source="train_policy")
        check_paths(config)
        from easyrl.train import run

        run(config)
    return output / "model"


def _write_prompts(prompts: Sequence[str | Mapping[str, Any]], output: Path) -> Path:
    """The prompts as the file that the run reads; each rank has its own."""
    if not prompts:
        raise ValueError("prompts: the list is empty")
    path = output / f"prompts-rank{os.environ.get('RANK', '0')}.jsonl"
    records = [{"prompt": p} if isinstance(p, str) else dict(p) for p in prompts]
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def _source_file(reward: Reward) -> str:
    try:
        file = inspect.getsourcefile(reward)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file() or reward.__qualname__ != reward.__name__:
        raise ValueError(
            f"reward: {reward!r} is not a function at the top level of a file; worker processes "
            "have to import it"
        )
    return file


def _embedded_server(model: Path, output: Path) -> EmbeddedServerProcess:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("endpoints: several ranks need endpoints that were started before")
    cpus = usable_cpus()
    server_cpus = cpus[len(cpus) // 2 :]
    options = ["--dtype", "float32", "--num-threads", str(len(server_cpus))]
    return EmbeddedServerProcess(
        model, options, cpus=server_cpus, api_key=new_api_key(), log=output / "server.log"
    )
