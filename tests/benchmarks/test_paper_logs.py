"""Logs of other trainers, made up here in their format, and what is no such log."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts.paper.baseline import read_baseline

RAY = "\x1b[36m(TaskRunner pid=17)\x1b[0m "


def verl_step(step: int, tokens: float, seconds: float, throughput: str) -> str:
    return (
        f"{RAY}step:{step} - actor/kl_loss:0.0004 - response_length/mean:np.float64(31.5) - "
        f"perf/total_num_tokens:{tokens} - perf/time_per_step:np.float64({seconds}) - "
        f"perf/throughput:{throughput} - training/global_step:{step}"
    )


def verl_log(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["Training Progress:   0%|", *lines, "bye"]))
    return f"verl:{path}"


def test_verl_is_tokens_by_seconds_and_devices_over_all_steps(tmp_path: Path) -> None:
    log = verl_log(
        tmp_path / "verl.log",
        f"{RAY}step:0 - val-core/made_up/reward/mean@1:0.25",  # a validation, nothing trained
        verl_step(1, 6000, 10, "150.0"),  # on 4 devices
        verl_step(2, 2000, 30.0, "np.float64(16.666666666666668)"),
    )
    name, tpspd = read_baseline(log, None)
    assert name == "verl" and tpspd == pytest.approx(8000 / (40 * 4))
    # what is given counts: the servers ran on four more
    assert read_baseline(log, 8).tpspd == pytest.approx(8000 / (40 * 8))


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    log = verl_log(
        tmp_path / "verl.log", verl_step(1, 9, 9e3, "1e-3"), verl_step(1, 4000, 4e1, "25.0")
    )
    assert read_baseline(log, None).tpspd == pytest.approx(25)


def test_trl_has_its_totals_in_the_last_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "trl.log"
    path.write_text(
        "{'loss': 0.1, 'num_tokens': 500.0, 'step_time': 2.0}\n"
        " 50%|#####     | 1/2 {'loss': '0.2', 'num_tokens': '1200', 'epoch': '0.5'}\n"
        "{'train_runtime': '6', 'train_loss': '0.15'}\n"
    )
    assert read_baseline(f"trl:{path}", 2) == ("trl", pytest.approx(1200 / 6 / 2))
    with pytest.raises(ValueError, match=r"trl\.log.*how many devices.*--baseline-devices"):
        read_baseline(f"trl:{path}", None)


@pytest.mark.parametrize(
    "lines, wanted",
    [
        (["nothing of it"], r"verl\.log: has no line with step:N"),
        (["step:1 - perf/time_per_step:2.0"], r"verl\.log:2: .*no perf/total_num_tokens"),
        (
            ["step:3 - perf/total_num_tokens:8 - perf/time_per_step:2.0"],
            r"log:2: .*no perf/throughput.*--baseline-devices",
        ),
        ([verl_step(1, 8, 0.0, "4.0")], r"log:2: .*have to be positive"),
    ],
)
def test_a_verl_log_without_its_figures_is_named(
    tmp_path: Path, lines: list[str], wanted: str
) -> None:
    with pytest.raises(ValueError, match=wanted):
        read_baseline(verl_log(tmp_path / "verl.log", *lines), None)


def test_other_words_and_files_are_refused(tmp_path: Path) -> None:
    for text in ("verl", "openrlhf:log", "verl:"):
        with pytest.raises(ValueError, match=r"verl:LOGFILE or trl:LOGFILE"):
            read_baseline(text, None)
    with pytest.raises(ValueError, match=r"there is no file .*absent\.log"):
        read_baseline(f"verl:{tmp_path}/absent.log", None)
    (tmp_path / "trl.log").write_text("{'loss': 1.0, 'num_tokens': 5.0}\n{'cut off")
    with pytest.raises(ValueError, match="'train_runtime'.*let the run end"):
        read_baseline(f"trl:{tmp_path}/trl.log", 1)
