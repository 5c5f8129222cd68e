"""Whether our log-probabilities of a model are those of its own forward, packed and padded.

A small copy of the model, of its configuration and random weights, is run: what decides is the
model's code and its configuration, and the copy needs neither the files nor the memory of a large
model, nor a device, nor whole weights under ZeRO-3. It has the model's own hidden size and heads,
few layers (one of each kind, two at least), a narrow MLP and a small vocabulary, and is computed in
fp32 on the CPU. Its attention on packed rows is the reference; that a faster backend agrees with
it, ``CheckedAttention`` sees to on the run's own tensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.dropout import switch_dropout_off
from easyrl.models.output_head import plain_logprobs
from easyrl.models.policy_model import PolicyModel
from easyrl.models.row_forward import ATTENTION, OWN_ATTENTION
from easyrl.runtime.user_code import describe

TOLERANCE = 1e-5  # of fp32 log-probabilities, relative to the largest, nats or more
TEMPERATURE = 0.7
VOCABULARY = 61
PROMPT, RESPONSES = 40, (5, 9, 2)  # tokens; a prompt that the last layer leaves out
# Sizes that can be smaller without another code being run, and how small they are made.
_NARROW = dict.fromkeys(
    ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "mlp_hidden_size"), 64
)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
_ANY_LENGTH = 1 << 20  # of a sliding window: whether sequences fit into it is asked elsewhere


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """Why a model cannot run on packed rows, and why not on padded ones; None: it can."""

    packed: str | None
    padded: str | None
    narrow: str | None = None  # packed, its last layer on the wanted tokens (``last_layer.py``)


def row_verdict(config: PreTrainedConfig) -> RowVerdict:
    """Of the models with this configuration. Once in a process for equal ones."""
    return _verdict(config.model_type, json.dumps(config.to_dict(), sort_keys=True, default=str))


@cache
def _verdict(model_type: str, values: str) -> RowVerdict:
    config = CONFIG_MAPPING[model_type].from_dict(json.loads(values))
    with _quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        try:
            model = _small_model(config)
            tokens = torch.randint(1, VOCABULARY, (PROMPT + sum(RESPONSES),))
            expected = _of_own_forward(model, tokens)
        except Exception as error:  # of a modeling file
            problem = f"a small copy of it cannot be run ({describe(error):.120})"
            return RowVerdict(problem, problem, problem)
        padded = _disagreement(model, OWN_ATTENTION, tokens, expected)
        packed = _disagreement(model, "reference", tokens, expected)
        narrow = packed or _disagreement(model, "reference", tokens, expected, narrow=True)
        return RowVerdict(packed, padded, narrow)


def _disagreement(
    model: PreTrainedModel,
    attention: str,
    tokens: Tensor,
    expected: Tensor,
    narrow: bool = False,
) -> str | None:
    """What is wrong with our log-probabilities in training mode."""
    try:
        if attention != OWN_ATTENTION:
            model.set_attn_implementation(ATTENTION)
            if model.config._attn_implementation != ATTENTION:
                return "its attention cannot be replaced"
        row = _shared_row(tokens) if attention != OWN_ATTENTION else _unshared_row(tokens)
        policy = PolicyModel(model, None, attention, narrow).train()
        with torch.no_grad():
            got = policy(*row, TEMPERATURE)[0]
    except Exception as error:  # of a modeling file, or ``NotPacked``
        return f"{describe(error):.200}"
    worst = float((got - expected).abs().max())
    if worst <= TOLERANCE * max(1.0, float(expected.abs().max())):
        return None
    return (
        f"log-probabilities of a small copy are up to {worst:.1e} from its own forward's; "
        f"{TOLERANCE:.0e} is tolerated"
    )


# ---- the copy ------------------------------------------------------------------------------------


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    small = _small_config(config)
    switch_dropout_off(small)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights():  # drawn below
        model: PreTrainedModel = made(small).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough for each token to depend on the others, and on each bias and norm.
            std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            nn.init.normal_(parameter, mean=float(is_norm), std=std)
    return model


def _small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    small: Any = copy.deepcopy(config)
    values = small.to_dict()
    per_layer = _per_layer(small)
    num_layers = _layers_of_each_kind(small.num_hidden_layers, list(per_layer.values()))
    for name, own in per_layer.items():
        setattr(small, name, own[:num_layers])
    small.num_hidden_layers = num_layers
    for name in _NARROW.keys() & values.keys():
        if isinstance(values[name], int):
            setattr(small, name, min(values[name], _NARROW[name]))
    if isinstance(values.get("sliding_window"), int):
        small.sliding_window = _ANY_LENGTH
    for name in _TOKENS:  # ids of the whole vocabulary
        setattr(small, name, None)
    small.vocab_size = VOCABULARY
    return small


def _per_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """What the configuration lists layer by layer."""
    values = {name: getattr(config, name, None) for name in config.to_dict()}
    return {
        name: own
        for name, own in values.items()
        if isinstance(own, list) and len(own) == config.num_hidden_layers
    }


def _layers_of_each_kind(num_layers: int, per_layer: list[list[Any]]) -> int:
    """How many of the first layers have one of each kind among them; two at least."""
    kinds = list(map(str, zip(*per_layer, strict=True))) or [""] * num_layers
    last = max(kinds.index(kind) for kind in set(kinds))
    return min(num_layers, max(2, last + 1))


# ---- what is compared ----------------------------------------------------------------------------


def _sequences(tokens: Tensor) -> list[Tensor]:
    """The prompt with each response."""
    prompt, *responses = tokens.split([PROMPT, *RESPONSES])
    return [torch.cat([prompt, response]) for response in responses]


@torch.no_grad()
def _of_own_forward(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Log-probabilities of all response tokens, sequence by sequence."""
    found = []
    for sequence in _sequences(tokens):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0]
        found.append(plain_logprobs(logits[PROMPT - 1 : -1], sequence[PROMPT:], TEMPERATURE))
    return torch.cat(found)


def _shared_row(tokens: Tensor) -> tuple[Tensor, Tensor, SegmentLayout, Tensor, Tensor]:
    """``PolicyModel``'s arguments: the prompt once, and each response behind it."""
    segments, positions, predictors = [(0, PROMPT, -1)], [torch.arange(PROMPT)], []
    start = PROMPT
    for length in RESPONSES:
        segments.append((start, length, 0))
        positions.append(torch.arange(PROMPT, PROMPT + length))
        predictors += [PROMPT - 1, *range(start, start + length - 1)]
        start += length
    layout = SegmentLayout(segments)
    return tokens, torch.cat(positions), layout, torch.tensor(predictors), tokens[PROMPT:]


def _unshared_row(tokens: Tensor) -> tuple[Tensor, Tensor, SegmentLayout, Tensor, Tensor]:
    """The same with the prompt before each response."""
    segments, positions = [], []
    predictors: list[int] = []
    start = 0
    sequences = _sequences(tokens)
    for sequence in sequences:
        segments.append((start, len(sequence), -1))
        positions.append(torch.arange(len(sequence)))
        predictors += range(start + PROMPT - 1, start + len(sequence) - 1)
        start += len(sequence)
    layout = SegmentLayout(segments)
    row = torch.cat(sequences)
    return row, torch.cat(positions), layout, torch.tensor(predictors), tokens[PROMPT:]


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' remarks are about the copy."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
