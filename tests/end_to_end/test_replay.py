"""A strict run with two updates per batch, replayed from its journal when its server is gone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.commands import replay
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.journal.batch import Journal
from easyrl.runtime.machine import free_port
from tests.end_to_end.trainer_run import ROOT, run_trainer, trainer_command, trainer_environment

pytestmark = pytest.mark.runs

BATCH, NUM_BATCHES, UPDATES = 4, 3, 2
PROMPT_TOKENS = 12
SERVER = ["--num-threads", "1", "--max-model-len", "160", "--batch-invariant"]
# Replays in one process, since half of a short one is imports; prints status and output of each.
REPLAYS = """
import contextlib, io, json, sys
from easyrl.commands import replay
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = replay.main(arguments)
    print("REPLAY", json.dumps([status, printed.getvalue()]), flush=True)
"""
# Likewise the attempts of one run; prints each one's error and the configurations that it left.
ATTEMPTS = """
import json, sys
from easyrl.config import ConfigError
from easyrl.config.file import load_config
from easyrl.train import run
file, attempts = json.loads(sys.argv[1])
for resume, overrides in enumerate(attempts):
    config, told = load_config(file, overrides), None
    try:
        run(config, resume=bool(resume))
    except ConfigError as error:
        told = str(error)
    left = {file.name: file.read_text() for file in config.run.output_dir.glob("config*")}
    print("ATTEMPT", json.dumps([told, left]), flush=True)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * NUM_BATCHES, PROMPT_TOKENS)
    with EmbeddedServerProcess(model, SERVER) as server:
        settings = [
            *("run.determinism=strict", "data.shuffle=true", "journal.keep=all"),
            *(f"trainer.batch_size={BATCH}", f"trainer.updates_per_batch={UPDATES}"),
            *("rollout.num_generations=4", "rollout.max_tokens=12"),
            *("trainer.learning_rate=1e-2", "trainer.lr_schedule=linear"),
            *("trainer.max_tokens_per_micro_batch=64", "checkpoint.every_steps=4"),
        ]
        command = trainer_command(folder / "run", model, prompts, [server.url], *settings)
        run_trainer(command)
        resume_with_other_settings(folder / "resumed", model, prompts, server.url)
    prompts.unlink()  # a replay needs neither dataset nor server
    return folder / "run"


def resume_with_other_settings(run_dir: Path, model: Path, prompts: Path, url: str) -> None:
    """An attempt of one step; a resume that is refused; one of another step and learning rate."""
    settings = [
        *("run.determinism=strict", "journal.keep=all", "checkpoint.every_steps=1"),
        *(f"trainer.batch_size={BATCH}", "rollout.num_generations=4", "rollout.max_tokens=12"),
    ]
    command = trainer_command(run_dir, model, prompts, [url], *settings)
    config, *overrides = command[command.index("easyrl.train") + 1 :]
    attempts = [
        ["trainer.learning_rate=1e-2", "trainer.max_steps=1"],
        ["trainer.learning_rate=5e-2", "trainer.max_steps=2", "run.seed=77"],
        ["trainer.learning_rate=2e-2", "trainer.max_steps=2"],
    ]
    asked = json.dumps([config, [[*overrides, *attempt] for attempt in attempts]])
    lines = run_trainer([sys.executable, "-c", ATTEMPTS, asked]).splitlines()
    kept = [json.loads(ln.removeprefix("ATTEMPT ")) for ln in lines if ln.startswith("ATTEMPT ")]
    (first_error, first), (second_error, second), (third_error, third) = kept
    assert first_error is None and first.keys() == {"config.yaml", "config-attempt0.yaml"}
    assert "--resume" in second_error and second == first  # and did not count
    assert third_error is None and third.keys() - first.keys() == {"config-attempt1.yaml"}
    assert third["config-attempt0.yaml"] == first["config.yaml"] == first["config-attempt0.yaml"]
    assert third["config.yaml"] == third["config-attempt1.yaml"] != first["config.yaml"]


@pytest.fixture(scope="module")
def replays(run_dir: Path) -> list[tuple[int, str]]:
    """Status and output of each."""
    before = contents(run_dir)
    asked = [
        [str(run_dir), "--step", "6"],
        [str(run_dir), "--step", "3"],
        [str(run_dir), "--step", "6", "recipe.advantage=group_mean"],
        [str(run_dir.with_name("resumed")), "--step", "1"],
        [str(run_dir.with_name("resumed")), "--step", "2"],
    ]
    result = subprocess.run(
        [sys.executable, "-c", REPLAYS, json.dumps(asked)],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert contents(run_dir) == before  # nothing of the run is touched
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPLAY ")]
    return [tuple(json.loads(line.removeprefix("REPLAY "))) for line in lines]


@pytest.mark.slow
def test_two_ranks_are_replayed_on_two(tmp_path: Path) -> None:
    """Started as the run was; on one rank the difference is told, and nobody expects none."""
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2 * BATCH, PROMPT_TOKENS)
    with EmbeddedServerProcess(model, SERVER) as server:
        settings = ["run.determinism=strict", f"trainer.batch_size={BATCH}", "journal.keep=all"]
        settings += ["rollout.max_tokens=12", "trainer.zero_stage=2"]
        urls = [server.url]
        run_trainer(trainer_command(tmp_path / "run", model, prompts, urls, *settings, num_ranks=2))
    replayed = [str(tmp_path / "run"), "--step", "2"]
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed"))]
    launcher += ["--num_accelerators", "2", "--master_port", str(free_port())]
    printed = run_trainer([*launcher, "--module", "easyrl.commands.replay", *replayed])
    assert printed.count("equal to the bit:") == 1  # rank 0 alone speaks
    printed = run_trainer([sys.executable, "-m", "easyrl.commands.replay", *replayed])
    assert "trained on 2 ranks, replayed on 1" in printed


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_step_is_the_same_to_the_bit(replays: list[tuple[int, str]]) -> None:
    """Behind a checkpoint; metrics of both updates, and the weights that they came to."""
    status, printed = replays[0]
    assert status == 0, printed
    assert "step 6: 1 batch trained from the checkpoint of step 4\n" in printed
    assert "equal to the bit:" in printed and "and the weights behind them" in printed
    for name in ("loss", "grad_norm", "update1/loss", "update2/policy/ratio_max", "reward/mean"):
        assert f"\n{name} " in printed, printed


def test_a_step_before_every_checkpoint_begins_with_the_initial_model(
    replays: list[tuple[int, str]],
) -> None:
    status, printed = replays[1]  # the first update of the second batch: the batch is replayed
    assert status == 0, printed
    assert "step 4: 2 batches trained from the start\n" in printed
    assert "equal to the bit:" in printed


def test_other_settings_give_other_metrics(replays: list[tuple[int, str]]) -> None:
    status, printed = replays[2]
    assert status == 0, printed  # nobody expects the same
    assert "not equal:" in printed and "recipe.advantage=group_mean" in printed
    (loss,) = [line.split() for line in printed.splitlines() if line.startswith("loss ")]
    assert loss[1] != loss[2] and float(loss[3]) > 1e-3
    (reward,) = [line.split() for line in printed.splitlines() if line.startswith("reward/mean ")]
    assert reward[1] == reward[2] and len(reward) == 3  # the samples are the same


def test_each_step_has_the_settings_of_the_attempt_that_trained_it(
    replays: list[tuple[int, str]],
) -> None:
    """Before and behind a resume with another learning rate."""
    for (status, printed), rate in zip(replays[3:], ("0.01", "0.02"), strict=True):
        assert status == 0, printed
        assert "equal to the bit:" in printed and "and the weights behind them" in printed
        (line,) = [ln.split() for ln in printed.splitlines() if ln.startswith("learning_rate ")]
        assert line[1:] == [rate, rate]


def test_what_cannot_be_replayed_is_told(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any model is loaded: no process of its own."""

    def told(*arguments: str) -> str:
        assert replay.main(arguments) == 2
        return capsys.readouterr().err

    assert "the run has steps 1 to 6, 7 is not one" in told(str(run_dir), "--step", "7")
    assert "the run has steps 1 to 6, 0 is not one" in told(str(run_dir), "--step", "0")
    assert "has no config.yaml" in told(str(tmp_path), "--step", "1")
    assert "trainer.learning_rat" in told(str(run_dir), "--step", "1", "trainer.learning_rat=1")
    pruned = tmp_path / "pruned"
    shutil.copytree(run_dir, pruned)
    Journal(pruned / "journal", 0, 0, "batch").prune(before_v=2)
    message = told(str(pruned), "--step", "2")
    assert "batch 0" in message and "the journal goes back to step 5" in message
    assert "journal.keep=all" in message
