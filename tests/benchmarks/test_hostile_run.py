"""One run among hostile behaviours: what happens to it, and which of its ends count as failures."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest

from benchmarks.parts.hostile.behaviour import (
    EndpointBehaviour,
    FileBehaviour,
    NotNow,
    SocketBehaviour,
)
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.files import RunFiles
from benchmarks.parts.hostile.plan import Due, RunPlan
from benchmarks.parts.hostile.run import HostileRun, Outcome
from benchmarks.parts.hostile.sockets import Listener
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.machine import free_port

LAST = 5  # batches of a run


class FakeAttempt:
    """Closes a batch at each look and ends after the last one, or with what it is told to."""

    pid = 2**22  # nobody's

    def __init__(self, run_dir: Path, status: int, said: str, batches: int) -> None:
        self.launcher = self
        self.returncode: int | None = None
        self._run_dir, self._status, self._said = run_dir, status, said
        self._batches, self._closed = batches, 0

    def poll(self) -> int | None:
        if self.returncode is None:
            if self._closed == self._batches:
                self.returncode = self._status
            else:
                self._tell(event="step", step=self._closed + 1, version=f"run:0:{self._closed}")
                self._closed += 1
                self._tell(event="batch_dispatched")
                self._tell(event="group_ready")
        return self.returncode

    def kill(self) -> None:
        self.returncode = self.returncode if self.returncode is not None else -9

    def said(self, characters: int = 0) -> str:
        return self._said

    def _tell(self, **event: object) -> None:
        with (self._run_dir / "events-rank0.jsonl").open("ab") as file:
            file.write(orjson.dumps({"t": 0.0, **event}) + b"\n")


@pytest.fixture
def thread():
    with LoopThread() as opened:
        yield opened


def go(tmp_path, thread, due=(), ends=((0, "", LAST),), endpoints=()) -> tuple[Outcome, list[bool]]:
    """The outcome, and which attempts were resumes; ``ends``: status, words, batches of each."""
    (run_dir := tmp_path / "run").mkdir()
    log, resumed, left = tmp_path / "log", [], list(ends)
    log.touch()

    def start(number: int, resume: bool) -> FakeAttempt:
        resumed.append(resume)
        return FakeAttempt(run_dir, *(left.pop(0) if len(left) > 1 else left[0]))

    plan = RunPlan(0, 0, tuple(endpoints), tuple(due))
    files = RunFiles(run_dir, tmp_path, tmp_path / "prompts")
    return HostileRun(plan, start, [], files, thread, log, 1e6).run(), resumed


def of_files(damage, when="killed", refused=None) -> Due:
    return Due(FileBehaviour("damage", "file", "says", when, damage, refused), 2)


def test_a_run_that_nothing_happens_to(tmp_path, thread):
    outcome, resumed = go(tmp_path, thread)
    assert outcome.has_ended_well and outcome.statuses == [0] and resumed == [False]


def test_it_is_killed_in_mid_batch_damaged_and_resumed(tmp_path, thread):
    damaged = []

    def damage(files: RunFiles, rng: random.Random) -> str:
        damaged.append((files.run_dir / "events-rank0.jsonl").read_bytes().count(b'"event":"step"'))
        return "all of it"

    outcome, resumed = go(tmp_path, thread, [of_files(damage)])
    assert outcome.has_ended_well and outcome.statuses == ["killed", 0] and resumed == [False, True]
    assert damaged == [2] and outcome.happened == {"damage": 1}
    assert outcome.notes == ["damage: all of it"]


def test_a_damage_that_is_not_possible_yet_comes_later(tmp_path, thread):
    calls = []

    def damage(files: RunFiles, rng: random.Random) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise NotNow
        return "now"

    outcome, resumed = go(tmp_path, thread, [of_files(damage)])
    assert outcome.happened == {"damage": 1} and resumed == [False, True, True]


@pytest.mark.parametrize(
    "refusal, is_right",
    [
        ((2, "easyrl: data.json is not what it was", 0), True),
        ((2, "easyrl: something else", 0), False),
        ((2, "Traceback: data.json", 0), False),
        ((0, "data.json was not looked at", LAST), False),
        ((1, "data.json", 0), False),
    ],
)
def test_a_damage_that_has_to_be_refused_is_put_back_after_that(
    tmp_path, thread, refusal, is_right
):
    def damage(files: RunFiles, rng: random.Random) -> str:
        files.on_put_back(lambda: (tmp_path / "put back").touch())
        return "data.json"

    ends = [(0, "", LAST), refusal, (0, "", LAST)]
    outcome, _ = go(tmp_path, thread, [of_files(damage, refused="data.json")], ends)
    assert outcome.has_ended_well == is_right == (tmp_path / "put back").exists()
    assert len(outcome.resume_failed) == (not is_right) and not outcome.crashed


def test_a_status_of_its_own_is_a_crash_and_of_a_resume_a_failed_one(tmp_path, thread):
    outcome, _ = go(tmp_path, thread, ends=[(1, "its last words", 2)])
    assert "status 1:\nits last words" in outcome.crashed[0] and not outcome.resume_failed
    (second := tmp_path / "second").mkdir()
    ends = [(0, "", LAST), (1, "no", 0)]
    outcome, _ = go(second, thread, [of_files(lambda files, rng: "")], ends)
    assert not outcome.crashed and "attempt 1: ended with status 1" in outcome.resume_failed[0]


def test_75_is_allowed_where_a_behaviour_says_so(tmp_path, thread):
    ends = [(75, "later", 2), (0, "", LAST)]
    outcome, _ = go(tmp_path, thread, ends=ends)
    assert outcome.crashed and outcome.statuses == [75]
    (second := tmp_path / "second").mkdir()
    late = EndpointBehaviour("late", "content", "", frozenset(), print, may_end_75=True)  # type: ignore[arg-type]
    outcome, resumed = go(second, thread, ends=ends, endpoints=[late])
    assert outcome.has_ended_well and resumed == [False, True]
    (third := tmp_path / "third").mkdir()
    outcome, _ = go(third, thread, ends=[(75, "again", 1)], endpoints=[late])
    assert "again and again" in outcome.resume_failed[0]


def test_files_change_while_it_goes_on(tmp_path, thread):
    outcome, resumed = go(tmp_path, thread, [of_files(lambda files, rng: "x", when="live")])
    assert outcome.happened == {"damage": 1} and resumed == [False]


def test_strangers_visit_every_port(tmp_path, thread, monkeypatch):
    ports = [Listener("127.0.0.1", port, f"listener {port}") for port in (1, 2)]
    monkeypatch.setattr("benchmarks.parts.hostile.run.listeners", lambda *_: ports)
    seen = []

    async def visit(listener: Listener, rng: random.Random) -> int:
        seen.append(listener.port)
        if listener.port == 2:
            raise ConnectionRefusedError
        return 3

    outcome, _ = go(tmp_path, thread, [Due(SocketBehaviour("visit", "socket", "", visit), 1)])
    assert sorted(seen) == [1, 2] and outcome.happened == {"visit": 3}
    assert outcome.met == {"visit": {"listener 1"}}


@pytest.mark.parametrize("name", ["noise", "slowloris", "reset-storm", "store-commands"])
def test_a_visit_to_a_port_that_nobody_listens_on_has_not_happened(
    tmp_path, thread, monkeypatch, name
):
    closed = [Listener("127.0.0.1", free_port(), "nobody")]
    monkeypatch.setattr("benchmarks.parts.hostile.run.listeners", lambda *_: closed)
    outcome, _ = go(tmp_path, thread, [Due(BEHAVIOURS[name], 1)])
    assert outcome.happened[name] == 0 and not outcome.met


def test_a_mistake_of_the_benchmark_is_no_result(tmp_path, thread):
    def damage(files: RunFiles, rng: random.Random) -> str:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        go(tmp_path, thread, [of_files(damage)])
