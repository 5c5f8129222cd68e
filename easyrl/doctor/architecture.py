"""Whether an endpoint serves a model of the policy's architecture: names, shapes and dtypes."""

from __future__ import annotations

from math import prod

import torch
from transformers import AutoModelForCausalLM

from easyrl.config import ModelConfig
from easyrl.doctor.finding import Finding, failed, not_checked, ok
from easyrl.engines.weight_names import saved_shapes
from easyrl.inference_client.client import EndpointClient, TensorShapes
from easyrl.inference_client.errors import EndpointError, NotAnswered
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPE_NAMES
from easyrl.models.loading import DTYPES
from easyrl.models.supported import trainable_config


def weight_shapes(model: ModelConfig) -> TensorShapes:
    """Dtype and shape of all that a run would send, by name, from ``config.json`` alone.

    Raises ``ConfigError`` naming ``model.path``.
    """
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(trainable_config(model), dtype=DTYPES[model.dtype])
    weights = saved_shapes(made)
    return {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in weights.items()}


def count_parameters(shapes: TensorShapes) -> int:
    """Of the model with these weights (``weight_shapes``), a tied head once."""
    return sum(prod(shape) for _, shape in shapes.values())


async def architecture_finding(
    client: EndpointClient, model: ModelConfig, shapes: TensorShapes
) -> Finding:
    """``shapes``: of the policy (``weight_shapes``). Reads and changes no weight there."""
    name = f"architecture of {client.url}"
    try:
        problems = await client.compare_shapes(shapes)
    except NotAnswered as error:
        return not_checked(name, error.reason)
    except EndpointError as error:  # vLLM answers 500 for a method that its workers do not have
        return not_checked(
            name,
            f"it does not tell what it serves ({error.reason:.200})",
            "start it with easyrl serve, or vllm serve with --worker-extension-cls "
            "easyrl_vllm.WeightProof and the plugin of this version",
        )
    if not problems:
        return ok(name, f"takes all {len(shapes)} weights of {model.path}")
    first = next((each for each in shapes if each in problems), min(problems))
    served_as = str(DTYPES[model.dtype]).removeprefix("torch.")
    if all(_is_of_dtype(shapes, each, said) for each, said in problems.items()):
        return failed(
            name,
            f"it serves another dtype than model.dtype={model.dtype}: {first} "
            f"{problems[first]:.200}",
            f"start the server with --dtype {served_as}, or set model.dtype",
        )
    return failed(
        name,
        f"it serves another model than model.path {model.path}: {len(problems)} weights differ, "
        f"{first} first ({problems[first]:.200})",
        f"start the server with {model.path}, or set model.path to the model that it serves",
    )


def _is_of_dtype(shapes: TensorShapes, name: str, said: str) -> bool:
    return name in shapes and said.startswith(f"is {shapes[name][0]}, ")
