"""A line for each batch, once all ranks have written theirs, and its shares as metrics."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from easyrl.timeline.accounts_file import AccountsFile, read_accounts
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.timeline.made_spans import ENDPOINTS, TRAINER, A, B, batch, phases

GROUPS = [
    Span("producer 0", "group", start, end)
    for start, end in [(0.5, 2.5), (0.5, 4.0), (2.5, 3.5), (4.0, 7.0)]  # two at a time
]


def spans_of(number: int, rank: int = 0) -> BatchSpans:
    return batch([*TRAINER, *ENDPOINTS, *GROUPS], 10.0, number, rank)


def test_each_batch_has_a_line_with_all_lanes(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    accounts = AccountsFile(folder, num_ranks=1, from_batch=0)
    assert accounts.metrics() == {} and read_accounts(tmp_path) == []
    for number in range(3):
        folder.write(spans_of(number))
        accounts.add(spans_of(number))
    accounts.close()
    found = read_accounts(tmp_path)
    assert [each.batch for each in found] == [0, 1, 2]
    assert [lane.lane for lane in found[1].lanes] == ["rank 0", A, B]
    for lane in found[1].lanes:
        assert sum(lane.causes.values()) == pytest.approx(lane.wall_s, abs=1e-4) == 10.0


def test_shares_and_equations_are_metrics(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    accounts = AccountsFile(folder, num_ranks=1, from_batch=7)
    folder.write(spans_of(7))
    accounts.add(spans_of(7))
    # as computed by hand in test_accounting: A generates 3.5 s of 10, B 6.5; A's tail is 1
    assert accounts.metrics() == pytest.approx(
        {
            "time/accounted_batch": 7,
            "time/trainer_waiting_share": 0.3,
            "time/trainer_training_share": 0.5,
            "time/unexplained_share": 0,
            "time/spans_left_out": 0,
            "time/inference_generating_share": 0.5,
            "time/inference_tail_share": 0.05,
            "time/inference_failed_share": 0,
            "time/inference_idle_share": (0.5 + 1 + 3.5 + 1 + 2) / 20,
            "time/inference_others_tail_share": 1 / 20,
            "time/inference_unexplained_share": 0,
            "time/startup_sync_s": 3.5 + 3.0,  # inference batches of two
            "time/startup_async_s": 2.0,
        }
    )


def test_a_batch_waits_for_its_other_rank_but_not_for_ever(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    accounts = AccountsFile(folder, num_ranks=2, from_batch=0)
    other = phases(("begin", 4), ("train", 6), lane="rank 1")

    def write(number: int, *, with_other: bool) -> None:
        if with_other:
            folder.write(batch(other, 10.0, number, rank=1))
        folder.write(spans_of(number))
        accounts.add(spans_of(number))

    write(0, with_other=False)
    assert read_accounts(tmp_path) == []
    folder.write(batch(other, 10.0, 0, rank=1))  # a moment later
    write(1, with_other=True)
    assert [len(each.lanes) for each in read_accounts(tmp_path)] == [4, 4]
    assert accounts.metrics()["time/trainer_training_share"] == pytest.approx((0.5 + 0.6) / 2)
    write(2, with_other=False)  # its other rank never writes
    write(3, with_other=True)
    assert [each.batch for each in read_accounts(tmp_path)] == [0, 1]
    write(4, with_other=True)
    assert [len(each.lanes) for each in read_accounts(tmp_path)] == [4, 4, 3, 4, 4]
    write(5, with_other=False)
    accounts.close()  # with what is there
    assert [each.batch for each in read_accounts(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_resumed_run_goes_on_behind_what_counts(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    first = AccountsFile(folder, num_ranks=1, from_batch=0)
    for number in range(4):
        folder.write(spans_of(number))
        first.add(spans_of(number))
    path = tmp_path / "timeline" / "accounts.jsonl"
    path.write_bytes(path.read_bytes()[:-40])  # a crash has cut the last line
    again = AccountsFile(folder, num_ranks=1, from_batch=2)
    assert [each.batch for each in read_accounts(tmp_path)] == [0, 1]
    again.add(spans_of(2))
    assert [each.batch for each in read_accounts(tmp_path)] == [0, 1, 2]
    assert {entry.name for entry in path.parent.iterdir()} == {
        "accounts.jsonl",
        *(f"batch-{number:08d}-rank0.json.gz" for number in range(4)),
    }


def test_a_run_on_records_has_no_endpoints_and_no_groups(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    accounts = AccountsFile(folder, num_ranks=1, from_batch=0)
    folder.write(batch(TRAINER, 10.0))
    accounts.add(batch(TRAINER, 10.0))
    assert set(accounts.metrics()) == {
        "time/accounted_batch",
        "time/trainer_waiting_share",
        "time/trainer_training_share",
        "time/unexplained_share",
        "time/spans_left_out",
    }


def test_a_batch_of_which_spans_were_left_out_says_so(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    accounts = AccountsFile(folder, num_ranks=1, from_batch=0)
    thinned = msgspec.structs.replace(spans_of(0), left_out=12)
    folder.write(thinned)
    accounts.add(thinned)
    (found,) = read_accounts(tmp_path)
    assert [lane.left_out for lane in found.lanes] == [0, 12, 12]
    metrics = accounts.metrics()
    assert metrics["time/spans_left_out"] == 12 and metrics["time/inference_idle_share"] == 0
    assert metrics["time/inference_unexplained_share"] == pytest.approx(8 / 20)
    assert metrics["time/trainer_training_share"] == 0.5  # of ranks all is there
    assert "time/startup_sync_s" not in metrics  # of groups it is not
