"""A Hugging Face causal language model, run on rows, with a log-probability head.

The model itself is not rewritten: its attention is ours through transformers'
``AttentionInterface``, or its own on a padded batch, and its ``lm_head`` becomes a ``LogprobHead``
over the same parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedModel

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.linear_divergence import TeacherRows
from easyrl.kernels.logprobs.token_losses import RowLoss
from easyrl.models.last_layer import narrow_last_layer
from easyrl.models.output_head import LogitShape, LogprobHead
from easyrl.models.row_forward import ATTENTION, OWN_ATTENTION, row_forward

if TYPE_CHECKING:  # torch and transformers are all that a model needs
    from easyrl.schema import MicroBatch


class PolicyModel(nn.Module):
    """Row in, log-probability and entropy of each trained token out.

    The Hugging Face model is ``self.model``: a parameter's name there is its name here without the
    leading ``model.``. ``attention`` is ``model.attention`` of the configuration. ``narrow``: of
    tokens that nothing is predicted from the last layer computes keys and values alone
    (``last_layer.py``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        logprob_chunk_size: int | None,
        attention: str = "auto",
        narrow: bool = True,
    ) -> None:
        super().__init__()
        is_packed = model.config._attn_implementation == ATTENTION
        assert is_packed == (attention != OWN_ATTENTION)
        self.model = model
        narrow = narrow and is_packed and narrow_last_layer(model)
        self.row_forward = row_forward(attention, narrow)
        self.logits = LogitShape.of(model.config)
        self.model.set_output_embeddings(
            LogprobHead(model.get_output_embeddings(), logprob_chunk_size, self.logits)
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
        predictors = self.row_forward(self.model, input_ids, position_ids, layout, predictor_index)
        head = self.model.get_output_embeddings()
        return head(predictors, label_ids, temperature, token_loss, teacher)


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
