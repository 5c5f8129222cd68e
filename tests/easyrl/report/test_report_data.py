"""A report has what a run has left, and says what it has not; no peak of a curve is lost."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.parts.long_run import (
    LongRun,
    metrics_line,
    write_batch,
    write_long_run,
    write_samples,
)
from easyrl.config import ConfigError
from easyrl.report.batches import packed_batch
from easyrl.report.collect import Collected, Collector, Verdict
from easyrl.report.columns import Column, MetricsFile
from easyrl.report.curves import MOST_CURVES, charts_of, curve_of, downsampled
from easyrl.report.facts import facts_of
from easyrl.report.packing import unpacked
from easyrl.report.page import render
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse, SampledTurn
from easyrl.timeline.accounting import account
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import Span
from tests.easyrl.timeline.made_spans import ENDPOINTS, TRAINER, batch, requests

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"


def words(config):
    return lambda token_ids: " ".join(EVIL if token == 666 else f"t{token}" for token in token_ids)


def found(run_dir: Path) -> Collected:
    return Collector(run_dir, lambda run: Verdict("sound", "on-policy: 3 batches"), words).collect()


def metrics_of(rows) -> MetricsFile:
    """What a file of these lines has."""
    metrics = MetricsFile(Path("metrics.jsonl"))
    for row in rows:
        metrics.add(row)
    return metrics


def charts(rows) -> dict[str, list[str]]:
    """Names of the curves by the chart's title."""
    found = charts_of(metrics_of(rows).columns)
    return {chart.title: [c.name for c in curves] for chart, _, curves in found}


def shown(report: Collected, but: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name, value in vars(report).items() if name not in but}


def drawn_of(spans):
    """What is drawn of one rank's batch."""
    return unpacked(packed_batch([spans], account([spans])))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_long_run(tmp_path / "run", LongRun(num_steps=30, num_batches=3, num_endpoints=2))
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
    assert {
        "Reward",
        "Entropy",
        "Gradient norm",
        "Memory, peak since the start",
        "Seconds per step",
    } <= set(titles)
    assert list(report.batches) == ["27", "28", "29"]
    assert report.shares["ranks"]["train"] > 0 and report.shares["endpoints"]["tail"] > 0
    (step,) = report.samples
    first, second = unpacked(step["groups"])[0]["responses"]
    assert first["tokens"][0] == "t1" and first["advantages"] == [0.5, 0.5, 0.5]
    assert first["logprobs"] == [-0.1, None, -2.0]
    assert second["advantages"] == [None, -0.5]


def with_an_episode(run_dir: Path) -> None:
    """Step 31: a turn, its answer by a tool, and a branch that begins anew."""
    turns = [SampledTurn(0, 1, 2), SampledTurn(2, 3, 4, 0), SampledTurn(4, 5, 6)]
    response = SampledResponse(
        [10, 11, 12, 13, 14, 15],
        "stop",
        reward=1.0,
        advantage=0.5,
        token_advantages=[None, 0.5, None, 0.5, None, 0.5],
        turns=turns,
        environment="tools",
    )
    group = SampledGroup(31, 0, 8, 3, "r:0:30", "drawn", [10], [response])
    SampleFolder(run_dir).write(31, 0, 1, [group])


def calling(config):
    """Token 11 is a tool call."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    return lambda token_ids: " ".join(call if t == 11 else f"t{t}" for t in token_ids)


def test_an_episode_is_shown_by_its_turns(run_dir: Path) -> None:
    with_an_episode(run_dir)
    report = Collector(run_dir, lambda run: Verdict("sound", ""), calling).collect()
    (response,) = unpacked(report.samples[0]["groups"])[0]["responses"]
    assert [(t["start"], t["sampled"], t["end"]) for t in response["turns"]] == [
        *((0, 1, 2), (2, 3, 4), (4, 5, 6))
    ]
    assert [(t["writer"], t["branch"]) for t in response["turns"]] == [
        *(("environment", 0), ("tool results", 0), ("environment", 1))
    ]
    assert "calls add({})" in response["turns"][0]["heading"]
    assert "environment tools | 3 turns in 2 branches" in response["heading"]
    (plain, _) = unpacked(report.samples[1]["groups"])[0]["responses"]
    assert plain["turns"] == []


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

    report = Collector(run_dir, lambda run: Verdict("unknown", ""), refuse).collect()
    assert unpacked(report.samples[0]["groups"])[0]["prompt"] == "666 8"
    assert "model.path: is not there" in report.notices[0]


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.yaml; name the run.output_dir"):
        found(tmp_path)


def test_a_configuration_of_another_version_is_shown_as_it_is(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("model: {path: m}\nnewer: 1\n")
    report = found(run_dir)
    assert "newer: 1" in report.config and "cannot be read by this version" in report.notices[0]


def test_what_a_model_writes_is_text(run_dir: Path) -> None:
    with (run_dir / "config.yaml").open("a") as file:
        file.write(f"# {EVIL}\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, f"memory/{EVIL}/host_peak_gib": 99.0}) + "\n")
    page = render(found(run_dir))
    assert "<script>alert(1)" not in page and "<img src=x" not in page
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert unpacked(data["samples"][0]["groups"])[0]["responses"][0]["tokens"][1] == EVIL
    assert EVIL in data["config"] and "&lt;/script&gt;" in page[:start]
    names = [c["name"] for chart in data["charts"] for c in chart["curves"]]
    assert f"memory/{EVIL}/host_peak_gib" in names


def test_a_page_loads_nothing(run_dir: Path) -> None:
    page = render(found(run_dir))
    own = page[: page.index('id="data">')]
    assert "default-src 'none'" in own
    assert "src=" not in own.replace("default-src", "").replace("script-src", "")
    assert "<link" not in own and "@import" not in own


def test_a_batch_is_packed_from_its_begin() -> None:
    drawn = drawn_of(batch([*TRAINER, *ENDPOINTS], 10.0))
    assert drawn["seconds"] == 10.0 and drawn["left_out"] == 0
    (rank,) = drawn["ranks"]
    assert ["train", 3.0, 3.0] in rank["spans"]
    names = ["begin", "first group", "train", "starved", "train", "step", "sync"]
    assert [span[0] for span in rank["spans"]] == names  # as in the accounts
    first = drawn["endpoints"][0]
    assert [span[0] for span in first["spans"]] == ["push", "proof"]
    assert first["times"][:2] == [0.5, 1.0] and first["in_flight"][:2] == [1, 2]
    assert {each["lane"] for each in drawn["accounts"]} == {
        "rank 0",
        *(each["lane"] for each in drawn["endpoints"]),
    }


def test_peaks_survive_and_order_stays() -> None:
    draw = random.Random(1)
    steps, values = list(range(10_000)), [draw.random() for _ in range(10_000)]
    values[4321], values[8765] = 50.0, -50.0
    kept_steps, kept = downsampled(steps, values, 1000)
    assert len(kept) <= 1000 and kept_steps == sorted(set(kept_steps))
    assert [values[step] for step in kept_steps] == kept
    assert {50.0, -50.0} <= set(kept)
    assert (kept_steps[0], kept_steps[-1]) == (0, 9999)
    assert downsampled(steps[:900], values[:900], 1000) == (steps[:900], values[:900])
    assert downsampled([1, 2, 3, 4, 5, 6], [0, 9, 1, 1, -9, 0], 4) == ([1, 2, 5, 6], [0, 9, -9, 0])
    for size in range(5, 40):  # also where a stretch has one point
        for most in range(4, size):
            kept_steps, _ = downsampled(steps[:size], values[:size], most)
            assert len(kept_steps) <= most and {0, size - 1} <= set(kept_steps)


def test_a_curve_leaves_out_what_is_no_number() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": float("nan")}, {"step": 3, "b": 2.0}]
    columns = metrics_of(rows).columns
    assert curve_of("a", columns["a"]).steps == [1] and set(columns) == {"a", "b"}


def test_a_curve_has_six_digits() -> None:
    column = Column()
    column.add(1, 1 / 3e6)
    assert curve_of("a", column).values == [3.33333e-7]


def test_the_papers_measure_and_the_shares_are_seen_first_and_drawn(run_dir: Path) -> None:
    report = found(run_dir)
    facts = dict(report.facts)
    assert {"tokens/s per device (TPSPD)", "packed tokens/s per device"} <= set(facts)
    assert facts["trainers train"].endswith(" % of the time") and "endpoints generate" in facts
    drawn = {chart["title"]: [c["name"] for c in chart["curves"]] for chart in report.charts}
    assert drawn["Throughput per device: of the sequences (TPSPD), packed"] == [
        *("throughput/tpspd", "throughput/tokens_per_s_per_device")
    ]
    assert "time/trainer_waiting_share" in drawn["Trainers' time in a batch"]
    assert len(drawn["Endpoints' time in a batch"]) == 6


def test_shares_are_of_all_batches_where_the_timeline_has_the_newest_alone(run_dir: Path) -> None:
    report = found(run_dir)
    assert report.num_accounted == 30 and len(report.batches) == 3
    accounts = run_dir / "timeline" / "accounts.jsonl"
    line = {"lane": "rank 0", "batch": 30, "wall_s": 1e9, "causes": {"step": 1e9}}
    with accounts.open("a") as file:
        file.write(json.dumps({"batch": 30, "lanes": [line]}) + "\nhalf a li")
    assert found(run_dir).shares["ranks"]["step"] == pytest.approx(1.0, abs=1e-5)
    accounts.unlink()  # of a run of an earlier version
    without = found(run_dir)
    assert without.num_accounted == 3 and without.shares["ranks"]["train"] > 0


def test_a_report_that_is_made_again_is_the_one_made_anew(run_dir: Path) -> None:
    collector = Collector(run_dir, lambda run: Verdict("sound", "on-policy: 3 batches"), words)
    assert collector.collect() == found(run_dir)
    draw, size = random.Random(2), LongRun(30, 3, 2, num_sample_tokens=40)
    of_ranks = TimelineFolder(run_dir).read(28)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(metrics_line(31, draw))
    write_batch(run_dir, 30, of_ranks)
    write_samples(run_dir, 31, size, draw)
    later = collector.collect()
    simulated = ("advice", "startup")  # half of the batches have to be others
    assert shown(later, simulated) == shown(found(run_dir), simulated)
    assert list(later.batches)[-1] == "30" and later.samples[0]["step"] == 31
    # trained again after a kill: the same names, other contents
    write_batch(
        run_dir, 30, [msgspec.structs.replace(each, spans=each.spans[:9]) for each in of_ranks]
    )
    write_samples(run_dir, 31, LongRun(30, 3, 2, num_sample_tokens=9), draw)
    (run_dir / "timeline" / "batch-00000027-rank0.json.gz").unlink()
    again = collector.collect()
    assert again.batches == found(run_dir).batches and again.samples == found(run_dir).samples
    assert list(again.batches) == ["28", "29", "30"]


def test_what_is_as_it_was_is_not_packed_again(run_dir: Path, monkeypatch) -> None:
    from easyrl.report import newest_batches, samples

    collector = Collector(run_dir, lambda run: Verdict("sound", ""), words)
    collector.collect()
    packed_again: list[object] = []
    for module, name in ((newest_batches, "packed_batch"), (samples, "packed")):
        monkeypatch.setattr(module, name, lambda *told: packed_again.append(told) or "packed")
    collector.collect()
    assert not packed_again
    write_batch(run_dir, 30, TimelineFolder(run_dir).read(28))
    assert collector.collect().batches["30"] == "packed" and len(packed_again) == 1


def test_lanes_beyond_what_is_drawn_are_counted() -> None:
    from easyrl.report.batches import MOST_LANES

    many = [r for i in range(MOST_LANES + 3) for r in requests(f"endpoint http://{i:02}", (1, 2))]
    drawn = drawn_of(batch([*TRAINER, *many], 10.0))
    assert len(drawn["endpoints"]) == MOST_LANES and drawn["left_out"] == 3


def test_timelines_of_more_batches_than_are_shown_are_left_out(tmp_path: Path, monkeypatch) -> None:
    from easyrl.report import newest_batches

    monkeypatch.setattr(newest_batches, "MOST_BATCHES", 2)
    write_long_run(tmp_path / "run", LongRun(num_steps=5, num_batches=1, num_endpoints=1))
    folder = TimelineFolder(tmp_path / "run")
    for number in range(4):
        folder.write(batch(TRAINER, 10.0, number))
    assert list(found(tmp_path / "run").batches) == ["3", "4"]


def test_what_no_phase_covers_has_one_name_in_timeline_and_accounts() -> None:
    drawn = drawn_of(batch([*TRAINER[:-1], Span("rank 0", "other", 9.5, 9.9)], 10.0))
    (rank,), (accounts,) = drawn["ranks"], drawn["accounts"]
    assert rank["spans"][-1][0] == "unexplained" and "other" not in accounts["causes"]
    assert accounts["causes"]["unexplained"] == pytest.approx(0.5)


def test_a_batch_of_many_spans_keeps_the_longest(monkeypatch) -> None:
    from easyrl.report import batches

    monkeypatch.setattr(batches, "MOST_SPANS", 4)
    monkeypatch.setattr(batches, "MOST_COUNTS", 16)
    spans = [Span("rank 0", "train", float(i), i + 0.1 * i) for i in range(1, 9)]
    many = requests("endpoint http://a", *[(i / 10, i / 10 + 0.05) for i in range(90)])
    drawn = drawn_of(batch([*spans, *many], 20.0))
    (rank,), (endpoint,) = drawn["ranks"], drawn["endpoints"]
    assert [span[1] for span in rank["spans"]] == [7.0, 8.0] and drawn["short_left_out"] == 6
    assert len(endpoint["times"]) <= 16 and max(endpoint["in_flight"]) == 1


def test_samples_of_so_many_steps_as_a_page_bears(run_dir: Path, monkeypatch) -> None:
    from easyrl.report import samples

    folder = SampleFolder(run_dir)
    folder.write(29, 0, 1, [msgspec.structs.replace(folder.read(30)[0], step=29)])
    assert [each["step"] for each in found(run_dir).samples] == [30, 29]
    monkeypatch.setattr(samples, "MOST_TOKENS_IN_ALL", 7)
    assert [each["step"] for each in found(run_dir).samples] == [30]
    monkeypatch.setattr(samples, "MOST_TOKENS_IN_ALL", 0)
    assert [each["step"] for each in found(run_dir).samples] == [30]  # a step is always shown


def test_a_number_that_was_not_finite_is_left_out(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "reward/mean": null, "grad_norm": null, "time/step_s": null}\n')
    report = found(run_dir)
    assert ("steps", "31") in report.facts
    (chart,) = [chart for chart in report.charts if chart["title"] == "Gradient norm"]
    assert chart["curves"][0]["x"][-1] == 30
    render(report)


def test_metrics_of_a_family_are_drawn_together() -> None:
    rows = [{"step": 1, "eval/avg@8": 0.5, "eval/pass@8": 0.9, "reward/exact/mean": 1.0}]
    assert charts(rows) == {
        "Held-out accuracy": ["eval/avg@8", "eval/pass@8"],
        "Rewards by name": ["reward/exact/mean"],
    }


def test_memory_is_drawn_by_kind_and_the_phases_that_take_most() -> None:
    phases = [f"phase{n}" for n in range(10)]
    rows = [
        {"step": step, "memory/host_peak_gib": 9.0, "memory/device_peak_gib": 5.0}
        | {f"memory/{phase}/device_peak_gib": float(n) for n, phase in enumerate(phases)}
        | {"memory/sync/shm_peak_gib": 0.5}
        for step in (1, 2)
    ]
    assert charts(rows) == {
        "Memory, peak since the start": ["memory/device_peak_gib", "memory/host_peak_gib"],
        "Device memory by phase, peaks": [
            f"memory/{phase}/device_peak_gib" for phase in phases[-MOST_CURVES:]
        ],
        "/dev/shm by phase, peaks": ["memory/sync/shm_peak_gib"],
    }


def test_named_sets_are_seen_first_and_drawn_together() -> None:
    rows = [
        {"step": n, "eval/aime24/accuracy": 0.25 * n, "eval/math500/avg@4": 0.5} for n in (0, 1)
    ]
    assert charts(rows) == {"Held-out accuracy": ["eval/aime24/accuracy", "eval/math500/avg@4"]}
    assert ("aime24 held-out accuracy", "0.000 → 0.250") in facts_of(metrics_of(rows), {})


def test_scripts_carry_a_number_of_their_own(run_dir: Path) -> None:
    one, other = render(found(run_dir)), render(found(run_dir))
    (number,) = set(re.findall(r'<script nonce="([^"]+)"', one))
    assert f"script-src 'nonce-{number}'" in one and number not in other
    assert one.count("<script") - one.count('<script nonce="') == 1  # the data, which is no script
