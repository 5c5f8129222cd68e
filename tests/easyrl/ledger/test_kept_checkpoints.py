"""A checkpoint that is kept for a reason outlives newer ones, and what it needs of the journal."""

from __future__ import annotations

from pathlib import Path

from easyrl.schema import Progress
from tests.easyrl.ledger.checkpoint_fakes import checkpoints
from tests.easyrl.ledger.test_ledger_progress import ledger, steps


def at(step: int) -> Progress:
    return Progress(step=step, closed_batches=step, position=step)


def test_it_stays_however_many_are_written_behind_it(tmp_path: Path) -> None:
    own = ledger(tmp_path, every_steps=1, keep=2)
    own.save_if_due(at(1))
    own.save(at(2), kept_for="alarm grad_norm")
    own.save_if_due(at(2))  # the same step is not written again, without its reason
    for step in (3, 4, 5):
        own.save_if_due(at(step))
    assert steps(tmp_path) == ["step-2", "step-4", "step-5"]
    _, saved = checkpoints(tmp_path / "checkpoints")
    manifests = {path.name: record["state"] for path, record in saved.folder.readable()}
    assert manifests["step-2"]["kept_for"] == "alarm grad_norm"
    assert all("kept_for" not in manifests[name] for name in ("step-4", "step-5"))


def test_a_step_that_was_saved_already_is_marked(tmp_path: Path) -> None:
    own = ledger(tmp_path, every_steps=0, keep=1)
    own.save(at(1))
    own.save(at(1), kept_for="alarm kl")
    own.save(at(2))
    assert steps(tmp_path) == ["step-1", "step-2"]


def test_one_of_a_later_step_that_an_earlier_attempt_kept_goes(tmp_path: Path) -> None:
    """It is what the run, which went back, has left behind."""
    own = ledger(tmp_path, every_steps=0, keep=2)
    own.save(at(5), kept_for="alarm kl")
    again = ledger(tmp_path, every_steps=0, keep=2)
    again.save(at(3))
    assert steps(tmp_path) == ["step-3"]


def test_a_damaged_one_is_not_kept(tmp_path: Path) -> None:
    own = ledger(tmp_path, every_steps=0, keep=1)
    own.save(at(1), kept_for="alarm kl")
    (tmp_path / "checkpoints/step-1/checkpoint.json").write_text("{")
    own.save(at(2))
    assert steps(tmp_path) == ["step-2"]
