"""Each batch's spans are in a file of its own; a run goes on where they cannot be written."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from easyrl.timeline import recorder as recorder_file
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.reading import chosen_batches, kept_batches, read_batch, read_spans
from easyrl.timeline.recorder import SpanRecorder


class Run:
    """A recorder whose open batch is ``v``, and its phases of a tenth of a second each."""

    def __init__(self, folder: Path, keep: int = 10, rank: int = 0) -> None:
        self.v, self.now_s = 0, time.monotonic()
        self.recorder = SpanRecorder(
            TimelineFolder(folder), keep=keep, batch=lambda: self.v, rank=rank
        )

    def train(self, *phases: str) -> None:
        for name in ("begin", *phases):
            self.recorder.phase(name, self.now_s, self.now_s + 0.1, {})
            self.now_s += 0.1
        self.v += 1


def test_a_batch_is_from_its_first_phase_to_the_next_ones(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.phase("sync", run.now_s, run.now_s + 0.1, {})  # the first weights
    run.now_s += 0.1
    run.recorder.endpoint("http://a:1", "push", run.now_s - 0.1, run.now_s)
    run.train("wait", "train")
    run.recorder.producer("reward", run.now_s - 0.2, run.now_s, index=3, sample=1)
    run.train("train")
    run.recorder.close()
    assert kept_batches(tmp_path) == [0, 1]
    (first,) = read_batch(tmp_path, 0)
    lanes = {(span.lane, span.name) for span in first.spans}
    assert ("rank 0", "sync") in lanes and ("endpoint http://a:1", "push") in lanes
    assert first.end_s - first.start_s == pytest.approx(0.3)  # not the push before it
    assert abs(first.start_s - time.time()) < 60  # of the epoch
    reward = next(span for span in read_spans(tmp_path, 0) if span.name == "reward")
    assert reward.lane == "producer 0" and reward.args == {"index": 3, "sample": 1}
    assert [span.name for span in read_spans(tmp_path, 1)] == ["begin", "train"]


def test_phases_interrupt_the_first_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train("settle", "begin", "report", "begin", "train")
    run.train("train")
    run.recorder.close()
    spans = [span.name for span in read_spans(tmp_path, 0)]
    assert spans == ["begin", "settle", "begin", "report", "begin", "train"]


def test_the_newest_batches_are_kept_and_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        run = Run(tmp_path, keep=2, rank=rank)
        for _ in range(5):
            run.train("train")
        run.recorder.close()
    assert kept_batches(tmp_path) == [3, 4]
    assert [spans.rank for spans in read_batch(tmp_path, 4)] == [0, 1]


def test_a_batch_that_is_trained_again_replaces_its_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.train("train")
    run.recorder.close()
    TimelineFolder(tmp_path).remove_from(1, rank=0)
    assert kept_batches(tmp_path) == [0]
    again = Run(tmp_path)
    again.v = 1
    again.train("wait")
    again.recorder.close()
    assert [span.name for span in read_spans(tmp_path, 1)] == ["begin", "wait"]


def test_a_damaged_file_is_left_out_with_a_warning(tmp_path: Path, caplog) -> None:
    run = Run(tmp_path)
    run.train("train")
    run.recorder.close()
    (file,) = (tmp_path / "timeline").iterdir()
    for content in (b"", b"no gzip", gzip.compress(b'{"batch": "one"}'), file.read_bytes()[:40]):
        caplog.clear()
        file.write_bytes(content)
        assert read_batch(tmp_path, 0) == [] and "is left out" in caplog.text


def test_a_run_goes_on_where_it_cannot_be_written_and_says_so_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "timeline").write_text("a file where the folder would be")
    run = Run(tmp_path)
    for _ in range(3):
        run.train("train")
    run.recorder.close()
    assert caplog.text.count("the run goes on without it") == 1


def test_requests_beyond_the_bound_are_thinned_out_and_the_batchs_end_is_kept(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(recorder_file, "MOST_SPANS", 20)
    run = Run(tmp_path)
    recorder, start_s = run.recorder, run.now_s
    for number in range(1000):
        at_s = start_s + number / 1000
        recorder.endpoint("http://a:1", "request", at_s, at_s + 1, number=number)
        if number % 2:
            recorder.producer("reward", at_s, at_s + 1)
    recorder.producer("group", start_s, start_s + 1)  # a rare one
    recorder.endpoint("http://a:1", "push", start_s + 1, start_s + 2)
    recorder.endpoint("http://a:1", "proof", start_s + 2, start_s + 3)
    for _ in range(30):
        recorder.model("policy forward", start_s + 1, start_s + 2)
    run.train(*["train"] * 30, "step", "sync")
    run.train("train")  # the next one has a budget of its own
    run.recorder.close()
    spans = read_spans(tmp_path, 0)
    names = Counter(span.name for span in spans)
    assert names["train"] == names["policy forward"] == 30
    assert names["step"] == names["sync"] == names["push"] == names["proof"] == names["group"] == 1
    kept = sorted(int(span.args["number"]) for span in spans if span.name == "request")
    assert 5 <= len(kept) and len(kept) + names["reward"] + 1 <= 20
    assert len({later - earlier for earlier, later in pairwise(kept)}) == 1  # evenly
    assert kept[0] == 0 and kept[-1] > 800
    (whole,) = read_batch(tmp_path, 0)
    assert whole.left_out == 1501 - len(kept) - names["reward"] - 1
    assert f"{whole.left_out} of them are left out" in caplog.text
    assert read_batch(tmp_path, 1)[0].left_out == 0


def test_nothing_is_left_out_within_the_bound(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(recorder_file, "MOST_SPANS", 20)
    run = Run(tmp_path)
    for _ in range(20):
        run.recorder.endpoint("http://a:1", "request", run.now_s, run.now_s + 1)
    run.train(*["train"] * 30)
    run.recorder.close()
    (whole,) = read_batch(tmp_path, 0)
    assert len(whole.spans) == 20 + 31 and whole.left_out == 0 and not caplog.text


@pytest.mark.parametrize(
    ("chosen", "found"),
    [(None, [2, 3, 4]), ("3", [3]), ("3:", [3, 4]), (":3", [2, 3]), ("0:9", [2, 3, 4])],
)
def test_batches_are_chosen_by_a_range(chosen, found) -> None:
    assert chosen_batches([2, 3, 4], chosen) == found


@pytest.mark.parametrize("chosen", ["x", "3:y", "7", "5:9"])
def test_a_range_without_a_batch_is_refused(chosen) -> None:
    with pytest.raises(ValueError, match="no range of batches|is kept; 2 to 4 are"):
        chosen_batches([2, 3, 4], chosen)
