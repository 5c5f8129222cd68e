"""``easyrl plan``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.parts.long_run import LongRun, write_long_run
from easyrl.__main__ import command_line
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.simulation.test_advice import made
from tests.tiny_models import save_tiny_model

OF_8B = ["--model", "8b", "--device", "h100", "--devices", "16", "--batch-size", "16"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(command_line(), ["plan", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_a_batch_that_nobody_has_run(tmp_path: Path) -> None:
    tree = json.loads(run(*OF_8B, "--json"))
    assert tree["measured_step_s"] is None
    first = tree["rows"][0]
    used = first["endpoints"] * first["devices_per_endpoint"]
    used += first["ranks"] * first["tensor"] * first["pipeline"]
    assert used <= 16 and first["batch_size"] == 16 and first["fits"] is True
    picture = tmp_path / "split.png"
    output = run(*OF_8B, "--png", str(picture))
    assert "rates by arithmetic, from assumptions" in output
    assert f"{first['step_s']:.2f}" in output and f"ZeRO {first['zero_stage']}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Batches of which the first that counts is slower than the others."""
    run = tmp_path / "run"
    write_long_run(run, LongRun(num_steps=1, num_batches=0, num_endpoints=1))
    for number, train_s in enumerate([0.3, 0.6, 0.2, 0.2, 0.2, 0.3]):
        batch = made(24, train_s)
        TimelineFolder(run).write(BatchSpans(number, 0, batch.start_s, batch.end_s, batch.spans))
    return run


def test_the_run_is_compared_with_what_it_took(run_dir: Path) -> None:
    tree = json.loads(run(str(run_dir), "--json"))
    # 2 s until all are there, 24 groups, 1 s behind them; without the first batch and the last
    assert tree["measured_step_s"] == pytest.approx(2 + 24 * 0.2 + 1)
    assert tree["measured_mean_s"] == pytest.approx(2 + 24 * 0.3 + 1)
    output = run(str(run_dir))
    mean_s, drawn_s = tree["measured_mean_s"], tree["rows"][0]["step_s"]
    assert f"{mean_s:.2f} ({drawn_s / mean_s - 1:+.1%})" in output  # beside the row
    assert f"{drawn_s:.2f}" in output
    for key, name in (("step", "median"), ("mean", "mean")):
        own_s, replayed_s = tree[f"measured_{key}_s"], tree[f"replayed_{key}_s"]
        assert f"{own_s:.2f}{' s' if key == 'step' else ''} in the {name}" in output
        assert f"{replayed_s:.2f} ({replayed_s / own_s - 1:+.1%})" in output


def test_another_setting_has_nothing_measured(run_dir: Path) -> None:
    first, second = [
        line for line in run(str(run_dir), "--ranks", "2").splitlines() if " x 8 " in line
    ]
    assert "(the run)" in first and "%)" in first
    assert "(the run)" not in second and "%)" not in second
    assert "measured" not in run(str(run_dir), "--devices", "9").split("below:")[1]


def add_metrics(run_dir: Path, devices: float) -> None:
    line = {"step": 2, "throughput/devices": devices}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def add_config(run_dir: Path, text: str) -> None:
    file = run_dir / "config.yaml"
    file.write_text(file.read_text() + text)


def test_devices_are_those_that_the_run_has_counted(run_dir: Path) -> None:
    """A server on four devices and a model on two: TPSPD is over six, and of 12 two copies are
    beside two servers."""
    add_config(run_dir, "parallel: {tensor: 2}\n")
    add_metrics(run_dir, 6.0)
    (row,) = json.loads(run(str(run_dir), "--json"))["rows"]
    assert (row["devices_per_endpoint"], row["devices_per_rank"]) == (4, 2)
    assert row["tpspd"] == pytest.approx(row["tokens"] / row["step_s"] / 6)
    rows = json.loads(run(str(run_dir), "--devices", "12", "--json"))["rows"]
    assert {(each["endpoints"], each["ranks"]) for each in rows} == {(1, 4), (2, 2)}
    stated = json.loads(run(str(run_dir), "--devices-per-endpoint", "8", "--json"))["rows"]
    assert [(each["devices_per_endpoint"], each["devices_per_rank"]) for each in stated] == [(8, 2)]


def test_devices_of_an_endpoint_are_those_of_the_configuration(run_dir: Path) -> None:
    add_metrics(run_dir, 5.0)
    file = run_dir / "config.yaml"
    text = file.read_text()
    file.write_text(
        text.replace("http://127.0.0.1:1]", "http://127.0.0.1:1], devices_per_endpoint: 2")
    )
    (row,) = json.loads(run(str(run_dir), "--json"))["rows"]
    assert (row["devices_per_endpoint"], row["devices_per_rank"]) == (2, 1)


def test_memory_is_that_of_the_stated_devices(run_dir: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "model")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    for device_gb, fits in (("80", True), ("0.001", False)):
        for more in ((), ("--devices", "4")):
            told = run(str(run_dir), "--device-gb", device_gb, "--json", *more)
            assert {row["fits"] for row in json.loads(told)["rows"]} == {fits}
    assert "does not fit" in run(str(run_dir), "--device-gb", "0.001")


def test_prompts_that_the_run_did_not_share_are_not_shared(run_dir: Path) -> None:
    add_config(run_dir, "trainer: {packing: none}\n")
    (row,) = json.loads(run(str(run_dir), "--json"))["rows"]
    assert row["shares_prompts"] is False


def test_episodes_are_refused(run_dir: Path) -> None:
    batch = made(24, 0.2)
    spans = [*batch.spans, Span("environment tools", "episode", 0.0, 1.0)]
    TimelineFolder(run_dir).write(BatchSpans(2, 0, batch.start_s, batch.end_s, spans))
    said = " ".join(run(str(run_dir), status=2).split())
    assert "its samples are episodes (environments)" in said and "easyrl trace" in said


def test_rates_of_a_run_are_what_can_be_stated(run_dir: Path, tmp_path: Path) -> None:
    (of_run,) = json.loads(run(str(run_dir), "--json"))["rows"]
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(of_run["rates"]))
    tree = json.loads(run("--rates", str(file), "--endpoints", "2", "--json"))
    (row,) = tree["rows"]
    assert row["rates"] == of_run["rates"] and tree["measured_step_s"] is None
    numbers = [row[name] for name in ("endpoints", "places", "ranks", "batch_size", "group_size")]
    assert numbers == [2, 32, 1, 64, 16] and row["prompt_tokens"] == 150
    divided = run("--rates", str(file), "--devices", "6", "--prompt-tokens", "10")
    assert "no run: rates as stated" in divided and "not known" in divided


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give a run's folder, or --model and --device"),
        (("runs/x", "--model", "8b"), "give a run's folder, or --model and --device"),
        (("--model", "8b", "--rates", "x"), "give a run's folder, or --model and --device, or"),
        (("--rates", "not/there.json"), "not/there.json"),
        (("--model", "7b"), "'7b' is no folder, and none of 8b"),
        (("--model", "8b", "--device", "tpu"), "'tpu' is not known; one of 910b, h100"),
        (("--model", "8b", "--ranks", "4"), "leave out --endpoints"),
        (("--model", "8b", "--device-gb", "80"), "--device-gb: is for a run"),
        (("--model", "8b", "--mean-tokens", "20000"), "below 15,360"),
        (("--model", "32b", "--devices", "4"), "has the memory to train this model"),
        (("--model", "8b", "--mode", "both"), "--mode: is 'both'; async or sync"),
        (("--model", "8b", "--mean-tokens", "nan"), "--mean-tokens: has to be a number above 0"),
        (("--model", "8b", "--sigma", "inf"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--mean-tokens", "nan"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--mean-tokens", "inf"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--mean-tokens", "-3"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--sigma", "inf"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--sigma", "1e200"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--sigma", "nan"), "--sigma"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in run(*arguments, status=2)
