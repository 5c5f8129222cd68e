"""An endpoint that refuses every prompt but canaries ends the run, and so its resume."""

from pathlib import Path

import orjson
import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.journal.reading import read_batch
from easyrl.ledger.verify import verify
from easyrl.schema import NEEDS_CHANGE
from tests.end_to_end.proxy import GENERATE, Proxy, reply
from tests.end_to_end.trainer_run import start_ranks, trainer_command

pytestmark = pytest.mark.runs

NUM_PROMPTS, BATCH, NUM_GENERATIONS, PROMPT_TOKENS, MAX_TOKENS = 40, 8, 2, 12, 16


class Refusing(Proxy):
    """Answers the first batch, and canaries, which are short."""

    num_rollouts = 0

    async def answer(self, request, body):
        if request.path != GENERATE:
            return None
        if orjson.loads(body)["sampling_params"]["max_tokens"] < MAX_TOKENS:
            return None
        self.num_rollouts += 1
        if self.num_rollouts <= BATCH * NUM_GENERATIONS:
            return None
        return reply({"error": {"message": "no \x1b[31mrollouts today"}}, 400)


def run_two_ranks(command: list[str], log: Path) -> tuple[list[int], str]:
    """Their exit statuses and what they said."""
    ranks = start_ranks(command, log, num_ranks=2)
    try:
        return [process.wait(120) for process in ranks], log.read_text()
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_too_many_refused_prompts_stop_the_run_and_its_resume(served, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    run_dir = tmp_path / "run"
    proxy = Refusing(served.url)
    command = trainer_command(
        run_dir, served.model, prompts, [proxy.url],
        f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}",
        f"rollout.max_tokens={MAX_TOKENS}", "checkpoint.every_steps=0",
        "inference.health_interval_s=0.5",
    )  # fmt: skip
    try:
        statuses, said = run_two_ranks(command, tmp_path / "log")
        assert statuses == [NEEDS_CHANGE] * 2, said[-3000:]
        assert "data.max_excluded: " in said and "step 1 is saved" in said
        assert "no [31mrollouts today" in said and f"{prompts}:" in said
        asked = proxy.num_rollouts
        statuses, said = run_two_ranks([*command, "--resume"], tmp_path / "log-resumed")
        assert statuses == [NEEDS_CHANGE] * 2, said[-3000:]
        assert proxy.num_rollouts == asked
    finally:
        proxy.close()
    verdict = verify(run_dir)
    assert verdict.on_policy and verdict.batches == 1, verdict
    kept = [g.excluded for g in read_batch(run_dir / "journal", 1) if g.excluded is not None]
    assert len(kept) >= 6 and {each.kind for each in kept} == {"refused"}
