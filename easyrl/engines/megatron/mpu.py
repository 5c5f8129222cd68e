"""The process groups of megatron-core as DeepSpeed asks for them (its *model parallel unit*)."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state


class ModelParallelUnit:
    """What ``deepspeed.initialize(mpu=...)`` takes: DeepSpeed shards and reduces over the
    data-parallel group, and adds norms up over tensor ranks and pipeline stages.

    ``get_model_parallel_rank`` is the tensor rank: by it DeepSpeed decides who counts a parameter
    that all tensor ranks have, and each stage has others.
    """

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.get_data_parallel_group())

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.get_data_parallel_group())

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_model_parallel_group()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.get_model_parallel_group())

    def get_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_world_size(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_pipeline_model_parallel_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()
