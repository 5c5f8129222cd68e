"""DeepSpeed behind ``TrainEngine``: ZeRO 0 to 3, any supported Hugging Face causal LM."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from easyrl.config import Config, ConfigError
from easyrl.engines.base import (
    MetricSums,
    NonFiniteLossError,
    SavedState,
    StepResult,
    WeightKind,
)
from easyrl.engines.deepspeed.config import frozen_config, schedule_factor, training_config
from easyrl.engines.deepspeed.critic import DeepSpeedCritic
from easyrl.engines.deepspeed.initialise import initialise, num_elements, trained_parameters
from easyrl.engines.deepspeed.joint_step import step_together
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.deepspeed.muon import MuonWithAdamW
from easyrl.engines.deepspeed.pieces import copy_pieces, read_pieces
from easyrl.engines.deepspeed.row_threads import Loss, RowThreads
from easyrl.engines.deepspeed.sharded_loading import sharded_loading, take_projection
from easyrl.engines.deepspeed.shards import (
    Fragment,
    Shard,
    own_part,
    shards_of,
    zero_3_fragment,
)
from easyrl.engines.deepspeed.state import (
    copy_of,
    optimizer_pieces,
    restore,
    restore_optimizer,
    restore_schedule,
)
from easyrl.engines.deepspeed.state_fit import SCHEDULE, require_fit, state_description
from easyrl.engines.perturbation import perturbation
from easyrl.engines.process_group import quiet, start_process_group
from easyrl.engines.state_file import EngineState
from easyrl.engines.weight_names import adapter_weights, saved_weights
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model
from easyrl.models.lora import OLD_POLICY as OLD_ADAPTER
from easyrl.models.lora import (
    TRAINED,
    adapter_change,
    adapter_layers,
    add_old_policy,
    factors,
    frozen_adapter,
)
from easyrl.models.offload import OffloadedModel
from easyrl.models.policy_model import PolicyModel
from easyrl.models.teacher import FullTeacher
from easyrl.models.teacher_loading import load_teacher
from easyrl.models.tri_model import Frozen, FrozenModel, TriModel, frozen_model
from easyrl.recipes.loading import load_recipe
from easyrl.recipes.recipe import Teacher
from easyrl.runtime.model_spans import ModelSpans
from easyrl.runtime.ranks import Ranks
from easyrl.schema import FrozenLogprobs, MicroBatch, Segment

OLD_POLICY = "old_policy"  # in a checkpoint


class DeepSpeedEngine:
    """A policy trained by DeepSpeed; see ``TrainEngine`` for what each method promises.

    One process per device, started by the ``deepspeed`` launcher or alone. All processes are
    data-parallel ranks.

    Args:
        config: the whole tree.
        total_steps: optimizer steps of the run, where a decaying schedule ends.
        load_model: makes the policy, and again its frozen copies.
    Raises:
        ConfigError: a combination that DeepSpeed cannot do.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int | None = None,
        load_model: Callable[[], PolicyModel] | None = None,
    ) -> None:
        local_rank = start_process_group()
        self.ranks = Ranks.data_parallel(dist.get_rank(), dist.get_world_size())
        self._config = config
        self._stage = config.trainer.zero_stage
        self.lockstep = self._stage >= 2 and self.ranks.dp_size > 1
        self.device = torch.device(get_accelerator().device_name(local_rank))
        self.spans = ModelSpans.of(self.device)
        load = load_model or (lambda: load_policy_model(config.model, seed=config.run.seed))
        factor = schedule_factor(config.trainer, total_steps or config.trainer.max_steps)
        self._uncontrolled = self._recipe = load_recipe(config)
        needs = self._recipe.needs
        # the frozen models too: all ranks run them together
        self._shards_frozen = self._stage == 3 and self.ranks.dp_size > 1
        if self._shards_frozen and self._recipe.before_advantages.reference:
            raise ConfigError(_reference_is_sharded(config))
        self._is_lagged = config.trainer.old_policy == "lagged"
        # never lagged too
        self._has_snapshot = needs.old_policy and config.trainer.updates_per_batch > 1
        with_old_policy = self._is_lagged or self._has_snapshot
        self._policy = self._load(load, training_config(config))
        if config.model.lora is not None and with_old_policy:
            add_old_policy(self._policy.model)
        self._engine = initialise(config, self._policy, factor)
        inner = self._engine.optimizer.optimizer
        if isinstance(inner, MuonWithAdamW) and self._stage > 0:
            inner.take_partitions(self._shards(), self._parameters())
        self._old_parameters: dict[str, nn.Parameter] = {}  # by the trained one's name
        self._tri_model = TriModel(
            self._engine,
            reference=self._reference(load) if needs.reference else None,
            old_policy=self._old_policy(load) if with_old_policy else None,
            teacher=None if needs.teacher is None else self._teacher(needs.teacher),
            temperature=config.rollout.temperature,
            device=self.device,
            spans=self.spans,
        )
        self._critic: DeepSpeedCritic | None = None
        if needs.critic:
            self._critic = DeepSpeedCritic(
                config, self.ranks, self.device, total_steps=total_steps, spans=self.spans
            )
        frozen = needs.reference, with_old_policy, needs.critic, needs.scores_with_teacher
        self.can_look_ahead = any(frozen) and not self._shards_frozen
        wanted, span = config.model.logprob_backward, self._recipe.span
        self._same_pass = span == "token" if wanted == "auto" else wanted == "same_pass"
        self._num_backwards = 0
        self._row_threads: RowThreads | None = None
        if self.device.type == "cpu" and self._runs_rows_by_thread():
            self._row_threads = RowThreads(self._tri_model, self._policy)

    def _runs_rows_by_thread(self) -> bool:
        """Not where a forward belongs to one thread: shards are gathered in it, adapters are put in
        place, or weights travel."""
        models, is_sharded = self._tri_model, self._stage == 3 or self.lockstep
        frozen = (models.reference, models.old_policy, models.teacher)
        are_here = all(model is None or isinstance(model, FrozenModel) for model in frozen)
        has_adapters = self._config.model.lora is not None
        return are_here and not (is_sharded or has_adapters or self._critic is not None)

    # ---- training --------------------------------------------------------------------------------

    def set_controls(self, controls: Mapping[str, float]) -> None:
        self._recipe = self._uncontrolled.controlled(controls)

    def begin_batch(self) -> None:
        if self._has_snapshot:
            self._set_old_policy(self._local(self._parameters().values()))
            self._tri_model.old_is_policy = True  # in the first update: no forward of the snapshot
        if self._critic is not None:
            self._critic.begin_batch()
        self._tri_model.sampled_by = "policy"

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        if not isinstance(self._tri_model.reference, OffloadedModel):
            return list(micro_batches)
        rows = list(micro_batches)
        places = [i for i, row in enumerate(rows) if row.frozen is None]
        frozen = self._tri_model.frozen_logprobs_of([rows[i] for i in places])
        for i, said in zip(places, frozen, strict=True):
            rows[i] = replace(rows[i], frozen=self._with_values(rows[i], said))
        return rows

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        metrics = []
        problem = None
        with closing(self._losses(micro_batches)) as losses:
            for index, (micro_batch, (loss_sum, sums)) in enumerate(
                zip(micro_batches, losses, strict=True)
            ):
                if not bool(torch.isfinite(loss_sum)):
                    problem = f"micro-batch {index}: loss sum is {loss_sum.item()}"
                    loss_sum = loss_sum * math.nan  # an infinite loss may have a finite gradient
                self._backward(loss_sum)
                if self._critic is not None:
                    value_sums, its_problem = self._critic.forward_backward(
                        micro_batch, self._recipe
                    )
                    sums.add(value_sums)
                    problem = problem or its_problem
                metrics.append(sums)
        if problem is not None:
            raise NonFiniteLossError(problem)  # only now: ranks in lock-step are not left waiting
        return metrics

    def _losses(self, micro_batches: Sequence[MicroBatch]) -> Generator[Loss]:
        """Of each, to be run backward before the next one."""
        if self._row_threads is not None:
            yield from self._row_threads.losses(
                micro_batches, self._recipe, same_pass=self._same_pass
            )
            return
        for row in micro_batches:
            yield self._tri_model.loss(row, self._recipe, same_pass=self._same_pass)

    def finish_backwards(self) -> list[MetricSums]:
        return []

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        assert denominator > 0
        learning_rate = float(self._engine.get_lr()[0])
        if self._backwards_of_all_ranks() == 0:
            return StepResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True)
        if self._num_backwards == 0:  # other ranks had rows; DeepSpeed reduces only what exists
            self._backward_of_nothing(scale=0.0)
            if self._critic is not None:
                self._critic.backward_of_nothing()
        before = copy_of(self._local(self._parameters().values())) if self._is_lagged else []
        grad_norm, applied, critic = self._step(denominator, value_denominator)
        self._num_backwards = 0
        if applied and self._is_lagged:
            self._set_old_policy(before)
        if applied:
            self._tri_model.old_is_policy = False
            self._tri_model.sampled_by = "old_policy" if self._has_snapshot else None
        return StepResult(grad_norm, learning_rate, skipped=not applied, critic=critic)

    def _step(
        self, denominator: float, value_denominator: float
    ) -> tuple[float, bool, StepResult | None]:
        """Of policy and critic together; the policy's norm and whether they stepped. Collective."""
        # DeepSpeed averages over ranks, the denominators are of all ranks' sums.
        num_ranks, critic = self.ranks.dp_size, self._critic
        if critic is None:
            return *step_divided(self._engine, denominator / num_ranks), None
        learning_rate = critic.learning_rate
        policy, (grad_norm, applied) = step_together(
            self._engine,
            denominator / num_ranks,
            lambda: critic.step(max(value_denominator, 1.0) / num_ranks),
            critic.discard_gradients,
        )
        return *policy, StepResult(grad_norm, learning_rate, skipped=not applied)

    def discard_gradients(self) -> None:
        """A step that cannot be taken is the one way of clearing that all of DeepSpeed's optimizers
        have in common.
        """
        self._backward_of_nothing(scale=math.nan)
        _, applied = step_divided(self._engine, 1.0)
        assert not applied
        if self._critic is not None:
            self._critic.discard_gradients()
        self._num_backwards = 0

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        assert self.can_look_ahead or self._critic is not None
        if self._shards_frozen:
            return self._with_values(micro_batch, FrozenLogprobs(None, None))
        return self._with_values(micro_batch, self._tri_model.frozen_logprobs(micro_batch))

    def _with_values(self, micro_batch: MicroBatch, said: FrozenLogprobs) -> FrozenLogprobs:
        """``said``, and what the critic said as the batch began."""
        if self._critic is None:
            return said
        return replace(said, values=self._critic.values(micro_batch))

    @property
    def has_frozen_models(self) -> bool:
        models = self._tri_model
        lags = models.old_policy is not None and not models.old_is_policy
        others = self._critic is not None or self._recipe.needs.scores_with_teacher
        return models.reference is not None or lags or others

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> MetricSums:
        return self._tri_model.loss(micro_batch, self._recipe, same_pass=False)[1]

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return self._tri_model.policy_logprobs(micro_batch).float().cpu()

    def _backward(self, loss: Tensor) -> None:
        with self.spans.span("policy backward"):
            self._engine.backward(loss)
        self._num_backwards += 1

    def _backward_of_nothing(self, scale: float) -> None:
        """A backward through all parameters whose gradient is ``scale`` times something."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        layout = SegmentLayout([Segment(0, 1, -1)])  # one token that predicts itself
        logprobs, _ = self._engine(zero, zero, layout, zero, zero)
        self._backward(logprobs.sum() * scale)

    def _backwards_of_all_ranks(self) -> int:
        count = torch.tensor([self._num_backwards], device=self.device)
        dist.all_reduce(count)
        return int(count)

    # ---- weights ---------------------------------------------------------------------------------

    def named_weights(self, kind: WeightKind = "full") -> Iterator[tuple[str, Tensor]]:
        """One module at a time; ranks other than 0 get tensors without data (device ``meta``)."""
        self._release_gathered()
        model, is_writer = self._policy.model, self.ranks.rank == 0
        if kind == "critic":
            assert self._critic is not None
            return self._critic.named_weights(is_writer=is_writer)
        if kind == "adapter":
            return adapter_weights(model, is_writer=is_writer)
        return saved_weights(model, is_writer=is_writer, merged=kind == "full")

    @contextmanager
    def perturbed_weights(self, kind: Literal["full", "adapter"] = "full") -> Iterator[None]:
        """Inside, every weight tensor is scaled by a factor between 0.95 and 1.05 of its own.

        Of adapters alone ``B`` is moved (``adapter_change``): it is zero as a run begins.
        """
        if kind == "adapter":
            with self._perturbed_adapter():
                yield
            return
        parameters = dict(self._policy.model.named_parameters())
        tensors = self._local(parameters.values())
        saved = copy_of(tensors)
        for name, tensor in zip(parameters, tensors, strict=True):
            tensor.mul_(perturbation(name))
        try:
            yield
        finally:
            restore(self._local(parameters.values()), saved)

    @contextmanager
    def _perturbed_adapter(self) -> Iterator[None]:
        layers = adapter_layers(self._policy.model).values()
        changed = [factors(layer)[1] for layer in layers]
        saved = copy_of(self._local(changed))
        for layer in layers:
            a, b = factors(layer)
            weight: Any = layer.get_base_layer().weight
            own_weight, own_a, own_b = self._local([weight, a, b])
            rank, scaling = layer.r[TRAINED], layer.scaling[TRAINED]
            own_b.add_(adapter_change(own_weight, own_a, own_b, rank=rank, scaling=scaling))
        try:
            yield
        finally:
            restore(self._local(changed), saved)

    def _local(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """This rank's storage of each parameter, with nothing gathered: a change to a shard would
        not reach the gathered copy.
        """
        self._release_gathered()
        if self._stage < 3:
            return [parameter.data for parameter in parameters]
        with_shards: list[Any] = list(parameters)  # DeepSpeed adds the attributes
        assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in with_shards)
        return [parameter.ds_tensor.data for parameter in with_shards]

    def _release_gathered(self) -> None:
        """After this, ZeRO-3's shards are the only copy of the policy."""
        if self._stage == 3:
            self._engine.optimizer.empty_partition_cache()  # the engine's own also collects garbage

    # ---- frozen models ---------------------------------------------------------------------------

    def _reference(self, load: Callable[[], PolicyModel]) -> Frozen:
        if self._config.model.lora is not None:
            return frozen_adapter(self._engine, self._policy, None)
        offload = self._config.trainer.offload_reference
        if offload and self._stage < 3:
            return OffloadedModel(load(), self.device)
        return self._frozen(load, offload=offload)

    def _old_policy(self, load: Callable[[], PolicyModel]) -> FrozenModel:
        """Also remembers the parameters that ``_set_old_policy`` writes."""
        if self._config.model.lora is not None:
            own = dict(self._policy.model.named_parameters())
            self._old_parameters = {
                name: own[name.replace(f".{TRAINED}.", f".{OLD_ADAPTER}.")]
                for name in self._parameters()
            }
            return frozen_adapter(self._engine, self._policy, OLD_ADAPTER)
        old_policy = self._frozen(load, offload=False)
        parameters = old_policy.module.parameters()
        self._old_parameters = dict(zip(self._parameters(), parameters, strict=True))
        return old_policy

    def _set_old_policy(self, values: list[Tensor]) -> None:
        """``values`` as this rank holds the trained parameters."""
        restore(self._local(self._old_parameters.values()), values)

    def _frozen(self, load: Callable[[], PolicyModel], *, offload: bool) -> FrozenModel:
        """``offload``: with ZeRO-3 the shards are in host memory, which DeepSpeed streams."""
        settings = frozen_config(self._config, offload=offload)
        return frozen_model(self._placed(self._load(load, settings), settings))

    def _teacher(self, teacher: Teacher) -> Frozen | FullTeacher:
        """Replicated on each rank; with ZeRO-3 in shards, but for the projection of a full one."""
        load = partial(load_teacher, self._config.model, teacher.path)
        if not teacher.full:
            return self._frozen(load, offload=False)
        settings = frozen_config(self._config, offload=False)
        model = self._load(load, settings)
        if self._stage < 3:  # before it is taken: a tied one stays one tensor
            model.to(self.device)
        projection = take_projection(model)
        module = frozen_model(self._placed(model, settings)).module
        return FullTeacher(module, *projection, model.logits)

    def _placed(self, model: PolicyModel, settings: dict[str, Any]) -> nn.Module:
        """A model to be frozen, on the device, with ZeRO-3 by an engine that gathers its shards."""
        if self._stage < 3:
            return model.to(self.device)
        model.requires_grad_(False)
        with quiet():
            sharded, *_ = deepspeed.initialize(model=model, config=settings)
        return sharded

    def _load(self, load: Callable[[], PolicyModel], settings: dict[str, Any]) -> PolicyModel:
        """With ZeRO-3 in shards from the beginning. Collective."""
        with sharded_loading(settings) if self._stage == 3 else nullcontext(), quiet():
            return load()

    # ---- checkpoints -----------------------------------------------------------------------------

    def snapshot(self) -> EngineState:
        """Masters, the optimizer's state, step counts; a critic's too; if lagged, the old policy.

        Host memory: 12 bytes per trained parameter (Muon 8, 8-bit Adam 6), divided by the number of
        ranks; with a lagged old policy its own size more.
        """
        pieces = list(optimizer_pieces(self._engine.optimizer, self._shards()))
        if self._is_lagged:
            for tensor, _, own in self._old_policy_fragments():
                pieces += copy_pieces(OLD_POLICY, tensor, [own])
        critic = EngineState([], {}) if self._critic is None else self._critic.snapshot()
        # The rest of the schedule's state is the configuration.
        position = {SCHEDULE: self._engine.lr_scheduler.last_epoch}
        description = self._description() | position | critic.description
        return EngineState(pieces + critic.pieces, description)

    def restore(self, saved: SavedState) -> None:
        """Also from another ZeRO stage, but for 8-bit moments; not of another model, dtype,
        optimizer or kind of old policy.
        """
        require_fit(self._description(), self._sizes(), saved)
        restore_optimizer(self._engine.optimizer, self._shards(), saved)
        if self._is_lagged:
            with torch.no_grad():
                for tensor, held, _ in self._old_policy_fragments():
                    read_pieces(OLD_POLICY, tensor, [held], saved)
        restore_schedule(self._engine.lr_scheduler, saved.description[SCHEDULE])
        if self._critic is not None:
            self._critic.restore(saved)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by a name that depends on neither ranks nor ZeRO stage."""
        return trained_parameters(self._policy)

    def _shards(self) -> list[Shard]:
        return shards_of(self._engine.optimizer, self._parameters(), self.ranks)

    def _old_policy_fragments(self) -> Iterator[tuple[Tensor, Fragment, Fragment]]:
        """The old policy's tensors on this rank: what they hold, what is saved of it."""
        tensors = self._local(self._old_parameters.values())
        for (name, parameter), tensor in zip(self._old_parameters.items(), tensors, strict=True):
            if self._stage == 3:
                held = own = zero_3_fragment(name, parameter, 0, tensor.numel(), self.ranks)
            else:
                held = Fragment(name, 0, tensor.numel(), 0)
                own = own_part(held, self.ranks)
            if held.numel > 0:
                yield tensor, held, own

    def _description(self) -> dict[str, Any]:
        return state_description(
            self._config,
            engine="deepspeed",
            num_parameters=sum(self._sizes().values()),
            num_critic_parameters=0 if self._critic is None else self._critic.num_parameters,
            dp_size=self.ranks.dp_size,
        )

    def _sizes(self) -> dict[str, int]:
        return {name: num_elements(p) for name, p in self._parameters().items()}


def _reference_is_sharded(config: Config) -> str:
    return (
        "trainer.zero_stage: 3 shards the reference over several ranks, and recipe "
        f"{config.recipe.name}, as it is set, makes advantages of what the reference says, which a "
        "rank asks for its own rows; use 2, or recipe.kl_coef (the KL in the loss)"
    )
