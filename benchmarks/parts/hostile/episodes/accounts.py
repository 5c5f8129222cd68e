"""What became of each episode, held against what its environment was told and did.

Independent of the gateway and of the session: the environment writes down every answer that its
client received, with the prompt that it was for, and the journal says what was trained.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parts.hostile.episodes.plan import ALL, PlannedPrompt
from benchmarks.parts.hostile.episodes.scene import ANSWERED, HAPPENED, WRONG, reward_of
from benchmarks.parts.trained_contents import requests_of
from easyrl.episodes.player import MAX_LOST
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.runtime.seeding import sample_seed
from easyrl.schema import Completion, Prompt

GATEWAY_DIED = f"{MAX_LOST} times: the gateway's process ended"
Turn = tuple[tuple[int, ...], tuple[int, ...]]  # ids shown, ids sampled


@dataclass
class EpisodeAccounts:
    """Attributes:
    happened: how often, by behaviour.
    num_turns: trained ones that were compared.
    num_replaced: groups that had to be, and were, with a reason.
    num_bystanders: samples that were left out as the gateway had died twice while they were open.
    first_rewards: of the first batch's samples that behaved, by prompt and number: the weights
        and seeds are those of any other run, and so is what they sample.
    """

    happened: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0
    num_replaced: int = 0
    num_bystanders: int = 0
    first_rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # replaced, and had not to be
    wrong: list[str] = field(default_factory=list)  # trained otherwise than it was told
    problems: list[str] = field(default_factory=list)  # any other


def keep_accounts(
    run_dir: Path, said: Path, prompts: Sequence[PlannedPrompt], run_seed: int
) -> EpisodeAccounts:
    """Of a finished run whose environments have written into ``said``."""
    kept = EpisodeAccounts(Counter(line["behaviour"] for line in _lines(said / HAPPENED)))
    kept.problems += [f"{line['behaviour']}: {line['what']}" for line in _lines(said / WRONG)]
    told = told_by(said / ANSWERED)
    run = RecordedRun(run_dir)
    for v in range(run.num_batches):
        outcomes = {group.key: group for group in run.batch(v).groups}
        for (_, index), group in outcomes.items():
            if group.outcome in ALL:
                _replaced(kept, index, prompts[index], group.outcome, group.reason)
        trained = frozenset(key for key, group in outcomes.items() if group.outcome == "trained")
        for (epoch, index), group in run.groups(v, trained).items():
            if prompts[index].is_replaced:
                kept.problems.append(f"{_name(index, prompts[index])}: was trained, not replaced")
            for number, completion in enumerate(group.completions):
                seed = sample_seed(run_seed, epoch, index, number)
                compare_trained(
                    kept, index, prompts[index], number, group.prompt, completion, told[seed]
                )
                if number in prompts[index].acting or failure_of(completion) is not None:
                    continue
                reward = group.scores[number].reward
                compare_reward(kept, index, prompts[index], number, reward, told[seed])
                if v == 0:
                    kept.first_rewards[index, number] = reward
    return kept


def compare_reward(
    kept: EpisodeAccounts,
    index: int,
    prompt: PlannedPrompt,
    number: int,
    reward: float,
    told: Counter[Turn],
) -> None:
    """Whether sample ``number``, which behaves, was trained with what its environment gave it."""
    given = reward_of([token for _, sampled in told.elements() for token in sampled])
    if reward != given:
        name = f"{_name(index, prompt)}, sample {number}"
        kept.wrong.append(f"{name}: reward {reward:g}, and its environment gave {given:g}")


def compare_with_calm(kept: EpisodeAccounts, calm: Mapping[tuple[int, int], float]) -> int:
    """How many rewards of the first batch the calm run has too; those that differ are wrong."""
    both = sorted(kept.first_rewards.keys() & calm.keys())
    if not both:
        kept.problems.append("no reward of the first batch is one of the calm run's, too")
    for index, number in both:
        reward, in_calm = kept.first_rewards[index, number], calm[index, number]
        if reward != in_calm:
            kept.wrong.append(
                f"prompt {index}, sample {number}: reward {reward:g}, {in_calm:g} in the calm run"
            )
    return len(both)


def _replaced(
    kept: EpisodeAccounts, index: int, prompt: PlannedPrompt, outcome: str, reason: str | None
) -> None:
    if not prompt.is_replaced:
        kept.lost.append(f"{_name(index, prompt)}: {outcome}: {reason}")
    elif prompt.behaviour is not None and prompt.behaviour.ends != outcome:
        kept.problems.append(f"{_name(index, prompt)}: {outcome}: {reason}")
    elif not reason:
        kept.problems.append(f"{_name(index, prompt)}: {outcome} without a reason")
    else:
        kept.num_replaced += 1


def compare_trained(
    kept: EpisodeAccounts,
    index: int,
    prompt: PlannedPrompt,
    number: int,
    of: Prompt,
    completion: Completion,
    told: Counter[Turn],
) -> None:
    """Whether sample ``number`` was trained as its client was ``told``, and failed if it had to."""
    name = f"{_name(index, prompt)}, sample {number}"
    try:
        requests = requests_of(of.token_ids, completion)
    except ValueError as error:
        kept.wrong.append(f"{name}: {error}")
        return
    turns = Counter((tuple(r.prompt_ids.tolist()), tuple(r.token_ids.tolist())) for r in requests)
    kept.num_turns += turns.total()
    acts = number in prompt.acting
    ends = prompt.behaviour.ends if acts and prompt.behaviour is not None else "counts"
    if ends == "silent":
        told = Counter()  # what it was answered is kept in no sample
    failure = failure_of(completion)
    is_bystander = failure is not None and ends == "counts" and GATEWAY_DIED in failure
    if is_bystander:  # open at two deaths of which nobody knows the reason
        kept.num_bystanders += 1
        told = Counter()
    if told - turns:
        kept.wrong.append(f"{name}: {(told - turns).total()} answers are not trained as told")
    if (not acts or ends == "silent") and turns - told:
        kept.wrong.append(f"{name}: {(turns - told).total()} turns are trained that nobody saw")
    if is_bystander:
        return
    if (failure is not None) != (ends in ("fails", "silent")):
        kept.problems.append(f"{name}: failure is {failure!r}")


def failure_of(completion: Completion) -> str | None:
    """Why its episode failed; None: it did not."""
    return None if completion.episode is None else completion.episode.failure


def told_by(path: Path) -> defaultdict[int, Counter[Turn]]:
    """What clients were answered, by the episode's seed; of its last session alone."""
    sessions: dict[int, str] = {}
    told: defaultdict[int, Counter[Turn]] = defaultdict(Counter)
    for line in _lines(path):
        seed = line["seed"]
        if sessions.get(seed) != line["session"]:
            sessions[seed] = line["session"]
            told[seed] = Counter()
        told[seed][tuple(line["prompt_ids"]), tuple(line["token_ids"])] += 1
    return told


def _name(index: int, prompt: PlannedPrompt) -> str:
    return f"prompt {index} ({prompt.behaviour.name if prompt.behaviour else 'behaves'})"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())
