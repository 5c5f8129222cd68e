"""Section ``parallel``: how many devices share one copy of the model, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from easyrl.config.base import Section
from easyrl.config.critic import CriticConfig
from easyrl.config.model import ModelConfig
from easyrl.config.trainer import TrainerConfig
from easyrl.config.weight_sync import WeightSyncConfig

Schedule = Literal["auto", "single", "flush"]


class ParallelConfig(Section):
    """Tensor and pipeline parallelism; with either the model is split by megatron-core.

    The processes are shared out: tensor · pipeline of them have one copy of the model, and there
    are as many data-parallel copies as that goes into the number of processes.
    """

    tensor: PositiveInt = 1  # ranks that share each layer's matrices
    sequence: bool = False  # they also share the tokens between the matrices (sequence parallelism)
    pipeline: PositiveInt = 1  # stages, each with consecutive layers
    chunks_per_stage: PositiveInt = 1  # of layers; more than one: interleaved 1F1B
    layers_per_stage: list[PositiveInt] | None = None  # by stage; default: as many in each
    schedule: Schedule = "auto"  # of micro-batches in a pipeline; single: one for all of an update,
    # which each enters as it comes; flush: one for each set that is ready together; auto: flush for
    # several chunks of layers, else single
    context: PositiveInt = 1  # ranks that share a sequence: not built yet
    expert: PositiveInt = 1  # ranks that share a layer's experts: not built yet

    @property
    def ranks_per_model(self) -> int:
        """Processes that share one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def is_split(self) -> bool:
        """Whether a process has a part of the model only."""
        return self.ranks_per_model > 1

    @property
    def split_key(self) -> str:
        """The key that splits it, for messages."""
        return "parallel.tensor" if self.tensor > 1 else "parallel.pipeline"


def parallel_contradictions(
    parallel: ParallelConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    critic: CriticConfig,
    weight_sync: WeightSyncConfig,
    source: Literal["rollouts", "records"],
) -> list[str]:
    """What does not go together in the section and with others, with key and remedy."""
    problems = [
        f"parallel.{name}: {value} is not built yet; use 1, and {instead}"
        for name, value, instead in (
            ("context", parallel.context, "parallel.tensor with parallel.sequence for long rows"),
            ("expert", parallel.expert, "trainer.zero_stage=3 for a mixture of experts"),
        )
        if value > 1
    ]
    if parallel.sequence and parallel.tensor == 1:
        problems.append(
            "parallel.sequence: shares tokens between the ranks of parallel.tensor, which is 1; "
            "remove it, or raise parallel.tensor"
        )
    problems += _pipeline_contradictions(parallel)
    if parallel.is_split:
        problems += _refused_with_split(parallel, model, trainer, critic, weight_sync, source)
    return problems


def _pipeline_contradictions(parallel: ParallelConfig) -> list[str]:
    problems, stages = [], parallel.layers_per_stage
    if parallel.pipeline == 1 and parallel.chunks_per_stage > 1:
        problems.append(
            "parallel.chunks_per_stage: has no effect without a pipeline; remove it, or raise "
            "parallel.pipeline"
        )
    if parallel.schedule == "single" and parallel.chunks_per_stage > 1:
        problems.append(
            "parallel.schedule: single has no order for several chunks of layers in a stage; use "
            "flush, or remove parallel.chunks_per_stage"
        )
    if stages is None:
        return problems
    if parallel.pipeline == 1:
        problems.append(
            "parallel.layers_per_stage: has no effect without a pipeline; remove it, or raise "
            "parallel.pipeline"
        )
    elif len(stages) != parallel.pipeline:
        problems.append(
            f"parallel.layers_per_stage: {len(stages)} numbers for "
            f"parallel.pipeline={parallel.pipeline} stages; give one for each"
        )
    if parallel.chunks_per_stage > 1:
        problems.append(
            "parallel.layers_per_stage: the chunks of an interleaved schedule are of one size; "
            "remove it, or parallel.chunks_per_stage"
        )
    return problems


def _refused_with_split(
    parallel: ParallelConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    critic: CriticConfig,
    weight_sync: WeightSyncConfig,
    source: Literal["rollouts", "records"],
) -> list[str]:
    """What the Megatron engine does not do."""
    stage, without = trainer.zero_stage, f"remove it, or {parallel.split_key}"
    wrong = {
        "trainer.zero_stage: 0 sums no gradient norm over the ranks that share the model; use 1": (
            stage == 0
        ),
        f"trainer.zero_stage: {stage} does not go with parallel.pipeline, whose stages run "
        "backwards in an order of their own, which reductions and gathers of DeepSpeed do not "
        "follow; use 1": stage > 1 and parallel.pipeline > 1,
        "model.attention: own is not built for a model that is split; use auto": (
            model.attention == "own"
        ),
        f"trainer.optimizer: {trainer.optimizer} is not built for a model that is split; use "
        "adamw": trainer.optimizer != "adamw",
        f"trainer.offload_optimizer: is not built for a model that is split; {without}": (
            trainer.offload_optimizer
        ),
        f"trainer.offload_reference: is not built for a model that is split; {without}": (
            trainer.offload_reference
        ),
        "trainer.old_policy: lagged is not built for a model that is split; use auto": (
            trainer.old_policy == "lagged"
        ),
        f"model.lora: adapters are not built for a model that is split; {without}": (
            model.lora is not None
        ),
        f"model.fused_layers: {model.fused_layers} fuses Hugging Face's layers, which a model that "
        "is split does not have; use auto": model.fused_layers not in ("auto", "none"),
        f"critic.path: a critic is not built for a model that is split; {without}": (
            critic.path is not None
        ),
        f"weight_sync.transport: {weight_sync.transport} sends whole tensors from one rank, of "
        "which a model that is split has none; use auto, file or http": (
            weight_sync.transport in ("nccl", "hccl")
        ),
        f"{parallel.split_key}: a run on records is not built for a model that is split; remove "
        "it, and use trainer.zero_stage=3 for a large model": source == "records",
    }
    return [message for message, is_wrong in wrong.items() if is_wrong]
