"""Turns in the journal: there before their answers go out, whatever becomes of the episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.session import Session
from easyrl.ledger.journal.batch import BatchJournal, Journal
from easyrl.ledger.journal.reading import journal_files
from easyrl.ledger.journal.record_file import JournalError
from easyrl.ledger.journal.turns import read_episodes, trained_turns, turn_digest, turn_files
from easyrl.ledger.verify import verify
from easyrl.schema import (
    Completion,
    JournalledTurn,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ServedWeights,
)
from tests.easyrl.episodes.parts import IDS, Endpoint, Environment, OpenGateway, Said
from tests.easyrl.episodes.test_player import PROMPT, SAMPLING
from tests.easyrl.ledger import certified_run
from tests.easyrl.ledger.certified_run import CertifiedRun
from tests.easyrl.ledger.test_verified_episodes import _stamped

SERVED = ServedWeights(PolicyVersion("run", 0, 1), "ab" * 32)
Turns = list[JournalledTurn]


def journal(folder: Path) -> BatchJournal:
    return Journal(folder, 0, 0, "batch").open_batch(SERVED)


async def branching(session: Session, prompt: Prompt) -> Said:
    """Two turns one after another, a retry of the second, and another beginning."""
    first = await session.turn(IDS)
    path = np.concatenate([IDS, first.token_ids, IDS]).astype(np.int32)
    await session.turn(path)
    await session.turn(path)
    await session.turn(np.array([9, 9], np.int32))
    return Said(1.0)


async def played(on_turn: Callable[[JournalledTurn], object]) -> Completion:
    gateway = OpenGateway()
    player = EpisodePlayer(gateway, [Environment(gateway, branching)], lambda prompt: 0)
    return await player.play(PROMPT, 1, SAMPLING, 77, Endpoint(), on_turn)


async def test_what_is_journalled_is_what_is_trained(tmp_path: Path):
    batch = journal(tmp_path)
    made = await played(batch.add_turn)
    (file,) = turn_files(tmp_path, 1)  # not closed: a killed process leaves as much
    (start,) = read_episodes(file).values()
    assert (start.sample, start.environment) == ((0, 3, 1), "game")
    assert [turn.parent for turn in start.turns] == [None, 0, 0, None]
    assert [len(turn.prompt_ids) for turn in start.turns] == [3, 3, 3, 2]  # not what it continues
    trained = trained_turns(made, PROMPT.key, 1)
    assert list(map(turn_digest, start.turns)) == list(map(turn_digest, trained))
    batch.close()
    assert journal_files(tmp_path / "batch-000001") == []  # a resume has nothing to read


async def test_a_turn_that_cannot_be_journalled_is_not_answered():
    def full(turn: JournalledTurn) -> None:
        raise JournalError("no space left")

    with pytest.raises(JournalError, match="no space left"):
        await played(full)


async def test_turns_behind_the_batchs_end_are_nobodys(tmp_path: Path):
    told: Turns = []
    await played(told.append)
    batch = journal(tmp_path)
    batch.add_turn(told[0])
    batch.sync()
    batch.close()
    batch.add_turn(told[1])
    (file,) = turn_files(tmp_path, 1)
    (start,) = read_episodes(file).values()
    assert len(start.turns) == 1


async def test_a_turn_that_was_being_written_is_dropped_and_a_changed_one_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    batch = journal(tmp_path)
    await played(batch.add_turn)
    (file,) = turn_files(tmp_path, 1)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-3])
    (start,) = read_episodes(file).values()
    assert len(start.turns) == 3 and "was being written" in caplog.text
    file.path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(JournalError, match="was changed after it was written"):
        read_episodes(file)


# ---- verify


def episodes(prompt: Prompt, served: ServedWeights) -> RolloutGroup:
    rng = np.random.default_rng([served.version.attempt, *prompt.key])
    made = tuple(_stamped(rng, str(served.version)) for _ in range(2))
    scores = tuple(Score(float(i), {}) for i in range(2))
    return RolloutGroup(prompt, made, scores, str(served.version), 0.0, 1.0)


def turns_of(group: RolloutGroup) -> Turns:
    return [
        replace(turn, episode=f"{group.prompt.key} {number}")
        for number, made in enumerate(group.completions)
        for turn in trained_turns(made, group.prompt.key, number)
    ]


def verified(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[Turns], Turns] = lambda turns: turns,
) -> str:
    """What is said of three batches of four groups, each episode of 7 turns."""
    monkeypatch.setattr(certified_run, "finished_group", episodes)
    add = BatchJournal.add

    def add_with_turns(self: BatchJournal, group: RolloutGroup, restart: int | None = None):
        for turn in written(turns_of(group)):
            self.add_turn(turn)
        return add(self, group, restart)

    monkeypatch.setattr(BatchJournal, "add", add_with_turns)
    run = CertifiedRun(folder)
    run.begin()
    run.train_all()
    return str(verify(run.folder))


def test_verify_finds_each_trained_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert verified(tmp_path, monkeypatch) == (
        "on-policy: 3 batches, 12 groups trained, 24 episodes of 168 turns in 120 branches, "
        "complete"
    )


def test_verify_counts_turns_of_episodes_that_were_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def played_twice(turns: Turns) -> Turns:
        """The first start ended behind three turns."""
        return [replace(turn, episode="first") for turn in turns[:3]] + turns

    said = verified(tmp_path, monkeypatch, played_twice)
    assert said.startswith("on-policy: ")
    assert f"{3 * 12} journalled turns of episodes that were not trained" in said


def other_token(turns: Turns) -> Turns:
    made = turns[1].completion
    changed = replace(made, token_ids=(made.token_ids + 1).astype(np.int32))
    return [turns[0], replace(turns[1], completion=changed), *turns[2:]]


@pytest.mark.parametrize("written", [other_token, lambda turns: turns[1:]])
def test_a_trained_turn_that_was_not_journalled_is_not_on_policy(
    written: Callable[[Turns], Turns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = verified(tmp_path, monkeypatch, written)
    assert said.startswith("NOT on-policy: ") and "turns are not those that were journalled" in said
