"""Mistakes in models: folder, configuration, weights, tokenizer, and what is asked of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts.bad_input.scene import CONFIG as CONFIG_TEXT
from benchmarks.parts.bad_input.scene import Mistake

MODEL = "{folder}/model"
GOOD = Path("good")  # beside the folder of the kinds: ``bad_input`` writes it there
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def _copy(folder: Path) -> Path:
    shutil.copytree(folder.parents[1] / GOOD, folder / "model")
    return folder / "model"


def _broken(
    title: str,
    change: Callable[[Path], object],
    *overrides: str,
    location: str | tuple[str, ...] = ("model.path", MODEL),
) -> Mistake:
    """A copy of the good model that ``change`` is called with."""

    def prepare(folder: Path) -> None:
        change(_copy(folder))

    return Mistake(title, location, (f"model.path={MODEL}", *overrides), prepare=prepare)


def _set(model: Path, *, file: str = CONFIG, **values: Any) -> None:
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _drop(model: Path, *keys: str) -> None:
    values = json.loads((model / CONFIG).read_text())
    kept = {key: value for key, value in values.items() if key not in keys}
    (model / CONFIG).write_text(json.dumps(kept))


def _cut(model: Path, name: str) -> None:
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[: len(content) // 2])


def _write(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)


def _remove(model: Path, *names: str) -> None:
    for name in names:
        (model / name).unlink(missing_ok=True)


def _no_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()


def _without_tensor(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / WEIGHTS)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def _only_an_adapter(model: Path) -> None:
    _remove(model, CONFIG, WEIGHTS)
    _write(model, "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "x"}')


def _missing_shard(model: Path) -> None:
    _remove(model, WEIGHTS)
    shard = "model-00001-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    _write(model, "model.safetensors.index.json", json.dumps(index))


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
_QUANTISED = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_LORA = "model.lora={rank: 4, target_modules: [query_proj]}"
MISTAKES = [
    Mistake("a folder that is missing", "model.path", ("model.path={folder}/qwen",)),
    Mistake("a name of the hub", "model.path", ("model.path=Qwen/Qwen3-0.6B",)),
    Mistake("a file instead of a folder", "model.path", ("model.path={model}/model.safetensors",)),
    Mistake("no path", "model.path", config=CONFIG_TEXT.replace("path: {model}, ", "")),
    Mistake("a tokenizer that is missing", "model.tokenizer", ("model.tokenizer={folder}/tok",)),
    Mistake("half precision of another kind", "model.dtype", ("model.dtype=fp16",)),
    Mistake("torch's name of a dtype", "model.dtype", ("model.dtype=bfloat16",)),
    Mistake("an attention that is none", "model.attention", ("model.attention=flash",)),
    Mistake("an attention of other devices", "model.attention", ("model.attention=npu",)),
    Mistake("the varlen attention on a CPU", "model.attention", ("model.attention=varlen",)),
    Mistake("checkpoints of no layers", "model.checkpoint_every", ("model.checkpoint_every=2",)),
    Mistake("an adapter of rank 0", "model.lora.rank", ("model.lora={rank: 0}",)),
    Mistake("an adapter of layers that are not there", "model.lora.target_modules", (_LORA,)),
    _broken("no config.json", lambda model: _remove(model, CONFIG)),
    _broken("a config.json that is no JSON", lambda model: _cut(model, CONFIG)),
    _broken(
        "a config.json without model_type",
        lambda model: _drop(model, "model_type", "architectures"),
    ),
    _broken("a config.json that is a list", lambda model: _write(model, CONFIG, "[]")),
    _broken(
        "a model that is no causal language model",
        lambda model: _set(model, model_type="t5", architectures=["T5ForConditionalGeneration"]),
    ),
    _broken(
        "an architecture that nobody knows",
        lambda model: _set(model, model_type="qwen9", architectures=["Qwen9ForCausalLM"]),
    ),
    _broken(
        "a model that needs its own code",
        lambda model: _set(model, model_type="my_model", auto_map={"AutoConfig": "mine.Config"}),
    ),
    _broken(
        "rotary frequencies that depend on lengths",
        lambda model: _set(
            model,
            max_position_embeddings=8,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
    ),
    _broken("quantised weights", lambda model: _set(model, quantization_config=_QUANTISED)),
    _broken("no weights", lambda model: _remove(model, WEIGHTS)),
    _broken("weights that are cut off", lambda model: _cut(model, WEIGHTS)),
    _broken("empty weights", lambda model: _write(model, WEIGHTS, "")),
    _broken("a pointer of git-lfs", lambda model: _write(model, WEIGHTS, _POINTER)),
    _broken("a shard that is missing", _missing_shard),
    _broken("a tensor that is missing", _without_tensor),
    _broken("weights of another size", lambda model: _set(model, intermediate_size=100)),
    _broken("more layers than weights", lambda model: _set(model, num_hidden_layers=5)),
    _broken("heads that do not divide", lambda model: _set(model, num_key_value_heads=3)),
    _broken(
        "an output layer that is not there", lambda model: _set(model, tie_word_embeddings=False)
    ),
    _broken("only an adapter", _only_an_adapter),
    _broken("no tokenizer", _no_tokenizer, location=("model.tokenizer", MODEL)),
    _broken(
        "a tokenizer that is cut off",
        lambda model: _cut(model, TOKENIZER),
        location=("model.tokenizer", MODEL),
    ),
    _broken(
        "a tokenizer of more ids than the model",
        lambda model: _set(model, vocab_size=8),
        location=("model.tokenizer", MODEL),
    ),
    _broken(
        "a chat without a chat template",
        lambda model: _remove(model, "chat_template.jinja"),
        "data.apply_chat_template=true",
        location="data.apply_chat_template",
    ),
    Mistake(
        "a server of a model that is missing", "{folder}/qwen", command=("serve", "{folder}/qwen")
    ),
    Mistake(
        "a server of a model without weights",
        MODEL,
        command=("serve", MODEL),
        prepare=lambda folder: _remove(_copy(folder), WEIGHTS),
    ),
]
