"""``easyrl diff``: a change planted in one of two equal runs is found where it was planted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.lab.first_difference import Difference, RunsDiffer, first_difference
from easyrl.ledger import recorded_run
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Completion, RolloutGroup, Score, ServedWeights
from tests.easyrl.ledger.certified_run import NUM_TOKENS, CertifiedRun, G

BATCH, PLACE = 1, 2  # of the group that is changed
Change = Callable[[RolloutGroup], RolloutGroup]


class ChangedRun(CertifiedRun):
    """A run whose endpoint, or reward, said something else once."""

    change: Change | None = None

    def finish(self, position: int, served: ServedWeights) -> RolloutGroup:
        group = super().finish(position, served)
        if self.change is not None and (self.next_batch, position) == (BATCH, PLACE):
            group = self.change(group)
        return group


def run_in(
    folder: Path,
    change: Change | None = None,
    *,
    losses: tuple[float | None, ...] = (0.5, 0.25, 0.125),
    **options: Any,
) -> CertifiedRun:
    """Three batches; one optimizer step and one line of metrics each."""
    folder.mkdir()
    run = ChangedRun(folder, **options)
    run.change = change
    run.begin()
    run.train_all()
    (folder / "config.yaml").write_text("")
    lines = [
        {"step": step, "loss": loss, "time/step_s": float(id(folder))}
        for step, loss in zip(run.steps, losses, strict=True)
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return run


def compared(tmp_path: Path, *other: Any, tolerance: float = 0.0, **options: Any) -> Any:
    one = run_in(tmp_path / "one")
    two = run_in(tmp_path / "two", *other, **options)
    return first_difference(RecordedRun(one.folder), RecordedRun(two.folder), tolerance)


def changed_completion(**changes: Callable[[Completion], Any]) -> Change:
    """Of the second sample."""

    def change(group: RolloutGroup) -> RolloutGroup:
        first, second = group.completions
        values = {name: value(second) for name, value in changes.items()}
        return dataclasses.replace(
            group, completions=(first, dataclasses.replace(second, **values))
        )

    return change


def with_value(array: np.ndarray, place: int, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] = value
    return changed


def test_equal_runs(tmp_path: Path) -> None:
    """Times are none of it."""
    found = compared(tmp_path)
    assert found.difference is None and found.num_batches == 3 and not found.not_journalled
    assert (found.num_groups, found.num_tokens) == (12, 12 * G * NUM_TOKENS)


def test_a_sampled_token(tmp_path: Path) -> None:
    found = compared(
        tmp_path, changed_completion(token_ids=lambda c: with_value(c.token_ids, 3, 99))
    )
    difference = found.difference
    assert (difference.what, difference.other) == ("sampled tokens", 99)
    assert (difference.batch, difference.step) == (BATCH, 2)
    assert (difference.sample, difference.token) == (1, 3) and found.num_batches == BATCH


def test_the_group_is_named_by_its_prompt(tmp_path: Path) -> None:
    one = run_in(tmp_path / "run")
    found = compared(tmp_path, changed_completion(finish_reason=lambda c: "length"))
    assert found.difference.prompt == one.batches[BATCH][PLACE].key
    assert found.difference.what == "finish reason" and found.difference.other == "length"


def test_a_response_that_is_longer(tmp_path: Path) -> None:
    grown = changed_completion(
        token_ids=lambda c: np.append(c.token_ids, np.int32(7)),
        logprobs=lambda c: np.append(c.logprobs, np.float32(-1)),
        loss_mask=lambda c: np.append(c.loss_mask, True),
        version_spans=lambda c: (c.version_spans[0]._replace(end=NUM_TOKENS + 1),),
    )
    difference = compared(tmp_path, grown).difference
    assert (difference.what, difference.token) == ("sampled tokens", NUM_TOKENS)
    assert (difference.one, difference.other) == (None, 7)


@pytest.mark.parametrize(("tolerance", "what"), [(0.0, "log-probabilities"), (1e-3, None)])
def test_a_number_within_the_tolerance_is_equal(
    tmp_path: Path, tolerance: float, what: str | None
) -> None:
    off = changed_completion(logprobs=lambda c: c.logprobs * np.float32(1 + 1e-4))
    difference = compared(tmp_path, off, tolerance=tolerance).difference
    assert (difference and difference.what) == what


def test_a_part_of_a_reward(tmp_path: Path) -> None:
    def change(group: RolloutGroup) -> RolloutGroup:
        first, second = group.scores
        return dataclasses.replace(group, scores=(first, Score(second.reward, {"exact": 0.5})))

    difference = compared(tmp_path, change).difference
    assert (difference.what, difference.name, difference.sample) == ("rewards", "exact", 1)
    assert difference.other == 0.5 != difference.one


def test_a_metric(tmp_path: Path) -> None:
    difference = compared(tmp_path, losses=(0.5, 0.2500001, 0.1)).difference
    assert difference == Difference("metrics", 0.25, 0.2500001, batch=1, step=2, name="loss")


def test_a_metric_that_is_not_finite(tmp_path: Path) -> None:
    difference = compared(tmp_path, losses=(None, 0.25, 0.125)).difference
    assert (difference.step, difference.one, difference.other) == (1, 0.5, None)


def test_metrics_are_read_once_for_all_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading for each batch would be quadratic: minutes for a run of 10,000 steps."""
    read: list[Path] = []

    def noted(file: Path) -> list[dict[str, float]]:
        read.append(file)
        return read_metrics(file)

    monkeypatch.setattr(recorded_run, "read_metrics", noted)
    assert compared(tmp_path).num_batches == 3
    assert read == [tmp_path / "one/metrics.jsonl", tmp_path / "two/metrics.jsonl"]


def test_other_weights_come_before_what_they_sampled(tmp_path: Path) -> None:
    """Two ranks come to other bits behind batch 0 (``CertifiedRun.served``)."""
    one = run_in(tmp_path / "one")
    (tmp_path / "two").mkdir()
    two = CertifiedRun(tmp_path / "two")
    two.begin(num_ranks=2)
    two.train_all()
    for name in ("config.yaml", "metrics.jsonl"):
        (two.folder / name).write_bytes((one.folder / name).read_bytes())
    runs = RecordedRun(one.folder), RecordedRun(two.folder)
    difference = first_difference(*runs).difference
    assert difference is not None and (difference.what, difference.batch) == ("weights", 1)
    assert first_difference(*runs, tolerance=1e-9).difference is None


def test_another_order_of_prompts(tmp_path: Path) -> None:
    refused = {run_in(tmp_path / "probe").batches[0][1].key: "rejected"}
    difference = compared(tmp_path, refused=refused).difference
    assert (difference.what, difference.batch) == ("outcome", 0)
    assert (difference.one, difference.other) == ("trained in update 0", "rejected in update 0")


def test_a_run_that_is_shorter(tmp_path: Path) -> None:
    one = run_in(tmp_path / "one")
    two = run_in(tmp_path / "two", epochs=None, num_batches=2, losses=(0.5, 0.25))
    difference = first_difference(RecordedRun(one.folder), RecordedRun(two.folder)).difference
    assert difference == Difference("number of batches", 3, 2)


def test_what_is_not_journalled_is_said(tmp_path: Path) -> None:
    one = run_in(tmp_path / "one")
    two = run_in(tmp_path / "two", journalled=False)
    found = first_difference(RecordedRun(one.folder), RecordedRun(two.folder))
    assert found.not_journalled == [0, 1, 2] and found.num_groups == 0


def test_runs_on_other_data_are_not_compared(tmp_path: Path) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    other = RecordedRun(two.folder)
    other.run = type(other.run)(**{**_fields(other.run), "data": "other"})
    with pytest.raises(RunsDiffer, match=r"data\.\*"):
        first_difference(RecordedRun(one.folder), other)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def run_command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(command_line(), ["diff", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    one = run_in(tmp_path / "one").folder
    two = run_in(tmp_path / "two", losses=(0.5, 0.3, 0.125)).folder
    same = run_command(one, one)
    assert same.exit_code == 0 and "3 batches equal" in same.output
    parted = run_command(one, two)
    assert parted.exit_code == 1
    assert "first difference: metrics loss (batch 1, step 2)" in parted.output
    assert "first run:  0.25" in parted.output and "second run: 0.3" in parted.output
    told = json.loads(run_command(one, two, "--json").output)
    assert told["difference"]["name"] == "loss" and told["num_batches"] == 1
    nothing = run_command(one, tmp_path)
    assert nothing.exit_code == 2
