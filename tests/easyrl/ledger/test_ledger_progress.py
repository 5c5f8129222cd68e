"""When a run's progress is saved, what it is restored to, and what the journal may let go then."""

from pathlib import Path

import numpy as np
import pytest

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.ledger import Ledger, resume
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import Progress, Prompt
from tests.easyrl.ledger.checkpoint_fakes import checkpoints
from tests.easyrl.ledger.journal_groups import group, journal, served

PROMPTS = [Prompt(i, np.arange(3, dtype=np.int32), "q", "a") for i in range(6)]


def ledger(
    run: Path,
    *,
    every_steps: int = 2,
    step: int = 0,
    reference: str | None = None,
    removes_from: Journal | None = None,
    keep: int = 2,
) -> Ledger:
    """Without a certificate, as on all ranks but the first."""
    _, saved = checkpoints(run / "checkpoints", keep=keep)
    order = PromptOrder(PROMPTS, seed=1)
    alone = Collectives(Ranks.data_parallel())
    return Ledger(
        None, saved, order, alone,
        every_steps=every_steps, step=step, journal=removes_from, reference=reference,
    )  # fmt: skip


def resumed(
    run: Path, *, seed: int = 1, epochs: int | None = 1, reference: str | None = None
) -> Progress:
    _, saved = checkpoints(run / "checkpoints")
    return resume(saved, PromptOrder(PROMPTS, seed=seed, epochs=epochs), reference)


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_progress_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    progress = Progress(
        step=5, closed_batches=4, bad_steps=1, position=7, weights="ab", reported_step=4,
        unreported={"loss": 0.5},
    )  # fmt: skip
    ledger(tmp_path).save(progress)
    assert resumed(tmp_path) == progress
    assert resumed(tmp_path, epochs=None) == progress  # a run can be extended


def test_later_checkpoints_than_are_certified_are_not_used(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    for step in (4, 5):
        kept.save(Progress(step=step))
    _, saved = checkpoints(tmp_path / "checkpoints")
    order = PromptOrder(PROMPTS, seed=1)
    assert resume(saved, order, None).step == 5
    assert resume(saved, order, None, at_most=4).step == 4


def test_without_a_checkpoint_a_run_begins_at_its_beginning(tmp_path: Path) -> None:
    assert resumed(tmp_path) == Progress()
    (tmp_path / "certificate.jsonl").write_text('{"kind":"run"}\n{"kind":"batch"}\n')
    assert resumed(tmp_path) == Progress()
    (tmp_path / "certificate.jsonl").write_text('{"kind":"run"}\n{"previous":"","kind":"end"}\n')
    with pytest.raises(ValueError, match="is complete and has no checkpoint.*every_steps"):
        resumed(tmp_path)


def test_another_order_or_reference_is_refused(tmp_path: Path) -> None:
    ledger(tmp_path, reference="abc").save(Progress(step=1, position=4))
    with pytest.raises(ValueError, match="model.path, which is frozen, is not the one"):
        resumed(tmp_path)
    with pytest.raises(ValueError, match="seed was 1 .* and is 2 now"):
        resumed(tmp_path, reference="abc", seed=2)
    assert resumed(tmp_path, reference="abc").position == 4


def test_checkpoints_are_due_every_so_many_steps_also_behind_a_resume(tmp_path: Path) -> None:
    first = ledger(tmp_path, every_steps=3, keep=9)
    for step in (1, 2, 3, 5, 8):  # several updates per batch step over a multiple
        first.save_if_due(Progress(step=step))
    assert steps(tmp_path) == ["step-3", "step-8"]
    second = ledger(tmp_path, every_steps=3, step=resumed(tmp_path).step, keep=9)
    second.save_if_due(Progress(step=8))
    second.save_if_due(Progress(step=9))
    assert steps(tmp_path) == ["step-3", "step-8", "step-9"]
    second.end(Progress(step=10), "")
    assert "step-10" in steps(tmp_path)


def test_a_run_without_checkpoints_writes_one_only_where_it_is_asked_for(tmp_path: Path) -> None:
    never = ledger(tmp_path, every_steps=0)
    never.save_if_due(Progress(step=4))
    never.end(Progress(step=4), "")
    assert steps(tmp_path) == []
    never.save(Progress(step=4))
    assert steps(tmp_path) == ["step-4"]


def test_the_journal_goes_back_to_the_oldest_checkpoint_that_is_kept(tmp_path: Path) -> None:
    kept = journal(tmp_path / "journal")
    for v in range(5):
        batch = kept.open_batch(served(v=v))
        batch.add(group(v, version=f"run:0:{v}"))
        batch.close()
    removing = ledger(tmp_path, every_steps=1, removes_from=kept)
    for closed in (1, 2, 3):
        removing.save_if_due(Progress(step=closed, closed_batches=closed))
    assert steps(tmp_path) == ["step-2", "step-3"]
    left = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert left == ["batch-000002", "batch-000003", "batch-000004"]
    ledger(tmp_path, every_steps=1).save_if_due(Progress(step=4, closed_batches=4))
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == left
