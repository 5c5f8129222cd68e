"""Some batches of a run again, from its journal, in a process of its own.

Arguments: files of the job, a ``BoundJob`` as JSON, and of the answer, a list of ``BatchCost``.
First the recorded micro-batches are trained, with no server. Then each batch's prompts are answered
with its seeds by the weights that it was made by, with no trainer: this process only asks, on the
other core. Each batch is answered with each concurrency, so that one slow spell decides nothing.
One of them is answered again and again while another process trains, for the ``Slowdown``.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from transformers import AutoModelForCausalLM

from benchmarks.parts.end_to_end.bound import BatchCost, BoundJob, Generated
from benchmarks.parts.end_to_end.bound_training import (
    BatchTraining,
    TrainingJob,
    recorded,
    train_batches,
)
from benchmarks.parts.end_to_end.ideal_schedules import Group, Slowdown, as_they_arrive
from easyrl.build.data import load_trained
from easyrl.build.inference import open_inference, open_scoring
from easyrl.build.servers import StartedServers
from easyrl.build.tokenizer import load_tokenizer
from easyrl.build.vocabulary import policy_vocabulary
from easyrl.config import Config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.schema import Prompt, RolloutGroup

LONG_ENOUGH_S = 3.0  # of one concurrency: a batch that takes less is repeated, and the best counts

Generate = Callable[[], Generated]


@contextmanager
def generation(
    server: ServerProcess,
    config: Config,
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    inflight: int,
) -> Iterator[Generate]:
    """Gives what generates the groups of ``prompts``, from the first request to the last response.

    Those of ``others`` come before: what fetches and scores is started and warm then. With
    ``inflight`` requests at a time.
    """
    limited = config.inference.model_copy(update={"max_inflight": inflight})
    config = config.model_copy(update={"inference": limited})
    complete: dict[int, float] = {}  # time.monotonic() of the last response, by prompt

    def record(event: str, **fields: Any) -> None:
        if event == "response_scored":
            complete[fields["index"]] = time.monotonic()

    with ExitStack() as opened:
        inference = open_inference(
            config,
            opened,
            open_scoring(config, opened),
            vocabulary=policy_vocabulary(config, load_tokenizer(config)),
            servers=StartedServers([server.url], {}),
            record=record,
        )
        rollouts = inference.rollouts()
        list(rollouts.produce(others, None))
        advantage_only = load_recipe(config).advantage_only

        def generate() -> Generated:
            _forget_prompts(server)
            start, used = time.monotonic(), _processor_s(server)
            groups = list(rollouts.produce(prompts, None))
            used = _processor_s(server) - used
            tokens = [len(c.token_ids) for group in groups for c in group.completions]
            ended = [
                Group(complete[g.prompt.index] - start, row_tokens(g, advantage_only))
                for g in groups
            ]
            seconds = max(group.complete_s for group in ended)
            return Generated(seconds, used, sum(tokens) / len(tokens), ended)

        yield generate


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


def _save(
    config: Config, job: BoundJob, folder: Path, closed: int, engine: DeepSpeedEngine
) -> None:
    """The weights behind ``closed`` batches, if they make a batch of the job."""
    if closed not in job.batches:
        return
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
    tensors = {name: tensor.detach().cpu() for name, tensor in engine.named_weights()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, "tied at most"
    model.save_pretrained(_weights(folder, closed))
    load_tokenizer(config).save_pretrained(_weights(folder, closed))


def _weights(folder: Path, v: int) -> Path:
    return folder / f"bound-model-{v}"


def measure(job: BoundJob) -> list[BatchCost]:
    """The training of all batches, then the generation of each."""
    run, config = recorded(Path(job.run_dir))
    cpus = usable_cpus()
    folder = Path(job.folder)
    for v in job.batches:
        shutil.rmtree(_weights(folder, v), ignore_errors=True)
    pin_process(0, cpus[:1])
    trained = train_batches(run, job.batches[-1], config, partial(_save, config, job, folder))
    by_index = {p.index: p for p in load_trained(config, load_tokenizer(config))}
    generated: dict[int, dict[int, Generated]] = {}  # by batch and concurrency
    slowdown = Slowdown()
    for v in job.batches:
        prompts = [by_index[index] for _, index in (group.key for group in run.batch(v).groups)]
        others = [p for p in by_index.values() if p not in prompts][:4] or prompts[:4]
        pin_process(0, cpus)  # its children inherit it, and the server has a core of its own
        with _serve(_weights(folder, v), folder / "bound-server.log") as server:
            pin_process(0, cpus[:1])
            opened = partial(generation, server, config, prompts, others)
            generated[v] = {n: _best(opened(n)) for n in job.concurrencies}
            if v == job.batches[len(job.batches) // 2]:
                fastest = _fastest(generated[v])
                slowdown = _beside(job, opened(fastest), generated[v][fastest], trained)
        shutil.rmtree(_weights(folder, v))
    return [_cost(trained[v], generated[v], slowdown) for v in job.batches]


def _best(opened: AbstractContextManager[Generate]) -> Generated:
    """The fastest of some."""
    with opened as generate:
        found = [generate()]
        while sum(each.seconds for each in found) < LONG_ENOUGH_S:
            found.append(generate())
    return min(found, key=lambda each: each.seconds)


def _fastest(generated: Mapping[int, Generated]) -> int:
    return min(generated, key=lambda inflight: generated[inflight].seconds)


def _beside(
    job: BoundJob,
    opened: AbstractContextManager[Generate],
    alone: Generated,
    trained: Mapping[int, BatchTraining],
) -> Slowdown:
    """Generates again and again while another process trains the batches on this core.

    Of the batches that were generated while it trained the fastest counts, as of those alone.
    """
    source, target = (Path(job.folder) / f"bound-training-{name}.json" for name in ("job", "done"))
    source.write_bytes(msgspec.json.encode(TrainingJob(job.run_dir, job.batches[-1])))
    module = "benchmarks.parts.end_to_end.bound_training"
    found: list[tuple[float, Generated]] = []
    with opened as generate:
        process = subprocess.Popen([sys.executable, "-m", module, str(source), str(target)])
        try:
            while process.poll() is None:
                found.append((time.monotonic(), generate()))
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"{module} ended with status {process.returncode}")
    beside = msgspec.json.decode(target.read_bytes(), type=dict[int, BatchTraining])
    if len(beside) > 1:
        del beside[0]  # by a process that has not warmed up
    first_s, last_s = (
        min(t.start_s for t in beside.values()),
        max(t.end_s for t in beside.values()),
    )
    during = [g.seconds for start, g in found if first_s <= start and start + g.seconds <= last_s]
    return Slowdown(
        generation=min(during, default=alone.seconds) / alone.seconds,
        training=statistics.median(beside[v].seconds / trained[v].seconds for v in beside),
    )


def _cost(
    trained: BatchTraining, generated: Mapping[int, Generated], slowdown: Slowdown
) -> BatchCost:
    """With the concurrency that each measure is best with."""

    def ended(slowdown: Slowdown) -> float:
        each = generated.values()
        return min(as_they_arrive(g.groups, trained.seconds, slowdown) for g in each)

    fastest = generated[_fastest(generated)]
    return BatchCost(
        training_s=trained.seconds,
        training_processor_s=trained.processor_s,
        generation=fastest,
        as_they_arrive_s=ended(Slowdown()),
        slowdown=slowdown,
        as_they_arrive_beside_s=ended(slowdown),
    )


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    job = msgspec.json.decode(source.read_bytes(), type=BoundJob)
    target.write_bytes(msgspec.json.encode(measure(job)))


if __name__ == "__main__":
    main()
