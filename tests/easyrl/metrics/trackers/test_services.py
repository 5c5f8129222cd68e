"""Two attempts of a run in each service's own package, without a network, read back from its files.

The second attempt takes step 2 again, with another reward.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easyrl.metrics.trackers.background import BackgroundTracker
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.mlflow import MlflowTracker, mlflow_name
from easyrl.metrics.trackers.state import ContinuedTracker, TrackerState
from easyrl.metrics.trackers.swanlab import SwanlabTracker
from easyrl.metrics.trackers.trackio import TrackioTracker
from easyrl.metrics.trackers.wandb import WandbTracker
from easyrl.schema import InterruptedRun
from tests.easyrl.metrics.trackers.packages import package

CONFIG = {"trainer": {"batch_size": 8}, "rewards": [{"name": "math"}]}
REWARDS = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0)]  # step 2 keeps the first attempt's
ACCURACIES = [(1, 0.25), (2, 0.5)]


def run_twice(name, output, open_tracker, error=None, *, on_thread=False):
    """Its evaluations come behind their steps, that of step 2 after the second start, which
    ``error`` ends."""
    ids = []
    for attempt, steps in enumerate(((0, 1, 2), (2, 3))):
        state, ending = TrackerState(output, name), RunEnding()
        tracker = ContinuedTracker(open_tracker(state, ending), state)
        if on_thread:
            tracker = BackgroundTracker(tracker, left_out=state.missed)
        ids.append(state.run_id)
        for step in steps:
            tracker.log(step, {"reward/mean": step + 100.0 * attempt, "loss": 1.0})
            if (step, attempt) in ((1, 0), (2, 1)):
                tracker.log(step, {"eval/avg@8": 0.25 * step})
        tracker.note("certificate", f"ab{attempt}")
        if attempt == 1 and error is not None:
            ending.take(type(error), error, None)
        tracker.close()
    assert ids[0] == ids[1] is not None


STOPPED = InterruptedRun("stopped, a checkpoint is saved", status=0)
FAILED = RuntimeError("the run has failed")


@pytest.mark.parametrize(
    "error, status", [(None, "FINISHED"), (STOPPED, "KILLED"), (FAILED, "FAILED")]
)
def test_mlflow_has_one_run_with_each_step_once(error, status, tmp_path, monkeypatch):
    mlflow = package("mlflow")
    package("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_twice(
        "mlflow",
        tmp_path,
        lambda s, e: MlflowTracker("a-project", "a-run", tmp_path, CONFIG, s, e),
        error,
        on_thread=True,
    )
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("a-project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a-run", status)
    assert run.data.params == {"trainer.batch_size": "8", "rewards_0_.name": "math"}
    assert run.data.tags["certificate"] == "ab1"

    def history(name):
        return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

    assert history("reward/mean") == REWARDS
    assert history("eval/avg_8") == ACCURACIES


def test_names_as_mlflow_takes_them():
    assert mlflow_name("eval/aime24/pass@8") == "eval/aime24/pass_8"
    assert mlflow_name("time/phase_train_s") == "time/phase_train_s"
    assert mlflow_name("weights (sum)") == "weights _sum_"


def test_trackio_has_one_run_with_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by its import
    storage = package("trackio.sqlite_storage").SQLiteStorage
    run_twice("trackio", tmp_path, lambda s, e: TrackioTracker("a-project", "a-run", CONFIG, s))
    (run,) = storage.get_runs("a-project")
    assert run.startswith("a-run-")
    logs = storage.get_logs("a-project", run)

    def history(name):
        return [(line["step"], line[name]) for line in logs if name in line]

    assert history("reward/mean") == REWARDS
    assert history("eval/avg@8") == ACCURACIES


@pytest.mark.parametrize("error, exit_code", [(None, 0), (STOPPED, 255), (FAILED, 1)])
def test_wandb_has_rows_of_one_run_with_each_step_once(error, exit_code, tmp_path, monkeypatch):
    package("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    opener = lambda s, e: WandbTracker("a-project", "a-run", tmp_path, CONFIG, s, e)  # noqa: E731
    run_twice("wandb", tmp_path, opener, error)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1 and len(files) == 2
    rows, configured, exit_codes = [], {}, []
    for file in files:
        for record in wandb_records(file):
            if record.HasField("history"):
                items = {
                    item.key or ".".join(item.nested_key): item for item in record.history.item
                }
                rows.append({key: json.loads(item.value_json) for key, item in items.items()})
            if record.HasField("exit"):
                exit_codes.append(record.exit.exit_code)
            if record.HasField("run"):
                configured |= {u.key: json.loads(u.value_json) for u in record.run.config.update}

    def history(name):
        return [(row["step"], row[name]) for row in rows if name in row]

    assert history("reward/mean") == REWARDS
    assert history("eval/avg@8") == ACCURACIES
    assert configured["trainer"] == {"batch_size": 8}
    assert sorted(exit_codes) == sorted([0, exit_code])  # files of one second are in any order


def wandb_records(file: Path) -> list[Any]:
    """Of a finished run; the service's process may write it a moment after ``finish``."""
    kind = package("wandb.proto.wandb_internal_pb2").Record
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        records = list(map(kind.FromString, log_records(file)))
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.05)
    raise TimeoutError(f"{file} has no end")


def log_records(file: Path) -> Iterator[bytes]:
    """Records of one of LevelDB's logs behind a header of 7 bytes: W&B's and SwanLab's files."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # the rest of a block
            at += left
            continue
        length, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # full, last
            yield whole
            whole = b""


@pytest.mark.parametrize(
    "error, ended",
    [
        (None, ("FINISHED", "")),
        (STOPPED, ("ABORTED", "")),
        (FAILED, ("CRASHED", "RuntimeError: the run has failed")),
    ],
)
def test_swanlab_has_each_step_once(error, ended, tmp_path, monkeypatch):
    """Without a network in two experiments of one id."""
    package("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    before = signal.getsignal(signal.SIGINT)
    opener = lambda s, e: SwanlabTracker("a-project", "a-run", tmp_path, CONFIG, s, e)  # noqa: E731
    run_twice("swanlab", tmp_path, opener, error)
    assert signal.getsignal(signal.SIGINT) is before
    files = sorted(tmp_path.glob("swanlab/run-*/run-*.swanlab"))
    assert len({file.name for file in files}) == 1 and len(files) == 2
    found = [record for file in files for record in swanlab_records(file)]
    scalars = [record.scalar for record in found if record.HasField("scalar")]

    def history(key):
        return [(each.step, each.value.number) for each in scalars if each.key == key]

    assert history("reward/mean") == REWARDS
    assert history("eval/avg@8") == ACCURACIES
    states = package("swanlab.proto.swanlab.run.v1.run_pb2").RunState
    ends = [record.finish for record in found if record.HasField("finish")]
    told = [(states.Name(end.state).removeprefix("RUN_STATE_"), end.error) for end in ends]
    assert sorted(told) == sorted([("FINISHED", ""), ended])


def swanlab_records(file: Path) -> Iterator[Any]:
    """Of an offline experiment."""
    kind = package("swanlab.proto.swanlab.record.v1.record_pb2").Record
    return map(kind.FromString, log_records(file))


def test_a_tracker_without_its_package_names_the_extra(tmp_path, monkeypatch):
    openers = {
        "wandb": lambda s: WandbTracker("p", "n", tmp_path, {}, s, RunEnding()),
        "trackio": lambda s: TrackioTracker("p", "n", {}, s),
        "mlflow": lambda s: MlflowTracker("p", "n", tmp_path, {}, s, RunEnding()),
        "swanlab": lambda s: SwanlabTracker("p", "n", tmp_path, {}, s, RunEnding()),
    }
    for name, opener in openers.items():
        monkeypatch.setitem(sys.modules, name, None)
        message = rf"run.trackers: {name} is not installed; pip install 'easyrl\[{name}\]'"
        with pytest.raises(ValueError, match=message):
            opener(TrackerState(tmp_path, name))
