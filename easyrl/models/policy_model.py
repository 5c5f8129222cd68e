"""A Hugging Face causal language model, run on packed rows, with a log-probability head.

The model itself is not rewritten: its attention is ours through transformers'
``AttentionInterface``, and its ``lm_head`` becomes a ``LogprobHead`` over the same parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.path_gather import gather_tokens
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.chunk_size import default_chunk_size
from easyrl.kernels.logprobs.linear_divergence import TeacherRows, linear_divergences
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.token_losses import RowLoss

if TYPE_CHECKING:  # torch and transformers are all that a model needs
    from easyrl.schema import MicroBatch

ATTENTION = "easyrl_shared_prompt"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: SegmentLayout | None = None,
    checked_attention: CheckedAttention | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; the last two come through the model's keywords."""
    assert layout is not None and checked_attention is not None and attention_mask is None, (
        "run this model through PolicyModel"
    )
    output = checked_attention(query, key, value, layout, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


class LogprobHead(nn.Module):
    """The output projection as log-probabilities of labels.

    A module of its own, because ZeRO-3 gathers a weight around the forward of the module that owns
    it. It takes over the projection's parameters, so a tied weight stays one object.
    """

    def __init__(self, projection: nn.Linear, chunk_size: int | None) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias: nn.Parameter | None = projection.bias
        self.chunk_size = chunk_size

    def forward(
        self,
        hidden: Tensor,
        label_ids: Tensor,
        temperature: float,
        token_loss: RowLoss | None = None,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies, float32 [N]; ``hidden`` [N, H], ``label_ids`` [N].

        With a ``teacher`` the divergences from it come behind them. With ``token_loss`` the sum of
        its losses comes before them, and alone carries gradient.
        """
        settings: dict[str, Any] = {
            "bias": self.bias,
            "temperature": temperature,
            "chunk_size": self.chunk_size or default_chunk_size(hidden, len(self.weight)),
        }
        if teacher is None:
            return linear_logprobs(hidden, self.weight, label_ids, token_loss, **settings)
        return linear_divergences(hidden, self.weight, label_ids, teacher, token_loss, **settings)


class PolicyModel(nn.Module):
    """Packed row in, log-probability and entropy of each trained token out.

    The Hugging Face model is ``self.model``: a parameter's name there is its name here without the
    leading ``model.``. ``attention`` is that of ``CheckedAttention``.
    """

    def __init__(
        self, model: PreTrainedModel, logprob_chunk_size: int | None, attention: str = "auto"
    ) -> None:
        super().__init__()
        assert model.config._attn_implementation == ATTENTION
        self.model = model
        self.attention = CheckedAttention(attention)
        self.model.set_output_embeddings(
            LogprobHead(model.get_output_embeddings(), logprob_chunk_size)
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        predictor_index: Tensor,
        label_ids: Tensor,
        temperature: float = 1.0,
        token_loss: RowLoss | None = None,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies, float32 [N], at ``temperature``; see ``LogprobHead``.

        ``input_ids`` and ``position_ids`` int64 [T] are the row, ``layout`` its segments; token
        ``label_ids[n]`` is predicted at position ``predictor_index[n]``, both int64 [N].
        """
        predictors = hidden_states(
            self.model, self.attention, input_ids, position_ids, layout, predictor_index
        )
        head = self.model.get_output_embeddings()
        return head(predictors, label_ids, temperature, token_loss, teacher)


def hidden_states(
    model: PreTrainedModel,
    attention: CheckedAttention,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: SegmentLayout,
    index: Tensor,
) -> Tensor:
    """[N, H], of the last layer at the positions ``index`` [N] of a packed row of T tokens."""
    hidden = model.base_model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        layout=layout,
        checked_attention=attention,
    ).last_hidden_state[0]  # [T, H]
    return gather_tokens(hidden, index)


def run_micro_batch(
    model: nn.Module,
    micro_batch: MicroBatch,
    temperature: float,
    *,
    layout: SegmentLayout | None = None,
    token_loss: RowLoss | None = None,
    teacher: TeacherRows | None = None,
) -> tuple[Tensor, ...]:
    """``PolicyModel.forward`` of ``micro_batch``; ``model`` may be an engine around the model.

    Both are on one device. Models that see the same row share its ``layout`` and with it what
    attention derives from it.
    """
    return model(
        micro_batch.input_ids,
        micro_batch.position_ids,
        layout or SegmentLayout(micro_batch.segments),
        micro_batch.predictor_index,
        micro_batch.label_ids,
        temperature,
        token_loss,
        teacher,
    )
