"""The seam between the trainer and a training stack (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from easyrl.runtime.model_spans import ModelSpans
    from easyrl.runtime.ranks import Ranks
    from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey


WeightKind = Literal["full", "adapter", "base", "critic"]


@dataclass(frozen=True, slots=True)
class TriLogprobs:
    """What the models say of the trained tokens of a micro-batch; only what is the policy's carries
    gradient."""

    logprobs: Tensor  # float32 [N], the policy's, at the sampling temperature
    entropy: Tensor  # float32 [N], nats, the policy's
    frozen: FrozenLogprobs
    # which of them has the weights that sampled the tokens; None: none has, the policy has moved on
    sampled_by: Literal["policy", "old_policy"] | None = "policy"
    # float32 [N], nats, KL(policy || teacher) over the vocabulary; None where no recipe asks for it
    teacher_kl: Tensor | None = None

    @property
    def sampling_policy(self) -> Tensor | None:
        """What the weights that sampled the tokens say of them; float32 [N]."""
        if self.sampled_by == "old_policy":
            return self.frozen.old_policy
        return self.logprobs if self.sampled_by == "policy" else None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step."""

    grad_norm: float  # before the clip, of the gradient divided by the denominator
    learning_rate: float  # that the step used
    skipped: bool  # gradient was not finite, parameters unchanged
    critic: StepResult | None = None  # of the critic, skipped with the policy; None without one


@dataclass(slots=True)
class LogprobComparison:
    """Sums over trained tokens that compare the trainer's log-probabilities with an endpoint's.

    Of each token x is the endpoint's log-probability, y the trainer's, d = y - x, and h the entropy
    of the trainer's distribution.
    """

    num: float = 0.0  # tokens
    y: float = 0.0
    h: float = 0.0
    d: float = 0.0
    yy: float = 0.0  # of y * y, and so on
    yh: float = 0.0
    hh: float = 0.0
    yd: float = 0.0
    hd: float = 0.0
    dd: float = 0.0
    abs: float = 0.0  # of |d|
    positive: float = 0.0  # of d² where d > 0
    zeros: float = 0.0  # tokens with x = 0 that the trainer is not certain of
    first: float = 0.0  # tokens at the beginning of a response
    first_abs: float = 0.0  # of |d| of these
    maximum: float = 0.0  # of |d|, no sum

    def add(self, other: LogprobComparison) -> None:
        maximum = max(self.maximum, other.maximum)
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.maximum = maximum


@dataclass(frozen=True, slots=True)
class ResponseDifference:
    """Over a response's trained tokens, the trainer's log-probabilities minus the endpoint's."""

    key: SampleKey
    num: float  # tokens
    d: float  # sum, nats
    by_token: tuple[float, ...] = ()  # of each of these tokens, in order


@dataclass(slots=True)
class MetricSums:
    """Sums over tokens or sequences that are divided once, at the end of a batch.

    ``sums`` holds additive quantities, ``maxima`` quantities that combine by maximum,
    ``compared`` the comparison with each endpoint whose tokens are among them, by URL, and
    ``responses`` that of each response.
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    compared: dict[str, LogprobComparison] = field(default_factory=dict)
    responses: list[ResponseDifference] = field(default_factory=list)

    def add(self, other: MetricSums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for url, comparison in other.compared.items():
            self.compared.setdefault(url, LogprobComparison()).add(comparison)
        self.responses += other.responses


class Columns(NamedTuple):
    """Consecutive columns of a matrix, such as a tensor-parallel rank has."""

    first: int
    width: int
    of: int  # columns of the whole matrix


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements ``[start, start + n)`` of a flattened tensor of the engine's state.

    With ``columns`` of the flattened matrix that these are by themselves: element i of it is in row
    i // width, column first + i % width of the tensor.
    """

    key: str  # of the tensor, the same on all ranks and in any layout
    start: int
    values: Tensor  # [n], on the host
    columns: Columns | None = None


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file that a snapshot has written."""

    name: str
    num_bytes: int
    blake3: str  # of all of it, 64 hex digits


class Snapshot(Protocol):
    """A copy of what a run goes on from: the share of one caller of ``TrainEngine.snapshot``.

    The shares of all callers make the whole.
    """

    @property
    def description(self) -> Mapping[str, Any]:
        """JSON, equal on all ranks."""

    def write(self, folder: Path, stem: str) -> list[StateFile]:
        """Writes and fsyncs files whose names begin with ``stem``, unlike any other caller's.

        In a thread, beside the training. Raises ``OSError`` naming the file.
        """


class SavedState(Protocol):
    """The shares of all ranks together (``StateReader``)."""

    @property
    def description(self) -> Mapping[str, Any]: ...

    @property
    def files(self) -> Sequence[Path]:
        """Of all shares."""

    def numel(self, key: str) -> int:
        """Elements of the whole tensor; 0 if there is none of that name."""

    def read(self, key: str, start: int, numel: int, columns: Columns | None = None) -> Tensor:
        """Elements ``[start, start + numel)``, counted as in ``StatePiece``; on the host.

        Raises ``ValueError`` naming the tensor if they are not all there.
        """


class TrainEngine(Protocol):
    """A model being trained. All ranks call every method; *collective* ones wait for all.

    An engine is made for a recipe, whose ``needs`` say what is trained and run beside the model;
    what it cannot do of them it refuses with ``ConfigError`` as it is made, by the key or by the
    recipe's name. Nothing else asks: an engine without a critic has to refuse ``needs.critic``
    itself. DeepSpeed's trains one.
    """

    ranks: Ranks
    device: torch.device  # that runs what is launched here, perhaps behind the host
    lockstep: bool  # all ranks must run equally many micro-batches (ZeRO 2 and 3)
    can_look_ahead: bool  # there are frozen models, and this rank can run them by itself
    spans: ModelSpans  # of this process's models: when each ran forward and backward

    @property
    def has_frozen_models(self) -> bool:
        """Whether ``frozen_logprobs`` says anything: a reference, an old policy that differs, a
        critic, a teacher that scores sampled tokens.
        """

    def set_controls(self, controls: Mapping[str, float]) -> None:
        """Those of the recipe (``Recipe.initial_controls``) for the updates that follow; the same
        on all ranks."""

    def begin_batch(self) -> None:
        """The weights as they are now are the old policy of the batch's updates, and the critic
        of their values, with ``updates_per_batch`` above 1; else without effect. All ranks call
        it before each batch.
        """

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The rows that are ready together, before each goes through ``forward_backward``.

        With an offloaded reference those without come back with what the frozen models say: its
        weights travel once for all of them. Else as they are. Never collective.
        """

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        """Accumulates the gradients of the recipe's *sums*; one metrics record per micro-batch.

        A pipeline may keep the last ones, and what there is to say of them, under way until
        ``finish_backwards``. Collective when ``lockstep``. Raises ``NonFiniteLossError`` when all
        backwards are done; the gradient is then NaN, and ``optimizer_step`` skips on every rank.
        """

    def finish_backwards(self) -> list[MetricSums]:
        """Ends what ``forward_backward`` has under way, and returns or raises what it would have.

        All ranks call it behind an update's last micro-batch. Never collective.
        """

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        """Divides by ``denominator`` (of all ranks together), clips, steps, clears. Collective.

        A critic takes its own step, divided by ``value_denominator``; a gradient of either model
        that is not finite skips both.
        """

    def discard_gradients(self) -> None:
        """Forgets what was accumulated (a skipped step). Collective."""

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        """What the frozen models say of ``micro_batch``, the critic as the batch began among them,
        for a caller that hands it over in ``MicroBatch.frozen``. Without reference and old policy
        where these are sharded. Never collective. Only if ``can_look_ahead``, or with a critic.
        """

    def evaluate(self, micro_batch: MicroBatch) -> MetricSums:
        """The recipe's loss and metrics, without gradient. Collective if sharded."""

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Policy log-probabilities, no gradient, float32 [N], on the CPU. Collective if sharded."""

    def named_weights(self, kind: WeightKind = "full") -> Iterator[tuple[str, Tensor]]:
        """Names and CPU tensors as ``save_pretrained`` writes them, one after another. Collective.

        ``full``: the whole model, an adapter merged into it; ``adapter``: the adapter alone;
        ``base``: the model without it; ``critic``: the critic, if there is one, as ``critic.path``
        takes it.
        All ranks iterate; tensors are only valid on rank 0 and until the next one is asked for.
        """

    def perturbed_weights(
        self, kind: Literal["full", "adapter"] = "full"
    ) -> AbstractContextManager[None]:
        """Inside, every weight is visibly changed; afterwards bit-equal to before.

        ``adapter``: what each adapter adds to its layer is, and the model itself is not.
        """

    def snapshot(self) -> Snapshot:
        """A copy, in host memory, of this rank's share of weights, optimizer and schedule.

        Of a step that is over: no gradients. Training may go on at once. All ranks call it.
        """

    def restore(self, saved: SavedState) -> None:
        """Inverse of ``snapshot``, to the bit, also in another layout or engine. Collective.

        Raises ``ValueError`` if the checkpoint does not fit.
        """


class NonFiniteLossError(FloatingPointError):
    """A micro-batch's loss is NaN or infinite; the step has to be skipped."""
