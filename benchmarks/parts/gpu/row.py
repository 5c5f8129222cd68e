"""Measures one row of ``benchmarks.gpu`` in this process; the last line printed is its JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.parts.gpu.rows import GROUP, MODELS, TINY_GROUP, Row, rows_of
from easyrl.runtime.allocator import use_expandable_segments

NO_DEVICE = 3  # exit status


def measure(row: Row, *, smoke: bool) -> dict[str, Any]:
    import torch

    from benchmarks.parts.gpu.training import measure_engine, measure_head, measure_training
    from benchmarks.parts.gpu.weights import measure_weights

    device = torch.device("cpu" if smoke else "cuda")
    shape, group = MODELS[row.model], TINY_GROUP if smoke else GROUP
    if not smoke:
        torch.cuda.init()
    about = {
        "device": "cpu" if smoke else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if row.kind == "weights":
        return about | measure_weights(row, shape, device)
    if row.kind == "head":
        return about | measure_head(row, shape, group, device)
    if row.kind == "training":
        return about | measure_training(row, shape, group, device)
    try:
        return about | measure_engine(row, shape, group, device)
    except ImportError as error:
        return about | {"status": "skipped", "error": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    use_expandable_segments(os.environ)
    if not arguments.smoke:
        import torch

        if not torch.cuda.is_available():
            return NO_DEVICE
    row = rows_of(arguments.smoke)[arguments.name]
    print(json.dumps({"status": "done"} | measure(row, smoke=arguments.smoke)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
