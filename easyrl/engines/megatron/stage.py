"""A pipeline stage of a policy: megatron-core's ``GPTModel`` on packed rows, with our head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from easyrl.engines.megatron.architecture import block_submodules, transformer_config
from easyrl.engines.megatron.layout import Place
from easyrl.engines.megatron.modules import Row, SharedPromptAttention
from easyrl.engines.megatron.splittable import architecture_of
from easyrl.engines.megatron.weights.loading import load_parameters
from easyrl.engines.megatron.weights.mapping import Split, rules
from easyrl.engines.megatron.weights.pieces import TensorRank, padded_share, padded_size
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.path_gather import gather_tokens
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.chunk_size import default_chunk_size
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.token_losses import RowLoss
from easyrl.kernels.logprobs.vocab_shard import VocabShard


class VocabParallelHead(nn.Module):
    """The output projection as log-probabilities of labels, its vocabulary split over ranks.

    Args:
        weight: [rows of this rank, H], those that pad the vocabulary included.
        num_tokens: of the whole vocabulary.
    """

    def __init__(
        self, weight: nn.Parameter, num_tokens: int, config: TransformerConfig, chunk: int | None
    ) -> None:
        super().__init__()
        self.weight = weight
        self._chunk = chunk
        self._sequence_parallel = config.sequence_parallel
        place = TensorRank(
            parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
        )
        own = padded_share(num_tokens, place)
        self._num_own = len(own)
        self._shard = None
        if place.size > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            # behind a gather of tokens its backward, a reduce-scatter, sums over the group
            reduce_hidden = not config.sequence_parallel
            self._shard = VocabShard(group, own.start, len(own), reduce_hidden)

    def forward(
        self,
        hidden: Tensor,
        predictor_index: Tensor,
        label_ids: Tensor,
        temperature: float,
        token_loss: RowLoss | None = None,
    ) -> tuple[Tensor, ...]:
        """As ``LogprobHead``; ``hidden`` [T, 1, H], or this rank's share of the tokens."""
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        predictors = gather_tokens(hidden[:, 0], predictor_index)
        weight = self.weight if self._num_own == len(self.weight) else self.weight[: self._num_own]
        return linear_logprobs(
            predictors,
            weight,
            label_ids,
            token_loss,
            temperature=temperature,
            chunk_size=self._chunk or default_chunk_size(predictors, len(weight)),
            shard=self._shard,
        )


class PolicyStage(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline stage, or of one chunk of it.

    The first stage begins with the embedding, the last ends with log-probabilities; others take and
    give hidden states [T, 1, H], or with sequence parallelism [T / ranks, 1, H].
    """

    def __init__(
        self,
        hf_config: PreTrainedConfig,
        place: Place,
        dtype: torch.dtype,
        *,
        attention: CheckedAttention,
        chunk: int = 0,
        logprob_chunk_size: int | None = None,
    ) -> None:
        layout = place.layout
        config = transformer_config(hf_config, layout, dtype)
        config.perform_initialization = False  # read from files; attributes are set below
        self.is_first = place.stage == 0 and chunk == 0
        self.is_last = place.stage == layout.pipeline - 1 and chunk == layout.chunks - 1
        self.tied = bool(hf_config.tie_word_embeddings)
        layers = layout.layers_of(place.stage, chunk, hf_config.num_hidden_layers)
        super().__init__(
            config,
            block_submodules(config, len(layers)),
            vocab_size=padded_size(hf_config.vocab_size, layout.tensor),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=self.is_first,
            post_process=self.is_last,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="none",  # each layer rotates, by the row's positions
            vp_stage=chunk if layout.chunks > 1 else None,
        )
        of_family: Any = hf_config
        self.rotary = LlamaRotaryEmbedding(of_family)  # the same of all four families
        if self.is_last:
            is_embedding = self.tied and self.is_first
            parts: Any = self
            owner = parts.embedding.word_embeddings if is_embedding else parts.output_layer
            self.output_layer: Any = VocabParallelHead(
                owner.weight, hf_config.vocab_size, config, logprob_chunk_size
            )
        for module in self.modules():
            if isinstance(module, SharedPromptAttention):
                module.attention = attention
        self._place, self._num_kv_heads = place, hf_config.num_key_value_heads
        padding = hf_config.pad_token_id
        self._padding_id = None if padding is None else padding % hf_config.vocab_size
        self.rules = rules(architecture_of(hf_config), hf_config.num_hidden_layers, tied=self.tied)
        self._mark_split()

    def setup_embeddings_and_output_layer(self) -> None:
        """A copy of a tied embedding is read from the file like all else, not sent by the first."""

    def row(self, layout: SegmentLayout, position_ids: Tensor) -> Row:
        """What the layers need of a packed row; ``position_ids`` int64 [T]."""
        cos, sin = self.rotary(self._of_dtype, position_ids[None])
        return Row(layout, cos, sin)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        predictor_index: Tensor,
        label_ids: Tensor,
        temperature: float = 1.0,
        token_loss: RowLoss | None = None,
        teacher: None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Hidden states for the next stage; of the last what ``PolicyModel.forward`` returns.

        Stages other than the first take the hidden states that ``set_input_tensor`` was given. A
        teacher is refused by the engine.
        """
        assert teacher is None
        hidden = None
        if self.is_first:
            hidden = self._embedded(input_ids, position_ids)
        hidden = self.decoder(hidden, attention_mask=self.row(layout, position_ids))
        if not self.is_last:
            return hidden
        return self.output_layer(hidden, predictor_index, label_ids, temperature, token_loss)

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[T, 1, H], or this rank's share of the tokens. As Hugging Face's embeddings, that of the
        padding token gets no gradient here, wherever it stands; as a label's it does."""
        hidden: Tensor = self.embedding(input_ids=input_ids[None], position_ids=position_ids[None])
        if self._padding_id is None:
            return hidden
        start = 0 if len(hidden) == len(input_ids) else self._place.tensor * len(hidden)
        is_padding = input_ids[start : start + len(hidden)] == self._padding_id
        return torch.where(is_padding[:, None, None], hidden.detach(), hidden)

    def load(self, folder: Path) -> None:
        """Raises ``ConfigError`` naming ``model.path`` if the files do not fit."""
        load_parameters(
            dict(self.global_parameters()),
            self.rules,
            folder,
            self._place.tensor_rank,
            self._num_kv_heads,
        )

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By name, layers numbered from the model's first."""
        for name, parameter in self.named_parameters():
            yield self._global_name(name), parameter

    def _global_name(self, name: str) -> str:
        head, _, rest = name.partition("decoder.layers.")
        if not rest:
            return head
        own, _, of_layer = rest.partition(".")
        number = self.decoder.layers[int(own)].layer_number - 1
        return f"decoder.layers.{number}.{of_layer}"

    def _mark_split(self) -> None:
        """What gradient norms tell split parameters from replicated ones by."""
        for name, parameter in self.global_parameters():
            split = self.rules[name].split
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                if hasattr(parameter, attribute):
                    delattr(parameter, attribute)
            set_tensor_model_parallel_attributes(
                parameter, split is not Split.WHOLE, 1 if split is Split.COLUMNS else 0, 1
            )

    @property
    def _of_dtype(self) -> Tensor:
        """A tensor of the model's dtype on its device, which decide those of the rotation."""
        first: Any = next(self.decoder.parameters())
        return first
