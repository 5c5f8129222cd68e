"""What Prometheus reads of a run, over HTTP."""

import socket
from urllib.request import urlopen

import pytest

from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers.optional import OptionalTracker
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
    with urlopen(tracker.url, timeout=10) as answer:
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


def test_the_log_says_where_it_is_read(caplog):
    package("prometheus_client")
    tracker = PrometheusTracker("a-run", "127.0.0.1", 0, None)
    assert f"metrics are at {tracker.url}" in caplog.text
    scraped(tracker)
    tracker.close()
    assert not tracker.url.endswith(":0/metrics")


def test_a_port_that_is_taken_is_told_of_with_key_and_remedy(caplog):
    """The run goes on."""
    package("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tracker = OptionalTracker(
            "prometheus", lambda: PrometheusTracker("a-run", "127.0.0.1", port, None)
        )
        tracker.log(1, {"loss": 1.0})
        tracker.close()
    assert f"metrics.prometheus_port: {port} is in use at 127.0.0.1" in caplog.text
    assert "set a free one, or 0 for any" in caplog.text and "the run goes on" in caplog.text


def test_an_address_that_is_not_this_machines_is_told_of():
    package("prometheus_client")
    with pytest.raises(
        OSError, match=r"metrics\.prometheus_host.*192\.0\.2\.1:0 cannot be listened"
    ):
        PrometheusTracker("a-run", "192.0.2.1", 0, None)


def test_names_as_prometheus_takes_them():
    assert gauge_name("eval/aime24/pass@8") == "easyrl_eval_aime24_pass_8"
