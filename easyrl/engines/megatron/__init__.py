"""Models split over devices by megatron-core: tensor, sequence and pipeline parallelism."""
