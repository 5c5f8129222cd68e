"""The report of a run that has taken place, in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.parts.browser import missing_browser, opened_page
from benchmarks.parts.random_model import write_prompts
from easyrl.__main__ import command_line
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser())),
]

STEPS, BATCH, SAMPLES = 3, 4, 4


def test_the_report_of_a_real_run_opens_and_switches_batches(served: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH * STEPS, 12)
    options = [f"trainer.batch_size={BATCH}", f"rollout.num_generations={SAMPLES}"]
    options += ["rollout.max_tokens=40", "recipe.kl_coef=0.01"]
    run_trainer(trainer_command(run_dir, served.model, prompts, [served.url], *options))
    result = CliRunner().invoke(command_line(), ["report", str(run_dir)])
    assert result.exit_code == 0, result.output
    with opened_page(run_dir / "report.html") as page:
        page.wait_for_batch()
        assert page.batch() == str(STEPS - 1)
        page.switch("previous")
        assert page.batch() == str(STEPS - 2)
        page.samples_ms()  # once their text is there
        assert page.text_of("#samples .token") and page.text_of(".facts b")
        assert page.problems() == []
