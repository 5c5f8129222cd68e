"""``inference.max_inflight: auto`` in a run: strict mode, what training tells, when limits hold."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from easyrl.build.accumulation import build_accumulator
from easyrl.build.evaluation import schedule_evaluation
from easyrl.build.inference import inference_settings
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.runtime.watchdog import TokenProgress
from tests.easyrl.build.test_wiring_recipe import Engine, Ready, groups_of_sizes


class Whole(Ready):
    def complete(self) -> None: ...


def config(folder: Path, determinism: str = "none", recipe: str = "grpo", **inference: object):
    return validate_config(
        {
            "run": {"determinism": determinism},
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"], **inference},
            "rewards": [{"name": "exact"}],
            "recipe": {"name": recipe},
            "evaluation": {"data": {"files": ["held-out.jsonl"]}, "every_steps": 1},
        }
    )


@pytest.mark.parametrize(
    "determinism, given, used",
    [("none", {}, "auto"), ("strict", {}, 256), ("strict", {"max_inflight": 7}, 7)],
)
def test_strict_mode_keeps_256(tmp_path, determinism, given, used):
    assert inference_settings(config(tmp_path, determinism, **given)).max_inflight == used


def trained(settings: Config, synchronous: bool) -> list[tuple[float, int]]:
    """What an accumulator that is given 4 groups tells of its training."""
    told: list[tuple[float, int]] = []
    with closing(StopRequest(60.0)) as stop:
        build_accumulator(
            settings,
            Engine(stop),  # type: ignore[arg-type]
            Collectives(Ranks.data_parallel(0, 1)),
            stop,
            record=ignore,
            synchronous=synchronous,
            on_trained=lambda seconds, num_groups: told.append((seconds, num_groups)),
        ).accumulate(Whole(groups_of_sizes()))  # type: ignore[arg-type]
    return told


def test_training_tells_its_seconds_and_groups(tmp_path):
    ((seconds, num_groups),) = trained(config(tmp_path), synchronous=False)
    assert seconds >= 0.0 and num_groups == 4


def test_training_that_waits_for_the_last_group_tells_nothing(tmp_path):
    assert trained(config(tmp_path), synchronous=True) == []


def test_an_evaluation_has_all_places_once_the_batch_is_decided(tmp_path):
    lifted = []
    limits = SimpleNamespace(lift=lambda: lifted.append(True))
    pool = SimpleNamespace(capacity=lambda in_batch: 8, limits=limits)
    evaluator = SimpleNamespace(config=SimpleNamespace(every_steps=1))
    inference = SimpleNamespace(pool=pool, evaluator=lambda *_: evaluator)
    rollouts = SimpleNamespace(num_undecided=2)
    run = SimpleNamespace(
        config=config(tmp_path),
        collectives=None,
        signals=SimpleNamespace(stop=None),
        tokens=TokenProgress(),
    )
    schedule_evaluation(run, SimpleNamespace(held_out=[]), inference, rollouts, from_step=0)
    rollouts.on_decision()
    assert lifted == []
    rollouts.num_undecided = 0
    rollouts.on_decision()
    assert lifted == [True]
