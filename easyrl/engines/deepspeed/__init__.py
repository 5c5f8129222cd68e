"""DeepSpeed as a ``TrainEngine``: ZeRO 0 to 3, offload, one late denominator per optimizer step."""
