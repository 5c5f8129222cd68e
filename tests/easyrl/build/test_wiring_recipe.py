"""What is taken together and how it is packed, as the configuration says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from easyrl.build.accumulation import (
    MOST_OF_MEMORY,
    ROWS_PER_DRAIN,
    build_accumulator,
    rows_by_thread,
    rows_per_drain,
)
from easyrl.build.recipe import RecipeFailed, accept_function, group_functions, pack_in_order
from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from easyrl.config.parallel import ParallelConfig
from easyrl.memory_plan.plan import plan_memory
from easyrl.metrics.event_log import ignore
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import MicroBatch, RolloutGroup, StopRequested
from easyrl.trainer.accumulation import Accumulator
from tests.tiny_models import random_group, tiny_config

BUDGET = 14
SIZES = (8, 8, 4, 4)  # in order three rows, 8 + 4 twice else


def config(model: Path, determinism: str = "none", packing: str = "prompt") -> Config:
    return validate_config(
        {
            "run": {"determinism": determinism},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "trainer": {"packing": packing, "max_tokens_per_micro_batch": BUDGET},
        }
    )


def groups_of_sizes(sizes: tuple[int, ...] = SIZES) -> list[RolloutGroup]:
    return [
        random_group(np.random.default_rng(index), 2, [size // 2 - 1] * 2, index=index)
        for index, size in enumerate(sizes)
    ]


class Ready:
    """All groups at once, as far as they fit (``GroupSource``)."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset(["run:0:0"])
    recovered = discarded = frozenset()

    def __init__(self, groups: list[RolloutGroup]) -> None:
        self.groups = groups
        self.asked: list[int] = []

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: object = None) -> list[RolloutGroup]:
        self.asked.append(max_tokens)
        groups, self.groups = self.groups, []
        return groups

    def interrupt(self, error: BaseException) -> None: ...


class Engine:
    """Remembers the prompts of each row, and asks for a stop with the row of number ``last``."""

    device = torch.device("cpu")
    lockstep = False
    can_look_ahead = False

    def __init__(self, stop: StopRequest, last: int = -1) -> None:
        self.rows: list[list[int]] = []
        self._stop, self._last = stop, last

    def finish_backwards(self) -> list[object]:
        return []

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return rows

    def forward_backward(self, micro_batches: list[MicroBatch]) -> list[object]:
        for row in micro_batches:
            self.rows.append([key.prompt for key in row.sequences[::2]])
            if len(self.rows) == self._last:
                self._stop.request("test")
        return []


def accumulator(config: Config, engine: Engine, stop: StopRequest) -> Accumulator:
    return Accumulator(
        engine=engine,  # type: ignore[arg-type]
        collectives=Collectives(Ranks.data_parallel(0, 1)),
        functions=group_functions(config),
        stop=stop,
        is_interruption=lambda error: isinstance(error, StopRequested),
        record=ignore,
        max_tokens=BUDGET,
        rows_per_drain=rows_per_drain(config),
        synchronous=False,
    )


@pytest.mark.parametrize(
    ("determinism", "asked", "rows"),
    [
        ("none", ROWS_PER_DRAIN * BUDGET, [[0, 2], [1, 3]]),
        ("strict", BUDGET, [[0], [1, 2], [3]]),  # by the prompts' order alone
    ],
)
def test_rows_of_a_take(
    tmp_path: Path, determinism: str, asked: int, rows: list[list[int]]
) -> None:
    groups = Ready(groups_of_sizes())
    with closing(StopRequest(60.0)) as stop:
        engine = Engine(stop)
        accumulator(config(tmp_path, determinism), engine, stop).accumulate(groups)  # type: ignore[arg-type]
    assert engine.rows == rows
    assert groups.asked == [asked] * 2


def test_a_stop_does_not_wait_for_the_rest_of_a_take(tmp_path: Path) -> None:
    with closing(StopRequest(60.0)) as stop:
        engine = Engine(stop, last=1)
        totals = accumulator(config(tmp_path), engine, stop).accumulate(Ready(groups_of_sizes()))  # type: ignore[arg-type]
    assert engine.rows == [[0, 2]]
    assert isinstance(totals.interruption, StopRequested)


def test_the_configuration_chooses_the_packing(tmp_path: Path) -> None:
    group = random_group(np.random.default_rng(0), 3, [5, 5])
    group.completions[1].token_ids[:] = group.completions[0].token_ids
    for packing, num_tokens in (("prompt", 13), ("tree", 8)):
        pack = pack_in_order(config(tmp_path, packing=packing))
        assert [row.num_tokens for row in pack([group])] == [num_tokens]


def test_costs_are_those_of_the_model(tmp_path: Path) -> None:
    """A long response costs more than two short ones with much attention, else less."""
    group = random_group(np.random.default_rng(0), 1, [7, 4, 4, 4])
    samples = {}
    for name, sizes in {
        "attention": {"num_attention_heads": 512, "hidden_size": 2, "intermediate_size": 1},
        "linear": {"num_attention_heads": 1, "hidden_size": 512, "intermediate_size": 4096},
    }.items():
        model = tmp_path / name
        tiny_config(
            "qwen3", num_key_value_heads=1, head_dim=2, vocab_size=2, **sizes
        ).save_pretrained(model)
        pack = group_functions(config(model)).pack_finished
        samples[name] = [[key.sample for key in row.sequences] for row in pack([group])]
    assert samples["attention"] == [[0], [1, 2, 3]]
    assert samples["linear"] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(("determinism", "skips"), [("none", True), ("strict", False)])
def test_groups_without_signal_are_run_in_strict_mode(
    tmp_path: Path, determinism: str, skips: bool
) -> None:
    """Which one of an endpoint is kept would depend on who answered first, and decide last bits."""
    with closing(StopRequest(60.0)) as stop:
        built = build_accumulator(
            config(tmp_path, determinism),
            Engine(stop),  # type: ignore[arg-type]
            Collectives(Ranks.data_parallel(0, 1)),
            stop,
            record=ignore,
            synchronous=True,
        )
    assert built.skip_without_signal == skips


def test_rows_beside_one_another_are_as_many_as_cores_and_memory_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_config("qwen3").save_pretrained(model)
    settings = config(model)
    assert rows_by_thread(settings, SharedCores()) == 1  # there is nobody to share with
    cores = SharedCores(tmp_path / "cores", num_cores=3)
    try:
        assert rows_by_thread(settings, cores) == 3
        plan = plan_memory(settings, 1, on_cpu=True)
        of_a_row = max(stage.running_bytes for stage in plan.stages)
        for fits, rows in ((0.5, 1), (2.5, 2)):
            memory = SimpleNamespace(total=fits * of_a_row / MOST_OF_MEMORY)
            monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
            assert rows_by_thread(settings, cores) == rows
        assert rows_by_thread(config(tmp_path), cores) == 1  # no model to plan for
        split = settings.model_copy(update={"parallel": ParallelConfig(tensor=2)})
        assert rows_by_thread(split, cores) == 1  # megatron-core
    finally:
        cores.close()


RECIPE = """
import asyncio
from dataclasses import dataclass
from easyrl.recipes import GRPO

@dataclass(frozen=True)
class Raising(GRPO):
    def accepts(self, group, run):
        raise {error}
"""


@pytest.mark.parametrize(
    "error", ["asyncio.CancelledError()", "SystemExit(3)", "StopIteration()", "KeyError('x')"]
)
def test_whatever_a_recipe_raises_is_an_error_of_that_recipe(tmp_path: Path, error: str) -> None:
    """In the producer's coroutine a ``CancelledError`` would end the prompt without a word."""
    (tmp_path / "own.py").write_text(RECIPE.format(error=error))
    settings = config(tmp_path).model_dump(mode="json")
    settings["recipe"] = {"name": "Raising", "file": str(tmp_path / "own.py")}
    accept = accept_function(validate_config(settings))
    (group,) = groups_of_sizes((8,))
    name = error.partition("(")[0].rpartition(".")[2]
    with pytest.raises(RecipeFailed, match=f"recipe Raising: accepts .* prompt 0 .*: {name}"):
        accept(group)


@pytest.mark.parametrize("error", ["SystemExit(0)", "asyncio.CancelledError()"])
def test_a_recipe_file_that_ends_the_process_is_an_error_of_that_file(
    tmp_path: Path, error: str
) -> None:
    (tmp_path / "own.py").write_text(f"import asyncio\nraise {error}")
    settings = config(tmp_path).model_dump(mode="json")
    settings["recipe"] = {"name": "Own", "file": str(tmp_path / "own.py")}
    with pytest.raises(ConfigError, match="recipe.file: .*own.py cannot be run"):
        load_recipe(validate_config(settings))
