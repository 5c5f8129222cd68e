"""Which checkpoints a resume may use where the certificate has lost its end."""

from __future__ import annotations

import pytest

from easyrl.build.ledger import last_certified_step
from easyrl.build.steps import trained_before
from easyrl.ledger.earlier_run import EarlierRun
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from tests.easyrl.ledger.certified_run import CertifiedRun


@pytest.fixture
def run(tmp_path):
    """Three certified batches of a step each; checkpoints of the first and the last."""
    made = CertifiedRun(tmp_path)
    made.begin()
    made.train_all()
    for closed in (1, 3):
        made.save(closed, keep=5)
    return made


def limit(run: CertifiedRun) -> int | None:
    earlier = EarlierRun(run.folder, run.run)
    folder = run.folder / "checkpoints"
    return last_certified_step(earlier, folder, Collectives(Ranks.data_parallel()))


def test_a_whole_certificate_limits_nothing(run):
    assert limit(run) is None
    alone = Collectives(Ranks.data_parallel())
    assert last_certified_step(None, run.folder / "checkpoints", alone) is None


def test_behind_a_lost_end_the_last_certified_checkpoint_is_used(run, caplog):
    lines = run.lines()  # run, attempt, three batches, end
    run.write_lines([*lines[:4], lines[4][:40]])  # the third is torn
    assert limit(run) == 2
    assert "certifies 2 steps, the newest checkpoint has 3" in caplog.text
    folder = run.folder / "checkpoints"
    assert trained_before(folder) == (3, 0) and trained_before(folder, 2) == (1, 0)


def test_without_a_checkpoint_that_is_certified_nothing_is_thrown_away(run):
    run.write_lines(run.lines()[:2])
    assert limit(run) is None  # the attempt is refused: it starts behind what is certified
    run.certificate_path.unlink()
    assert limit(run) is None
