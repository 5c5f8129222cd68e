"""``PolicyModel`` on a GPU: log-probabilities and gradients of packed rows against the plain
transformers model in fp64, each sequence alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from easyrl.kernels.attention.segment_layout import SegmentLayout  # noqa: E402
from easyrl.models.activation_checkpointing import checkpoint_activations  # noqa: E402
from easyrl.models.fused_layers import fuse_layers  # noqa: E402
from easyrl.models.policy_model import PolicyModel  # noqa: E402
from easyrl.models.row_forward import ATTENTION  # noqa: E402
from tests.gpu.device import DEVICE, ON_CUDA, marks  # noqa: E402
from tests.gpu.packed_row import Group, packed, random_groups  # noqa: E402

pytestmark = marks

VOCAB, TEMPERATURE = 1000, 0.8
SHAPES = [(150, [60, 41, 90]), (33, [70, 8])]
FAMILIES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}
ATTENTIONS = ("auto", "merged", "flex", "varlen") if ON_CUDA else ("auto", "merged")
# ‖difference‖ / ‖expected‖ of log-probabilities and of the worst gradient
TOLERANCES = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (2e-2, 1e-1)}


def plain_model(family: str) -> Any:
    """Two layers with heads of 64, fp64 weights that bf16 can hold."""
    config_class, model_class = (getattr(transformers, name) for name in FAMILIES[family])
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = model_class(config).to(DEVICE, torch.bfloat16).double()
    return model.train()


def alone(model: Any, groups: list[Group], weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, start = [], 0
    for prompt, responses in groups:
        for response in responses:
            logits = model(torch.cat([prompt, response])[None].to(DEVICE)).logits[0]
            logp = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            picked = logp.gather(1, response[:, None].to(DEVICE)).squeeze(1)
            (picked * weights[start : start + len(response)]).sum().backward()
            start += len(response)
            logprobs.append(picked.detach())
    return torch.cat(logprobs), {name: p.grad for name, p in model.named_parameters()}


def in_a_row(
    plain: Any, groups: list[Group], weights: Tensor, dtype: torch.dtype, attention: str, mode: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(plain).to(dtype)
    model.zero_grad()
    model.set_attn_implementation(ATTENTION)
    fuse_layers(model, "auto")
    checkpoint_activations(model, mode)
    policy = PolicyModel(model, None, attention).train()
    row = packed(groups)
    inputs = [x.to(DEVICE) for x in (row.input_ids, row.position_ids)]
    logprobs, _ = policy(
        *inputs,
        SegmentLayout(row.segments),
        row.predictor_index.to(DEVICE),
        row.label_ids.to(DEVICE),
        TEMPERATURE,
    )
    (logprobs * weights).sum().backward()
    prefix = "model."
    named = {n.removeprefix(prefix): p.grad for n, p in policy.named_parameters()}
    return logprobs.detach().double(), {n: g.double() for n, g in named.items() if g is not None}


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(
    family: str, dtype: torch.dtype, attention: str, mode: Any
) -> None:
    if attention == "varlen" and dtype == torch.float32:
        pytest.skip("varlen takes half precision")
    plain = plain_model(family)
    groups = random_groups(SHAPES, VOCAB)
    num_tokens = sum(len(r) for _, responses in groups for r in responses)
    weights = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logprobs, gradients = alone(plain, groups, weights.double())
    got_logprobs, got = in_a_row(plain, groups, weights, dtype, attention, mode)
    of_logprobs, of_gradients = TOLERANCES[dtype]
    error = (got_logprobs - logprobs).norm() / logprobs.norm()
    assert error < of_logprobs, float(error)
    assert got.keys() == gradients.keys() and len(got) > 10
    for name, gradient in gradients.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < of_gradients, (name, float(error))
