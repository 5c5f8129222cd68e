"""A run whose journal holds, in its open batch, a token that its model does not have."""

import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.journal.codec import decode_record
from easyrl.ledger.journal.record_file import RecordWriter, read_records
from easyrl.ledger.verify import verify
from easyrl.metrics.event_log import read_events
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import event_names, run_trainer, start_trainer, trainer_command
from tests.waiting import wait_until

BATCH, PROMPT_TOKENS, NUM_GENERATIONS = 4, 12, 2


def poison_first(journal: Path) -> tuple[int, int]:
    """Its first group's first token becomes one of no vocabulary. Its epoch and index."""
    header, first, *others = [payload for _, payload in read_records(journal)]
    group = decode_record(first)
    tokens = np.frombuffer(group.completions[0].token_ids, "<i4").copy()
    tokens[0] = 10**6
    group.completions[0].token_ids = tokens.tobytes()
    journal.unlink()
    writer = RecordWriter(journal, durable=False)
    for payload in (header, msgspec.msgpack.encode(group), *others):
        writer.append(payload)
    writer.close()
    return group.key


@pytest.mark.runs
def test_it_resumes_and_draws_that_group_again(served, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH, PROMPT_TOKENS)
    seen: list[tuple[int, ...]] = []

    def held(token_ids: list[int]) -> bool:
        """The batch stays open: of the last prompt nothing returns."""
        if len(token_ids) == PROMPT_TOKENS and tuple(token_ids) not in seen:
            seen.append(tuple(token_ids))
        return tuple(token_ids) in seen[BATCH - 1 :]

    proxy = GatedProxy(served.url, held)
    (tmp_path / "weights").mkdir()
    run_dir, log = tmp_path / "run", tmp_path / "run.log"

    def command(url: str, *options: str) -> list[str]:
        settings = [
            *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
            *("rollout.max_tokens=12", f"weight_sync.directory={tmp_path / 'weights'}"),
        ]
        return trainer_command(run_dir, served.model, prompts, [url], *settings, *options)

    process = start_trainer(command(proxy.url), log)
    try:
        wait_until(lambda: event_names(run_dir).count("group_ready") == BATCH - 1, 120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.close()
    (journal,) = (run_dir / "journal/batch-000000").glob("*.journal")
    epoch, index = poison_first(journal)

    printed = run_trainer(command(served.url, "--resume"))
    assert "token_ids[0] is 1000000, the policy's vocabulary has ids" in printed
    (dropped,) = [
        event
        for event in read_events(run_dir / "events-rank0.jsonl")
        if event["event"] == "record_dropped"
    ]
    assert (dropped["epoch"], dropped["index"]) == (epoch, index)
    verdict = verify(run_dir)
    assert verdict.on_policy and verdict.discarded == 1, verdict
