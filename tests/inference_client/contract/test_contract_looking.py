"""What a server tells of itself before a run: what it could be given, how it reads a text."""

from __future__ import annotations

from typing import Any

import pytest

from easyrl.inference_client.client import EndpointClient, TensorShapes
from tests.inference_client.contract.conftest import Server
from tests.inference_client.contract.served_models import LETTERS


def shapes_of(model: Any) -> dict[str, tuple[str, list[int]]]:
    """As its trainer would send it: a tied head once."""
    return {name: ("F32", list(weight.shape)) for name, weight in model.named_parameters()}


async def test_a_model_of_the_served_architecture_could_be_given(
    server: Server, client: EndpointClient
) -> None:
    version = await client.weight_version()
    assert await client.compare_shapes(shapes_of(server.model)) == {}
    assert await client.weight_version() == version
    await client.health()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"model.layers.2.self_attn.q_proj.weight": ("F32", [128, 32])}, "layers.2"),
        ({"model.layers.0.self_attn.q_norm.weight": ("F32", [16])}, "layers.0.self_attn.q_norm"),
        ({"model.layers.1.mlp.up_proj.weight": ("F32", [32, 48])}, "layers.1.mlp"),
        ({"model.norm.weight": ("BF16", [32])}, "model.norm.weight"),
    ],
    ids=["a-layer-more", "another-head-size", "transposed", "another-dtype"],
)
async def test_what_it_could_not_be_given_is_named(
    server: Server, client: EndpointClient, change: TensorShapes, wrong: str
) -> None:
    problems = await client.compare_shapes({**shapes_of(server.model), **change})
    assert len(problems) == 1
    ((name, said),) = problems.items()
    assert wrong in name and said
    assert await client.compare_shapes(shapes_of(server.model)) == {}  # nothing has changed


async def test_what_it_serves_beside_is_named(server: Server, client: EndpointClient) -> None:
    """A model with a layer less, as of a server with a layer more."""
    shapes = {n: s for n, s in shapes_of(server.model).items() if ".layers.1." not in n}
    problems = await client.compare_shapes(shapes)
    assert problems and all(".layers.1." in name for name in problems)


async def test_the_ids_of_a_text(client: EndpointClient) -> None:
    asked = {"prompt": "abc+1", "add_special_tokens": False}
    assert await client.tokenize(asked) == [1 + LETTERS.index(letter) for letter in "abc+1"]
