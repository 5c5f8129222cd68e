"""Training overlaps generation in async mode and follows it in sync mode: the run's own event log.

A slow endpoint holds back one response. In async mode it is released only after the log shows that
training has begun and that the trainer, with nothing else to do, has looked ahead at the others of
its group, so a trainer that waited for the whole batch or did nothing would never finish; in sync
mode it is released once the trainer waits and all other responses are scored.
"""

import time
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.conftest import ServedModel
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import event_names, start_trainer, trainer_command

NUM_PROMPTS, NUM_GENERATIONS, PROMPT_TOKENS = 4, 4, 12


def wait_for(condition, process, log, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def run_gated(mode: str, run_dir: Path, served: ServedModel) -> None:
    """One batch; a response to the last prompt is held back until the moment ``mode`` allows."""
    prompts = write_prompts(run_dir.parent / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    seen: list[list[int]] = []  # prompts in the order in which they were dispatched

    def held(token_ids: list[int]) -> bool:
        if len(token_ids) != PROMPT_TOKENS:  # a canary
            return False
        is_first = token_ids not in seen
        if is_first:
            seen.append(token_ids)
        return is_first and len(seen) == NUM_PROMPTS

    proxy = GatedProxy(served.url, held)
    options = [
        *(f"run.mode={mode}", f"trainer.batch_size={NUM_PROMPTS}"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", "rollout.max_tokens=24"),
        "recipe.kl_coef=0.1",  # there is a reference to look ahead with
    ]
    log = run_dir.with_suffix(".log")
    command = trainer_command(run_dir, served.model, prompts, [proxy.url], *options)
    process = start_trainer(command, log)
    others = NUM_PROMPTS * NUM_GENERATIONS - 1
    try:
        wait_for(lambda: proxy.num_waiting == 1, process, log)
        if mode == "async":
            for event in ("micro_batch_end", "look_ahead_end"):
                wait_for(lambda event=event: event in event_names(run_dir), process, log)
        else:
            wait_for(lambda: "waiting_for_batch" in event_names(run_dir), process, log)
            wait_for(lambda: event_names(run_dir).count("response_scored") == others, process, log)
        proxy.open_gate()
        assert process.wait(60) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
        proxy.close()


@pytest.fixture(scope="module")
def runs(served, tmp_path_factory) -> dict[str, Path]:
    folders = {mode: tmp_path_factory.mktemp("order") / mode for mode in ("async", "sync")}
    for mode, folder in folders.items():
        run_gated(mode, folder, served)
    return folders


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_first_backward_and_last_response(mode, runs):
    order = event_names(runs[mode])
    first_backward = order.index("micro_batch_start")
    last_response = len(order) - 1 - order[::-1].index("response_scored")
    assert order.count("response_scored") == NUM_PROMPTS * NUM_GENERATIONS
    assert (first_backward < last_response) == (mode == "async")
    assert ("waiting_for_batch" in order) == (mode == "sync")
    ahead = read_metrics(runs[mode] / "metrics.jsonl")[1]["batch/look_ahead_tokens"]
    assert (ahead > 0) == ("look_ahead_end" in order) == (mode == "async")


def test_both_modes_take_the_same_step(runs):
    asynchronous, synchronous = (read_metrics(runs[m] / "metrics.jsonl")[1] for m in runs)
    assert asynchronous["grad_norm"] > 0
    # No figure over the computed tokens: which group without signal is kept is a matter of arrival.
    for name in ("grad_norm", "loss", "reward/mean", "tokens/response"):
        # to the rounding of fp32 sums, whose order differs
        assert asynchronous[name] == pytest.approx(synchronous[name], rel=1e-5, abs=1e-7), name
