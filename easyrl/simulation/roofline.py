"""Rates of a model on a class of devices, by arithmetic: bytes over bandwidth, FLOPs over FLOP/s.

A decoding step reads the weights and the keys and values of all that it decodes. Training takes
6 FLOPs for each parameter that a token goes through, a frozen model 2, and attention on top. What
part of a device's peaks is reached is assumed (``devices.Assumed``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from easyrl.memory_plan.model_shape import ModelShape
from easyrl.simulation.devices import Assumed, Device
from easyrl.simulation.setting import Rates

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class ModelWork:
    """What a token costs."""

    parameters: int
    looked_up: int  # of them the input embedding, a row of which is read; 0 if it is the output's
    experts: int  # of them in experts
    routed: float  # share of the experts that a token goes through
    layers: int
    hidden: int  # features
    queries: int
    keys: int
    key_heads: int

    @classmethod
    def of(cls, shape: ModelShape) -> ModelWork:
        experts = {n: size for n, size in shape.parameters.items() if ".experts." in n}
        num_experts = getattr(shape.config, "num_experts", 0) or 0
        if experts and not num_experts:
            raise ValueError(
                f"--model: a {shape.architecture} has experts, but its config.json no num_experts"
            )
        return cls(
            parameters=shape.num_parameters,
            looked_up=0 if shape.tied else shape.embedding_numel,
            experts=sum(map(prod, experts.values())),
            routed=shape.experts_per_token / num_experts if experts else 1.0,
            layers=shape.num_layers,
            hidden=shape.hidden,
            queries=shape.queries,
            keys=shape.keys,
            key_heads=round(shape.keys * shape.query_heads / shape.queries),
        )

    @property
    def weights(self) -> float:
        """Bytes."""
        return BF16 * self.parameters

    @property
    def key_value(self) -> float:
        """Bytes of one token, keys and values of all layers."""
        return 2 * BF16 * self.layers * self.keys

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.parameters - self.looked_up - self.experts * (1 - self.routed)

    def read(self, running: int) -> float:
        """Bytes of weights of a step of so many tokens, each with experts drawn at random."""
        untouched = self.experts * (1 - self.routed) ** running
        return BF16 * (self.parameters - self.looked_up - untouched)

    def forward_flops(self, context: float) -> float:
        """Of a token that attends to ``context`` tokens."""
        return 2 * self.active + 4 * self.layers * self.queries * context


@dataclass(frozen=True)
class Server:
    """An inference endpoint: one model, split over ``devices``. ``context``: tokens of a sequence
    in flight, in the mean over its time."""

    work: ModelWork
    device: Device
    assumed: Assumed
    devices: int
    context: float

    @property
    def key_shares(self) -> int:
        """Devices that divide the keys between them; more than there are heads hold them twice."""
        return min(self.devices, self.work.key_heads)

    @property
    def tokens_held(self) -> float:
        """Whose keys and values there is memory for; negative where the weights do not fit."""
        usable = self.device.memory * self.assumed.server_memory - self.assumed.server_reserve
        left = usable - self.work.weights / self.devices
        return left * self.key_shares / self.work.key_value

    @property
    def most_running(self) -> int:
        """Sequences at a time."""
        return min(self.assumed.most_running, int(self.tokens_held / self.context))

    def decode_s(self, running: int) -> float:
        """A token of each of ``running`` sequences."""
        bandwidth = self.device.memory_per_s * self.assumed.decode_bandwidth
        weights = self.work.read(running) / self.devices
        keys = running * self.context * self.work.key_value / self.key_shares
        memory_s = (weights + keys) / bandwidth
        flops = running * self.work.forward_flops(self.context) / self.devices
        compute_s = flops / (self.device.flops * mfu(self.work, self.assumed, self.assumed.forward))
        messages_s = 2 * self.work.layers * self.assumed.message_s if self.devices > 1 else 0.0
        return max(memory_s, compute_s) + messages_s


@dataclass(frozen=True)
class Trainer:
    """Ranks that train: ``ranks`` copies of the model, each split over ``tensor`` x ``pipeline``.

    ``context``: tokens that a token attends to, in the mean. ``frozen``: models whose
    log-probabilities are computed beside the policy's.
    """

    work: ModelWork
    device: Device
    assumed: Assumed
    ranks: int
    tensor: int
    pipeline: int
    zero_stage: int
    row_tokens: int
    context: float
    frozen: int

    @property
    def devices_per_rank(self) -> int:
        return self.tensor * self.pipeline

    @property
    def token_s(self) -> float:
        """Of one copy, a token of a full row: computing and what its tensor ranks exchange, or what
        copies send each other meanwhile."""
        forward = self.work.forward_flops(self.context)
        peak = self.device.flops * self.devices_per_rank
        policy_s = 3 * forward / (peak * mfu(self.work, self.assumed, self.assumed.training))
        frozen_s = forward / (peak * mfu(self.work, self.assumed, self.assumed.forward))
        passes = 3 + self.frozen  # forward, again, backward
        exchanged_s = passes * self._exchanged / (self.device.node_per_s * self.assumed.links)
        sent_s = self._bytes_of_a_row / self._between_copies / self.row_tokens
        return max(policy_s + self.frozen * frozen_s + exchanged_s, sent_s)

    @property
    def border_s(self) -> float:
        """Gradients summed where that was not done for each row, weights gathered and pushed, and a
        pipeline filled and emptied."""
        own = self.work.parameters / self.devices_per_rank * self._others
        reduced = 2 * FP32 * own if self.zero_stage < 2 else 0.0
        gathered = BF16 * own if self.zero_stage < 3 else 0.0
        filling_s = (self.pipeline - 1) * self.row_tokens * self.token_s
        return (reduced + gathered) / self._between_copies + self.push_s + filling_s

    @property
    def push_s(self) -> float:
        """Weights to all endpoints at once: a broadcast over the network."""
        return self.work.weights / (self.device.network_per_s * self.assumed.links)

    @property
    def _exchanged(self) -> float:
        """Bytes of a token in one pass through a device's layers: before attention and MLP gathered
        from the tensor ranks, behind them summed and scattered."""
        of_layer = 4 * BF16 * self.work.hidden * (self.tensor - 1) / self.tensor
        return of_layer * self.work.layers / self.pipeline

    @property
    def _others(self) -> float:
        """The share of what is summed or gathered that is other ranks'."""
        return (self.ranks - 1) / self.ranks

    @property
    def _between_copies(self) -> float:
        """Bytes per second of a device to those that have the same of other copies."""
        device = self.device
        in_node = self.ranks * self.devices_per_rank <= device.per_node
        return (device.node_per_s if in_node else device.network_per_s) * self.assumed.links

    @property
    def _bytes_of_a_row(self) -> float:
        """ZeRO-2 sums gradients for each row; ZeRO-3 also gathers weights, for the forward, for the
        backward and for each frozen model."""
        times = {2: 1, 3: 3 + self.frozen}.get(self.zero_stage, 0)
        return times * BF16 * self.work.parameters / self.devices_per_rank * self._others


@dataclass(frozen=True)
class RooflineRates(Rates):
    """Whose decoding is no straight line."""

    decode_by_running: tuple[float, ...]  # seconds of a step of 1, 2, … sequences

    def decode_s(self, running: int) -> float:
        return self.decode_by_running[running - 1]


def rates_of(server: Server, trainer: Trainer, *, prompt_tokens: int) -> RooflineRates:
    work, assumed = server.work, server.assumed
    table = _decode_table(server)
    each_s = (table[-1] - table[0]) / max(len(table) - 1, 1)
    peak = server.device.flops * server.devices * mfu(work, assumed, assumed.forward)
    return RooflineRates(
        decode_step_s=table[0] - each_s,
        decode_each_s=each_s,
        prefill_s=work.forward_flops(prompt_tokens / 2) / peak,
        request_s=0.0,
        train_token_s=trainer.token_s,
        train_group_s=0.0,
        trained_share=1.0,
        update_s=0.0,
        border_s=trainer.border_s,
        decode_by_running=table,
    )


@cache
def _decode_table(server: Server) -> tuple[float, ...]:
    return tuple(server.decode_s(running) for running in range(1, server.most_running + 1))


def mfu(work: ModelWork, assumed: Assumed, share: float) -> float:
    """Of the peak: ``share``, less of a mixture of experts."""
    return share * (assumed.mixture if work.routed < 1 else 1.0)
