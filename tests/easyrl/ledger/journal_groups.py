"""Groups for the tests of the journal, and the bytes that tell whether two are the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.journal.codec import GroupRecord
from easyrl.ledger.journal.reading import batch_folder, journal_files, read_batch, read_file
from easyrl.ledger.journal.rollouts import BatchRules, JournalledRollouts
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.rank_coordination import RankCoordination
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    Completion,
    Key,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ServedWeights,
    VersionSpan,
)

WEIGHTS = "ab" * 32
OTHER_WEIGHTS = "cd" * 32


def served(attempt: int = 0, v: int = 3, digest: str = WEIGHTS) -> ServedWeights:
    return ServedWeights(PolicyVersion("run", attempt, v), digest)


class ListedOrder:
    """These prompts, one after another."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def num_left(self, position: int) -> int:
        return len(self.prompts) - position

    def prompt(self, position: int) -> Prompt:
        return self.prompts[position]


def rollouts_of(
    directory: Path,
    attempt: int,
    generator: RolloutGenerator,
    prompts: Sequence[Prompt],
    *,
    ranks: Ranks | None = None,
    coordination: RankCoordination | None = None,
    **rules: Any,
) -> JournalledRollouts:
    """An attempt's; ``rules`` are those of ``BatchRules``, by default all prompts in one batch."""
    ranks = ranks or Ranks.data_parallel()
    return JournalledRollouts(
        generator,
        journal(directory, attempt, ranks.rank),
        ListedOrder(prompts),
        BatchRules(**{"batch_size": len(prompts)} | rules),
        ranks,
        coordination or RankCoordination(Collectives(Ranks.data_parallel(0, 1))),
    )


def journal(directory: Path, attempt: int = 0, rank: int = 0, fsync="never") -> Journal:
    return Journal(directory, attempt, rank, fsync)


URL = "http://127.0.0.1:1"


def group(
    index: int, version: str = "run:0:3", lengths=(5, 1, 9), made_by=((URL, 0),)
) -> RolloutGroup:
    """Random tokens, masks and scores that ``index`` determines.

    ``made_by``: endpoint and number of its proof, of each completion in turn.
    """
    rng = np.random.default_rng(index)

    def completion(number: int, length: int) -> Completion:
        endpoint, proof = made_by[number % len(made_by)]
        return Completion(
            token_ids=rng.integers(0, 2**31, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            finish_reason="length" if length > 5 else "stop",
            version_spans=(VersionSpan(version, 0, length),),
            endpoint=endpoint,
            proof=proof,
            loss_mask=rng.random(length) > 0.3,
        )

    token_ids = rng.integers(0, 2**31, 4 + index % 3, dtype=np.int32)
    return RolloutGroup(
        prompt=Prompt(index, token_ids, "question", "42", epoch=index // 2),
        completions=tuple(completion(*each) for each in enumerate(lengths)),
        scores=tuple(Score(rng.normal(), {"exact": rng.normal()}, i == 1) for i in lengths),
        policy_version=version,
        dispatched_s=1.0,
        completed_s=2.0,
        position=index,
    )


def prompt(index: int) -> Prompt:
    return group(index).prompt


def contents(made: RolloutGroup) -> tuple:
    """Everything that is trained, to the bit; not the times, nor the record's digest."""
    return (
        made.prompt.key,
        made.prompt.token_ids.dtype.str,
        made.prompt.token_ids.tobytes(),
        [
            (
                c.token_ids.dtype.str,
                c.token_ids.tobytes(),
                c.logprobs.dtype.str,
                c.logprobs.tobytes(),
                c.loss_mask.dtype.str,
                c.loss_mask.tobytes(),
                c.finish_reason,
                c.version_spans,
                c.endpoint,
                c.proof,
            )
            for c in made.completions
        ],
        [(np.float64(s.reward).tobytes(), dict(s.components), s.failed) for s in made.scores],
        made.policy_version,
        made.position,
        made.excluded,
        made.rejected,
    )


def write(directory: Path, groups, attempt: int = 0, rank: int = 0, digest: str = WEIGHTS) -> Path:
    """An attempt that journals ``groups`` of batch 3 and is gone. Returns its file."""
    batch = journal(directory, attempt, rank).open_batch(served(attempt, digest=digest))
    for made in groups:
        batch.add(made)
    batch.close()
    return directory / "batch-000003" / f"attempt{attempt}-rank{rank}.journal"


class JournalledGroup(NamedTuple):
    """A group as an attempt finished it, and what it was made by."""

    attempt: int
    rank: int
    version: str
    weights: str
    digest: str
    group: RolloutGroup

    @property
    def key(self) -> Key:
        return self.group.prompt.key


def read(directory: Path) -> list[JournalledGroup]:
    groups = list(read_batch(directory, 3))
    made_by = [
        (file.attempt, file.rank, record.version, record.weights, place.digest.hex())
        for file in journal_files(batch_folder(directory, 3))
        for place, record in read_file(file, 3)[1]
        if isinstance(record, GroupRecord)
    ]
    return [
        JournalledGroup(*each, group) for each, group in zip(made_by, groups, strict=False)
    ]  # a live journal may have grown
