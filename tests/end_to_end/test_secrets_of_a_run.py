"""A whole run with keys everywhere: none is in what it prints or leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.config.file import load_config
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from tests.end_to_end.trainer_run import run_to_end, trainer_command

pytestmark = pytest.mark.runs

REWARD = """
def reward_func(prompt, texts, token_ids, judge_key, note, hf_token):
    assert (judge_key, note, hf_token) == ("MARKED-judge", "Bearer MARKED-judge", "MARKED-plain")
    return [float(len(ids)) for ids in token_ids]
"""
KWARGS = (
    "{judge_key: '${oc.env:JUDGE_KEY}', note: 'Bearer ${oc.env:JUDGE_KEY}', hf_token: MARKED-plain}"
)
VARIABLES = {"JUDGE_KEY": "MARKED-judge", "SERVER_KEY": "MARKED-server"}


def test_no_key_is_in_what_a_run_prints_or_leaves(tmp_path: Path, monkeypatch) -> None:
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2, 12)
    (tmp_path / "reward.py").write_text(REWARD)
    server_options = ["--num-threads", "1", "--max-model-len", "64"]
    with EmbeddedServerProcess(
        model, server_options, api_key=VARIABLES["SERVER_KEY"], log=tmp_path / "server.log"
    ) as server:
        entry = f"{{url: '{server.url}', api_key_env: SERVER_KEY}}"
        run_dir = tmp_path / "run"
        command = trainer_command(
            *(run_dir, model, prompts, [entry], "run.trackers=[tensorboard]", "run.console=true"),
            f"rewards=[{{file: {tmp_path / 'reward.py'}, kwargs: {KWARGS}}}]",
            *("trainer.batch_size=2", "rollout.num_generations=2", "rollout.max_tokens=8"),
        )
        ended = run_to_end(command, **VARIABLES)
        refused = run_to_end([*command[:3], str(run_dir / "config.yaml"), "--resume"], **VARIABLES)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "rewards[0].kwargs.hf_token: is a secret in plain text" in ended.stdout
    assert refused.returncode == 2
    assert "rewards[0].kwargs.hf_token: was a secret in plain text" in refused.stdout
    left = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "config-attempt0.yaml", "certificate.jsonl", "events-rank0.jsonl"} <= {
        path.name for path in left
    }
    shown = {str(path): path.read_bytes() for path in [*left, tmp_path / "server.log"]}
    shown |= {"printed": (ended.stdout + refused.stdout).encode()}
    assert [name for name, content in shown.items() if b"MARKED" in content] == []

    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    again = load_config(run_dir / "config.yaml", ["rewards[0].kwargs.hf_token=MARKED-plain"])
    (endpoint,) = again.inference.endpoints
    assert (endpoint.url, endpoint.api_key_env) == (server.url, "SERVER_KEY")
    assert again.rewards[0].kwargs["note"] == "Bearer MARKED-judge"
