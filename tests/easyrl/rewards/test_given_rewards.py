"""Rewards given as objects: what is pickled or run from its file, and what workers make of it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from easyrl.api import train_policy
from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards import worker
from easyrl.rewards.functions import check_rewards
from easyrl.rewards.given import GivenRewards
from easyrl.rewards.pickled import load_pickled, pickle_reward
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt
from tests.tiny_tokenizer import tiny_tokenizer
from tests.waiting import started

ROOT = Path(__file__).resolve().parents[3]
ASKED = Prompt(0, np.zeros(1, np.int32), "", "7")
TOKEN_IDS = [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)]


def of_length(bonus):
    return lambda prompt, texts, token_ids: [len(ids) + bonus for ids in token_ids]


class Judge:
    def __init__(self, weight):
        self.weight = weight

    def judge(self, completions, **columns):
        return [self.weight * len(said) for said in completions]


def closure(offset):
    seen = {"calls": 0}

    async def counts(prompts, completions, **columns):
        seen["calls"] += 1
        return [offset + seen["calls"] for _ in completions]

    return counts


def configs(given: GivenRewards) -> list[RewardConfig]:
    return [
        RewardConfig(**{**each, "file": Path(each["file"])} if "file" in each else each)
        for each in given.sections
    ]


async def test_lambdas_closures_and_methods_work_in_worker_processes(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    given = GivenRewards.of(
        [of_length(0.5), closure(10), Judge(2.0).judge, "format", of_length(-1)], tmp_path, "0"
    )
    given.write()
    rewards = configs(given)
    check_rewards(rewards)
    given.check(rewards)
    assert [reward.label for reward in rewards] == [
        "lambda_0",
        "counts",
        "judge",
        "format",
        "lambda_4",
    ]
    async with started(WorkerPool(1, worker.initialize, (rewards, tmp_path / "tokenizer"))) as pool:
        said = [
            await pool.call(worker.score_reward, index, ASKED, TOKEN_IDS, timeout_s=20)
            for index in (0, 1, 1, 2, 3, 4)
        ]
    assert said == [[3.5, 5.5], [11, 11], [12, 12], [6, 10], [0, 0], [2, 4]]


SCRIPT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from easyrl.config import RewardConfig
from easyrl.rewards import worker
from easyrl.rewards.given import GivenRewards
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt

with open("runs.txt", "a") as runs:
    runs.write("x")
BONUS = 2.0

def helper(text):
    return BONUS + len(text)

def mine(completions, answer, **columns):
    return [helper(text) for text in completions]

def breaks(prompt, texts, token_ids):
    raise LookupError("no judge")

async def main():
    given = GivenRewards.of([mine, breaks], Path("."), "0")
    given.write()
    rewards = [RewardConfig(file=Path(s["file"]), function=s["function"]) for s in given.sections]
    pool = WorkerPool(2, worker.initialize, (rewards, Path("tokenizer")))
    await pool.start()
    ids = [np.arange(n, dtype=np.int32) for n in (3, 5)]
    asked = Prompt(0, ids[0], "", "7")
    for _ in range(4):
        print(await pool.call(worker.score_reward, 0, asked, ids, timeout_s=20))
    try:
        await pool.call(worker.score_reward, 1, asked, ids, timeout_s=20)
    except Exception as error:
        print(error.what, error.where)
    await pool.close()

asyncio.run(main())
"""


def test_workers_do_not_run_the_script_again(tmp_path):
    """It needs no ``if __name__ == "__main__":``."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = 1 + SCRIPT.splitlines().index('    raise LookupError("no judge")')
    raised = f"raised LookupError: no judge {tmp_path / 'script.py'}:{line}"
    assert done.stdout.splitlines() == ["[5.0, 7.0]"] * 4 + [raised], done.stderr
    assert (tmp_path / "runs.txt").read_text() == "x"


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """A folder whose files can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_function_of_a_file_is_run_from_there(importable):
    file = importable / "judge_of_a_file.py"
    file.write_text("def mine(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    module = importlib.import_module(file.stem)
    given = GivenRewards.of([module.mine], importable, "0")
    assert given.sections == [{"file": str(file), "function": "mine"}] and not given.files


def test_a_function_of_a_package_is_pickled_by_name_and_its_text_counts(importable):
    folder = importable / "judges_of_a_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "level.py").write_text("LEVEL = 4.0\n")
    text = "from .level import LEVEL\ndef mine(completions, **kwargs):\n    return [LEVEL]\n"
    (folder / "mine.py").write_text(text)
    module = importlib.import_module("judges_of_a_package.mine")
    given = GivenRewards.of([module.mine], importable, "0")
    given.write()
    ((file, (_, content)),) = given.files.items()
    assert load_pickled(file) is module.mine
    (folder / "mine.py").write_text(text + "# changed\n")
    importlib.reload(module)
    assert pickle_reward(module.mine) != content


def test_what_is_written_already_stays_as_it_is(tmp_path):
    given = GivenRewards.of([of_length(1)], tmp_path, "0")
    given.write()
    (file,) = given.files
    os.utime(file, (1, 1))
    GivenRewards.of([of_length(1)], tmp_path, "0").write()
    assert file.stat().st_mtime == 1
    GivenRewards.of([of_length(2)], tmp_path, "0").write()
    assert file.stat().st_mtime > 1


def needs_a_lock():
    lock = threading.Lock()

    def mine(prompt, texts, token_ids):
        with lock:
            return [0.0 for _ in texts]

    return mine


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        (needs_a_lock(), {}, "reward: mine cannot be pickled .*lock.*; make what it refers to in"),
        (["exact", needs_a_lock()], {}, r"reward\[1\]: mine cannot be pickled"),
        ([], {}, "reward: the list is empty; give a function or a built-in one's name"),
        (3, {}, "reward: 3 is neither a function nor the name of a built-in reward"),
        ("exakt", {}, r"rewards\[0\].name: Input should be 'exact', "),
        (["exact", "exact"], {"rewards[1].log_as": "exact_0"}, "two are called the same"),
        (len, {}, r"rewards\[0\]\.function: len takes \(obj, /\) but is called with \(prompt, "),
        (lambda **kwargs: [], {}, r"rewards\[0\]\.signature: lambda takes .*any call fits; set s"),
        (
            ["format", lambda prompt, completions, ids: []],
            {},
            r"rewards\[1\]\.signature: lambda takes .*names of easyrl and trl",
        ),
        (
            lambda completions: [],
            {"rewards[0].kwargs": {"n": 3}},
            r"rewards\[0\]\.kwargs: lambda takes .completions. but .*argument 'n'",
        ),
    ],
)
def test_what_cannot_be_a_reward_is_refused_before_anything_is_written(
    tmp_path, reward, settings, message
):
    output = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        train_policy(
            "model", ["a"], reward, output_dir=output, endpoints=["http://x"], settings=settings
        )
    assert not output.exists()


def test_weights_and_signatures_are_settings(tmp_path):
    settings = {"rewards[1].weight": 0.25, "rewards[1].signature": "trl"}
    both = ["exact", lambda *args, **kwargs: []]
    with pytest.raises(ConfigError, match="model.path: model is not a directory") as caught:
        train_policy(
            "model", ["a"], both, output_dir=tmp_path, endpoints=["http://x"], settings=settings
        )
    assert "rewards" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_pickled_file_that_is_none_says_so(tmp_path):
    (tmp_path / "reward.pkl").write_bytes(b"no pickle")
    reward = RewardConfig(file=tmp_path / "reward.pkl")
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.file: .*is no pickled reward that can"):
        check_rewards([reward])
