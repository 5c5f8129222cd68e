"""Training from Python: a model, prompts and a reward function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from easyrl.config import ConfigError
from easyrl.config.file import resolve_config
from easyrl.config.machine import check_paths
from easyrl.hub.models import with_local_models
from easyrl.rewards.given import GivenRewards
from easyrl.runtime.uncaught import tell_in_short
from easyrl.schema import InterruptedRun

# also what has rows and ``column_names``: a ``datasets.Dataset`` or ``IterableDataset``
Prompts = Iterable[str | Mapping[str, Any]]
# a name of a built-in one, or a function in one of the signatures of docs/rewards.md
Reward = str | Callable[..., Any]


def train_policy(
    model: str | Path,
    prompts: Prompts | None,
    reward: Reward | Sequence[Reward],
    *,
    output_dir: str | Path = "runs/easyrl",
    endpoints: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    seal: str | Path | None = None,
) -> Path:
    """Trains ``model`` with GRPO and returns the folder of the trained one.

    Args:
        model: folder of a Hugging Face causal language model, or its id on the Hub.
        prompts: texts, or records with ``prompt`` (a text, or a list of chat messages) and, for the
            reward, ``answer`` and other fields; a split of Hugging Face's ``datasets`` too. None:
            those that ``settings`` name with ``data.files`` or ``data.dataset``.
        reward: a function, sync or async, called as ``reward(prompt, texts, token_ids)`` with the
            responses of one group, or as TRL or verl call theirs (docs/rewards.md); the name of a
            built-in one; or a list of these, whose sum is trained. Worker processes call it. They
            do not run the script again: what that defines, lambdas and closures too, is
            pickled by value; what an importable file defines is run from there.
        output_dir: receives everything that the run writes.
        endpoints: URLs of inference endpoints. Without any, an embedded server is started on this
            machine's processors, and training runs there too, in fp32.
        settings: any keys of the configuration, as ``{"trainer.max_steps": 20}``.
        resume: go on with the run in ``output_dir``, from its last checkpoint. One that is finished
            is left as it is, unless the settings now give it more to do.
        seal: file with a key, outside ``output_dir``: the certificate's lines are sealed with it.

    Raises ``ConfigError`` for settings and data that cannot be used, and for an ``output_dir`` that
    holds another run; then nothing in it has changed. ``InterruptedRun`` where the run cannot go
    on, for a reward that fails too. A script that catches neither ends with the message, without a
    stack, and with Python's status 1.
    """
    try:
        return _train(
            Path(model), prompts, reward, Path(output_dir), endpoints, settings or {}, resume, seal
        )
    except (ConfigError, InterruptedRun) as error:  # the message says it all
        error.args = (str(error).replace("--resume", "resume=True"),)  # the option, as an argument
        tell_in_short(error)
        raise error.with_traceback(None) from None


def _train(
    model: Path,
    prompts: Prompts | None,
    reward: Reward | Sequence[Reward],
    output: Path,
    endpoints: Sequence[str] | None,
    settings: Mapping[str, Any],
    resume: bool,
    seal: str | Path | None,
) -> Path:
    rank = os.environ.get("RANK", "0")  # each has files of its own
    prompts_file = output / f"prompts-rank{rank}.jsonl"
    records = None if prompts is None else _records(prompts, settings)
    several = [reward] if isinstance(reward, str) or callable(reward) else reward
    rewards = GivenRewards.of(several, output, rank)
    tree = OmegaConf.create(
        {
            "run": {"output_dir": str(output)},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {} if records is None else _data(records, prompts_file),
            "inference": _own_server() if endpoints is None else {"endpoints": list(endpoints)},
            "rewards": rewards.sections,
            "trainer": {"batch_size": min(32, len(records or range(32))), "zero_stage": 0},
        }
    )
    if not {"recipe", "recipe.name", "recipe.file"} & set(settings):  # another has other keys
        tree.recipe = {"name": "grpo", "aggregation": "token", "kl_coef": 0.0}
    for key, value in settings.items():
        try:
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{key}: {said}; give a plain value, as 1e-6 or a text") from error
    config = with_local_models(resolve_config(tree, source="train_policy"), resume=resume)
    rewards.check(config.rewards)
    check_paths(config, written_later=[prompts_file, *rewards.files])
    if rank == "0":
        print(f"easyrl: train_policy of {model}, into {output}", file=sys.stderr, flush=True)
    content = None if records is None else _prompt_lines(records)
    if resume and content and prompts_file.exists() and prompts_file.read_bytes() != content:
        raise ConfigError(
            f"prompts: are not those that the run in {output} was begun with, {prompts_file}; give "
            "the same ones, or start a new run in another output_dir"
        )
    from easyrl.train import run

    def write_files() -> None:
        if content and not (resume and prompts_file.exists()):
            prompts_file.write_bytes(content)
        rewards.write()

    seal_file = None if seal is None else Path(seal)
    run(config, resume=resume, on_folder=write_files, seal=seal_file)
    return output / "model"


def _records(prompts: Prompts, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records, of an endless source as many as ``data.max_records`` says."""
    if isinstance(prompts, str | Path):
        raise ConfigError(
            f"prompts: {str(prompts)!r:.80} is one text; give a list of texts or of records, or "
            "None and in settings data.files or data.dataset"
        )
    if isinstance(prompts, Mapping):
        raise ConfigError(
            f"prompts: is a mapping of {', '.join(map(repr, list(prompts)[:5]))}; of a DatasetDict "
            "give one split, prompts['train']"
        )
    most = settings.get("data.max_records")
    if not isinstance(prompts, Sized) and most is None:
        raise ConfigError(
            "prompts: has no length, and the order of the prompts wants a known number of them; "
            "give settings={'data.max_records': N}"
        )
    records: list[Mapping[str, Any]] = []
    for prompt in islice(prompts, most):
        if not isinstance(prompt, str | Mapping):
            raise ConfigError(
                f"prompts[{len(records)}]: {prompt!r:.80} is neither a text nor a record; give a "
                "text, or a dict with a prompt"
            )
        records.append({"prompt": prompt} if isinstance(prompt, str) else dict(prompt))
    if not records:
        raise ConfigError("prompts: the list is empty; give at least one")
    return records


def _data(records: Sequence[Mapping[str, Any]], file: Path) -> dict[str, Any]:
    """Section ``data`` of these records."""
    with_answers = any("answer" in record for record in records)
    return {"files": [str(file)], "fields": {"answer": "answer" if with_answers else None}}


def _prompt_lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    """The records as the file that the run reads."""
    lines = []
    for number, record in enumerate(records):
        try:
            lines.append(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        except TypeError as error:
            raise ConfigError(
                f"prompts: record {number} has a value that JSON cannot hold ({error}); remove its "
                "column (dataset.remove_columns) or turn it into text or numbers"
            ) from None
    return b"".join(lines)


def _own_server() -> dict[str, Any]:
    """Section ``inference`` with an embedded server."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("endpoints: several ranks need endpoints that were started before")
    return {"launch": {"engine": "embedded"}}
