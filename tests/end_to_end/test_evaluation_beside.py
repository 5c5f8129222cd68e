"""Evaluation beside its version's batch, in whole runs that a batch-invariant server answers."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.determinism import reproducible
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import run_to_end, run_trainer, start_trainer
from tests.golden.whole_run import NUM_BATCHES, PROMPT_TOKENS, Inputs, servers, strict_command
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FIGURES = ("eval/accuracy", "eval/pass@1", "eval/pass@4", "eval/excluded")
NUM_HELD_OUT, NUM_SAMPLES, HELD_OUT_TOKENS = 24, 4, PROMPT_TOKENS + 1
DIES_BEFORE_THE_LINE = """
import os, runpy, signal
from easyrl.ledger.certificate.writer import Certificate

close_batch = Certificate.close_batch

def close(self, account):
    if account.batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    close_batch(self, account)

Certificate.close_batch = close
runpy.run_module("easyrl.train", run_name="__main__")
"""


class World(NamedTuple):
    inputs: Inputs
    url: str
    options: list[str]
    whole: list[dict[str, float]]  # what a run that nobody disturbs tells of each step


def figures(metrics: dict[str, float], names: Sequence[str] = FIGURES) -> dict[str, float]:
    return {name: metrics[name] for name in names}


def steps(run_dir: Path) -> list[dict[str, float]]:
    return [reproducible(step) for step in read_metrics(run_dir / "metrics.jsonl")]


def alone(
    folder: Path, inputs: Inputs, url: str, options: list[str], names: Sequence[str] = FIGURES
) -> dict[str, float]:
    """Of what the endpoint serves now."""
    command = strict_command(folder / "unused", inputs, [url], *options)
    place = command.index("easyrl.train")
    said = run_trainer([sys.executable, "-m", "easyrl", "eval", *command[place + 1 :]])
    return figures(json.loads(said.splitlines()[-1]), names)


def prepare(folder: Path) -> tuple[Inputs, list[str]]:
    inputs = Inputs(folder)
    held_out = write_prompts(folder / "held-out.jsonl", NUM_HELD_OUT, HELD_OUT_TOKENS, seed=1)
    data = f"files: [{held_out}], apply_chat_template: false, max_prompt_tokens: 16"
    return inputs, [
        f"evaluation={{data: {{{data}}}, num_samples: {NUM_SAMPLES}, pass_at: [1, 4],"
        " every_steps: 1, sampling: {max_tokens: 12}}",
        "inference.max_inflight=16",  # as many as the batch asks for
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("evaluation")
    inputs, options = prepare(folder)
    with servers(inputs.model, 1) as (server,):
        run_trainer(strict_command(folder / "whole", inputs, [server.url], *options))
        yield World(inputs, server.url, options, steps(folder / "whole"))


def ended_in_the_second_wait(
    how: signal.Signals, world: World, run_dir: Path, num_tokens: int, num_requests: int
) -> int:
    """The status of a run that gets ``how`` while it waits for the second version's evaluation.

    Held are the held-out prompts of ``num_tokens``, behind their first ``num_requests``.
    """
    num_seen = 0

    def held(token_ids):
        nonlocal num_seen
        num_seen += len(token_ids) == num_tokens
        return len(token_ids) == num_tokens and num_seen > num_requests

    def waits():
        assert process.poll() is None, log.read_text()[-3000:]
        path = run_dir / "events-rank0.jsonl"
        events = read_events(path) if path.exists() else []
        return any(e["event"] == "evaluation_wait" and e["version"].endswith(":1") for e in events)

    log = run_dir.with_name("log")
    with closing(GatedProxy(world.url, held)) as proxy:
        command = strict_command(run_dir, world.inputs, [proxy.url], *world.options)
        process = start_trainer(command, log)
        try:
            wait_until(waits, 60)
            process.send_signal(how)
            return process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_version_is_evaluated_beside_its_batch_with_the_samples_it_has_alone(
    num_ranks, tmp_path
):
    inputs, options = prepare(tmp_path)
    run_dir = tmp_path / "run"
    with servers(inputs.model, 1) as (server,):
        before = alone(tmp_path, inputs, server.url, options)
        ranks = 0 if num_ranks == 1 else num_ranks
        run_trainer(strict_command(run_dir, inputs, [server.url], *options, num_ranks=ranks))
        after = alone(tmp_path, inputs, server.url, options)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(NUM_BATCHES + 1))
    assert figures(metrics[0]) == before and figures(metrics[-1]) == after
    assert len({tuple(figures(m).values()) for m in metrics}) > 1  # there is something to compare
    assert all(m["time/evaluation_wait_s"] >= 0 for m in metrics[:-1])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], "eval/accuracy" in m) for m in lines] == [
        *((step, is_late) for step in range(NUM_BATCHES) for is_late in (False, True)),
        (NUM_BATCHES, True),
    ]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_while_it_waits_for_an_evaluation_goes_on_with_the_same_numbers(
    how, world, tmp_path
):
    """In the second batch: its last step is not taken, so that a stop saves the first."""
    run_dir = tmp_path / "run"
    num_prompts = NUM_HELD_OUT * NUM_SAMPLES
    status = ended_in_the_second_wait(how, world, run_dir, HELD_OUT_TOKENS, num_prompts)
    assert status == (0 if how == signal.SIGTERM else -how)
    saved = ["step-1"] if how == signal.SIGTERM else []
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == saved
    command = strict_command(run_dir, world.inputs, [world.url], *world.options, "--resume")
    run_trainer(command)
    assert steps(run_dir) == world.whole


def test_a_run_that_is_killed_before_the_line_of_its_batch_makes_it_again(world, tmp_path):
    """Its steps are taken and its weights on their way, and nothing but the journal knows of it."""
    run_dir = tmp_path / "run"
    command = strict_command(run_dir, world.inputs, [world.url], *world.options)
    place = command.index("-m")
    killed = [*command[:place], "-c", DIES_BEFORE_THE_LINE, *command[place + 2 :]]
    assert run_to_end(killed).returncode == -signal.SIGKILL
    lines = [json.loads(line) for line in (run_dir / "certificate.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines if line["kind"] == "batch"] == [0]
    run_trainer([*command, "--resume"])
    assert steps(run_dir) == world.whole
    verify = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert verify.returncode == 0, verify.stdout


def test_named_sets_are_evaluated_resumed_and_told_of_under_their_version(tmp_path):
    """A run that is stopped while it waits for the second set repeats both."""
    inputs = Inputs(tmp_path)
    sets = {"short": (5, 2), "long": (4, 3)}  # prompts, samples of each
    of_sets = {
        name: write_prompts(tmp_path / f"{name}.jsonl", num, PROMPT_TOKENS + 1 + i, seed=1 + i)
        for i, (name, (num, _)) in enumerate(sets.items())
    }
    named = ", ".join(
        f"{name}: {{data: {{files: [{file}], apply_chat_template: false, max_prompt_tokens: 16}},"
        f" num_samples: {sets[name][1]}, pass_at: [1, {sets[name][1]}]}}"
        for name, file in of_sets.items()
    )
    options = [f"evaluation={{every_steps: 1, sampling: {{max_tokens: 12}}, {named}}}"]
    names = [
        f"eval/{name}/{metric}"
        for name, (_, samples) in sets.items()
        for metric in ("accuracy", f"avg@{samples}", "pass@1", f"pass@{samples}", "excluded")
    ]
    run_dir = tmp_path / "run"
    with servers(inputs.model, 1) as (server,):
        before = alone(tmp_path, inputs, server.url, options, names)
        run_trainer(strict_command(tmp_path / "whole", inputs, [server.url], *options))
        after = alone(tmp_path, inputs, server.url, options, names)
        world = World(inputs, server.url, options, steps(tmp_path / "whole"))
        num_requests = sets["long"][0] * sets["long"][1]
        status = ended_in_the_second_wait(
            signal.SIGTERM, world, run_dir, PROMPT_TOKENS + 2, num_requests
        )
        assert status == 0 and len(steps(run_dir)) < NUM_BATCHES
        run_trainer(strict_command(run_dir, inputs, [server.url], *options, "--resume"))
    whole = world.whole
    assert [step["step"] for step in whole] == list(range(NUM_BATCHES + 1))
    assert figures(whole[0], names) == before and figures(whole[-1], names) == after
    assert len({tuple(figures(step, names).values()) for step in whole}) > 1
    assert not any("eval/accuracy" in step for step in whole)
    assert steps(run_dir) == whole
