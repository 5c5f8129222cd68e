"""What Prometheus reads of a run, over HTTP."""

import socket
from urllib.request import urlopen

import pytest

from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers.prometheus import PrometheusTracker, gauge_name
from tests.easyrl.metrics.trackers.packages import package


@pytest.fixture
def tracker():
    package("prometheus_client")
    progress = StepProgress(8, "trains", size=32, arrived=20, trained=12, in_flight=64)
    opened = PrometheusTracker("a-run", "127.0.0.1", 0, lambda: progress)
    yield opened
    opened.close()


def scraped(tracker):
    """Value by name and labels."""
    with urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    told = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in told}, lines


def test_gauges_are_the_last_steps_and_the_open_ones(tracker):
    tracker.log(6, {"reward/mean": 0.25, "eval/avg@8": 0.5})
    tracker.log(7, {"reward/mean": 0.75})
    tracker.note("certificate", "ab12")
    values, lines = scraped(tracker)
    assert values['easyrl_reward_mean{run="a-run"}'] == 0.75
    assert values['easyrl_eval_avg_8{run="a-run"}'] == 0.5  # of the last step that had one
    assert values['easyrl_step{run="a-run"}'] == 7
    open_step = {name.removeprefix("easyrl_open_step_"): v for name, v in values.items()}
    assert open_step['size{run="a-run"}'] == 32 and open_step['arrived{run="a-run"}'] == 20
    assert open_step['in_flight{run="a-run"}'] == 64
    assert values['easyrl_open_step_does{does="trains",run="a-run"}'] == 1
    assert 'easyrl_open_step_evaluated{run="a-run"}' not in values  # none goes on
    assert values['easyrl_certificate_info{run="a-run",text="ab12"}'] == 1
    meaning = "reward/mean (reward): mean of the weighted sums over all responses of the batch"
    assert f"# HELP easyrl_reward_mean {meaning}" in lines
    assert "# TYPE easyrl_reward_mean gauge" in lines


def test_two_runs_of_one_process_do_not_share_gauges(tracker):
    other = PrometheusTracker("other", "127.0.0.1", 0, None)
    tracker.log(1, {"loss": 1.0})
    values, _ = scraped(other)
    other.close()
    assert not any("loss" in name or "open_step" in name for name in values)


def test_a_port_that_is_taken_is_an_error_of_the_system():
    package("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError):
            PrometheusTracker("a-run", "127.0.0.1", taken.getsockname()[1], None)


def test_names_as_prometheus_takes_them():
    assert gauge_name("eval/aime24/pass@8") == "easyrl_eval_aime24_pass_8"
