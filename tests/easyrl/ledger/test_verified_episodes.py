"""``easyrl verify`` of a run whose samples are episodes: counted, and each sampled token stamped"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from easyrl.ledger import evidence
from easyrl.ledger.verify import verify
from easyrl.schema import Completion, Prompt, RolloutGroup, Score, ServedWeights, VersionSpan
from tests.easyrl.episodes.trees import Logged, episode, typical
from tests.easyrl.ledger import certified_run
from tests.easyrl.ledger.certified_run import URLS, CertifiedRun

Change = Callable[[Completion], Completion]


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Change = lambda c: c) -> str:
    """What is said of three batches of four groups of two episodes of 7 turns in 5 branches."""

    def finished(prompt: Prompt, served: ServedWeights) -> RolloutGroup:
        rng = np.random.default_rng([served.version.attempt, *prompt.key])
        made = [change(_stamped(rng, str(served.version))) for _ in range(2)]
        scores = tuple(Score(float(i), {"game/reward": float(i)}) for i in range(2))
        return RolloutGroup(prompt, tuple(made), scores, str(served.version), 0.0, 1.0)

    monkeypatch.setattr(certified_run, "finished_group", finished)
    run = CertifiedRun(folder)
    run.begin()
    run.train_all()
    return str(verify(run.folder))


def _stamped(rng: np.random.Generator, version: str) -> Completion:
    urls = dict(zip(("http://a", "http://b"), URLS, strict=True))
    logged = [Logged(p, s, urls[url]) for p, s, url in typical(rng, [10, 11, 12])]
    made = episode(*logged)
    spans = tuple(span._replace(version=version) for span in made.version_spans)
    return replace(made, version_spans=spans)


def test_episodes_turns_and_branches_are_counted(tmp_path: Path, monkeypatch) -> None:
    assert trained(tmp_path, monkeypatch) == (
        "on-policy: 3 batches, 12 groups trained, 24 episodes of 168 turns in 120 branches, "
        "24 without journalled turns, complete"
    )


def _environments_token(made: Completion) -> Completion:
    first = made.version_spans[0]
    return replace(
        made, version_spans=(VersionSpan(first.version, 0, first.start), *made.version_spans)
    )


WRONG: dict[str, tuple[Change, str]] = {
    "without a version": (
        lambda made: replace(made, version_spans=made.version_spans[:-1]),
        "has 0 versions, its turns have sampled it 1 times",
    ),
    "that the environment wrote": (
        _environments_token,
        "token 0 has 1 versions, its turns have sampled it 0 times",
    ),
    "twice": (
        lambda made: replace(made, version_spans=(*made.version_spans, made.version_spans[-1])),
        "has 2 versions, its turns have sampled it 1 times",
    ),
    "trained, though the environment wrote it": (
        lambda made: replace(made, loss_mask=np.ones_like(made.loss_mask)),
        "loss_mask: is not of the sampled tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_token_is_not_on_policy(name: str, tmp_path: Path, monkeypatch) -> None:
    change, said = WRONG[name]
    verdict = trained(tmp_path, monkeypatch, change)
    assert verdict.startswith("NOT on-policy: ") and said in verdict


def test_each_turn_has_to_be_of_the_trained_version() -> None:
    """A certificate refuses others before; a journal that was changed is found too."""
    made = _stamped(np.random.default_rng(0), "run:0:1")
    last = made.version_spans[-1]._replace(version="run:0:0")
    other = replace(made, version_spans=(*made.version_spans[:-1], last))
    assert evidence._span_problem(made, ["run:0:1"]) is None
    assert "are of version run:0:0" in str(evidence._span_problem(other, ["run:0:1"]))
