"""Whole strict runs of PPO: the same bits however groups arrive, and behind a kill.

What is compared are the final weights of both models, and the last checkpoint with their masters
and moments.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from aiohttp import web
from safetensors.torch import load_file

from easyrl.inference_client.transfer.artifact import tensor_checksum
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.determinism import reproducible
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.test_strict_mode import UnevenProxy
from tests.end_to_end.trainer_run import run_to_end, run_trainer, start_trainer
from tests.golden.whole_run import BATCH, PROMPT_TOKENS, Inputs, servers, strict_command

pytestmark = pytest.mark.slow

NUM_GENERATIONS, STEPS, SAVED = 4, 6, 2
SETTINGS = [
    *("critic.learning_rate=1e-2", "trainer.updates_per_batch=2", f"trainer.max_steps={STEPS}"),
    *(f"checkpoint.every_steps={SAVED}", "checkpoint.keep=3", "journal.keep=all"),
]
STREAMING = "recipe={name: ppo, whiten: false, kl_in_reward_coef: 0.05}"
WHITENED = "recipe={name: ppo}"


class WatchedProxy(UnevenProxy):
    """Writes down what each update of the weights had: hashes of the tensors' bytes, by name."""

    def __init__(self, upstream: str, seed: int) -> None:
        self.updates: list[dict[str, str]] = []
        super().__init__(upstream, seed)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path == "/start_weight_update":
            self.updates.append({})
        if request.path == "/update_weights":
            for chunk in orjson.loads(body)["update_info"]["chunks"]:
                self.updates[-1] |= chunk["checksums"]
        return await super().answer(request, body)


class Runs(NamedTuple):
    paths: dict[str, Path]
    updates: list[list[dict[str, str]]]  # that the asynchronous runs pushed, by endpoint


class Outcome(NamedTuple):
    steps: list[dict[str, Any]]
    files: dict[str, bytes]  # weights of policy and critic, and the last checkpoint's state


def outcome(run_dir: Path) -> Outcome:
    found = [
        *(run_dir / "model").glob("*.safetensors"),
        *(run_dir / "critic").glob("*.safetensors"),
        *(run_dir / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"),
    ]
    assert len(found) == 3
    files = {str(file.relative_to(run_dir)): file.read_bytes() for file in found}
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return Outcome([reproducible(step) for step in metrics], files)


def kill_in_batch_2(run_dir: Path, inputs: Inputs, url: str) -> None:
    """A first attempt that ends when the responses of the batch behind the checkpoint are held."""
    saved = run_dir / "checkpoints" / f"step-{SAVED}"
    seen: set[tuple[int, ...]] = set()

    def held(token_ids: list[int]) -> bool:
        if len(token_ids) != PROMPT_TOKENS:  # a canary
            return False
        seen.add(tuple(token_ids))
        return len(seen) > BATCH  # batches do not overlap

    proxy = GatedProxy(url, held)
    command = strict_command(run_dir, inputs, [proxy.url], *SETTINGS, STREAMING)
    process = start_trainer(command, run_dir.with_suffix(".log"))
    try:
        deadline = time.monotonic() + 120
        while proxy.num_waiting < BATCH * NUM_GENERATIONS or not saved.is_dir():
            assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-3000:]
            assert time.monotonic() < deadline, "batch 2 was not asked for, or step 2 not saved"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.close()


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("ppo")
    inputs = Inputs(folder)
    names = ("sync", "async", "parts", "whitened-sync", "whitened-async")
    paths = {name: folder / name for name in names}
    with ExitStack() as opened:
        direct = [server.url for server in opened.enter_context(servers(inputs.model, 2))]
        proxies = [WatchedProxy(url, seed) for seed, url in enumerate(direct)]
        for proxy in proxies:
            opened.callback(proxy.close)
        late = [proxy.url for proxy in proxies]
        for kind, recipe in (("", STREAMING), ("whitened-", WHITENED)):
            for mode, urls in (("sync", direct[:1]), ("async", late)):
                options = (*SETTINGS, recipe, f"run.mode={mode}")
                run_trainer(strict_command(paths[kind + mode], inputs, urls, *options), 120)
        kill_in_batch_2(paths["parts"], inputs, direct[0])
        options = (*SETTINGS, STREAMING, "--resume")
        run_trainer(strict_command(paths["parts"], inputs, direct[:1], *options), 120)
        yield Runs(paths, [proxy.updates for proxy in proxies])


@pytest.fixture
def runs(all_runs: Runs) -> dict[str, Path]:
    return all_runs.paths


def test_a_synchronous_run_and_one_of_late_groups_come_to_the_same_bits(
    runs: dict[str, Path],
) -> None:
    for kind in ("", "whitened-"):
        one, two = outcome(runs[f"{kind}sync"]), outcome(runs[f"{kind}async"])
        assert one.steps == two.steps
        assert one.files == two.files
        last = one.steps[-1]
        assert last["grad_norm"] > 0 and last["critic/grad_norm"] > 0
        assert last["policy/ratio"] != 1 and last["critic/loss"] > 0
        assert last["critic/learning_rate"] == 1e-2
        assert {"critic/explained_variance", "critic/value_mean", "critic/clip_fraction"} <= set(
            last
        )


def test_killed_and_resumed_policy_and_critic_are_those_of_an_undisturbed_run(
    runs: dict[str, Path],
) -> None:
    """Weights, masters and moments of both, to the bit."""
    whole, parts = outcome(runs["async"]), outcome(runs["parts"])
    assert whole.files == parts.files
    assert whole.steps[1:] == parts.steps[1:]
    assert json.loads((runs["parts"] / "attempt.json").read_text())["attempt"] == 1


def test_both_models_were_trained_and_the_critic_is_not_served(runs: dict[str, Path]) -> None:
    (policy,) = (runs["sync"] / "model").glob("*.safetensors")
    (critic,) = (runs["sync"] / "critic").glob("*.safetensors")
    before = load_file(runs["sync"].parent / "model" / "model.safetensors")
    one, two = load_file(policy), load_file(critic)
    assert one.keys() == before.keys() and "score.weight" not in one
    assert two["score.weight"].abs().max() > 0 and "lm_head.weight" not in two
    for name in two.keys() & before.keys():
        assert not two[name].equal(before[name]) and not two[name].equal(one[name])


def test_what_endpoints_are_sent_is_the_policy(all_runs: Runs) -> None:
    """Each update, a probe's too, has the policy's tensors by name and the critic's of none; the
    last version is the policy as it is exported, to the bit.
    """
    for name in ("async", "whitened-async"):
        policy, critic = (
            {tensor: tensor_checksum(weight) for tensor, weight in load_file(file).items()}
            for kind in ("model", "critic")
            for file in (all_runs.paths[name] / kind).glob("*.safetensors")
        )
        for updates in all_runs.updates:
            assert policy in updates
            for update in updates:
                assert update.keys() == policy.keys() and "score.weight" not in update
                assert not set(update.values()) & set(critic.values())


def test_verify_and_replay_go_on_working(runs: dict[str, Path]) -> None:
    """A replay comes to the same metrics of both models, and to the policy's weights."""
    run_dir = str(runs["async"])
    verified = run_to_end([sys.executable, "-m", "easyrl", "verify", run_dir])
    assert verified.returncode == 0, verified.stdout
    replayed = run_to_end([sys.executable, "-m", "easyrl", "replay", run_dir, "--step", "4"])
    assert replayed.returncode == 0, replayed.stdout
    assert "equal to the bit:" in replayed.stdout, replayed.stdout
    assert "\ncritic/explained_variance " in replayed.stdout


def test_a_run_begins_with_the_critic_of_another(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its first values are not zero."""
    inputs = Inputs(tmp_path / "inputs")
    with servers(inputs.model, 1) as (server,):
        options = (*SETTINGS, STREAMING, f"critic.path={runs['sync'] / 'critic'}")
        command = strict_command(tmp_path / "run", inputs, [server.url], *options)
        run_trainer([*command, "trainer.max_steps=2"], 120)
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    fresh = outcome(runs["sync"]).steps[1]
    assert fresh["update1/critic/value_mean"] == 0 != first["update1/critic/value_mean"]
