"""The data and the run's arithmetic: records, what is left out, batches, steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from easyrl.config import Config
from easyrl.dataloaders.prompts.sources import source_records
from easyrl.doctor.finding import Finding, failed, ok
from easyrl.schema import Prompt


def data_finding(config: Config, prompts: Sequence[Prompt]) -> Finding:
    """``prompts``: of an epoch, as the run would load them."""
    data, name = config.data, "data"
    num_records = sum(1 for _ in source_records(data))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    said = f"{len(prompts):,} prompts, the longest of {longest:,} tokens"
    left_out = num_records - len(prompts)
    if left_out == 0:
        return ok(name, said)
    said += f"; {left_out:,} of {num_records:,} records are left out (too long, or bad)"
    if left_out <= len(prompts):
        return ok(name, said)
    return failed(
        name, said, f"raise data.max_prompt_tokens={data.max_prompt_tokens}, or mend them"
    )


def batch_findings(config: Config, num_prompts: int, described: Sequence[str]) -> Iterator[Finding]:
    """``described``: what the run itself says of its arithmetic."""
    name, size = "batches", config.trainer.batch_size
    said = "; ".join(described)
    if config.trainer.max_steps is None and size > num_prompts * config.data.epochs:
        yield failed(
            name,
            f"{said}; no batch is full",
            f"lower trainer.batch_size={size}, give more records, or set trainer.max_steps",
        )
        return
    yield ok(name, said)
