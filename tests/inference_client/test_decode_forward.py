"""The decode step of few operations against the models' own forward, and which models it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
)

from easyrl.inference_client.servers.embedded.attention import SharedPrompts
from easyrl.inference_client.servers.embedded.cache import SlotCache, StatesOfLayers
from easyrl.inference_client.servers.embedded.decode_check import checked_decode_forward
from easyrl.inference_client.servers.embedded.decode_forward import DecodeForward, _Angles, _Norm
from easyrl.inference_client.servers.embedded.decode_masks import DecodeMasks
from easyrl.inference_client.servers.embedded.prefill import states_of_layers
from tests.tiny_models import VOCAB_SIZE, Family, tiny_config, tiny_model

ATOL = 2e-5  # a wrong head, angle or position moves these logits by 1e-2 and more
DENSE: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
LENGTHS = (5, 90, 1, 33, 33)  # tokens of the sequences
SHARED = (1, 3)  # that go on from a prompt held apart
PROMPT = 70  # tokens of it


def random_model(family: Family, *, tied: bool = False) -> PreTrainedModel:
    """All parameters random, norms' weights and biases too."""
    torch.manual_seed(1)
    model = tiny_model(family, tied=tied, initializer_range=0.3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
    return model.eval().requires_grad_(False)


def forward_of(model: PreTrainedModel) -> DecodeForward:
    forward = checked_decode_forward(model, DecodeMasks())
    assert forward is not None
    return forward


def prefilled(model: PreTrainedModel, tokens: Tensor) -> StatesOfLayers:
    cache = DynamicCache()
    model.base_model(input_ids=tokens[None], past_key_values=cache, use_cache=True)
    return states_of_layers(cache)


def decoded(
    model: PreTrainedModel, forward: DecodeForward, sequences: list[Tensor], prompt: Tensor
) -> Tensor:
    """Logits [B, V] behind the last tokens; those of ``SHARED`` have ``prompt`` before them."""
    held = prefilled(model, prompt)
    own = [len(tokens) - 1 for tokens in sequences]
    cache = SlotCache(len(held), len(sequences), max(own) + 1, model.device)
    cache.ensure(len(sequences), max(own) + 1)
    for row, tokens in enumerate(sequences):
        if not own[row]:
            continue
        before = PROMPT if row in SHARED else 0
        whole = torch.cat([prompt[:before], tokens[:-1]])
        states = [tuple(s[:, :, before:] for s in layer) for layer in prefilled(model, whole)]
        slot = torch.tensor([row])
        cache.fill(slot, torch.zeros_like(slot), states, own[row])  # type: ignore[arg-type]
    slots = torch.tensor(own)
    cache.begin_step(slots, max(own) + 1)
    zero = torch.zeros(())
    mask = DecodeMasks().of_step(zero, cache.unwritten(slots), slots)
    assert isinstance(mask, Tensor)
    before = torch.tensor([PROMPT * (row in SHARED) for row in range(len(sequences))])
    apart = [held if row in SHARED else None for row in range(len(sequences))]
    newest = torch.stack([tokens[-1] for tokens in sequences])
    return forward(newest, slots + before, mask, cache, SharedPrompts.of(apart, model.device))


def compare(model: PreTrainedModel, forward: DecodeForward) -> None:
    torch.manual_seed(2)
    sequences = [torch.randint(VOCAB_SIZE, (length,)) for length in LENGTHS]
    prompt = torch.randint(VOCAB_SIZE, (PROMPT,))
    found = decoded(model, forward, sequences, prompt)
    for row, tokens in enumerate(sequences):
        whole = torch.cat([prompt, tokens]) if row in SHARED else tokens
        expected = model(input_ids=whole[None]).logits[0, -1]
        torch.testing.assert_close(found[row], expected, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_it_says_what_the_model_says(family: Family, tied: bool) -> None:
    """Of sequences of unequal lengths, two of them behind a prompt that is held apart."""
    model = random_model(family, tied=tied)
    compare(model, forward_of(model))


ROTARY: dict[str, dict[str, object]] = {  # by kind, the rest of its settings
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", ROTARY)
def test_angles_have_the_bits_of_the_models_own(kind: str) -> None:
    """Also far behind the sequences of other tests; the signs are of the sines' first halves."""
    settings = {"rope_type": kind, "rope_theta": 10_000.0, **ROTARY[kind]}
    model: Any = tiny_model("qwen3", rope_parameters=settings)
    rotary = model.model.rotary_emb
    positions, hidden = torch.tensor([0, 1, 77, 511]), torch.zeros(4, 32)
    cos, signed = _Angles(rotary)(hidden, positions)
    own_cos, own_sin = rotary(hidden[:, None], positions[:, None])
    assert torch.equal(cos, own_cos)
    half = own_sin.shape[-1] // 2
    assert torch.equal(signed, torch.cat((-own_sin[..., :half], own_sin[..., half:]), -1))


def test_norms_are_in_the_precision_of_the_models_own() -> None:
    """Long and short vectors, in bf16: where float32 is left too early, 1e-2 and more is lost."""
    weight = nn.Parameter(torch.rand(64, dtype=torch.bfloat16) + 0.5, requires_grad=False)
    module: Any = nn.Module()
    module.weight, module.variance_epsilon = weight, 1e-6
    scales = torch.tensor([1e-4, 1.0, 1e4])[:, None]
    x = (torch.randn(3, 64) * scales).bfloat16()
    expected = nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-6)
    found = _Norm.of(module)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


def test_other_epsilons_of_queries_and_keys_stay_with_the_modules() -> None:
    model: Any = random_model("qwen3")
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 1e-3
    assert checked_decode_forward(model, DecodeMasks()) is None


@pytest.mark.parametrize("family", DENSE)
def test_weights_written_into_the_model_are_decoded_with(family: Family) -> None:
    """In place, as ``ServedWeights`` writes them, through views taken after it was made."""
    model = random_model(family)
    forward = forward_of(model)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0) * 0.9)
    compare(model, forward)


def test_the_parameters_keep_names_shapes_and_values() -> None:
    model = random_model("qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    forward_of(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(after[name].is_contiguous() for name in before)


def test_a_sequence_alone_has_the_same_bits_whatever_was_decoded_before() -> None:
    model = random_model("qwen3")
    forward = forward_of(model)
    tokens = [torch.arange(1, 20)]
    first = decoded(model, forward, tokens, torch.arange(PROMPT) % VOCAB_SIZE)
    decoded(model, forward, [torch.arange(9), torch.arange(30)], torch.arange(PROMPT) % VOCAB_SIZE)
    again = decoded(model, forward, tokens, torch.arange(PROMPT) % VOCAB_SIZE)
    assert torch.equal(first, again)


def of_sizes(config_class: Any, **others: object) -> Any:
    settings = tiny_config("llama").to_dict()
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )
    return config_class(**{name: settings[name] for name in names}, initializer_range=0.3, **others)


OTHERS = {
    "norms of one plus the weight": lambda: GemmaForCausalLM(of_sizes(GemmaConfig)),
    "a factor in the residual sum": lambda: GraniteForCausalLM(
        of_sizes(GraniteConfig, residual_multiplier=0.5)
    ),
    "norms behind attention": lambda: Olmo2ForCausalLM(of_sizes(Olmo2Config)),
    "experts": lambda: random_model("qwen3_moe"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_block_stays_with_its_modules(what: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = OTHERS[what]().eval().requires_grad_(False)
    tokens = torch.arange(1, 12)[None]
    before = model(input_ids=tokens).logits
    with caplog.at_level("INFO"):
        assert checked_decode_forward(model, DecodeMasks()) is None
    assert f"decoded by the modules of a {type(model).__name__}: " in caplog.text
    torch.testing.assert_close(model(input_ids=tokens).logits, before)


def test_a_window_stays_with_the_modules() -> None:
    assert checked_decode_forward(random_model("mistral"), DecodeMasks(window=8)) is None


class OddLinear(nn.Linear):
    """Something that says it is linear, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_a_layer_of_another_class_is_not_joined() -> None:
    model: Any = random_model("llama")
    odd = OddLinear(32, 32, bias=False)
    model.model.layers[1].self_attn.k_proj = odd
    assert checked_decode_forward(model, DecodeMasks()) is None


def test_a_model_that_deviates_by_its_code_alone_is_found_out_by_its_logits() -> None:
    model: Any = random_model("llama")
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: 1.1 * own(x)
    assert checked_decode_forward(model, DecodeMasks()) is None
