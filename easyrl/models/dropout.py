"""Dropout off: a policy's log-probabilities are those of the model that is sampled from.

Training mode then only switches activation checkpointing on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

# Settings that are probabilities of noise while training: resid_pdrop, attention_dropout,
# hidden_dropout_prob, layerdrop, router_jitter_noise, …
_NAMES = re.compile(r"(pdrop|dropout|dropout_(prob|rate|p)|layerdrop|drop_path_rate|jitter_noise)$")


def dropout_settings(config: PreTrainedConfig) -> dict[str, float]:
    """Those of ``config`` and of the configurations in it that are not 0, by name."""
    return {name: value for _, name, value in _settings(config)}


def switch_dropout_off(config: PreTrainedConfig) -> None:
    """For models made of ``config`` from now on: attention without a module reads it there."""
    for owner, name, _ in list(_settings(config)):
        setattr(owner, name, 0.0)


def silence_dropout(model: nn.Module) -> None:
    """For modules of ``model`` that have a rate of their own."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _settings(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str, float]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _settings(value)
        elif _NAMES.search(name) and isinstance(value, int | float) and value > 0:
            yield config, name, float(value)
