"""A run that is killed in the middle of a batch and resumed goes on where its checkpoint was.

Prompts, steps, schedule, optimizer and weights are those of a run that nobody disturbed. The
responses of batch 3 are held back at the endpoint, so that the first attempt certainly dies there.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.samples.folder import SampleFolder
from easyrl.schema import PolicyVersion
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import start_trainer, trainer_command

pytestmark = pytest.mark.runs
BATCH, STEPS, SAVED = 4, 4, 2
PROMPT_TOKENS, NUM_GENERATIONS = 12, 4


def start(
    run_dir: Path, model: Path, prompts: Path, url: str, *options: str
) -> subprocess.Popen[bytes]:
    settings = [
        *("data.shuffle=true", f"trainer.batch_size={BATCH}"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", "rollout.max_tokens=12"),
        *("trainer.learning_rate=1e-3", "trainer.lr_schedule=linear"),
        *(f"checkpoint.every_steps={SAVED}", "checkpoint.export_at_end=true"),
        f"weight_sync.directory={run_dir.parent / 'weights'}",
        *options,
    ]
    command = trainer_command(run_dir, model, prompts, [url], *settings)
    return start_trainer(command, run_dir.with_suffix(".log"))


def finish(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    try:
        assert process.wait(120) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def kill_in_batch_3(run_dir: Path, model: Path, prompts: Path, url: str) -> None:
    """A first attempt that ends when all responses of the batch behind the checkpoint are held.

    The checkpoint is copied beside that batch's requests.
    """
    saved = run_dir / "checkpoints" / f"step-{SAVED}"
    seen: set[tuple[int, ...]] = set()

    def held(token_ids: list[int]) -> bool:
        if len(token_ids) != PROMPT_TOKENS:  # a canary
            return False
        seen.add(tuple(token_ids))
        return len(seen) > SAVED * BATCH  # batches do not overlap

    proxy = GatedProxy(url, held)
    process = start(run_dir, model, prompts, proxy.url)
    try:
        deadline = time.monotonic() + 120
        while proxy.num_waiting < BATCH * NUM_GENERATIONS or not saved.is_dir():
            assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-3000:]
            assert time.monotonic() < deadline, "batch 3 was not asked for, or step 2 not saved"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.close()


@pytest.fixture(scope="module")
def runs(served, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * STEPS, PROMPT_TOKENS)
    whole, parts = folder / "whole", folder / "parts"
    (folder / "weights").mkdir()
    finish(start(whole, served.model, prompts, served.url), whole)
    kill_in_batch_3(parts, served.model, prompts, served.url)
    assert [p.name for p in (parts / "checkpoints").iterdir()] == [f"step-{SAVED}"]
    assert not (parts / "model").exists()
    finish(start(parts, served.model, prompts, served.url, "--resume"), parts)
    return whole, parts


def dispatched(run_dir: Path) -> list[tuple[str, list[int]]]:
    """Version and sorted indices of the finished prompts of each batch, as the log tells."""
    batches: list[tuple[str, list[int]]] = []
    for event in read_events(run_dir / "events-rank0.jsonl"):
        if event["event"] == "batch_dispatched":
            batches.append((event["version"], []))
        elif event["event"] == "group_ready":
            batches[-1][1].append(event["index"])
    return [(version, sorted(indices)) for version, indices in batches]


def test_the_second_attempt_takes_the_remaining_prompts(runs):
    expected, taken = ([indices for _, indices in dispatched(run)] for run in runs)
    # the third batch was asked for twice, and the first attempt had no response of it
    assert taken == [*expected[:SAVED], [], *expected[SAVED:]]
    assert sorted(sum(taken, [])) == list(range(BATCH * STEPS))


def test_attempts_do_not_share_versions(runs):
    _, parts = runs
    versions = [PolicyVersion.parse(version) for version, _ in dispatched(parts)]
    assert len({version.run for version in versions}) == 1
    assert [(version.attempt, version.v) for version in versions] == [
        *((0, v) for v in range(SAVED + 1)),
        *((1, v) for v in range(SAVED, STEPS)),
    ]
    assert json.loads((parts / "attempt.json").read_text())["attempt"] == 1


def test_metrics_go_on_as_if_nothing_had_happened(runs):
    whole, parts = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert [m["step"] for m in parts] == [m["step"] for m in whole] == list(range(STEPS + 1))
    rates = [m["learning_rate"] for m in parts[1:]]
    assert rates == [m["learning_rate"] for m in whole[1:]]
    assert rates[0] > rates[-1] > 0
    for ours, theirs in zip(parts[1:], whole[1:], strict=True):
        # seeds belong to prompts and weights agree to rounding, so the tokens are the same ones
        for name in (
            *("reward/mean", "tokens/response", "batch/denominator"),
            "batch/groups_without_signal",
        ):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name
        # The order of arrival changes the order of summation, and which of the groups without
        # signal is computed: no figure over the computed tokens is compared.
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_each_step_has_its_samples_once(runs):
    """The same prompts and responses as without the kill, whatever the order of arrival."""
    whole, parts = map(SampleFolder, runs)
    assert whole.steps() == parts.steps() == list(range(1, STEPS + 1))
    for step, (_, indices) in zip(whole.steps(), dispatched(runs[0]), strict=True):
        ours, theirs = whole.read(step), parts.read(step)
        assert sorted(group.index for group in ours) == indices  # a batch has as many as are kept
        for group, other in zip(ours, theirs, strict=True):
            assert (group.index, group.why) == (other.index, other.why)
            assert [r.token_ids for r in group.responses] == [r.token_ids for r in other.responses]
    attempts = [PolicyVersion.parse(parts.read(s)[0].version).attempt for s in parts.steps()]
    assert attempts == [0, 0, 1, 1]


def test_the_trained_weights_agree(runs, served):
    whole, parts = (load_file(run / "model" / "chunk-00000.safetensors") for run in runs)
    initial = load_file(served.model / "model.safetensors")
    for name, value in whole.items():
        moved = (value - initial[name]).norm()
        assert moved > 0
        # rounding is 4e-7 of the movement; a fifth without Adam's moments
        assert (parts[name] - value).norm() < 1e-4 * moved, name


def test_the_killed_attempt_leaves_no_weights_behind(runs):
    assert list((runs[0].parent / "weights").iterdir()) == []


def test_only_the_newest_checkpoints_stay(runs):
    for run in runs:
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-2", "step-4"]
