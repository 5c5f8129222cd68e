"""One batch of a run again, from its journal, in a process of its own.

Arguments: files of the request, a ``BoundRequest`` as JSON, and of the answer, a ``BatchCost``.
First the batch's recorded micro-batches are trained, with no server. Then its prompts are answered
with its seeds by the weights that it was made by, with no trainer: this process only asks, on the
other core.
"""

from __future__ import annotations

import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.end_to_end.bound import BatchCost, BoundRequest, Generated
from easyrl.build.data import load_data, load_tokenizer, policy_vocabulary
from easyrl.build.inference import open_inference, open_scoring
from easyrl.build.replay import replay_batch
from easyrl.build.servers import StartedServers
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.metrics.event_log import EventLog, read_events
from easyrl.recipes.loading import with_whole_recipe
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.schema import Prompt

LONG_ENOUGH_S = 3.0  # of one concurrency: a batch that takes less is repeated, and the best counts


def train_batch(run: RecordedRun, v: int, config: Config, weights: Path) -> tuple[float, float]:
    """Seconds of forward and backward of batch ``v``, and of the processor for all of it.

    ``weights``: receives what made it.
    """
    used = {}  # processor seconds so far, by closed batches

    def save(closed: int, engine: DeepSpeedEngine) -> None:
        used[closed] = time.process_time()
        if closed != v:
            return
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
        tensors = {name: tensor.detach().cpu() for name, tensor in engine.named_weights()}
        missing, unknown = model.load_state_dict(tensors, strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}, "tied at most"
        model.save_pretrained(weights)
        load_tokenizer(config).save_pretrained(weights)
        used[closed] = time.process_time()

    metrics = replay_batch(run, v, config, save).metrics
    return metrics["time/train_s"] + metrics["time/look_ahead_s"], used[v + 1] - used[v]


def generate_batch(
    server: ServerProcess, config: Config, prompts: Sequence[Prompt], log: Path
) -> Generated:
    """The groups of ``prompts``, from the first request to the last response."""
    log.unlink(missing_ok=True)
    with ExitStack() as opened:
        events = EventLog(log)
        opened.callback(events.close)
        inference = open_inference(
            config,
            opened,
            open_scoring(config, opened),
            vocabulary=policy_vocabulary(config, load_tokenizer(config)),
            servers=StartedServers([server.url], {}),
            record=events.record,
        )
        _forget_prompts(server)
        start, used = time.monotonic(), _processor_s(server)
        groups = list(inference.rollouts().produce(prompts, None))
        tokens = [len(c.token_ids) for group in groups for c in group.completions]
    ends = [event["t"] for event in read_events(log) if event["event"] == "response_scored"]
    used = _processor_s(server) - used
    return Generated(max(ends) - start, used, sum(tokens) / len(tokens))


def _processor_s(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


def _forget_prompts(server: ServerProcess) -> None:
    """What an earlier concurrency has computed of them."""
    request = urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(request).close()


@contextmanager
def _serve(weights: Path, log: Path) -> Iterator[ServerProcess]:
    """The embedded server on the last core, with one thread."""
    options = ["--num-threads", "1"]
    with EmbeddedServerProcess(weights, options, cpus=usable_cpus()[-1:], log=log) as server:
        yield server


def measure(request: BoundRequest) -> BatchCost:
    """The batch's training, then its generation with each concurrency."""
    run = RecordedRun(Path(request.run_dir))
    config = with_whole_recipe(load_config(run.config_file(0), (), to_look_back=True))
    cpus = usable_cpus()
    weights = Path(request.folder) / "bound-model"
    shutil.rmtree(weights, ignore_errors=True)
    torch.set_num_threads(1)
    pin_process(0, cpus[:1])
    training_s, training_processor_s = train_batch(run, request.batch, config, weights)
    by_index = {p.index: p for p in load_data(config.data, load_tokenizer(config), "data")}
    keys = [group.key for group in run.batch(request.batch).groups]
    prompts = [by_index[index] for _, index in keys]
    others = [p for p in by_index.values() if p not in prompts][:4] or prompts[:4]
    log = Path(request.folder) / "bound-events.jsonl"
    pin_process(0, cpus)  # its children inherit it, and the server has a core of its own
    generated: list[Generated] = []
    with _serve(weights, Path(request.folder) / "bound-server.log") as server:
        pin_process(0, cpus[:1])
        generate_batch(server, config, others, log)  # warms up
        for inflight in request.concurrencies:
            limited = config.inference.model_copy(update={"max_inflight": inflight})
            asked = config.model_copy(update={"inference": limited})
            spent_s = 0.0
            while spent_s < LONG_ENOUGH_S:
                generated.append(generate_batch(server, asked, prompts, log))
                spent_s += generated[-1].seconds
    fastest = min(generated, key=lambda each: each.seconds)
    return BatchCost(training_s, training_processor_s, fastest)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    request = msgspec.json.decode(source.read_bytes(), type=BoundRequest)
    target.write_bytes(msgspec.json.encode(measure(request)))


if __name__ == "__main__":
    main()
