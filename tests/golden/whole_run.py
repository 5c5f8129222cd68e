"""A whole strict run, small, as users start it: from the command line, with embedded servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.determinism import ARITHMETIC_FILE, reproducible
from tests.end_to_end.trainer_run import run_trainer, trainer_command
from tests.golden.comparison import sketch

KEPT = Path(__file__).with_name("whole_run.json")
BATCH, NUM_BATCHES, PROMPT_TOKENS = 4, 3, 12
# Of a tensor's norm, on another processor. Measured (see comparison.py): 4e-6, because Adam makes
# the rounding of a small gradient as large as any other; the run moves matrices by 0.7.
WEIGHTS_TOLERANCE = 5e-5
SERVER = ["--batch-invariant", "--max-model-len", "160", "--dtype", "float32"]


class Inputs:
    """A model and its prompts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
        count = BATCH * NUM_BATCHES
        self.prompts = write_prompts(folder / "prompts.jsonl", count, PROMPT_TOKENS)


@contextmanager
def servers(model: Path, count: int) -> Iterator[list[EmbeddedServerProcess]]:
    """``count`` servers, started at once."""
    with ExitStack() as opened:
        started = [
            opened.enter_context(EmbeddedServerProcess(model, SERVER, wait=False))
            for _ in range(count)
        ]
        for server in started:
            server.wait_until_healthy()
        yield started


def strict_command(
    run_dir: Path, inputs: Inputs, urls: Sequence[str], *options: str, num_ranks: int = 0
) -> list[str]:
    settings = [
        *("run.determinism=strict", "data.shuffle=true", f"trainer.batch_size={BATCH}"),
        *("rollout.num_generations=4", "rollout.max_tokens=12"),
        *("trainer.max_tokens_per_micro_batch=100", "trainer.learning_rate=1e-2"),
        *("recipe.kl_coef=0.01", "checkpoint.export_at_end=true"),
        *("inference.health_interval_s=0.5", "run.name=strict"),
    ]
    options = (*settings, *options)
    return trainer_command(
        run_dir, inputs.model, inputs.prompts, urls, *options, num_ranks=num_ranks
    )


def train(run_dir: Path, inputs: Inputs, urls: Sequence[str], *options: str) -> None:
    """Runs it to its end."""
    run_trainer(strict_command(run_dir, inputs, urls, *options), timeout_s=120)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What every such run has to come to, to the bit where it computes alike.

    Elsewhere ``assert_as_kept`` wants the same tokens to be sampled. One of them would be another
    where its draw falls within rounding, about 1e-7, of the border to the next: these are some 450.
    """
    weights = blake3()
    tensors: dict[str, Tensor] = {}
    for file in sorted((run_dir / "model").glob("*.safetensors")):
        weights.update(file.read_bytes())
        tensors |= load_file(file)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return {
        "arithmetic": (run_dir / ARITHMETIC_FILE).read_text().strip(),
        "steps": [reproducible(step) for step in metrics],
        "weights": weights.hexdigest(),
        "sketch": sketch(tensors.items()),
    }


def keep(folder: Path) -> None:
    """Writes down what the run comes to now."""
    inputs = Inputs(folder)
    with servers(inputs.model, 1) as (server,):
        train(folder / "run", inputs, [server.url])
    KEPT.write_text(json.dumps(outcome(folder / "run"), indent=1) + "\n")
