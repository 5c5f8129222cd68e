"""A report has what a run has left, and says what it has not; no peak of a curve is lost."""

from __future__ import annotations

import base64
import gzip
import json
import random
from pathlib import Path

import pytest

from benchmarks.parts.long_run import write_long_run
from easyrl.config import ConfigError
from easyrl.report.batches import packed_batch
from easyrl.report.collect import Collected, Verdict, collect
from easyrl.report.curves import curve_of, downsampled
from easyrl.report.page import render
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.timeline.folder import TimelineFolder
from tests.easyrl.timeline.made_spans import ENDPOINTS, TRAINER, batch

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"


def words(config):
    return lambda token_ids: " ".join(EVIL if token == 666 else f"t{token}" for token in token_ids)


def found(run_dir: Path) -> Collected:
    return collect(run_dir, lambda run: Verdict("sound", "on-policy: 3 batches"), words)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_long_run(tmp_path / "run", num_steps=30, num_batches=3, num_endpoints=2)
    responses = [
        SampledResponse(
            [1, 666, 2], "stop", reward=1.0, advantage=0.5, logprobs=[-0.1, None, -2.0]
        ),
        SampledResponse(
            [3, 4], "length", reward=0.0, advantage=-0.5, token_advantages=[None, -0.5]
        ),
    ]
    group = SampledGroup(30, 0, 7, 3, "r:0:29", "worst", [666, 8], responses)
    SampleFolder(tmp_path / "run").write(30, 0, 1, [group])
    return tmp_path / "run"


def test_all_that_a_run_has_is_there(run_dir: Path) -> None:
    report = found(run_dir)
    assert report.notices == [] and report.verdict.state == "sound"
    assert ("steps", "30") in report.facts
    titles = [chart["title"] for chart in report.charts]
    assert {"Reward", "Entropy", "Gradient norm", "Memory", "Seconds per step"} <= set(titles)
    assert list(report.batches) == ["27", "28", "29"]
    assert report.shares["ranks"]["train"] > 0 and report.shares["endpoints"]["tail"] > 0
    (step,) = report.samples
    first, second = step["groups"][0]["responses"]
    assert first["tokens"][0] == "t1" and first["advantages"] == [0.5, 0.5, 0.5]
    assert first["logprobs"] == [-0.1, None, -2.0]
    assert second["advantages"] == [None, -0.5]


def test_what_is_missing_is_told(run_dir: Path) -> None:
    for name in ("timeline", "samples"):
        for file in (run_dir / name).iterdir():
            file.unlink()
    (run_dir / "metrics.jsonl").unlink()
    report = found(run_dir)
    assert len(report.notices) == 3 and report.charts == [] and report.batches == {}
    assert "no timeline is kept" in render(report)


def test_without_a_tokenizer_samples_are_numbers(run_dir: Path) -> None:
    def refuse(config):
        raise ConfigError("model.path: is not there")

    report = collect(run_dir, lambda run: Verdict("unknown", ""), refuse)
    assert report.samples[0]["groups"][0]["prompt"] == "666 8"
    assert "model.path: is not there" in report.notices[0]


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.yaml; name the run.output_dir"):
        found(tmp_path)


def test_a_configuration_of_another_version_is_shown_as_it_is(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("model: {path: m}\nnewer: 1\n")
    report = found(run_dir)
    assert "newer: 1" in report.config and "cannot be read by this version" in report.notices[0]


def test_what_a_model_writes_is_text(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text() + f"# {EVIL}\n")
    page = render(found(run_dir))
    assert "<script>alert(1)" not in page and "<img src=x" not in page
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert data["samples"][0]["groups"][0]["responses"][0]["tokens"][1] == EVIL
    assert EVIL in data["config"] and "&lt;/script&gt;" in page[:start]


def test_a_page_loads_nothing(run_dir: Path) -> None:
    page = render(found(run_dir))
    own = page[: page.index('id="data">')]
    assert "default-src 'none'" in own
    assert "src=" not in own.replace("default-src", "").replace("script-src", "")
    assert "<link" not in own and "@import" not in own


def test_a_batch_is_packed_from_its_begin() -> None:
    drawn = json.loads(
        gzip.decompress(base64.b64decode(packed_batch([batch([*TRAINER, *ENDPOINTS], 10.0)])))
    )
    assert drawn["seconds"] == 10.0 and drawn["left_out"] == 0
    (rank,) = drawn["ranks"]
    assert ["train", 3.0, 3.0] in rank["spans"]
    first = drawn["endpoints"][0]
    assert [span[0] for span in first["spans"]] == ["push", "proof"]
    assert first["times"][:2] == [0.5, 1.0] and first["in_flight"][:2] == [1, 2]
    assert {each["lane"] for each in drawn["accounts"]} == {
        "rank 0",
        *(each["lane"] for each in drawn["endpoints"]),
    }


def test_peaks_survive_and_order_stays() -> None:
    draw = random.Random(1)
    points = [(step, draw.random()) for step in range(10_000)]
    points[4321], points[8765] = (4321, 50.0), (8765, -50.0)
    kept = downsampled(points, 1000)
    assert len(kept) <= 1000 and kept == sorted(kept)
    assert (4321, 50.0) in kept and (8765, -50.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert downsampled(points[:900], 1000) == points[:900]


def test_a_curve_leaves_out_what_is_no_number() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": float("nan")}, {"step": 3, "b": 2.0}]
    curve = curve_of(rows, "a")
    assert curve is not None and curve.steps == [1] and curve_of(rows, "c") is None


def test_lanes_beyond_what_is_drawn_are_counted() -> None:
    from easyrl.report.batches import MOST_LANES
    from tests.easyrl.timeline.made_spans import requests

    many = [r for i in range(MOST_LANES + 3) for r in requests(f"endpoint http://{i:02}", (1, 2))]
    packed = packed_batch([batch([*TRAINER, *many], 10.0)])
    drawn = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert len(drawn["endpoints"]) == MOST_LANES and drawn["left_out"] == 3


def test_timelines_of_more_batches_than_are_shown_are_left_out(tmp_path: Path, monkeypatch) -> None:
    from easyrl.report import collect as collecting

    monkeypatch.setattr(collecting, "MOST_BATCHES", 2)
    write_long_run(tmp_path / "run", num_steps=5, num_batches=1, num_endpoints=1)
    folder = TimelineFolder(tmp_path / "run")
    for number in range(4):
        folder.write(batch(TRAINER, 10.0, number))
    assert list(found(tmp_path / "run").batches) == ["3", "4"]
