"""A run as a Ray job: whole nodes are reserved, each runs the same scripts as without Ray.

    ray job submit --working-dir . -- python configs/launch/ray_job.py \\
        --train-nodes 1 --infer-nodes 1 configs/qwen3_8b_16_devices.yaml models/Qwen3-8B

Paths are below the job's folder unless absolute; ``run.output_dir`` has to be on a disk that all
training nodes share. Ray places and ends processes, it carries no data. Not run: Ray was not
installed where this was written.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

DEVICES = 8  # of a node


def run(command: Sequence[str]) -> int:
    """The command's exit status; it is ended with the task."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--train-nodes", type=int, default=1)
    parser.add_argument("--infer-nodes", type=int, default=1)
    parser.add_argument("--devices-per-server", type=int, default=1)
    parser.add_argument("--resource", default="GPU", help="Ascend: NPU")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    num_nodes = arguments.train_nodes + arguments.infer_nodes
    nodes = placement_group([{arguments.resource: DEVICES, "CPU": 1}] * num_nodes, "STRICT_SPREAD")
    ray.get(nodes.ready())

    def on(node: int, function: Callable[..., Any]) -> Any:
        """``function`` as a task that has all devices of a reserved node."""
        where = PlacementGroupSchedulingStrategy(nodes, placement_group_bundle_index=node)
        is_gpu = arguments.resource == "GPU"
        own = {"num_gpus": DEVICES} if is_gpu else {"resources": {arguments.resource: DEVICES}}
        return ray.remote(num_cpus=1, max_retries=0, scheduling_strategy=where, **own)(function)

    addresses = ray.get([on(n, ray.util.get_node_ip_address).remote() for n in range(num_nodes)])
    train, infer = addresses[: arguments.train_nodes], addresses[arguments.train_nodes :]
    per_server = str(arguments.devices_per_server)
    urls = ["configs/launch/endpoint_urls.sh", per_server, *infer]
    endpoints = subprocess.run(urls, check=True, capture_output=True, text=True).stdout.strip()

    serve = ["configs/launch/serve.sh", arguments.model, per_server]
    served = [on(len(train) + n, run).remote(serve) for n in range(len(infer))]
    again = ["--resume"] if arguments.resume else []
    trained = [
        on(n, run).remote(
            [
                *("configs/launch/train_node.sh", str(n), str(len(train)), train[0], endpoints),
                *(arguments.config, *arguments.overrides, *again),
            ]
        )
        for n in range(len(train))
    ]
    statuses = ray.get(trained)
    for task in served:
        ray.cancel(task)
    return max(statuses, key=abs)  # 75: interrupted; the same with --resume goes on


if __name__ == "__main__":
    sys.exit(main())
