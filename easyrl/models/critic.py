"""The critic of PPO: a model of the policy's architecture that gives a value for each state."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from easyrl.config import ConfigError, ModelConfig
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model, path_errors_named
from easyrl.models.policy_model import PolicyModel
from easyrl.models.weight_files import weight_files

# Of the value head in a folder of weights, as transformers' sequence classifiers call theirs.
VALUE_HEAD = "score.weight"


class ValueHead(nn.Module):
    """A linear layer from a hidden state to a value, float32 at least.

    It begins at zero: all values are then zero, and the first advantages are made of the rewards
    alone, whatever the seed. Its own gradient is not zero, and the model's is not from the second
    step on.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[n] values of ``hidden`` [n, H]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(dtype), self.weight.to(dtype)).squeeze(-1)


class CriticModel(nn.Module):
    """Row in, value of the state before each trained token out.

    A value is read where ``PolicyModel`` reads the token's log-probability: at the position that
    predicts it. The Hugging Face model is ``self.model``, with a ``ValueHead`` for its projection
    to the vocabulary.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self.model = policy.model
        self.row_forward = policy.row_forward
        dtype = next(self.model.parameters()).dtype
        hidden_size = self.model.config.get_text_config().hidden_size
        self.model.set_output_embeddings(ValueHead(hidden_size, dtype))

    @property
    def head(self) -> ValueHead:
        head = self.model.get_output_embeddings()
        assert isinstance(head, ValueHead)
        return head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        predictor_index: Tensor,
    ) -> Tensor:
        """float32 [N]; the arguments are those of ``PolicyModel``."""
        predictors = self.row_forward(self.model, input_ids, position_ids, layout, predictor_index)
        values: Tensor = self.head(predictors)
        return values


def load_critic_model(model: ModelConfig, *, seed: int = 0) -> CriticModel:
    """The critic at ``model.path``: a language model, whose value head is zero, or one with a head.

    Raises ``ConfigError`` naming ``critic.path``.
    """
    with path_errors_named("critic.path"):
        found = _value_head(model)
        critic = CriticModel(load_policy_model(model, seed=seed, has_head=found is None))
    if found is not None:
        if found.shape != critic.head.weight.shape:
            raise ConfigError(
                f"critic.path: {model.path} has a {VALUE_HEAD} of shape {list(found.shape)}, a "
                f"critic's is {list(critic.head.weight.shape)}; give a critic that a run has "
                "exported, or a language model"
            )
        with torch.no_grad():
            critic.head.weight.copy_(found)
    return critic


def _value_head(model: ModelConfig) -> Tensor | None:
    """That of the folder; None where there is none."""
    for file in weight_files(model.path):
        with safe_open(file, framework="pt") as weights:
            if VALUE_HEAD in weights.keys():  # noqa: SIM118 (no mapping)
                head: Tensor = weights.get_tensor(VALUE_HEAD)
                return head
    return None
