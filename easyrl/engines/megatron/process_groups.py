"""megatron-core's process groups for a layout."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from easyrl.engines.megatron.cpu import redirect_cuda
from easyrl.engines.megatron.layout import Layout, Place


def start_model_parallel(layout: Layout) -> Place:
    """This process's place, once ``torch.distributed`` runs. Collective.

    A process has one layout at a time: megatron-core keeps its groups in globals.
    """
    assert layout.world_size == dist.get_world_size(), layout
    redirect_cuda()
    if not parallel_state.model_parallel_is_initialized():  # once in a process
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        )
    made = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )
    assert made == (layout.tensor, layout.pipeline, layout.chunks), f"{made} are there: {layout}"
    # There is no dropout; the tracker that changes nothing needs no seed and no CUDA.
    initialize_rng_tracker(inference_rng_tracker=True)
    return layout.place(dist.get_rank())
