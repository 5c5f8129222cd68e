"""A policy that is split over devices by megatron-core, behind ``TrainEngine``."""

import warnings

# Of what it would do with packages that are not used here (Apex, Transformer Engine).
warnings.filterwarnings("ignore", module=r"megatron\.core")
