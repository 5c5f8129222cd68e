"""How many optimizer steps a run takes, counted by taking them."""

import pytest

from easyrl.build.steps import total_steps
from easyrl.config import TrainerConfig


def count(num_prompts: int, batch_size: int, updates: int, position: int = 0) -> int:
    """Cuts batches into slices as the trainer does."""
    steps = 0
    while position < num_prompts:
        batch = min(batch_size, num_prompts - position)
        size = -(-batch // updates)
        steps += len(range(0, batch, size))
        position += batch
    return steps


@pytest.mark.parametrize("num_prompts", [8, 9, 10, 11, 13])
@pytest.mark.parametrize(("batch_size", "updates"), [(4, 1), (4, 2), (4, 4), (8, 2)])
def test_the_steps_of_a_whole_run(num_prompts, batch_size, updates):
    config = TrainerConfig(batch_size=batch_size, updates_per_batch=updates)
    assert total_steps(config, num_prompts) == count(num_prompts, batch_size, updates)


def test_a_run_that_is_extended_goes_on_behind_its_short_last_batch():
    config = TrainerConfig(batch_size=4)
    assert total_steps(config, 6) == 2  # 4 and 2 prompts
    # a second epoch, from a cursor behind the six: 4 and 2 again
    assert total_steps(config, 12, step=2, position=6) == 2 + count(12, 4, 1, position=6) == 4


def test_max_steps_ends_it_earlier():
    assert total_steps(TrainerConfig(batch_size=4, max_steps=2), 100) == 2
