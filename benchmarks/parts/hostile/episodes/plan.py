"""Which records of a run's data have which behaviour, and which of their samples act."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.hostile.episodes.catalogue import EpisodeBehaviour
from easyrl.runtime.seeding import sample_seed

NUM_SAMPLES = 4  # of a group
ACTING = (1, 3)  # of its samples; the others behave
ALL = ("rejected", "excluded")  # what becomes of a group of which all act
DIGITS = 6  # of a prompt


@dataclass(frozen=True)
class EpisodesPlan:
    """One run; calm: nobody acts."""

    number: int
    seed: int
    behaviours: tuple[EpisodeBehaviour, ...]
    is_calm: bool = False

    @property
    def name(self) -> str:
        return "calm" if self.is_calm else f"episodes-{self.number}"


@dataclass(frozen=True)
class PlannedPrompt:
    """A record of the data; its index is its place in the file."""

    behaviour: EpisodeBehaviour | None
    acting: tuple[int, ...]  # numbers of samples

    @property
    def is_replaced(self) -> bool:
        """By another prompt: none of its samples is trained."""
        return self.behaviour is not None and self.behaviour.ends in ALL


def plan_episodes(
    behaviours: Sequence[EpisodeBehaviour], num_runs: int, seed: int
) -> list[EpisodesPlan]:
    """Each behaviour once; every run gets its share of each kind."""
    rng = random.Random(seed)
    shuffled = list(behaviours)
    rng.shuffle(shuffled)
    shuffled.sort(key=lambda each: (each.kind, each.ends))  # stable: mixed within a kind
    return [
        EpisodesPlan(number, rng.randrange(2**31), tuple(shuffled[number::num_runs]))
        for number in range(num_runs)
    ]


def plan_prompts(plan: EpisodesPlan, batch_size: int, num_batches: int) -> list[PlannedPrompt]:
    """As many as are drawn: whole batches, and one more for each that is to be replaced."""
    chosen = [] if plan.is_calm else list(plan.behaviours)
    prompts = [PlannedPrompt(each, _acting(each)) for each in chosen]
    num_prompts = batch_size * num_batches + sum(prompt.is_replaced for prompt in prompts)
    if num_prompts < len(prompts):
        raise ValueError(f"{len(prompts)} behaviours in {num_prompts} prompts; take more runs")
    prompts += [PlannedPrompt(None, ())] * (num_prompts - len(prompts))
    random.Random(plan.seed).shuffle(prompts)
    return prompts


def _acting(behaviour: EpisodeBehaviour) -> tuple[int, ...]:
    if behaviour.ends in ALL:
        return tuple(range(NUM_SAMPLES))
    return ACTING[:1] if behaviour.ends == "silent" else ACTING


def write_episode_prompts(
    path: Path, prompts: Sequence[PlannedPrompt], folder: Path, run_seed: int
) -> Path:
    """The data: each record tells its environment what it is to do, and where to say so."""
    rng = random.Random(run_seed)
    with path.open("w") as file:
        for index, prompt in enumerate(prompts):
            record = {
                "prompt": "".join(rng.choice("0123456789") for _ in range(DIGITS)),
                "answer": "1",  # nobody asks
                "behaviour": "" if prompt.behaviour is None else prompt.behaviour.name,
                "acting": [sample_seed(run_seed, 0, index, number) for number in prompt.acting],
                "folder": str(folder),
            }
            file.write(json.dumps(record) + "\n")
    return path
