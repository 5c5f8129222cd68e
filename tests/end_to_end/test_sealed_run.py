"""A sealed run: its last line is what ``easyrl verify`` compares, its key is needed to go on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.parts.random_model import write_prompts
from easyrl.__main__ import command_line
from easyrl.ledger.certificate.chain import ChainReader
from easyrl.ledger.certificate.records import BatchRecord
from tests.end_to_end.trainer_run import ROOT, run_trainer, trainer_command, trainer_environment


@pytest.mark.runs
def test_the_last_line_and_the_key_are_what_a_verdict_rests_on(served, tmp_path: Path) -> None:
    run_dir, key, prompts = tmp_path / "run", tmp_path / "key", tmp_path / "prompts.jsonl"
    write_prompts(prompts, 8, num_tokens=12)
    key.write_text("5ea1" * 16)
    (tmp_path / "weights").mkdir()
    settings = ["trainer.batch_size=2", "rollout.num_generations=2", "rollout.max_tokens=6"]
    settings += ["trainer.max_steps=2", "trainer.learning_rate=1e-3", "checkpoint.every_steps=1"]
    settings += [f"weight_sync.directory={tmp_path / 'weights'}"]
    command = trainer_command(run_dir, served.model, prompts, [served.url], *settings)
    said, chain, file = run_trainer([*command, "--seal", str(key)]).splitlines()[-1].split()
    assert (said, Path(file)) == ("certificate", run_dir / "certificate.jsonl")

    def verify(*options: str):
        return CliRunner().invoke(command_line(), ["verify", str(run_dir), *options])

    good = verify("--seal", str(key), "--chain", chain)
    assert good.exit_code == 0, good.stdout
    assert "weights: 2 answers to a nonce" in good.stdout and "seals checked" in good.stdout
    lines = [r for _, r in ChainReader(run_dir / "certificate.jsonl") if isinstance(r, BatchRecord)]
    proofs = [line.confirmations[0].proof for line in lines]
    assert len({proof.nonce for proof in proofs}) == len({p.answers for p in proofs}) == 2
    assert all(proof.whole for proof in proofs)

    refused = subprocess.run(
        [*command, "trainer.max_steps=3", "--resume"],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and "the run is sealed: go on with --seal" in refused.stderr
    assert "Traceback" not in refused.stderr and "certificate " not in refused.stdout
    assert verify("--seal", str(key), "--chain", chain).exit_code == 0
