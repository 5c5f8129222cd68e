"""How many optimizer steps a run takes, counted by taking them."""

import pytest

from easyrl.build.steps import max_draws, num_epochs, total_steps
from easyrl.config import Config, DataConfig, TrainerConfig
from easyrl.dataloaders.producer.membership import BatchMembership


def count(num_prompts: int, batch_size: int, updates: int, position: int = 0) -> int:
    """Fills batches and cuts them into slices as the producer does."""
    steps = 0
    while position < num_prompts:
        batch = BatchMembership(batch_size, updates, num_left=num_prompts - position)
        while not batch.complete:
            batch.decide(batch.num_accepted, accepted=True)
        steps += batch.num_known_updates
        position += batch.num_accepted
    return steps


def settings(epochs: int = 1, **trainer: int) -> Config:
    values = {"data": DataConfig(files=["p.jsonl"], epochs=epochs)}
    return Config.model_construct(trainer=TrainerConfig(**trainer), **values)


@pytest.mark.parametrize("num_prompts", [8, 9, 10, 11, 13])
@pytest.mark.parametrize(("batch_size", "updates"), [(4, 1), (4, 2), (4, 4), (8, 2)])
def test_the_steps_of_a_whole_run(num_prompts, batch_size, updates):
    config = settings(batch_size=batch_size, updates_per_batch=updates)
    assert total_steps(config, num_prompts) == count(num_prompts, batch_size, updates)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_batches_run_across_the_ends_of_epochs(epochs):
    config = settings(epochs, batch_size=4, updates_per_batch=2)
    assert total_steps(config, 7) == count(7 * epochs, 4, 2)


def test_a_run_that_is_extended_goes_on_behind_its_short_last_batch():
    config = settings(batch_size=4)
    assert total_steps(config, 6) == 2  # 4 and 2 prompts
    # a second epoch, from a cursor behind the six: 4 and 2 again
    config = settings(2, batch_size=4)
    assert total_steps(config, 6, step=2, position=6) == 2 + count(12, 4, 1, position=6) == 4


def test_a_recipe_that_rejects_groups_has_no_known_end():
    config = settings(batch_size=4)
    assert total_steps(config, 6, rejects=True) is None
    config = settings(batch_size=4, max_steps=3)
    assert total_steps(config, 6, rejects=True) == 3


def test_max_steps_takes_as_many_epochs_as_it_needs():
    assert num_epochs(settings(3)) == 3
    assert num_epochs(settings(3, max_steps=100)) is None
    assert total_steps(settings(max_steps=100, batch_size=4), 6) == 100


def test_a_batch_draws_ten_prompts_for_each_accepted_one_unless_told_otherwise():
    assert max_draws(settings(batch_size=4)) == 40
    assert max_draws(settings(batch_size=4, max_draws_per_batch=5)) == 5


def test_max_steps_ends_it_earlier():
    assert total_steps(settings(batch_size=4, max_steps=2), 100) == 2
