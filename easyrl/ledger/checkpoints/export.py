"""The trained model, and an adapter of it, as folders that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from easyrl.config import LoraConfig
from easyrl.inference_client.transfer.artifact import write_artifact

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
WEIGHT_INDEX = "model.safetensors.index.json"
EXPORT_SHARD_BYTES = 4 * 2**30


def export_model(
    weights: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    tokenizer: Path,
    target: Path,
    dtype: str,
) -> None:
    """Writes a folder that ``from_pretrained`` loads: safetensors shards, config, tokenizer.

    Args:
        weights: names as ``save_pretrained`` writes them.
        source: the model the run started from; its other files are copied.
        dtype: torch's name of the weights' type, for ``config.json``.
    """
    with _replaced(target) as unfinished:
        chunks = write_artifact(iter(weights), unfinished, "export", EXPORT_SHARD_BYTES)
        weight_map = {name: chunk.file for chunk in chunks for name in chunk.checksums}
        index = {"metadata": {}, "weight_map": weight_map}
        for folder in (source, tokenizer):
            for file in folder.iterdir():
                is_weights = file.suffix in WEIGHT_SUFFIXES or file.name == WEIGHT_INDEX
                if file.is_file() and not is_weights:
                    shutil.copy2(file, unfinished / file.name)
        (unfinished / WEIGHT_INDEX).write_text(json.dumps(index, indent=1))
        (unfinished / "manifest.json").unlink()
        config_file = unfinished / "config.json"
        config = json.loads(config_file.read_text())
        config["dtype"] = dtype
        config.pop("torch_dtype", None)
        config_file.write_text(json.dumps(config, indent=2))


def export_adapter(
    weights: Iterable[tuple[str, torch.Tensor]], lora: LoraConfig, source: Path, target: Path
) -> None:
    """Writes a folder that ``PeftModel.from_pretrained`` puts on the model in ``source``.

    ``weights`` are named as peft saves them. Not into the merged model's folder: transformers would
    load the adapter on top of what already contains it.
    """
    from easyrl.models.lora import peft_config

    with _replaced(target) as unfinished:
        unfinished.mkdir(parents=True)
        save_file(
            dict(weights), unfinished / "adapter_model.safetensors", metadata={"format": "pt"}
        )
        peft_config(lora, source).save_pretrained(str(unfinished))


@contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``target`` when it is complete."""
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    yield unfinished
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def is_newer(export: Path, file: Path) -> bool:
    """Whether ``export`` is there and was completed behind the last line of ``file``."""
    return export.is_dir() and export.stat().st_mtime_ns >= file.stat().st_mtime_ns
