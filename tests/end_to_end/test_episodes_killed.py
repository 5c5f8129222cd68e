"""Runs that end in the middle of episodes: their turns are there, and they are played again.

In strict mode, so that what is sampled does not depend on what runs beside it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from easyrl.ledger.journal.codec import GroupRecord, decode_any
from easyrl.ledger.journal.record_file import read_records
from easyrl.ledger.journal.turns import EpisodeTurns, read_episodes, turn_files
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.determinism import reproducible
from easyrl.schema import PolicyVersion
from tests.end_to_end.held_batch import MarkedRun
from tests.golden.whole_run import BATCH, NUM_BATCHES, Inputs, servers, strict_command

pytestmark = pytest.mark.runs

SAMPLES = 4  # of a group, as strict_command has it
EPISODES = BATCH * SAMPLES  # of a batch
HELD = 2  # batch in which episodes wait for the file "go", behind their first turn
# The turns are those of a conversation; the second answer decides the reward. Batches do not
# overlap: who begins behind so many others is of a later one.
ROLLOUT = f"""
import asyncio
import os
from pathlib import Path

FOLDER = Path(__file__).parent
num_begun = 0


async def rollout(client, prompt):
    global num_begun
    num_begun += 1
    is_held = num_begun > {HELD * EPISODES}
    messages = [dict(role="user", content=prompt.text)]
    for turn in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        messages += [dict(role="assistant", content=text), dict(role="user", content="7")]
        while turn == 0 and is_held and not (FOLDER / "go").exists():
            await asyncio.sleep(0.02)
    return sum(character in "02468" for character in text) / 12
"""


class Episodes:
    """A run in a folder of its own, whose environment holds its last batch until it may go on."""

    def __init__(self, folder: Path, inputs: Inputs, url: str) -> None:
        folder.mkdir()
        self.folder, self.run_dir = folder, folder / "run"
        self._inputs, self._url = inputs, url
        (folder / "game.py").write_text(ROLLOUT)

    def start(self, *options: str) -> MarkedRun:
        environment = f"{{name: game, file: {self.folder / 'game.py'}, num_hosts: 1}}"
        settings = ("rewards=[]", f"environments=[{environment}]", "recipe.kl_coef=0.0")
        settings += ("journal.keep=all",)
        command = strict_command(self.run_dir, self._inputs, [self._url], *settings, *options)
        return MarkedRun(command, self.folder / "log")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait(self, run: MarkedRun, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert run.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.05)

    def hold(self, run: MarkedRun) -> None:
        """Returns when batch ``HELD`` waits behind the first turn of all its episodes."""
        saved = self.run_dir / "checkpoints" / f"step-{HELD}"
        self.wait(run, lambda: saved.is_dir() and len(self.recorded(HELD)) == EPISODES)

    def go(self) -> None:
        (self.folder / "go").touch()

    def recorded(self, batch: int) -> list[EpisodeTurns]:
        """Starts of episodes with a turn in the journal of ``batch``, of all attempts."""
        files = turn_files(self.run_dir / "journal", batch)
        return [start for file in files for start in read_episodes(file).values()]

    def sampled(self) -> dict[tuple[int, int, int], list[list[int]]]:
        """The trained tokens of each episode, from the journal: once for each time it is there."""
        found: dict[tuple[int, int, int], list[list[int]]] = {}
        for record in self.groups():
            for number, completion in enumerate(record.completions):
                tokens = list(memoryview(completion.token_ids).cast("i"))
                found.setdefault((*record.key, number), []).append(tokens)
        return found

    def groups(self) -> Iterator[GroupRecord]:
        for file in sorted((self.run_dir / "journal").rglob("*.journal")):
            for _, payload in list(read_records(file))[1:]:
                if isinstance(record := decode_any(payload), GroupRecord):
                    yield record

    def trainings(self) -> list[int]:
        """Prompts of committed steps."""
        events = read_events(self.run_dir / "events-rank0.jsonl")
        return sorted(e["index"] for e in events if e["event"] == "group_closed")

    def verified(self) -> str:
        command = [sys.executable, "-m", "easyrl", "verify", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("episodes_killed"))


@pytest.fixture(scope="module")
def url(inputs: Inputs) -> Iterator[str]:
    with servers(inputs.model, 1) as (server,):
        yield server.url


@pytest.fixture(scope="module")
def whole(inputs: Inputs, url: str) -> Episodes:
    run = Episodes(inputs.prompts.parent / "whole", inputs, url)
    run.go()
    assert run.start().wait(120) == 0, run.log()[-4000:]
    return run


def test_a_run_that_is_killed_in_mid_episode_plays_them_again(
    inputs: Inputs, url: str, whole: Episodes
) -> None:
    parts = Episodes(inputs.prompts.parent / "parts", inputs, url)
    run = parts.start("checkpoint.every_steps=1")
    try:
        parts.hold(run)
    finally:
        run.kill()
    left = parts.recorded(HELD)
    assert len(left) == EPISODES and all(len(start.turns) == 1 for start in left)
    samples = {start.sample for start in left}
    assert len(samples) == EPISODES  # each episode once
    assert not any(key in samples for key in parts.sampled())  # none of them has come to its end
    shown = subprocess.run(
        [sys.executable, "-m", "easyrl", "samples", str(parts.run_dir), "--unfinished"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.count("---- sample ") == EPISODES and shown.count("-- turn 0") == EPISODES
    parts.go()
    resumed = parts.start("checkpoint.every_steps=1", "--resume")
    assert resumed.wait(120) == 0, parts.log()[-4000:]

    # the first turn again, token for token, by another attempt; then the second
    starts: dict[tuple[int, int, int], list[EpisodeTurns]] = {}
    for start in parts.recorded(HELD):
        starts.setdefault(start.sample, []).append(start)
    for first, second in starts.values():
        assert [len(first.turns), len(second.turns)] == [1, 2]
        one, other = first.turns[0].completion, second.turns[0].completion
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert first.turns[0].prompt_ids.tolist() == second.turns[0].prompt_ids.tolist()
        attempts = [
            PolicyVersion.parse(made.version_spans[0].version).attempt for made in (one, other)
        ]
        assert attempts == [0, 1]

    # what is trained is what the run that nobody disturbed has trained, each episode once
    assert parts.sampled() == whole.sampled()
    assert all(len(times) == 1 for times in parts.sampled().values())
    assert parts.trainings() == whole.trainings() == list(range(BATCH * NUM_BATCHES))
    ours, theirs = (
        [reproducible(step) for step in read_metrics(run.run_dir / "metrics.jsonl")]
        for run in (parts, whole)
    )
    assert [step["reward/mean"] for step in ours[1:]] == [s["reward/mean"] for s in theirs[1:]]
    assert ours[-1]["grad_norm"] == theirs[-1]["grad_norm"] > 0
    said = parts.verified()
    assert "on-policy: 3 batches" in said and "NOT" not in said
    assert f"{NUM_BATCHES * EPISODES} episodes of {2 * NUM_BATCHES * EPISODES} turns" in said
    assert f"{EPISODES} journalled turns of episodes that were not trained" in said
    assert "journalled turn" not in whole.verified()


def test_a_gateway_that_does_not_come_up_again_ends_the_run(inputs: Inputs, url: str) -> None:
    tokenizer = inputs.prompts.parent / "tokenizer"
    subprocess.run(["cp", "-r", str(inputs.model), str(tokenizer)], check=True)
    parts = Episodes(inputs.prompts.parent / "gateway", inputs, url)
    options = (f"model.tokenizer={tokenizer}", "checkpoint.every_steps=1")
    run = parts.start(*options)
    elsewhere = tokenizer.with_name("elsewhere")
    try:
        parts.hold(run)
        tokenizer.rename(elsewhere)
        for pid in run.pids("easyrl.gateway.process"):
            os.kill(pid, signal.SIGKILL)
        assert run.wait(60) == 75, parts.log()[-4000:]
    finally:
        run.kill()
    end = parts.log()[-3000:]
    assert "the gateway's process could not be started 3 times: exit code 1" in end
    assert "go on with --resume" in end
    assert all(record.excluded is None for record in parts.groups())
    elsewhere.rename(tokenizer)
    parts.go()
    assert parts.start(*options, "--resume").wait(120) == 0, parts.log()[-4000:]
    said = parts.verified()
    assert "on-policy: 3 batches, 12 groups trained" in said and "excluded" not in said
