"""A pipeline stage's part of policy, old policy and reference, run in one pass over a row.

Between stages the models' hidden states travel one behind the other along the sequence, so that
a row costs one message however many models there are. Only the policy's send gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.engines.megatron.stage import PolicyStage
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.token_losses import RowLoss
from easyrl.models.policy_model import run_micro_batch
from easyrl.recipes.losses import loss_metrics, policy_loss, token_loss
from easyrl.recipes.recipe import Recipe
from easyrl.runtime.model_spans import ModelSpans
from easyrl.schema import FrozenLogprobs, MicroBatch


@dataclass(frozen=True)
class Loss:
    """What the last stage makes of a row's log-probabilities."""

    recipe: Recipe
    same_pass: bool  # the projection forms its gradient with its values (``TriModel.loss``)
    sampled_by: Any  # ``TriLogprobs.sampled_by``
    temperature: float


class StreamStage(nn.Module):
    """``policy`` and the frozen models whose log-probabilities are to be had, of one stage.

    ``frozen``: by their names in ``FrozenLogprobs``, in the order in which they travel, behind the
    policy unless that is left out.
    """

    def __init__(
        self,
        policy: nn.Module,
        stage: PolicyStage,
        frozen: dict[str, PolicyStage],
        *,
        with_policy: bool = True,
        spans: ModelSpans,
    ) -> None:
        super().__init__()
        self.policy = policy  # an engine around ``stage``, or itself
        self.stage = stage
        self._frozen = frozen  # not submodules: nothing of them is trained
        self.config, self.model_type, self.vp_stage = stage.config, stage.model_type, stage.vp_stage
        self._num_policies = int(with_policy)
        self._inputs: Sequence[Tensor | None] = ()
        self._names = [*(["policy"] if with_policy else []), *frozen]  # of the streams
        self._spans = spans

    @property
    def num_streams(self) -> int:
        return self._num_policies + len(self._frozen)

    def set_input_tensor(self, tensor: Any) -> None:
        """Hidden states of all streams, [streams · T, 1, H]; None for the first stage."""
        received = tensor[0] if isinstance(tensor, list) else tensor
        parts = [None] * self.num_streams if received is None else received.chunk(self.num_streams)
        self._inputs = parts

    def hidden(self, row: MicroBatch, layout: SegmentLayout) -> Tensor:
        """For the next stage; only the policy's part carries gradient."""
        outputs = []
        if self._num_policies:
            outputs.append(self._run(self.policy, self.stage, 0, row, layout))
        with torch.no_grad():
            for number, model in enumerate(self._frozen.values(), start=self._num_policies):
                outputs.append(self._run(model, model, number, row, layout))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def loss(self, row: MicroBatch, layout: SegmentLayout, loss: Loss) -> tuple[Tensor, MetricSums]:
        """Of the last stage: the recipe's loss sum, which carries gradient, and its metrics."""
        said = self.frozen_logprobs(row, layout, loss.temperature)
        recipe = loss.recipe
        if not loss.same_pass:
            logprobs, entropy = self.policy_logprobs(row, layout, loss.temperature)
            tri = TriLogprobs(logprobs, entropy, said, loss.sampled_by)
            return policy_loss(tri, row, recipe)
        losses = token_loss(row, said, recipe)
        loss_sum, logprobs, entropy = self._run(
            self.policy, self.stage, 0, row, layout, loss.temperature, losses
        )
        tri = TriLogprobs(logprobs, entropy, said, loss.sampled_by)
        return loss_sum, loss_metrics(tri, row, recipe, loss_sum)

    def policy_logprobs(
        self, row: MicroBatch, layout: SegmentLayout, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Of the last stage: the policy's log-probabilities and entropy, float32 [N] each."""
        logprobs, entropy = self._run(self.policy, self.stage, 0, row, layout, temperature)
        return logprobs, entropy

    @torch.no_grad()
    def frozen_logprobs(
        self, row: MicroBatch, layout: SegmentLayout, temperature: float
    ) -> FrozenLogprobs:
        """Of the last stage: float32 [N] of each frozen model that there is, and what comes with
        the row."""
        given = row.frozen or FrozenLogprobs(None, None)
        said: dict[str, Tensor | None] = {}
        for number, (name, model) in enumerate(self._frozen.items(), start=self._num_policies):
            said[name] = self._run(model, model, number, row, layout, temperature)[0]
        return replace(given, **said)

    def _run(
        self,
        model: nn.Module,
        stage: PolicyStage,
        number: int,
        row: MicroBatch,
        layout: SegmentLayout,
        temperature: float = 1.0,
        losses: RowLoss | None = None,
    ) -> Any:
        """What the stream ``number`` comes to; ``model`` is ``stage`` or an engine around it."""
        stage.set_input_tensor(self._inputs[number])
        with self._spans.span(f"{self._names[number].replace('_', ' ')} forward"):
            return run_micro_batch(model, row, temperature, layout=layout, token_loss=losses)


class StreamCommunicator(P2PCommunicator):  # type: ignore[misc]
    """Sends all streams forward, and back only the policy's gradient.

    ``num_streams``: of all rows of a schedule. ``on_sent`` is told the direction and the bytes of
    each message.
    """

    def __init__(
        self,
        group: Any,
        config: ModelParallelConfig,
        num_streams: int,
        on_sent: Callable[[str, int], None],
    ) -> None:
        super().__init__(group, config)
        self._num_streams = num_streams
        self._on_sent = on_sent

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """As megatron-core's, in an order that is right with two stages too.

        There both neighbours are one process, messages to it arrive in the order of sending, and
        what one sends to its previous stage is what the other receives from its next.
        """
        device = torch.cuda.current_device()  # where messages have to be
        shapes = {
            name: torch.empty(3, dtype=torch.int64, device=device)
            for name, wanted in (("next", recv_next), ("prev", recv_prev))
            if wanted
        }
        peers = {"next": self.next_rank, "prev": self.prev_rank}
        ops = [
            dist.P2POp(dist.isend, torch.tensor(tensor.shape, device=device), peer, self.pp_group)
            for tensor, peer in (
                (tensor_send_prev, self.prev_rank),
                (tensor_send_next, self.next_rank),
            )
            if tensor is not None
        ]
        ops += [
            dist.P2POp(dist.irecv, shape, peers[name], self.pp_group)
            for name, shape in shapes.items()
        ]
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()
        nothing = [0, 0, 0]
        received = {name: shape.tolist() for name, shape in shapes.items()}
        return received.get("prev", nothing), received.get("next", nothing)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        if tensor_send_prev is not None:
            own = len(tensor_send_prev) // self._num_streams
            tensor_send_prev = tensor_send_prev[:own].contiguous()
        for direction, tensor in (("forward", tensor_send_next), ("backward", tensor_send_prev)):
            if tensor is not None:
                self._on_sent(direction, tensor.numel() * tensor.element_size())
        received, gradient, requests = super()._communicate(
            tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **settings
        )
        if gradient is not None and self._num_streams > 1:
            assert requests is None, "the padding needs the gradient to be there"
            others = gradient.new_zeros(
                (self._num_streams - 1) * len(gradient), *gradient.shape[1:]
            )
            gradient = torch.cat([gradient, others])
        return received, gradient, requests
