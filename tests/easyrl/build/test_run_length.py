"""What a run says of itself before its first step."""

from __future__ import annotations

import pytest

from easyrl.build.run_length import describe_run
from easyrl.build.steps import total_steps
from easyrl.config import Config, DataConfig, RolloutConfig, TrainerConfig
from easyrl.schema import Progress

BATCH = "64 prompts; a batch has {} prompts x 8 responses, at most {} response tokens"


def lines(epochs: int = 1, done: Progress | None = None, **trainer: int) -> list[str]:
    config = Config.model_construct(
        trainer=TrainerConfig(**trainer),
        data=DataConfig(files=["p.jsonl"], epochs=epochs),
        rollout=RolloutConfig(max_tokens=100),
    )
    progress = done or Progress()
    steps = total_steps(config, 64, step=progress.step, position=progress.position)
    return describe_run(config, 64, steps, progress)


def test_batches_that_divide_the_prompts() -> None:
    assert lines(batch_size=32, epochs=3) == [
        BATCH.format(32, "25,600"),
        "3 epochs (data.epochs), 6 steps",
    ]


def test_max_steps_decides_and_not_the_epochs() -> None:
    assert lines(batch_size=32, epochs=3, max_steps=20)[1] == (
        "20 steps (trainer.max_steps), 10 epochs"
    )


@pytest.mark.parametrize(
    ("size", "epochs", "said"),
    [
        (100, 1, "1 epoch (data.epochs), 1 step; the last batch has 64 prompts only"),
        (100, 2, "2 epochs (data.epochs), 2 steps; the last batch has 28 prompts only"),
        (30, 1, "1 epoch (data.epochs), 3 steps; the last batch has 4 prompts only"),
    ],
)
def test_a_batch_that_is_short_is_said(size: int, epochs: int, said: str) -> None:
    assert lines(batch_size=size, epochs=epochs)[1] == said


def test_several_updates_and_a_resumed_run() -> None:
    told = lines(batch_size=32, updates_per_batch=4, done=Progress(step=4, position=32))
    assert told == [
        BATCH.format(32, "25,600") + ", 4 steps",
        "1 epoch (data.epochs), 8 steps",
        "4 steps are done",
    ]


def test_a_recipe_that_rejects_has_no_known_number_of_steps() -> None:
    config = Config.model_construct(
        trainer=TrainerConfig(), data=DataConfig(files=["p.jsonl"]), rollout=RolloutConfig()
    )
    assert "how many groups the recipe accepts" in describe_run(config, 64, None, Progress())[1]
