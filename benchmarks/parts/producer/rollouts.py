"""EasyRL's side of ``benchmarks.producer``: a producer wired by the same code as a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.parts.producer.load import MAX_INFLIGHT, VERSION, VOCABULARY, Load
from easyrl.build.inference import Inference, open_inference, open_scoring
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.metrics.event_log import EventLog
from easyrl.schema import Prompt

REWARD = Path(__file__).parents[2] / "parity_reward.py"


@contextlib.contextmanager
def producer(
    load: Load, urls: Sequence[str], folder: Path, *, max_inflight: int = MAX_INFLIGHT
) -> Iterator[tuple[Inference, RolloutGenerator]]:
    """Fetcher, worker, loop thread, pool, scorer, event log; all endpoints confirmed."""
    config = _config(load, urls, folder, max_inflight)
    with ExitStack() as opened:
        events = EventLog(folder / "events.jsonl")
        opened.callback(events.close)
        inference = open_inference(
            config,
            opened,
            open_scoring(config, opened),
            vocabulary=Vocabulary(VOCABULARY),
            record=events.record,
        )
        inference.thread.run(_confirm(inference))
        yield inference, inference.rollouts()


def prompts(load: Load) -> list[Prompt]:
    return [
        Prompt(index, load.prompt(index), text="", answer="") for index in range(load.num_groups)
    ]


def run_easyrl(load: Load, inference: Inference, rollouts: RolloutGenerator) -> int:
    """All groups at once. Returns the number of tokens."""
    stream = rollouts.produce(prompts(load), VERSION)
    total = 0
    for group in stream:
        assert len(group.completions) == len(group.scores) == load.num_samples
        total += sum(len(completion.token_ids) for completion in group.completions)
    return total


async def _confirm(inference: Inference) -> None:
    for endpoint in inference.pool.endpoints:
        inference.pool.confirm(endpoint, VERSION)


def _config(load: Load, urls: Sequence[str], folder: Path, max_inflight: int) -> Config:
    _write_tokenizer(folder / "tokenizer.json")
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"files": [str(folder / "none.jsonl")]},
            "rollout": {
                "num_generations": load.num_samples,
                "max_tokens": 2 * load.num_tokens,
                "queue_size": load.num_groups,
            },
            "inference": {"endpoints": list(urls), "max_inflight": max_inflight},
            "rewards": [{"file": str(REWARD)}],
            "scoring": {"num_workers": 1},
        }
    )


def _write_tokenizer(path: Path) -> None:
    """A word per token id."""
    vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))


def wait_until_warm(load: Load, inference: Inference, rollouts: RolloutGenerator) -> None:
    """Processes are started, code is loaded, connections are made."""
    small = Load(64, load.num_samples, load.num_prompt_tokens, load.num_tokens, load.latency_s)
    run_easyrl(small, inference, rollouts)
    time.sleep(0.1)
