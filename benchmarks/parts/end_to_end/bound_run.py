"""Some batches of a run again, from its journal, in a process of its own.

Arguments: files of the job, a ``BoundJob`` as JSON, and of the answer, a list of ``BatchCost``.
First the recorded micro-batches are trained, with no server. Then each batch's prompts are answered
with its seeds by the weights that it was made by, with no trainer: this process only asks, on the
other core. Each batch is answered with each concurrency, so that one slow spell decides nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.end_to_end.bound import (
    BatchCost,
    BoundJob,
    Generated,
    Group,
    as_they_arrive,
)
from easyrl.build.data import load_trained
from easyrl.build.inference import open_inference, open_scoring
from easyrl.build.replay import replay_batch
from easyrl.build.servers import StartedServers
from easyrl.build.tokenizer import load_tokenizer
from easyrl.build.vocabulary import policy_vocabulary
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.metrics.event_log import EventLog, read_events
from easyrl.recipes.loading import load_recipe, with_whole_recipe
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.schema import Prompt, RolloutGroup

LONG_ENOUGH_S = 3.0  # of one concurrency: a batch that takes less is repeated, and the best counts


def train_batches(
    run: RecordedRun, batches: Sequence[int], config: Config, weights: Callable[[int], Path]
) -> dict[int, tuple[float, float]]:
    """Seconds of each batch's forward and backward, and of the processor for all of it.

    ``weights``: folders for what made each.
    """
    entered, left = {}, {}  # processor seconds so far, by closed batches

    def save(closed: int, engine: DeepSpeedEngine) -> None:
        entered[closed] = time.process_time()
        if closed in batches:
            model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
            tensors = {name: tensor.detach().cpu() for name, tensor in engine.named_weights()}
            missing, unknown = model.load_state_dict(tensors, strict=False)
            assert not unknown and set(missing) <= {"lm_head.weight"}, "tied at most"
            model.save_pretrained(weights(closed))
            load_tokenizer(config).save_pretrained(weights(closed))
        left[closed] = time.process_time()

    metrics_of = replay_batch(run, batches[-1], config, save).metrics_of
    seconds = {}
    for v in batches:
        metrics = metrics_of[run.batch(v).step]
        training_s = metrics["time/train_s"] + metrics["time/look_ahead_s"]
        seconds[v] = (training_s, entered[v + 1] - left[v])
    return seconds


def generate_batch(
    server: ServerProcess,
    config: Config,
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    log: Path,
) -> Generated:
    """The groups of ``prompts``, from the first request to the last response.

    Those of ``others`` come before them: what fetches and scores is started and warm then.
    """
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
        rollouts = inference.rollouts()
        list(rollouts.produce(others, None))
        _forget_prompts(server)
        start, used = time.monotonic(), _processor_s(server)
        groups = list(rollouts.produce(prompts, None))
        tokens = [len(c.token_ids) for group in groups for c in group.completions]
    used = _processor_s(server) - used
    complete: dict[int, float] = {}  # by prompt
    for event in read_events(log):
        if event["event"] == "response_scored":
            complete[event["index"]] = event["t"] - start  # the last one's
    advantage_only = load_recipe(config).advantage_only
    ended = [Group(complete[g.prompt.index], row_tokens(g, advantage_only)) for g in groups]
    return Generated(max(complete.values()), used, sum(tokens) / len(tokens), ended)


def row_tokens(group: RolloutGroup, advantage_only: bool) -> int:
    """Of its packed row; none of a group without signal, where that is all that is trained."""
    if advantage_only and np.ptp(group.rewards) == 0:
        return 0
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)


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


def measure(job: BoundJob) -> list[BatchCost]:
    """The training of all batches, then the generation of each."""
    run = RecordedRun(Path(job.run_dir))
    config = with_whole_recipe(load_config(run.config_file(0), (), to_look_back=True))
    cpus = usable_cpus()
    folder = Path(job.folder)

    def weights(v: int) -> Path:
        return folder / f"bound-model-{v}"

    for v in job.batches:
        shutil.rmtree(weights(v), ignore_errors=True)
    torch.set_num_threads(1)
    pin_process(0, cpus[:1])
    trained = train_batches(run, job.batches, config, weights)
    by_index = {p.index: p for p in load_trained(config, load_tokenizer(config))}
    costs: list[BatchCost] = []
    for v in job.batches:
        prompts = [by_index[index] for _, index in (group.key for group in run.batch(v).groups)]
        others = [p for p in by_index.values() if p not in prompts][:4] or prompts[:4]
        pin_process(0, cpus)  # its children inherit it, and the server has a core of its own
        with _serve(weights(v), folder / "bound-server.log") as server:
            pin_process(0, cpus[:1])
            generated = _generate(server, config, prompts, others, job.concurrencies, folder)
        fastest = min(generated, key=lambda inflight: generated[inflight].seconds)
        training_s = trained[v][0]
        ended = {n: as_they_arrive(each.groups, training_s) for n, each in generated.items()}
        first = min(ended, key=ended.__getitem__)
        costs.append(BatchCost(*trained[v], generated[fastest], ended[first]))
        shutil.rmtree(weights(v))
    return costs


def _generate(
    server: ServerProcess,
    config: Config,
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    concurrencies: Sequence[int],
    folder: Path,
) -> dict[int, Generated]:
    """By concurrency."""
    log = folder / "bound-events.jsonl"
    found: dict[int, Generated] = {}
    for inflight in concurrencies:
        limited = config.inference.model_copy(update={"max_inflight": inflight})
        asked = config.model_copy(update={"inference": limited})
        spent_s = 0.0
        while spent_s < LONG_ENOUGH_S:
            generated = generate_batch(server, asked, prompts, others, log)
            spent_s += generated.seconds
            found[inflight] = min(
                found.get(inflight, generated), generated, key=lambda each: each.seconds
            )
    return found


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    job = msgspec.json.decode(source.read_bytes(), type=BoundJob)
    target.write_bytes(msgspec.json.encode(measure(job)))


if __name__ == "__main__":
    main()
